//! Opens a key slot with a secret and returns the cipher of the disk.

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_engine::LockedBytes;
use blockhouse_format::{LuksCipher, LuksHeader, LuksSlotKey};

use crate::kdf::{Work, empty_key};
use crate::{Secret, SectorCipher, stripes};

/// The cipher of a container's disk, and the index of the first of `secrets` that opens a key slot.
/// `areas` are the bytes of the slots' areas, in the slots' order; areas of unsupported slots are
/// not read. Errors do not name a file.
///
/// Computes for seconds, with up to 1 GiB of memory: do not call it on an event loop. The work that
/// the header can demand is limited: 2^27 rounds of HMAC, and 32 GiB filled by Argon2, over all
/// slots and secrets.
///
/// # Errors
/// `Unsupported` when no secret opens a slot, also if slots could not be tried or exceed the
/// limits; the kernel's error if it has no memory for the disk's key.
pub fn unlock(
    header: &LuksHeader,
    areas: &[Vec<u8>],
    secrets: &[&Secret],
) -> Result<(SectorCipher, usize)> {
    let mut work = Work::new();
    let mut reasons = Vec::new();
    for (index, secret) in secrets.iter().enumerate() {
        for (slot, area) in header.slots.iter().zip(areas) {
            let key = match &slot.key {
                Ok(key) => open_slot(&mut work, key, area, secret, header.key_bytes),
                Err(why) => Err(why.clone()),
            };
            match key {
                Ok(Some(key)) => {
                    let cipher = SectorCipher::new(header.cipher, &key, header.sector_size);
                    return cipher
                        .map(|cipher| (cipher, index))
                        .map_err(|error| Error::host("no memory for its key", error));
                }
                Ok(None) => {}
                Err(why) => reasons.push(format!("key slot {}: {why}", slot.number)),
            }
        }
    }
    Err(refusal(header, reasons))
}

/// The cipher of an image in QEMU's encryption before LUKS: the key is the secret, truncated or
/// zero-padded to 16 bytes. A wrong secret is not detected: it gives a cipher, too.
///
/// # Errors
/// The kernel has no memory for the key.
pub fn aes_of_password(secret: &Secret) -> Result<SectorCipher> {
    let host = |error| Error::host("no memory for its key", error);
    let mut key = LockedBytes::new(16).map_err(host)?;
    let length = secret.bytes().len().min(key.len());
    key[..length].copy_from_slice(&secret.bytes()[..length]);
    SectorCipher::new(LuksCipher::AesCbcPlain64, &key, 512).map_err(host)
}

/// The disk's key, if the secret opens the slot.
pub(crate) fn open_slot(
    work: &mut Work,
    slot: &LuksSlotKey,
    area: &[u8],
    secret: &Secret,
    key_bytes: usize,
) -> Result<Option<LockedBytes>, String> {
    let mut area_key = empty_key(slot.area_key_bytes)?;
    work.derive(&slot.kdf, secret.bytes(), &mut area_key)?;
    let no_memory = |error| format!("no memory for its key: {error}");
    let cipher = SectorCipher::new(slot.cipher, &area_key, 512).map_err(no_memory)?;
    let mut material = LockedBytes::copy_of(area).map_err(no_memory)?;
    cipher.decrypt(0, &mut material);
    let mut key = empty_key(key_bytes)?;
    let length = key_bytes * slot.stripes as usize;
    stripes::merge(slot.stripe_hash, &material[..length], &mut key);
    Ok(work.is_key_of(&slot.digest, &key)?.then_some(key))
}

fn refusal(header: &LuksHeader, mut reasons: Vec<String>) -> Error {
    let count = header.slots.len();
    if count == 0 {
        let what = "its LUKS header has no key slot in use: no key can open it";
        return Error::new(ErrorKind::Unsupported, what)
            .hint("restore the header from a backup (cryptsetup luksHeaderRestore)");
    }
    reasons.sort();
    reasons.dedup();
    match reasons.first() {
        None => {
            let what = format!("the key opens none of its {count} key slots");
            Error::new(ErrorKind::Unsupported, what).hint(
                "check the key; a key file counts with its line feeds, a passphrase file does not",
            )
        }
        Some(first) => {
            let what = format!("no key slot was opened, and not all could be tried; {first}");
            Error::new(ErrorKind::Unsupported, what)
                .hint("let cryptsetup make a slot that asks for less (luksConvertKey)")
        }
    }
}
