//! Key slots of an existing header: the slot that a secret opens, and the content of a new one.
//!
//! The functions take as long as [`unlock`](crate::unlock), within the same limits. So an event
//! loop must not call them.

use std::time::Duration;

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_engine::LockedBytes;
use blockhouse_format::{LuksCipher, LuksHash, LuksHeader, NewLuks, NewLuksSlot};

use crate::create::{fill_random, iterations_for, random};
use crate::kdf::Work;
use crate::unlock::open_slot;
use crate::{Secret, SectorCipher, hash, stripes};

/// The numbers of the key slots that a secret opens. `areas` are as for [`unlock`](crate::unlock).
/// Slots with unsupported features are skipped.
///
/// # Errors
/// `Unsupported` if a slot cannot be tried: it needs too much work, or there is no memory for it.
pub fn slots_of(header: &LuksHeader, areas: &[Vec<u8>], secret: &Secret) -> Result<Vec<u32>> {
    let mut work = Work::new();
    let mut found = Vec::new();
    for (slot, area) in header.slots.iter().zip(areas) {
        let Ok(key) = &slot.key else { continue };
        let opened = open_slot(&mut work, key, area, secret, header.key_bytes);
        let refuse =
            |why| Error::new(ErrorKind::Unsupported, format!("key slot {}: {why}", slot.number));
        if opened.map_err(refuse)?.is_some() {
            found.push(slot.number);
        }
    }
    Ok(found)
}

/// A new slot for the disk's key, which `secret` opens in about `time`. One of `openers` must open
/// an existing slot.
///
/// # Errors
/// `Unsupported` if no opener opens a slot; the kernel has no random numbers or no memory.
pub fn new_slot(
    header: &LuksHeader,
    areas: &[Vec<u8>],
    openers: &[&Secret],
    secret: &Secret,
    time: Duration,
) -> Result<NewLuksSlot> {
    let (key, hash) = disk_key(header, areas, openers)?;
    let iterations = iterations_for(secret, time, hash, header.key_bytes);
    let sealed = seal(header.cipher, hash, &key, secret, iterations);
    sealed.map_err(|error| Error::host("cannot make a key slot", error))
}

/// The slot with the disk's `key` that `secret` opens.
fn seal(
    cipher: LuksCipher,
    hash: LuksHash,
    key: &[u8],
    secret: &Secret,
    iterations: u32,
) -> std::io::Result<NewLuksSlot> {
    let salt: [u8; 32] = random()?;
    let mut area_key = LockedBytes::new(key.len())?;
    hash::pbkdf2(hash, secret.bytes(), &salt, iterations, &mut area_key);
    let length = key.len() * NewLuks::STRIPES;
    // The area has whole sectors, which are encrypted as a whole.
    let mut material = LockedBytes::new(length.next_multiple_of(512))?;
    fill_random(&mut material)?;
    stripes::split(hash, key, &mut material[..length]);
    SectorCipher::new(cipher, &area_key, 512)?.encrypt(0, &mut material);
    Ok(NewLuksSlot { iterations, salt, material: material.to_vec() })
}

/// Random bytes of the length of a key slot's area, to overwrite an area no longer used.
///
/// # Errors
/// The kernel has no random numbers.
pub fn slot_wipe(header: &LuksHeader) -> Result<Vec<u8>> {
    let mut bytes = vec![0; (header.key_bytes * NewLuks::STRIPES).next_multiple_of(512)];
    fill_random(&mut bytes).map_err(|error| Error::host("cannot overwrite a key slot", error))?;
    Ok(bytes)
}

fn disk_key(
    header: &LuksHeader,
    areas: &[Vec<u8>],
    openers: &[&Secret],
) -> Result<(LockedBytes, LuksHash)> {
    let mut work = Work::new();
    for opener in openers {
        for (slot, area) in header.slots.iter().zip(areas) {
            let Ok(key) = &slot.key else { continue };
            if let Ok(Some(found)) = open_slot(&mut work, key, area, opener, header.key_bytes) {
                return Ok((found, key.stripe_hash));
            }
        }
    }
    let what = "no key that was named opens one of its key slots";
    Err(Error::new(ErrorKind::Unsupported, what)
        .hint("name the one that does: --key-file FILE, or --passphrase-file FILE"))
}

#[cfg(test)]
mod tests {
    use blockhouse_core::ByteRange;
    use blockhouse_format::{LuksDigest, LuksKdf, LuksSlotKey};

    use super::*;

    fn secret(text: &str) -> Secret {
        let path = std::env::temp_dir().join(format!("key-{}-{text}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        let secret = Secret::from_key_file(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        secret
    }

    #[test]
    fn a_secret_that_opens_nothing_makes_no_slot() {
        let header = LuksHeader {
            version: 1,
            uuid: String::new(),
            cipher: NewLuks::CIPHER,
            key_bytes: NewLuks::KEY,
            sector_size: 512,
            iv_tweak: 0,
            payload: NewLuks::LENGTH as u64,
            payload_size: None,
            slots: Vec::new(),
            slot_offsets: vec![4096; 8],
        };
        let one = secret("one");
        assert_eq!(slots_of(&header, &[], &one).unwrap(), [0_u32; 0]);
        let refused = new_slot(&header, &[], &[&one], &one, Duration::ZERO);
        assert_eq!(refused.err().map(|error| error.kind()), Some(ErrorKind::Unsupported));
        assert_eq!(slot_wipe(&header).unwrap().len(), 256_000);
    }

    #[test]
    fn a_new_slot_gives_back_keys_of_each_length() {
        let (hash, secret) = (LuksHash::Sha256, secret("key"));
        for length in [16, 24, 32] {
            let key: Vec<u8> = (0..length as u8).collect();
            let cipher = LuksCipher::AesCbcPlain64;
            let slot = seal(cipher, hash, &key, &secret, 1000).unwrap();
            let mut digest = vec![0; 20];
            hash::pbkdf2(hash, &key, b"salt", 1, &mut digest);
            let area_length = slot.material.len() as u64;
            let opening = LuksSlotKey {
                kdf: LuksKdf::Pbkdf2 { hash, iterations: 1000, salt: slot.salt.to_vec() },
                area: ByteRange::between(0, area_length),
                cipher,
                area_key_bytes: length,
                stripes: NewLuks::STRIPES as u32,
                stripe_hash: hash,
                digest: LuksDigest { hash, iterations: 1, salt: b"salt".to_vec(), digest },
            };
            let opened = open_slot(&mut Work::new(), &opening, &slot.material, &secret, length);
            assert_eq!(opened.unwrap().as_deref(), Some(&key[..]), "{length}");
        }
    }

    #[test]
    fn a_short_key_takes_more_iterations() {
        let most = |length| iterations_for(&secret("any"), Duration::MAX, LuksHash::Sha256, length);
        assert_eq!(most(32), 2 * most(64));
    }
}
