//! The header of LUKS version 1 as bytes ("LUKS On-Disk Format Specification", version 1.2.3).

use super::header::{
    LuksCipher, LuksDigest, LuksHash, LuksHeader, LuksKdf, LuksSlot, LuksSlotKey, MAX_KEY, MIN_KEY,
    printable, slot_area,
};
use super::words::{be16, be32, text};

/// The first bytes of every header.
pub(super) const MAGIC: [u8; 6] = *b"LUKS\xba\xbe";
/// Bytes before the areas of the key slots.
pub(super) const LENGTH: u64 = 4096;
/// Bytes of a sector, the unit of offsets.
const SECTOR: u64 = 512;
/// How many key slots it has.
const SLOTS: usize = 8;
/// Offset of the first slot's record, and bytes of each record.
const FIRST_SLOT: usize = 208;
const SLOT_LENGTH: usize = 48;
/// Offset in a record of the field with the first sector of the slot's area.
const SLOT_AREA: usize = 40;
const ENABLED: u32 = 0x00ac_71f3;
const DISABLED: u32 = 0x0000_dead;

/// Parses the header in `bytes`, 4 KiB, whose magic was checked. An error is the reason and the
/// offset of the field.
pub(super) fn parse(bytes: &[u8]) -> Result<LuksHeader, (String, usize)> {
    let name = format!("{}-{}", text(bytes, 8, 32), text(bytes, 40, 32));
    let cipher = LuksCipher::parse(&name).map_err(|why| (why, 8))?;
    let hash = LuksHash::parse(&text(bytes, 72, 32)).map_err(|why| (why, 72))?;
    let key = u64::from(be32(bytes, 108));
    if !(MIN_KEY..=MAX_KEY).contains(&key) {
        return Err((format!("a key of {key} bytes is not {MIN_KEY} to {MAX_KEY}"), 108));
    }
    let key_bytes = cipher.check_key(key).map_err(|why| (why, 108))?;
    let digest = LuksDigest {
        hash,
        iterations: be32(bytes, 164),
        salt: bytes[132..164].to_vec(),
        digest: bytes[112..132].to_vec(),
    };
    let mut slots = Vec::new();
    for number in 0..SLOTS {
        let at = FIRST_SLOT + number * SLOT_LENGTH;
        match be32(bytes, at) {
            ENABLED => slots.push(slot(bytes, at, number as u32, cipher, key_bytes, &digest)?),
            DISABLED => {}
            other => return Err((format!("the key slot {number} is marked {other:#010x}"), at)),
        }
    }
    Ok(LuksHeader {
        version: 1,
        uuid: printable(&text(bytes, 168, 40)),
        cipher,
        key_bytes,
        sector_size: SECTOR as u32,
        iv_tweak: 0,
        payload: u64::from(be32(bytes, 104)) * SECTOR,
        payload_size: None,
        slots,
        slot_offsets: (0..SLOTS)
            .map(|number| be32(bytes, FIRST_SLOT + number * SLOT_LENGTH + SLOT_AREA))
            .map(|sector| u64::from(sector) * SECTOR)
            .collect(),
    })
}

fn slot(
    bytes: &[u8],
    at: usize,
    number: u32,
    cipher: LuksCipher,
    key_bytes: usize,
    digest: &LuksDigest,
) -> Result<LuksSlot, (String, usize)> {
    let offset = u64::from(be32(bytes, at + 40)) * SECTOR;
    let stripes = be32(bytes, at + 44);
    let area = slot_area(offset, key_bytes as u64, u64::from(stripes))
        .map_err(|why| (format!("the key slot {number}: {why}"), at + 40))?;
    let kdf = LuksKdf::Pbkdf2 {
        hash: digest.hash,
        iterations: be32(bytes, at + 4),
        salt: bytes[at + 8..at + 40].to_vec(),
    };
    let key = LuksSlotKey {
        kdf,
        area,
        cipher,
        area_key_bytes: key_bytes,
        stripes,
        stripe_hash: digest.hash,
        digest: digest.clone(),
    };
    Ok(LuksSlot { number, key: Ok(key) })
}

/// The record of a key slot: its offset in the header, and its bytes. `area` is the offset of its
/// area, in bytes from the start of the header; `key` is `None` for a slot that is not in use.
pub(super) fn slot_record(
    number: u32,
    area: u64,
    stripes: u32,
    key: Option<(u32, [u8; 32])>,
) -> (usize, [u8; SLOT_LENGTH]) {
    let mut record = [0; SLOT_LENGTH];
    let mut put = |at: usize, field: &[u8]| record[at..at + field.len()].copy_from_slice(field);
    put(0, &if key.is_some() { ENABLED } else { DISABLED }.to_be_bytes());
    if let Some((iterations, salt)) = key {
        put(4, &iterations.to_be_bytes());
        put(8, &salt);
    }
    put(SLOT_AREA, &((area / SECTOR) as u32).to_be_bytes());
    put(SLOT_AREA + 4, &stripes.to_be_bytes());
    (FIRST_SLOT + number as usize * SLOT_LENGTH, record)
}

/// The end of the slots' records: no area begins before it.
pub(super) const END_OF_SLOTS: u64 = (FIRST_SLOT + SLOTS * SLOT_LENGTH) as u64;

/// A new header, with one key slot in use. AES-256-XTS with `plain64`, and SHA-256.
pub struct NewLuks {
    /// The container's UUID, at most 39 bytes.
    pub uuid: String,
    /// PBKDF2 of the disk's key, its salt and iterations.
    pub digest: [u8; 20],
    /// See `digest`.
    pub digest_salt: [u8; 32],
    /// See `digest`.
    pub digest_iterations: u32,
    /// The salt of the passphrase's derivation in slot 0.
    pub salt: [u8; 32],
    /// The iterations of the passphrase's derivation in slot 0.
    pub iterations: u32,
}

impl NewLuks {
    /// How the sectors of the disk and the slot's area are encrypted.
    pub const CIPHER: LuksCipher = LuksCipher::AesXtsPlain64;
    /// The hash with which keys are derived and stripes are merged.
    pub const HASH: LuksHash = LuksHash::Sha256;
    /// Bytes of the disk's key.
    pub const KEY: usize = 64;
    /// Stripes of a slot.
    pub const STRIPES: usize = 4000;
    /// The offset of slot 0's area, and bytes of its key material.
    pub const AREA: usize = 4096;
    /// See `AREA`.
    pub const AREA_LENGTH: usize = Self::KEY * Self::STRIPES;
    /// Bytes from the start of one slot's area to the next.
    const AREA_STEP: usize = Self::AREA_LENGTH.next_multiple_of(4096);
    /// Bytes of the header with all areas: the offset of the container's disk.
    pub const LENGTH: usize = Self::AREA + SLOTS * Self::AREA_STEP;

    /// The header with its areas, which are zeros.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; Self::LENGTH];
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(0, &MAGIC);
        put(6, &1_u16.to_be_bytes());
        put(8, b"aes");
        put(40, b"xts-plain64");
        put(72, Self::HASH.as_str().as_bytes());
        put(104, &sectors(Self::LENGTH));
        put(108, &(Self::KEY as u32).to_be_bytes());
        put(112, &self.digest);
        put(132, &self.digest_salt);
        put(164, &self.digest_iterations.to_be_bytes());
        put(168, &self.uuid.as_bytes()[..self.uuid.len().min(39)]);
        for number in 0..SLOTS {
            let at = FIRST_SLOT + number * SLOT_LENGTH;
            put(at, &if number == 0 { ENABLED } else { DISABLED }.to_be_bytes());
            put(at + 40, &sectors(Self::AREA + number * Self::AREA_STEP));
            put(at + 44, &(Self::STRIPES as u32).to_be_bytes());
        }
        put(FIRST_SLOT + 4, &self.iterations.to_be_bytes());
        put(FIRST_SLOT + 8, &self.salt);
        bytes
    }
}

/// An offset as a field of the header.
fn sectors(offset: usize) -> [u8; 4] {
    ((offset as u64 / SECTOR) as u32).to_be_bytes()
}

/// The version in the first bytes of a header.
pub(super) fn version(bytes: &[u8]) -> u16 {
    be16(bytes, 6)
}
