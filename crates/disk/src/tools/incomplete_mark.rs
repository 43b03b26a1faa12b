//! The mark of a disk that is being made by a mirror: until the disk is complete, its first sector
//! holds a text in place of the data.
//!
//! Guarantee: once the mark is gone from a disk, the disk is complete. The mark is written durably
//! before anything else is written. After everything else is durable, the sector's data durably
//! replaces it. Disks write a sector as a whole, so that write is the moment in which the disk
//! becomes complete. The mark is in the disk, not beside it, so it works on every kind of target,
//! and no program takes the disk for a bootable one.

use blockhouse_core::{
    Buffer, ByteRange, Durability, Error, ErrorKind, ExtentState, Request, Result, Storage, rare,
};
use blockhouse_format::{DataPlace, Intent};

use crate::disk::Disk;

/// Bytes at the start of a disk that hold the mark: a sector, which is written as a whole.
pub const MARK_BYTES: u64 = 512;

/// The first bytes of the mark.
const MAGIC: &[u8] = b"blockhouse: mirror not complete\n";

/// Puts the mark on a disk, durably. `source` names the mirror's source, for people who read the
/// mark.
///
/// # Errors
/// Errors of the storage.
pub async fn mark_incomplete<S: Storage>(disk: &Disk<S>, source: &str) -> Result<()> {
    let mut buffer = Buffer::try_new(MARK_BYTES as usize)?;
    let text = format!("the disk is to become a mirror of {source}\n");
    let bytes = MAGIC.iter().chain(text.as_bytes()).chain(std::iter::repeat(&0));
    buffer.bytes_mut().iter_mut().zip(bytes).for_each(|(to, byte)| *to = *byte);
    let (from, durability) = (buffer.lend(), Durability::Data);
    rare(disk.submit_unlimited(Request::Write { offset: 0, from, durability })).await
}

/// Refuses a disk that has the mark. A disk whose first sector cannot be read is accepted, because
/// no mark can be found.
///
/// # Errors
/// `Corrupt`, with advice; errors of looking up the sector.
pub async fn check_not_marked<S: Storage>(disk: &Disk<S>) -> Result<()> {
    rare(find_mark(disk)).await?.map_or(Ok(()), Err)
}

/// Warns of a disk that has the mark, in the words of [`check_not_marked`]: for commands that only
/// inspect an image.
pub async fn warn_of_mark<S: Storage>(disk: &Disk<S>) {
    // An error of the look-up is no mark: the command's own work reports it.
    if let Ok(Some(refusal)) = rare(find_mark(disk)).await {
        tracing::warn!("{refusal}");
    }
}

/// The refusal of a disk that has the mark.
async fn find_mark<S: Storage>(disk: &Disk<S>) -> Result<Option<Error>> {
    let (layer, format) = (disk.image().layer(), disk.format());
    let end = MARK_BYTES.max(layer.block_size()).min(format.end());
    if end < MARK_BYTES {
        return Ok(None);
    }
    let _guard = format.begin_read();
    let extent = format.map(ByteRange::between(0, end), Intent::Read).await?;
    // The mark is in the image itself, never in compressed form. The statistics do not count the
    // read of the mark, unless the mark has to be decrypted.
    let ExtentState::Mapped { host } = extent.state else { return Ok(None) };
    let mut buffer = Buffer::try_new(extent.guest.length() as usize)?;
    let read = if layer.is_encrypted() {
        layer.read_data(DataPlace { guest: 0, host }, buffer.lend()).await
    } else {
        layer.data().storage().read(host, buffer.lend()).await
    };
    if read.is_err() {
        return Ok(None);
    }
    let Some(text) = buffer.bytes().strip_prefix(MAGIC) else { return Ok(None) };
    let text = String::from_utf8_lossy(&text[..MARK_BYTES as usize - MAGIC.len()]);
    let text = text.trim_end_matches('\0').trim_end().escape_debug();
    let what = format!("a mirror that was not completed: {text}");
    let refusal = Error::new(ErrorKind::Corrupt, what).on(disk.name());
    Ok(Some(refusal.hint("its source is the complete disk: use that, and mirror it again")))
}
