//! Commits an overlay's data into its backing file.
//!
//! The overlay keeps all its data until the backing file has the data durably. While the overlay is
//! emptied, the backing file has the same data as the dropped clusters. So a crash at any point
//! leaves a disk that reads as before, and the commit can be repeated.

use blockhouse_core::{
    Buffer, ByteRange, Durability, Request, Result, Storage, ToolProgress, rare,
};

use super::chunks::{Source, for_each_chunk, make_zeros, read_or_zeros};
use crate::disk::Disk;

/// The treatment of an overlay once its data is in its backing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterCommit {
    /// The overlay is emptied: its space is freed.
    Empty,
    /// The overlay keeps its data.
    Keep,
}

/// Writes the overlay's own data into `base`, the disk of its backing file, then empties the
/// overlay if `after` says so. A shorter base is grown to the overlay's size. Durable when it
/// returns. No other request may be in flight on either disk.
///
/// # Errors
/// `ReadOnly` for either disk, `Unsupported` for a format without backing files; or storage errors:
/// then nothing is lost.
pub async fn commit_overlay<S: Storage>(
    overlay: &Disk<S>,
    base: &Disk<S>,
    after: AfterCommit,
    progress: &ToolProgress,
) -> Result<()> {
    overlay.check_writable()?;
    progress.begin(overlay.size());
    if base.size() < overlay.size() {
        base.resize(overlay.size()).await?;
    }
    rare(for_each_chunk(overlay, async |chunk, source| {
        commit_chunk(overlay, base, chunk, source).await?;
        progress.reach(chunk.end());
        Ok(())
    }))
    .await?;
    base.flush().await?;
    match after {
        AfterCommit::Empty => rare(overlay.format().make_empty()).await,
        AfterCommit::Keep => overlay.flush().await,
    }
}

async fn commit_chunk<S: Storage>(
    overlay: &Disk<S>,
    base: &Disk<S>,
    chunk: ByteRange,
    source: Source,
) -> Result<()> {
    match source {
        Source::Backing => Ok(()),
        Source::Zero => make_zeros(base, chunk).await,
        Source::Image => {
            let mut buffer = Buffer::new(chunk.length() as usize);
            read_or_zeros(overlay, chunk, &mut buffer).await?;
            let (offset, from) = (chunk.offset(), buffer.lend());
            base.submit(Request::Write { offset, from, durability: Durability::None }).await
        }
    }
}
