//! The hash functions of LUKS headers.

use blockhouse_format::LuksHash;
use pbkdf2::pbkdf2_hmac;
use sha1::Sha1;
use sha2::{Digest, Sha224, Sha256, Sha384, Sha512};

/// Bytes of a digest.
pub(crate) fn length(hash: LuksHash) -> usize {
    match hash {
        LuksHash::Sha1 => 20,
        LuksHash::Sha224 => 28,
        LuksHash::Sha256 => 32,
        LuksHash::Sha384 => 48,
        LuksHash::Sha512 => 64,
    }
}

/// Fills `into`, which is at most as long as a digest, with the first bytes of the digest of the
/// two `parts` concatenated.
pub(crate) fn digest(hash: LuksHash, parts: [&[u8]; 2], into: &mut [u8]) {
    fn of<D: Digest>(parts: [&[u8]; 2], into: &mut [u8]) {
        let digest = D::new().chain_update(parts[0]).chain_update(parts[1]).finalize();
        into.copy_from_slice(&digest[..into.len()]);
    }
    match hash {
        LuksHash::Sha1 => of::<Sha1>(parts, into),
        LuksHash::Sha224 => of::<Sha224>(parts, into),
        LuksHash::Sha256 => of::<Sha256>(parts, into),
        LuksHash::Sha384 => of::<Sha384>(parts, into),
        LuksHash::Sha512 => of::<Sha512>(parts, into),
    }
}

/// PBKDF2 with the HMAC of this hash.
pub(crate) fn pbkdf2(hash: LuksHash, secret: &[u8], salt: &[u8], iterations: u32, into: &mut [u8]) {
    match hash {
        LuksHash::Sha1 => pbkdf2_hmac::<Sha1>(secret, salt, iterations, into),
        LuksHash::Sha224 => pbkdf2_hmac::<Sha224>(secret, salt, iterations, into),
        LuksHash::Sha256 => pbkdf2_hmac::<Sha256>(secret, salt, iterations, into),
        LuksHash::Sha384 => pbkdf2_hmac::<Sha384>(secret, salt, iterations, into),
        LuksHash::Sha512 => pbkdf2_hmac::<Sha512>(secret, salt, iterations, into),
    }
}
