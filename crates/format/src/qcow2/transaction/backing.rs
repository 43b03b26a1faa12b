//! Changes an image's backing file, by changes of the header only.
//!
//! The name, its format (a header extension) and the fields that point to them must change
//! together, but only a write of 512 bytes is atomic on every disk. So:
//!
//! 1. the bytes beyond the first 512 bytes (the new name, and the end of the new extensions) are
//!    durably written to a part of the first cluster that neither the old name nor the old
//!    extensions use; nothing refers to these bytes yet;
//! 2. one write of the first 512 bytes changes the fields and the extensions. The feature name
//!    table (an extension only for messages) is left out if space is short. If everything fits, the
//!    name follows the extensions, as in other programs' images.
//!
//! If clusters have 512 bytes, the whole header is in the first 512 bytes. After a crash the image
//! has either the old backing file or the new one. If the extensions do not fit, the change is
//! refused.

use blockhouse_core::{Error, ErrorKind, Result, Storage, SyncMode, rare};

use crate::qcow2::header::Qcow2Header;
use crate::qcow2::layout::extensions::{self, BACKING_FORMAT, Extension, FEATURE_NAMES};
use crate::qcow2::layout::header::{Header, SECTOR};
use crate::qcow2::layout::limits::MAX_FILE_NAME;
use crate::qcow2::layout::options::{Backing, DataFile};
use crate::qcow2::layout::table_io;
use crate::qcow2::layout::words::be64;
use crate::qcow2::tables::put_names;
use crate::qcow2::writeback::Metadata;

impl<S: Storage> Qcow2Header<'_, S> {
    /// Durably gives the image another backing file, or none. The [facts](crate::Qcow2::facts)
    /// remain as when the image was opened; the caller closes the image after this. The caller
    /// ensures that the new file has the content that the image relies on.
    ///
    /// # Errors
    /// `InvalidInput` for a name that is empty, too long, or too long for the header, and for any
    /// name if the data file is the raw disk; `ReadOnly`; storage errors. If a header write
    /// fails, the old name is written again. If that fails, too, the image has one of the two until
    /// the next header write, at the latest that of the closing, stores the old name.
    pub async fn set_backing(&self, backing: Option<Backing>) -> Result<()> {
        rare(change_backing(&self.image.metadata, backing, NamePlace::BehindExtensions)).await
    }
}

/// The location of the backing file's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NamePlace {
    /// Directly after the extensions, as in images of other programs.
    BehindExtensions,
    /// Beyond the first sector, if clusters are larger, so that the sector keeps its free space.
    BeyondFirstSector,
}

async fn change_backing<S: Storage>(
    metadata: &Metadata<S>,
    backing: Option<Backing>,
    place: NamePlace,
) -> Result<()> {
    metadata.check_writable()?;
    metadata.flush(SyncMode::Full).await?;
    restore_names(metadata).await?;
    let storage = metadata.storage();
    let invalid = |what: &str| {
        Error::new(ErrorKind::InvalidInput, format!("cannot change the backing file: {what}"))
            .on(storage.name())
    };
    if backing.as_ref().is_some_and(|new| new.name.is_empty() || new.name.len() > MAX_FILE_NAME) {
        return Err(invalid("its name must have 1 to 1023 bytes"));
    }
    let old = metadata.lock().tables.headers.disk().clone();
    if backing.is_some() && old.data_file.as_ref().is_some_and(DataFile::is_raw_disk) {
        return Err(invalid("its data file is the raw disk, which has no backing file"));
    }
    let length = metadata.geometry().cluster_size() as usize;
    let bytes = table_io::read(storage, 0, length).await?;
    let new = with_backing(&old, backing);
    let no_room = || invalid("the header has no room for it");
    let NewLayout { list, name_offset } = lay_out(&old, &new, &bytes, place).ok_or_else(no_room)?;
    metadata.autoclear().begin_changes_beside_guest_data().await?;
    let name = new.backing.as_ref().map_or(&[][..], |backing| &backing.name);
    let mut after = bytes.clone();
    after[8..16].copy_from_slice(&(name_offset.unwrap_or(0) as u64).to_be_bytes());
    after[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
    after[new.length..SECTOR].fill(0);
    after[new.length..new.length + list.len()].copy_from_slice(&list);
    if let Some(at) = name_offset {
        after[at..at + name.len()].copy_from_slice(name);
    }
    let changed = (SECTOR..after.len()).filter(|&at| after[at] != bytes[at]);
    if let (Some(first), Some(last)) = (changed.clone().min(), changed.max()) {
        let part = first..last + 1;
        let patch = |bytes: &mut [u8]| bytes.copy_from_slice(&after[part.clone()]);
        metadata.writer().write_header_part(part.clone(), patch).await?;
        metadata.sync(SyncMode::Data).await?;
    }
    let mut change = NameChange { metadata, old: &bytes, is_durable: false };
    // Other fields stay as they are: a writeback may change them at the same time.
    let patch = |bytes: &mut [u8]| put_names(bytes, new.length, &after);
    let written = match metadata.writer().write_header(patch).await {
        Ok(()) => metadata.sync(SyncMode::Data).await,
        Err(error) => Err(error),
    };
    change.is_durable = written.is_ok();
    drop(change);
    if let Err(error) = written {
        // If that fails, too (a full host), guests go on, and the next header write repeats it: a
        // detached backing file has nothing that they need.
        let _ = restore_names(metadata).await;
        return Err(error);
    }
    let mut state = metadata.lock();
    state.tables.headers.set_names(&new);
    state.mapping.set_backing_end(if new.backing.is_some() { u64::MAX } else { 0 });
    Ok(())
}

/// A change of the names on disk. If it is dropped before it is durable, it is unknown which names
/// are on disk, so later header writes store the old ones.
struct NameChange<'a, S: Storage> {
    metadata: &'a Metadata<S>,
    /// The first sector with the old names.
    old: &'a [u8],
    is_durable: bool,
}

impl<S: Storage> Drop for NameChange<'_, S> {
    fn drop(&mut self) {
        if !self.is_durable {
            self.metadata.lock().tables.headers.restore_names(self.old);
        }
    }
}

/// Durably stores the old names again, if a change of names failed and was not undone.
pub(super) async fn restore_names<S: Storage>(metadata: &Metadata<S>) -> Result<()> {
    if metadata.lock().tables.headers.has_old_names() {
        metadata.rewrite_header(|_| ()).await?;
    }
    Ok(())
}

/// Durably moves the name of the backing file out of the first sector to make space for extensions,
/// if the name is in this sector and clusters are larger than a sector.
///
/// # Errors
/// As [`Qcow2Header::set_backing`].
pub(super) async fn free_first_sector<S: Storage>(metadata: &Metadata<S>) -> Result<()> {
    restore_names(metadata).await?;
    let backing = metadata.lock().tables.headers.disk().backing.clone();
    if backing.is_none() || metadata.geometry().cluster_size() <= SECTOR as u64 {
        return Ok(());
    }
    let sector = table_io::read(metadata.storage(), 0, SECTOR).await?;
    if be64(&sector, 8) >= SECTOR as u64 {
        return Ok(());
    }
    change_backing(metadata, backing, NamePlace::BeyondFirstSector).await
}

/// The header with another backing file. The file's format is among the extensions.
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

/// The parts after the fields of a header.
struct NewLayout {
    /// The extensions, which follow the fields.
    list: Vec<u8>,
    /// Offset of the backing file's name.
    name_offset: Option<usize>,
}

/// The new extensions and the offset of the name; `None` if there is no space. `bytes` is the old
/// first cluster.
fn lay_out(old: &Header, new: &Header, bytes: &[u8], place: NamePlace) -> Option<NewLayout> {
    let name_length = new.backing.as_ref().map_or(0, |backing| backing.name.len());
    let has_name = new.backing.is_some();
    // The parts of the old header beyond the first sector.
    let list_end = old.length + extensions::to_bytes(&old.extensions).len();
    let name_start = be64(bytes, 8) as usize;
    let old_name = old.backing.as_ref().map(|old| name_start..name_start + old.name.len());
    let is_free = |start: usize, end: usize| {
        end <= bytes.len()
            && (end <= SECTOR
                || (list_end <= SECTOR.max(start)
                    && old_name.as_ref().is_none_or(|old| {
                        end <= old.start.max(SECTOR) || old.end <= start.max(SECTOR)
                    })))
    };
    let all = extensions::to_bytes(&new.extensions);
    let few: Vec<Extension> =
        new.extensions.iter().filter(|one| one.kind != FEATURE_NAMES).cloned().collect();
    let few = extensions::to_bytes(&few);
    for list in [&all, &few] {
        let end = new.length + list.len();
        let is_small = bytes.len() <= SECTOR;
        if (place == NamePlace::BehindExtensions || is_small)
            && is_free(new.length, end + name_length)
        {
            return Some(NewLayout { list: list.clone(), name_offset: has_name.then_some(end) });
        }
    }
    let list = [all, few].into_iter().find(|list| new.length + list.len() <= SECTOR)?;
    if !has_name {
        return Some(NewLayout { list, name_offset: None });
    }
    let free = SECTOR.max(list_end).next_multiple_of(SECTOR);
    let after = old_name.as_ref().map_or(free, |name| free.max(name.end.next_multiple_of(SECTOR)));
    let at = [free, after].into_iter().find(|&start| is_free(start, start + name_length))?;
    Some(NewLayout { list, name_offset: Some(at) })
}
