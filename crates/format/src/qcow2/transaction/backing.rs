//! Another backing file for an image: only its header changes.
//!
//! The name, its format (a header extension) and the fields that point to them must change together, and
//! only 512 bytes are written at once by every disk. So:
//!
//! 1. the new name goes to a part of the first cluster that neither the old name nor the old extensions
//!    use, durably; nothing refers to it yet;
//! 2. one write of the first 512 bytes changes the fields and the extensions, which have to fit in there.
//!    Names of feature bits (an extension that only serves messages) are left out where room is short.
//!
//! Where clusters have 512 bytes, all is in the first ones. A crash leaves the old backing file or the
//! new one. Where the extensions do not fit, the change is refused.

use blockhouse_core::{Durability, Error, ErrorKind, Result, Storage, SyncMode};

use crate::qcow2::layout::extensions::{self, BACKING_FORMAT, Extension, FEATURE_NAMES};
use crate::qcow2::layout::header::{Header, SECTOR};
use crate::qcow2::layout::limits::MAX_FILE_NAME;
use crate::qcow2::layout::options::{Backing, DataFile};
use crate::qcow2::layout::table_io;
use crate::qcow2::layout::words::be64;

use super::ImageMetadata;

/// Gives the image another backing file or none, durably.
///
/// # Errors
/// `InvalidInput` for a name that is empty, too long, or for which the header has no room; or what
/// the storage answers.
pub(crate) async fn set_backing<S: Storage>(
    metadata: &ImageMetadata<S>,
    backing: Option<Backing>,
) -> Result<()> {
    metadata.check_writable()?;
    metadata.flush(SyncMode::Full).await?;
    let storage = metadata.storage();
    let invalid = |what: &str| {
        Error::new(ErrorKind::InvalidInput, format!("cannot change the backing file: {what}"))
            .on(storage.name())
    };
    if backing.as_ref().is_some_and(|new| new.name.is_empty() || new.name.len() > MAX_FILE_NAME) {
        return Err(invalid("its name must have 1 to 1023 bytes"));
    }
    let old = metadata.lock().tables.headers().disk().clone();
    if backing.is_some() && old.data_file.as_ref().is_some_and(DataFile::is_raw_disk) {
        return Err(invalid("its data file is the raw disk, which has no backing file"));
    }
    let length = metadata.geometry().cluster_size() as usize;
    let mut bytes = table_io::read(storage, 0, length).await?;
    let new = with_backing(&old, backing);
    let no_room = || invalid("the header has no room for it");
    let (extensions, at) = lay_out(&old, &new, &bytes).ok_or_else(no_room)?;
    if let (Some(backing), Some(at)) = (&new.backing, at)
        && at >= SECTOR
    {
        bytes[at..at + backing.name.len()].copy_from_slice(&backing.name);
        write_header_part(metadata, &bytes, at, backing.name.len()).await?;
    }
    let name_length = new.backing.as_ref().map_or(0, |backing| backing.name.len());
    let patch = |bytes: &mut [u8]| {
        bytes[8..16].copy_from_slice(&(at.unwrap_or(0) as u64).to_be_bytes());
        bytes[16..20].copy_from_slice(&(name_length as u32).to_be_bytes());
        bytes[new.length..SECTOR].fill(0);
        bytes[new.length..new.length + extensions.len()].copy_from_slice(&extensions);
        if let (Some(backing), Some(at @ ..SECTOR)) = (&new.backing, at) {
            bytes[at..at + name_length].copy_from_slice(&backing.name);
        }
    };
    // A writeback may change other fields meanwhile.
    metadata.writer().write_header(patch).await?;
    metadata.sync(SyncMode::Data).await?;
    let mut state = metadata.lock();
    state.tables.set_backing(&new);
    state.changes.set_backing_end(if new.backing.is_some() { u64::MAX } else { 0 });
    Ok(())
}

/// Moves the name of the backing file out of the first sector, if it is there and clusters have more, so that
/// extensions find room: durably.
///
/// # Errors
/// As [`set_backing`].
pub(super) async fn free_first_sector<S: Storage>(metadata: &ImageMetadata<S>) -> Result<()> {
    let backing = metadata.lock().tables.headers().disk().backing.clone();
    if backing.is_none() || metadata.geometry().cluster_size() <= SECTOR as u64 {
        return Ok(());
    }
    let sector = table_io::read(metadata.storage(), 0, SECTOR).await?;
    if be64(&sector, 8) >= SECTOR as u64 {
        return Ok(());
    }
    set_backing(metadata, backing).await
}

/// Writes the blocks of the first cluster that hold a part of it, durably.
async fn write_header_part<S: Storage>(
    metadata: &ImageMetadata<S>,
    bytes: &[u8],
    start: usize,
    length: usize,
) -> Result<()> {
    let storage = metadata.storage();
    let block = (storage.capabilities().alignment.offset as usize).max(SECTOR);
    let end = (start + length).next_multiple_of(block).min(bytes.len());
    let start = start / block * block;
    let part = &bytes[start..end];
    table_io::write(storage, start as u64, part, Durability::None).await?;
    metadata.sync(SyncMode::Data).await
}

/// The header with another backing file, and its format among the extensions.
fn with_backing(old: &Header, backing: Option<Backing>) -> Header {
    let mut new = old.clone();
    new.extensions.retain(|extension| extension.kind != BACKING_FORMAT);
    if let Some(format) = backing.as_ref().and_then(|backing| backing.format.as_ref()) {
        let data = format.as_bytes().to_vec();
        new.extensions.insert(0, Extension { kind: BACKING_FORMAT, data });
    }
    new.backing = backing;
    new
}

/// The extensions as bytes, and the offset of the name; `None` where there is no room. `bytes` is the old
/// first cluster.
fn lay_out(old: &Header, new: &Header, bytes: &[u8]) -> Option<(Vec<u8>, Option<usize>)> {
    let name_length = new.backing.as_ref().map_or(0, |backing| backing.name.len());
    let needed = if bytes.len() > SECTOR { 0 } else { name_length };
    let fits = |list: &Vec<u8>| new.length + list.len() + needed <= SECTOR;
    let all = extensions::to_bytes(&new.extensions);
    let few: Vec<Extension> =
        new.extensions.iter().filter(|one| one.kind != FEATURE_NAMES).cloned().collect();
    let list = [all, extensions::to_bytes(&few)].into_iter().find(fits)?;
    if new.backing.is_none() {
        return Some((list, None));
    }
    if bytes.len() <= SECTOR {
        let at = new.length + list.len();
        return Some((list, Some(at)));
    }
    // What the old header uses beyond the first sector.
    let list_end = old.length + extensions::to_bytes(&old.extensions).len();
    let old_name = be64(bytes, 8) as usize;
    let old_name = old.backing.as_ref().map(|backing| old_name..old_name + backing.name.len());
    let free = SECTOR.max(list_end).next_multiple_of(SECTOR);
    let after = old_name.as_ref().map_or(free, |name| free.max(name.end.next_multiple_of(SECTOR)));
    let is_free = |start: &usize| {
        let end = start + name_length;
        end <= bytes.len()
            && old_name.as_ref().is_none_or(|old| end <= old.start || old.end <= *start)
    };
    let at = [free, after].into_iter().find(is_free)?;
    Some((list, Some(at)))
}
