//! The anti-forensic splitter of LUKS: it splits a key into stripes, all of which are needed to
//! restore the key.

use blockhouse_format::LuksHash;

use crate::hash;

/// Restores `key` from `stripes`, each of the key's length.
pub(crate) fn merge(hash: LuksHash, stripes: &[u8], key: &mut [u8]) {
    key.fill(0);
    let mut stripes = stripes.chunks_exact(key.len()).peekable();
    while let Some(stripe) = stripes.next() {
        key.iter_mut().zip(stripe).for_each(|(byte, other)| *byte ^= other);
        if stripes.peek().is_some() {
            diffuse(hash, key);
        }
    }
}

/// Sets the last of `stripes` so that [`merge`] restores `key`. The caller has filled the other
/// stripes with random bytes.
pub(crate) fn split(hash: LuksHash, key: &[u8], stripes: &mut [u8]) {
    let last = stripes.len() - key.len();
    let (random, last) = stripes.split_at_mut(last);
    last.fill(0);
    for stripe in random.chunks_exact(key.len()) {
        last.iter_mut().zip(stripe).for_each(|(byte, other)| *byte ^= other);
        diffuse(hash, last);
    }
    last.iter_mut().zip(key).for_each(|(byte, other)| *byte ^= other);
}

/// Replaces each piece of a digest's length by the digest of the piece's number and content.
fn diffuse(hash: LuksHash, bytes: &mut [u8]) {
    for (number, piece) in bytes.chunks_mut(hash::length(hash)).enumerate() {
        let (mut copy, length) = ([0; 64], piece.len());
        copy[..length].copy_from_slice(piece);
        hash::digest(hash, [&(number as u32).to_be_bytes(), &copy[..length]], piece);
        zeroize::Zeroize::zeroize(&mut copy);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_split_is_merged_again_and_every_bit_counts() {
        let key: Vec<u8> = (0..64).collect();
        for hash in [LuksHash::Sha1, LuksHash::Sha256, LuksHash::Sha512] {
            let mut stripes: Vec<u8> = (0..64 * 50).map(|index| (index * 7 % 251) as u8).collect();
            split(hash, &key, &mut stripes);
            let mut merged = [0; 64];
            merge(hash, &stripes, &mut merged);
            assert_eq!(merged, key[..]);
            stripes[70] ^= 1;
            merge(hash, &stripes, &mut merged);
            assert_ne!(merged, key[..]);
        }
    }
}
