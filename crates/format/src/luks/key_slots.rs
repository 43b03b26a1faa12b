//! Changes of the key slots of a LUKS header of version 1.
//!
//! Order: a slot's area is durable before its record marks it as in use. When a slot is erased or
//! gets another key, its record is durable as not in use before its area is overwritten. So a slot
//! that is marked as in use has a key after any crash, and may be counted as one that opens the
//! disk. After a crash between the two writes of an erasure, the area is useless without the salt,
//! which the record had. The repeated erasure overwrites the area, because slots that are not in
//! use are erased, too.

use blockhouse_core::{Buffer, ByteRange, Durability, Error, ErrorKind, Result, Storage, SyncMode};

use super::luks1::{END_OF_SLOTS, NewLuks, slot_record};
use super::{LuksEncryption, LuksHeader, LuksSlot};
use crate::aligned_read;

/// The content of a key slot.
pub struct NewLuksSlot {
    /// Iterations of the key derivation from the passphrase.
    pub iterations: u32,
    /// The salt of the key derivation.
    pub salt: [u8; 32],
    /// The encrypted stripes of the disk's key.
    pub material: Vec<u8>,
}

impl LuksHeader {
    /// The first key slot that is not in use.
    pub fn free_slot(&self) -> Option<u32> {
        (0..self.slot_offsets.len() as u32).find(|&number| !self.has_slot(number))
    }

    /// Whether a key slot is in use.
    pub fn has_slot(&self, number: u32) -> bool {
        self.slots.iter().any(|slot| slot.number == number)
    }

    /// The area of a key slot, used or not. Fails if the area overlaps other data of the header.
    fn area_of(&self, number: u32) -> Result<ByteRange> {
        let length = self.key_bytes as u64 * NewLuks::STRIPES as u64;
        let length = length.next_multiple_of(512);
        let Some(&start) = self.slot_offsets.get(number as usize) else {
            let what = format!("there is no key slot {number}");
            return Err(Error::new(ErrorKind::InvalidInput, what));
        };
        let range = ByteRange::new(start, length)
            .filter(|range| range.offset() >= END_OF_SLOTS && range.end() <= self.payload);
        let others = self.slot_offsets.iter().enumerate();
        let mut others = others.filter(|&(other, _)| other != number as usize);
        let mut overlaps = |range: ByteRange| {
            others.any(|(_, &other)| other < range.end() && range.offset() < other + length)
        };
        match range {
            Some(range) if !overlaps(range) => Ok(range),
            _ => {
                let what = format!("the area of the key slot {number} overlaps other data");
                Err(Error::new(ErrorKind::Corrupt, what).at(start))
            }
        }
    }
}

impl LuksEncryption {
    /// Stores a key in a slot, durably. The slot's previous key is lost, even if the storage fails
    /// before the new one is stored.
    ///
    /// # Errors
    /// `Unsupported` for another version than 1, or for slots of another size than usual;
    /// `InvalidInput` if there is no such slot; `Corrupt` if its area overlaps other data; errors
    /// of the storage.
    pub async fn set_slot<S: Storage>(
        &self,
        storage: &S,
        number: u32,
        slot: &NewLuksSlot,
    ) -> Result<()> {
        let area = self.writable_area(number)?;
        let key = Some((slot.iterations, slot.salt));
        if self.header().has_slot(number) {
            self.write_record(storage, number, area, None).await?;
        }
        write(storage, self.start() + area.offset(), &slot.material).await?;
        self.write_record(storage, number, area, key).await
    }

    /// Erases a slot, in use or not, durably: its record, then its area, which is overwritten with
    /// `random`, up to the shorter of the two lengths.
    ///
    /// # Errors
    /// As [`set_slot`](Self::set_slot).
    pub async fn erase_slot<S: Storage>(
        &self,
        storage: &S,
        number: u32,
        random: &[u8],
    ) -> Result<()> {
        let area = self.writable_area(number)?;
        let length = random.len().min(area.length() as usize);
        self.write_record(storage, number, area, None).await?;
        write(storage, self.start() + area.offset(), &random[..length]).await
    }

    fn writable_area(&self, number: u32) -> Result<ByteRange> {
        if self.header().version != 1 {
            let what = "key slots of LUKS 2 are not changed here";
            return Err(Error::new(ErrorKind::Unsupported, what)
                .hint("use cryptsetup (luksAddKey, luksKillSlot)"));
        }
        let is_usual = |slot: &LuksSlot| {
            slot.key.as_ref().is_ok_and(|key| key.stripes as usize == NewLuks::STRIPES)
        };
        // All programs write this number, and `area_of` relies on it.
        if !self.header().slots.iter().all(is_usual) {
            let what = format!(
                "a key slot that does not have {} stripes, as all others",
                NewLuks::STRIPES
            );
            return Err(Error::new(ErrorKind::Unsupported, what)
                .hint("convert the image to a new one, which gets new key slots"));
        }
        self.header().area_of(number)
    }

    async fn write_record<S: Storage>(
        &self,
        storage: &S,
        number: u32,
        area: ByteRange,
        key: Option<(u32, [u8; 32])>,
    ) -> Result<()> {
        let (at, record) = slot_record(number, area.offset(), NewLuks::STRIPES as u32, key);
        write(storage, self.start() + at as u64, &record).await
    }
}

/// Writes bytes at any offset, durably, by a read-modify-write of their blocks.
async fn write<S: Storage>(storage: &S, offset: u64, bytes: &[u8]) -> Result<()> {
    let block = u64::from(storage.capabilities().alignment.offset).max(512);
    let start = offset / block * block;
    let end = (offset + bytes.len() as u64).next_multiple_of(block);
    let mut blocks = aligned_read::read(storage, start, (end - start) as usize).await?;
    let at = (offset - start) as usize;
    blocks[at..at + bytes.len()].copy_from_slice(bytes);
    let mut buffer = Buffer::try_new(blocks.len())?;
    buffer.bytes_mut().copy_from_slice(&blocks);
    storage.write(start, buffer.lend(), Durability::None).await?;
    storage.flush(SyncMode::Full).await
}
