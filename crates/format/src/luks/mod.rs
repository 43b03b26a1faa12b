//! LUKS containers: a header with encrypted keys, and a disk of encrypted sectors.
//!
//! - [`LuksHeader`] is the content of a header (`header`): of version 1 (`luks1`), or of version 2
//!   with its copies (`luks2`) and its JSON (`metadata`). [`LuksHeader::read`] finds it in a
//!   storage.
//! - [`Luks`] is the mapping: the disk is a contiguous range of the storage after the header.
//!
//! This module neither derives keys nor decrypts; the I/O path does both with `blockhouse-crypt`.
//! Therefore extents have the host offsets of encrypted bytes. Headers are untrusted input: at most
//! 8 MiB are read, and every field is checked.

mod header;
mod key_slots;
mod luks1;
mod luks2;
mod metadata;
mod words;

use std::sync::atomic::{AtomicU64, Ordering};

use blockhouse_core::{
    Buffer, ByteRange, Durability, Error, ErrorKind, Extent, ExtentFlags, ExtentState, Result,
    Storage, SyncMode,
};

pub use header::{LuksCipher, LuksDigest, LuksHash, LuksHeader, LuksKdf, LuksSlot, LuksSlotKey};

pub use key_slots::NewLuksSlot;
pub use luks1::NewLuks;

use crate::{Access, aligned_read};

/// The hints for a damaged header, and for one that this program does not support.
const DAMAGED: &str =
    "its header is damaged: restore it (cryptsetup luksHeaderRestore) or a copy of the image";
const OTHER_PROGRAM: &str = "cryptsetup may open it, or can make another container of it";

impl LuksHeader {
    /// Reads the header that begins at `start` of the storage. The header with its key slots' areas
    /// may take `room` bytes.
    ///
    /// # Errors
    /// `Corrupt` for a missing or damaged header, `Unsupported` for unsupported features; errors of
    /// the storage.
    pub async fn read<S: Storage>(storage: &S, start: u64, room: u64) -> Result<Self> {
        let first = aligned_read::read(storage, start, luks2::BINARY).await?;
        let header = match luks1::version(&first) {
            // The first copy of a version 2 header may be damaged, so the second copy is searched
            // for.
            _ if first[..6] != luks1::MAGIC => {
                match second_copy(storage, start, &luks2::LENGTHS).await? {
                    Some(copy) => container(copy, start),
                    None => {
                        let what = "is no LUKS container: the magic bytes are missing";
                        let error = Error::new(ErrorKind::Corrupt, what).at(start);
                        Err(error.hint("check which format it has"))
                    }
                }
            }
            1 => luks1::parse(&first).map_err(|(what, at)| refusal(what, start + at as u64)),
            2 => version_2(storage, &first, start).await,
            version => Err(refusal(format!("its version {version} is not 1 or 2"), start + 6)),
        };
        let header = header.and_then(|header| header.check_areas(start, room));
        header.map_err(|error| error.on(storage.name()))
    }

    /// Checks that the areas of all supported key slots lie in the first `room` bytes, and that the
    /// disk begins after them: otherwise the first writes to the disk would destroy the keys.
    fn check_areas(self, start: u64, room: u64) -> Result<Self> {
        let header = if self.version == 1 { luks1::LENGTH } else { 2 * luks2::LENGTHS[0] };
        if self.payload < header {
            let what = format!("its disk at offset {} overlaps it", self.payload);
            let hint = "open a detached header (cryptsetup --header) and its data with cryptsetup";
            return Err(refusal(what, start).hint(hint));
        }
        let room = room.min(self.payload);
        for LuksSlot { number, key } in &self.slots {
            let Ok(key) = key else { continue };
            if key.area.end() > room {
                let what =
                    format!("the area of its key slot {number} is past the end of the header");
                return Err(damaged(what, start.saturating_add(key.area.offset())));
            }
        }
        Ok(self)
    }
}

/// Reads both copies of a header of version 2, and returns the valid one with the higher sequence
/// number.
async fn version_2<S: Storage>(storage: &S, binary: &[u8], start: u64) -> Result<LuksHeader> {
    let first = copy(storage, binary, luks1::MAGIC, start, 0).await?;
    // A valid first copy contains its length, which is the offset of the second copy.
    let second = match luks2::length(binary, luks1::MAGIC) {
        Ok(length) if first.is_ok() => second_copy(storage, start, &[length]).await?,
        _ => second_copy(storage, start, &luks2::LENGTHS).await?,
    };
    let best = match (first, second) {
        (Ok(first), Some(second)) if second.sequence > first.sequence => second,
        (Ok(first), _) => first,
        (Err(_), Some(second)) => second,
        (Err((what, at)), None) => return Err(damaged(what, start + at as u64)),
    };
    container(best, start)
}

fn container(copy: luks2::Copy, start: u64) -> Result<LuksHeader> {
    metadata::parse(&copy.json, &copy.uuid)
        .map_err(|what| refusal(what, start + luks2::BINARY as u64))
}

type CopyOrFault = Result<luks2::Copy, (String, usize)>;

/// Reads the copy at `offset` of the container; its binary part is `binary`.
async fn copy<S: Storage>(
    storage: &S,
    binary: &[u8],
    magic: [u8; 6],
    start: u64,
    offset: u64,
) -> Result<CopyOrFault> {
    let length = match luks2::length(binary, magic) {
        Ok(length) => length,
        Err(fault) => return Ok(Err(fault)),
    };
    let bytes = aligned_read::read(storage, start + offset, length as usize).await?;
    Ok(luks2::parse(&bytes, offset))
}

/// The second copy of a header of version 2, at the first of `offsets` with a valid copy.
async fn second_copy<S: Storage>(
    storage: &S,
    start: u64,
    offsets: &[u64],
) -> Result<Option<luks2::Copy>> {
    for &offset in offsets {
        let binary = aligned_read::read(storage, start + offset, luks2::BINARY).await?;
        if binary[..6] == luks2::SECOND_MAGIC
            && let Ok(found) = copy(storage, &binary, luks2::SECOND_MAGIC, start, offset).await?
        {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

fn damaged(what: impl Into<String>, offset: u64) -> Error {
    Error::new(ErrorKind::Corrupt, what.into()).at(offset).hint(DAMAGED)
}

fn refusal(what: String, offset: u64) -> Error {
    Error::new(ErrorKind::Unsupported, format!("a LUKS header that cannot be used: {what}"))
        .at(offset)
        .hint(OTHER_PROGRAM)
}

/// Durably makes `storage` a container. `header` has the bytes of a [`NewLuks`] with its areas. The
/// rest of the storage becomes the disk. The disk does not read as zeros, because the present bytes
/// of the storage are decrypted.
///
/// # Errors
/// Errors of the storage.
pub async fn create<S: Storage>(storage: &S, header: &[u8]) -> Result<()> {
    let mut buffer = Buffer::try_new(header.len())?;
    buffer.bytes_mut().copy_from_slice(header);
    storage.write(0, buffer.lend(), Durability::None).await?;
    storage.flush(SyncMode::Full).await
}

/// The encryption of an image's data: its LUKS header, which has the encrypted keys.
pub struct LuksEncryption {
    header: LuksHeader,
    /// Offset of the header in the image.
    start: u64,
    /// The host offset of the sector with the number 0.
    origin: u64,
}

impl LuksEncryption {
    /// The encryption of a qcow2 image whose LUKS header is at `place`. The number of a sector is
    /// its host offset divided by 512.
    ///
    /// # Errors
    /// As [`LuksHeader::read`]; `Unsupported` for another version than 1, the only one that qcow2
    /// defines.
    pub(crate) async fn of_clusters<S: Storage>(storage: &S, place: ByteRange) -> Result<Self> {
        let header = LuksHeader::read(storage, place.offset(), place.length()).await?;
        if header.version != 1 {
            let what = format!("its version {} is not 1", header.version);
            return Err(refusal(what, place.offset()).on(storage.name()));
        }
        Ok(Self { header, start: place.offset(), origin: 0 })
    }

    /// Offset of the header in the image.
    fn start(&self) -> u64 {
        self.start
    }

    /// The header with the keys.
    pub fn header(&self) -> &LuksHeader {
        &self.header
    }

    /// The number of the sector at `host` for its initialization vector, in units of 512 bytes.
    pub fn sector_number(&self, host: u64) -> u64 {
        (host.wrapping_sub(self.origin) / 512).wrapping_add(self.header.iv_tweak)
    }

    /// The contents of the areas of the header's key slots, in the order of the slots; empty for
    /// unsupported slots.
    ///
    /// # Errors
    /// Errors of the storage.
    pub async fn read_areas<S: Storage>(&self, storage: &S) -> Result<Vec<Vec<u8>>> {
        let mut areas = Vec::with_capacity(self.header.slots.len());
        for slot in &self.header.slots {
            areas.push(match &slot.key {
                Ok(key) => {
                    let (at, length) = (self.start + key.area.offset(), key.area.length());
                    aligned_read::read(storage, at, length as usize).await?
                }
                Err(_) => Vec::new(),
            });
        }
        Ok(areas)
    }
}

/// A container as a mapping: the disk is one range of the storage, which begins at the header's
/// payload offset.
pub struct Luks<S: Storage> {
    storage: S,
    header: LuksHeader,
    size: AtomicU64,
}

impl<S: Storage> Luks<S> {
    /// Reads the header of the container in `storage`.
    ///
    /// # Errors
    /// As [`LuksHeader::read`]; `Corrupt` if the file ends before the disk does; `Unsupported` for
    /// write access if the disk does not begin and end at blocks of the storage.
    pub async fn open(storage: S, access: Access) -> Result<Self> {
        let header = LuksHeader::read(&storage, 0, storage.size()).await?;
        let room = storage.size().checked_sub(header.payload);
        let size = match (room, header.payload_size) {
            (Some(room), None) => room,
            (Some(room), Some(size)) if size <= room => size,
            _ => {
                let what = format!(
                    "the file of {} bytes ends before its disk, which begins at {}",
                    storage.size(),
                    header.payload
                );
                return Err(Error::new(ErrorKind::Corrupt, what)
                    .on(storage.name())
                    .at(header.payload)
                    .hint("it was truncated: restore it from a copy"));
            }
        };
        let size = size & !(u64::from(header.sector_size) - 1);
        let block = u64::from(storage.capabilities().alignment.offset);
        if access == Access::ReadWrite && !(header.payload | size).is_multiple_of(block) {
            let what = format!("its disk does not begin and end with a block of {block} bytes");
            let error = Error::new(ErrorKind::Unsupported, what).on(storage.name());
            return Err(error.at(header.payload).hint(
                "go through the page cache (--cache writeback), or open it with --read-only",
            ));
        }
        Ok(Self { storage, header, size: AtomicU64::new(size) })
    }

    /// Bytes of the disk, a multiple of the container's sector size.
    pub(crate) fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// The container.
    pub fn storage(&self) -> &S {
        &self.storage
    }

    /// The container's header.
    pub fn header(&self) -> &LuksHeader {
        &self.header
    }

    /// How the disk is encrypted.
    pub(crate) fn encryption(&self) -> LuksEncryption {
        LuksEncryption { header: self.header.clone(), start: 0, origin: self.header.payload }
    }

    /// Maps all of `range`, at its offset after the header.
    pub(crate) fn map(&self, range: ByteRange) -> Extent {
        let state = ExtentState::Mapped { host: self.header.payload + range.offset() };
        Extent { guest: range, alloc_range: range, state, flags: ExtentFlags::empty() }
    }

    /// Changes the size of the disk, and of its file. The added part of the disk reads as random
    /// data, as in a new container.
    ///
    /// # Errors
    /// `Unsupported` if the header states the size of the disk; `InvalidInput` for a size that is
    /// not a multiple of the sector size; or errors of the storage.
    pub(crate) async fn resize(&self, size: u64) -> Result<()> {
        if size == self.size() {
            return Ok(());
        }
        if self.header.payload_size.is_some() {
            let what = "the size of a LUKS container whose header says it cannot be changed";
            let error = Error::new(ErrorKind::Unsupported, what).on(self.storage.name());
            return Err(error.hint("convert it to a new image, and make that longer"));
        }
        let sector = u64::from(self.header.sector_size);
        let Some(end) =
            self.header.payload.checked_add(size).filter(|_| size.is_multiple_of(sector))
        else {
            let what = format!("a disk of {size} bytes does not consist of sectors of {sector}");
            return Err(Error::new(ErrorKind::InvalidInput, what).on(self.storage.name()));
        };
        self.storage.resize(end).await?;
        self.size.store(size, Ordering::Release);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use blockhouse_sim::{Config, Sim, SimDisk};

    use super::*;

    fn container(edit: impl FnOnce(&mut [u8])) -> Vec<u8> {
        let new = NewLuks {
            uuid: String::new(),
            digest: [0; 20],
            digest_salt: [0; 32],
            digest_iterations: 1000,
            salt: [0; 32],
            iterations: 1000,
        };
        let mut bytes = new.to_bytes();
        edit(&mut bytes);
        bytes.resize(NewLuks::LENGTH + 4096, 0);
        bytes
    }

    fn read(edit: impl FnOnce(&mut [u8])) -> Result<LuksHeader> {
        parse(container(edit))
    }

    fn parse(bytes: Vec<u8>) -> Result<LuksHeader> {
        let sim = Sim::new(1);
        let storage = SimDisk::new(&sim, Config::default(), bytes);
        sim.block_on(async move { LuksHeader::read(&storage, 0, storage.size()).await })
    }

    #[test]
    fn a_disk_that_overlaps_its_keys_is_refused() {
        assert!(read(|_| ()).is_ok());
        let sectors = |offset: usize| ((offset / 512) as u32).to_be_bytes();
        let end_of_slot = NewLuks::AREA + NewLuks::AREA_LENGTH;
        assert!(read(|bytes| bytes[104..108].copy_from_slice(&sectors(end_of_slot))).is_ok());
        for (payload, words) in [
            (0, "disk at offset 0 overlaps it"),
            (512, "disk at offset 512 overlaps it"),
            (NewLuks::AREA, "key slot 0 is past the end of the header"),
            (end_of_slot - 512, "key slot 0 is past the end of the header"),
        ] {
            let refused = read(|bytes| bytes[104..108].copy_from_slice(&sectors(payload)));
            let error = refused.unwrap_err().to_string();
            assert!(error.contains(words), "{payload}: {error}");
        }
    }

    /// The area of such a slot may reach into the area of the slot that is changed.
    #[test]
    fn slots_are_not_changed_beside_one_with_another_number_of_stripes() {
        let erase = |stripes: u32| {
            let bytes = container(|bytes| bytes[252..256].copy_from_slice(&stripes.to_be_bytes()));
            let header = parse(bytes.clone()).unwrap();
            let sim = Sim::new(1);
            let storage = SimDisk::new(&sim, Config::default(), bytes);
            let keys = LuksEncryption { header, start: 0, origin: 0 };
            sim.block_on(async move { keys.erase_slot(&storage, 1, &[9; 512]).await })
        };
        erase(4000).unwrap();
        for stripes in [3999, 8000] {
            assert_eq!(erase(stripes).unwrap_err().kind(), ErrorKind::Unsupported);
        }
    }

    /// A slot without a key that counts as one in use would let the last good slot be erased.
    #[test]
    fn a_slot_that_is_in_use_has_its_key_whenever_a_crash_interrupts_its_change() {
        let area = NewLuks::AREA..NewLuks::AREA + NewLuks::AREA_LENGTH;
        // The salt of slot 0 is 0, and its new one 9, like the bytes of its area.
        let (salt, material) = ([9; 32], vec![9; area.len()]);
        for is_erased in [true, false] {
            let sim = Sim::new(1);
            let mut random = sim.fork_prng();
            let bytes = container(|_| ());
            let header = parse(bytes.clone()).unwrap();
            let disk = SimDisk::new(&sim, Config::default(), bytes);
            let (changed, material) = (disk.clone(), material.clone());
            let task = sim.spawn(async move {
                let keys = LuksEncryption { header, start: 0, origin: 0 };
                if is_erased {
                    return keys.erase_slot(&changed, 0, &material).await;
                }
                let slot = NewLuksSlot { iterations: 1000, salt, material };
                keys.set_slot(&changed, 0, &slot).await
            });
            let (mut last, mut crashes) = (None, 0);
            while sim.step() {
                let moment = disk.counts();
                if last.replace(moment) != Some(moment) {
                    crashes += 1;
                    let bytes = disk.crash(&mut random);
                    let header = parse(bytes.clone()).unwrap();
                    let Some(slot) = header.slots.first() else { continue };
                    let LuksKdf::Pbkdf2 { salt, .. } = &slot.key.as_ref().unwrap().kdf else {
                        unreachable!("version 1 has no other")
                    };
                    let has_key = bytes[area.clone()].iter().all(|byte| *byte == salt[0]);
                    assert!(has_key, "after {moment:?}, erased: {is_erased}");
                }
            }
            task.output().expect("it ends").unwrap();
            assert!(crashes > 3 && disk.content()[area.clone()].iter().all(|&byte| byte == 9));
            assert_eq!(parse(disk.content()).unwrap().has_slot(0), !is_erased);
        }
    }
}
