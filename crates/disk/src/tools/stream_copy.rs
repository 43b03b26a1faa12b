//! Copies a stream of bytes, whose length is known only at its end, to a disk.
//!
//! Guarantees: zeros of the stream take no space in a new target. A target that may grow grows in
//! large steps during the copy; at the end it is cut to the length of the stream, in whole sectors.
//! Memory is bounded: a few pieces are in flight together. Nothing is durable before the target is
//! closed.

use std::sync::Arc;

use blockhouse_core::{Buffer, Error, ErrorKind, Result, Storage, ToolProgress, rare};
use futures_util::stream::{self, LocalBoxStream, StreamExt};

use super::chunks::for_each_in_flight;
use super::convert::TargetContent;
use super::range_writer::RangeWriter;
use super::zeros::{is_zero, runs};
use crate::disk::Disk;

/// The least step by which a target grows, in bytes.
const MIN_GROWTH: u64 = 1 << 30;
const SECTOR: usize = 512;

/// How a stream is copied.
#[derive(Clone, Copy, Debug)]
pub struct StreamOptions {
    /// The target's content before the copy.
    pub target_content: TargetContent,
    /// Whether data is stored in compressed clusters if that saves space.
    pub compress: bool,
    /// Whether zeros are written like data.
    pub writes_zeros: bool,
    /// Whether the target becomes as long as the stream. If not, it must be long enough, and its
    /// bytes beyond the stream stay as they are.
    pub resize: bool,
}

/// Bytes of each piece of a stream but the last: a multiple of clusters of every size.
pub const STREAM_PIECE: usize = 2 << 20;

/// Writes a stream to the start of `target`, which must not be used otherwise. Each piece has
/// [`STREAM_PIECE`] bytes; only the last may be shorter. Returns the length of the stream in bytes;
/// a partial sector at its end is filled up with zeros. `progress` counts the bytes of the stream
/// that are done.
///
/// # Errors
/// Errors of the stream or a storage; `NoSpace` if the target is too short and must not grow;
/// `InvalidInput` if its format has no compressed clusters. After an error the target has a part of
/// the copy.
pub async fn copy_stream<S: Storage>(
    target: &Arc<Disk<S>>,
    pieces: LocalBoxStream<'_, Result<Buffer>>,
    options: StreamOptions,
    progress: &ToolProgress,
) -> Result<u64> {
    let mut writer = RangeWriter::new(Arc::clone(target), options.compress)?;
    if options.writes_zeros {
        writer.write_zeros();
    }
    let writer = &writer;
    let mut length = 0;
    let placed = stream::unfold((pieces, &mut length), |(mut pieces, length)| async move {
        let piece = match pieces.next().await? {
            Ok(piece) => make_room(target, *length, &piece, options.resize).await.map(|()| piece),
            Err(error) => Err(error),
        };
        let offset = *length;
        *length += piece.as_ref().map_or(0, |piece| piece.len() as u64);
        Some((piece.map(|piece| (offset, piece)), (pieces, length)))
    });
    rare(for_each_in_flight(placed, async |(offset, mut piece): (u64, Buffer)| {
        let length = piece.len();
        fill_last_sector(&mut piece);
        if options.target_content == TargetContent::Unknown && !options.writes_zeros {
            let bytes = piece.bytes();
            let holes = runs(bytes.len(), offset, writer.unit(), |unit| is_zero(&bytes[unit]));
            writer.make_holes(offset, holes).await?;
        }
        let data = writer.data_of(offset, piece.bytes());
        writer.store(offset, data, &mut piece).await?;
        progress.advance(length as u64);
        Ok(())
    }))
    .await?;
    let size = length.next_multiple_of(SECTOR as u64);
    if options.resize && size < target.size() {
        target.shrink(size).await?;
    }
    Ok(length)
}

/// Makes the target long enough for a piece at `offset`.
async fn make_room<S: Storage>(
    target: &Disk<S>,
    offset: u64,
    piece: &Buffer,
    may_resize: bool,
) -> Result<()> {
    let end = (offset + piece.len() as u64).next_multiple_of(SECTOR as u64);
    let size = target.size();
    if end <= size {
        return Ok(());
    }
    if !may_resize {
        let what = format!("has {size} bytes, and more than that came");
        return Err(Error::new(ErrorKind::NoSpace, what).on(target.name()));
    }
    let generous = end.max(size.saturating_mul(2)).max(MIN_GROWTH);
    match target.resize(generous).await {
        // A limit of the host or the format may lie between the two sizes.
        Err(_) if generous > end => target.resize(end).await,
        outcome => outcome,
    }
}

fn fill_last_sector(piece: &mut Buffer) {
    let (length, whole) = (piece.len(), piece.len().next_multiple_of(SECTOR));
    if whole > length {
        piece.set_len(whole);
        piece.bytes_mut()[length..].fill(0);
    }
}
