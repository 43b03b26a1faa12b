//! Going through a disk piece by piece, for tools that move much of it.

use std::cell::Cell;
use std::future::{Future, ready};

use blockhouse_core::sync::run_bounded;
use blockhouse_core::{
    Allocation, Buffer, ByteRange, Durability, ExtentState, Fallback, IoVector, Request, Result,
    Storage, Unmap, WorkBudget,
};
use blockhouse_format::Intent;
use futures_util::stream::{self, Stream, StreamExt};

use crate::Disk;
use crate::block_status::HostRuns;

/// The most bytes that are moved at once.
const PIECE: u64 = 1 << 20;
/// How many pieces are under way together.
const TOGETHER: usize = 8;

/// Where the bytes of a piece come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The image itself has data.
    Own,
    /// The image says that they are zeros, or has a place for them that is a hole of the host file.
    Zeros,
    /// What is behind the image, or nothing.
    Behind,
}

/// Holes of the host file that are shorter are read and written as data is, in bytes.
const MIN_HOLE: u64 = 64 << 10;

/// Does `work` on all pieces, several at a time. Ends with the first error, once all that were begun
/// have ended.
pub(crate) async fn together<T, F: Future<Output = Result<()>>>(
    pieces: impl Stream<Item = Result<T>>,
    work: impl Fn(T) -> F,
) -> Result<()> {
    let work = &work;
    let has_failed = &Cell::new(false);
    let pieces = pieces.take_while(|_| ready(!has_failed.get()));
    let done = pieces.map(|piece| async move { work(piece?).await });
    run_bounded(TOGETHER, &WorkBudget::new(), has_failed, done).await
}

impl<S: Storage> Disk<S> {
    /// Hands the disk to `work`, piece by piece, several at a time. Ends with the first error, once all
    /// that were begun have ended.
    pub(crate) async fn for_each_piece<F: Future<Output = Result<()>>>(
        &self,
        work: impl Fn(ByteRange, Source) -> F,
    ) -> Result<()> {
        let start = (ByteRange::between(0, self.size()), HostRuns::default());
        let pieces = stream::unfold(start, |(rest, mut runs)| async move {
            if rest.is_empty() {
                return None;
            }
            Some(match self.next_piece(rest, &mut runs).await {
                Ok((piece, source)) => (Ok((piece, source)), (rest.skip(piece.length()), runs)),
                Err(error) => (Err(error), (rest.skip(rest.length()), runs)),
            })
        });
        together(pieces, |(piece, source)| work(piece, source)).await
    }

    async fn next_piece(
        &self,
        rest: ByteRange,
        runs: &mut HostRuns,
    ) -> Result<(ByteRange, Source)> {
        let extent = self.format.map(rest, Intent::Read).await?;
        Ok(match extent.state {
            ExtentState::Mapped { host } => self.next_mapped(extent.guest, host, runs).await?,
            ExtentState::Compressed { .. } => (extent.guest.truncate(PIECE), Source::Own),
            ExtentState::Zero => (extent.guest, Source::Zeros),
            ExtentState::Hole | ExtentState::Backing => {
                (extent.guest.truncate(PIECE), Source::Behind)
            }
        })
    }

    /// The first piece of a mapped extent: data, or a hole of the host file, which reads as zeros.
    async fn next_mapped(
        &self,
        guest: ByteRange,
        host: u64,
        runs: &mut HostRuns,
    ) -> Result<(ByteRange, Source)> {
        let mut data = 0;
        while data < guest.length().min(PIECE) {
            let rest = ByteRange::between(host + data, host + guest.length());
            let (status, length) = runs.block_status(self.storage(), rest).await?;
            let is_all = length == guest.length();
            if status == Allocation::Hole && (length >= MIN_HOLE || is_all) {
                if data == 0 {
                    return Ok((guest.truncate(length), Source::Zeros));
                }
                break;
            }
            data += length;
        }
        Ok((guest.truncate(data.min(PIECE)), Source::Own))
    }

    /// Reads `range`, what lies past the end as zeros.
    pub(crate) async fn read_or_zeros(&self, range: ByteRange, buffer: &mut Buffer) -> Result<()> {
        let inside = range.truncate(self.size().saturating_sub(range.offset()));
        let mut into: IoVector = buffer.lend();
        into.split_off(inside.length() as usize).fill(0);
        if inside.is_empty() {
            return Ok(());
        }
        self.submit(Request::Read { offset: inside.offset(), into }).await
    }

    /// Makes `range` zeros, plainly.
    pub(crate) async fn make_zeros(&self, range: ByteRange) -> Result<()> {
        let (unmap, fallback) = (Unmap::Allowed, Fallback::Allowed);
        self.submit(Request::WriteZeroes { range, unmap, fallback, durability: Durability::None })
            .await
    }
}
