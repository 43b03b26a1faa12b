//! Gives an overlay another backing file, with the same content.
//!
//! Ranges that would read differently with the new backing file are first copied into the overlay,
//! durably; only then does one header write name the new backing file. A crash before that write
//! leaves an overlay of the old backing file, with more clusters of its own than it needs. Ranges
//! that block status shows as zeros in both the old and the new backing files are not read.

use blockhouse_core::{Buffer, ExtentState, Result, Storage, ToolProgress, rare};
use blockhouse_format::{Backing, Intent};
use futures_util::stream;

use super::chunks::for_each_in_flight;
use super::convert::read;
use super::range_writer::RangeWriter;
use super::scan::{Chunk, StatusScan};
use crate::disk::Disk;

/// Minimum bytes of a chunk of the scan; a chunk is at least a cluster.
const MIN_CHUNK: u64 = 1 << 20;

/// How copied clusters are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compress {
    /// Uncompressed.
    Nothing,
    /// Whole clusters compressed, if that saves space.
    Clusters,
}

/// Copies into `disk` the ranges that would read differently with the backing file `new`; with
/// `None`, all that it reads from the old backing file. With [`Compress::Clusters`] the image's
/// format must have compressed clusters. Durable when it returns. No other request may be in
/// flight.
///
/// # Errors
/// `ReadOnly`, or storage errors; the content is the same as before in any case.
pub async fn prepare_rebase<S: Storage>(
    disk: &Disk<S>,
    new: Option<&Disk<S>>,
    compress: Compress,
    progress: &ToolProgress,
) -> Result<()> {
    disk.check_writable()?;
    progress.begin(disk.size());
    // Zeros past the end of the backing file must be stored as well: the new backing file may be
    // longer.
    disk.format().set_backing_size(u64::MAX);
    let chunk_size = disk.image().cluster_size().unwrap_or(MIN_CHUNK).max(MIN_CHUNK);
    let scan = StatusScan::new([disk].into_iter().chain(new), chunk_size, disk.size());
    let chunks = stream::unfold(Some(scan), |scan| async move {
        let mut scan = scan?;
        match scan.next().await {
            Ok(chunk) => Some((Ok(chunk?), Some(scan))),
            Err(error) => Some((Err(error), None)),
        }
    });
    rare(for_each_in_flight(chunks, async |chunk: Chunk| {
        let end = chunk.range.end();
        keep_chunk(disk, new, compress, chunk).await?;
        progress.reach(end);
        Ok(())
    }))
    .await?;
    disk.flush().await
}

/// Writes the new backing file, or none, to the image's header, durably: see
/// [`ImageHeader::set_backing`](blockhouse_format::ImageHeader::set_backing). Without
/// [`prepare_rebase`] the content may change. The caller then closes the disk and reopens it.
///
/// # Errors
/// As there; `ReadOnly`; `Unsupported` for a format without backing files.
pub async fn set_backing_file<S: Storage>(disk: &Disk<S>, backing: Option<Backing>) -> Result<()> {
    disk.check_writable()?;
    rare(disk.format().header().set_backing(backing)).await
}

/// Copies the ranges of a chunk that the disk reads from its backing file.
async fn keep_chunk<S: Storage>(
    disk: &Disk<S>,
    new: Option<&Disk<S>>,
    compress: Compress,
    chunk: Chunk,
) -> Result<()> {
    let mut rest = chunk.range;
    while !rest.is_empty() {
        let extent = disk.format().map(rest, Intent::Read).await?;
        rest = rest.skip(extent.guest.length());
        let part = chunk.part(extent.guest);
        let is_of_backing = matches!(extent.state, ExtentState::Hole | ExtentState::Backing);
        if is_of_backing && !part.data.is_empty() {
            keep_part(disk, new, compress, &part).await?;
        }
    }
    Ok(())
}

async fn keep_part<S: Storage>(
    disk: &Disk<S>,
    new: Option<&Disk<S>>,
    compress: Compress,
    part: &Chunk,
) -> Result<()> {
    let [mut old, mut other] = [(); 2].map(|()| Buffer::new(part.range.length() as usize));
    read(disk, part, &mut old).await?;
    match new {
        Some(new) => read(new, part, &mut other).await?,
        None => other.bytes_mut().fill(0),
    }
    let (offset, length) = (part.range.offset(), part.range.length() as usize);
    let writer = RangeWriter::new(disk, compress == Compress::Clusters)?;
    writer.update(offset, length, &mut old, &other).await
}
