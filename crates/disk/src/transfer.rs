//! Going through a disk piece by piece, for tools that move much of it.

use std::future::{Future, ready};

use blockhouse_core::{
    Buffer, ByteRange, Durability, Effort, ExtentState, IoVector, Request, Result, Storage, Unmap,
};
use blockhouse_format::Intent;
use futures_util::stream::{self, StreamExt};

use crate::Disk;

/// The most bytes that are moved at once.
const PIECE: u64 = 1 << 20;
/// How many pieces are under way together.
const TOGETHER: usize = 8;

/// Where the bytes of a piece come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The image itself has data.
    Own,
    /// The image says that they are zeros.
    Zeros,
    /// What is behind the image, or nothing.
    Behind,
}

impl<S: Storage> Disk<S> {
    /// Hands the disk to `work`, piece by piece, several at a time. Ends with the first error, once all
    /// that were begun have ended.
    pub(crate) async fn for_each_piece<F: Future<Output = Result<()>>>(
        &self,
        work: impl Fn(ByteRange, Source) -> F,
    ) -> Result<()> {
        let pieces = stream::unfold(ByteRange::between(0, self.size()), |rest| async move {
            if rest.is_empty() {
                return None;
            }
            Some(match self.next_piece(rest).await {
                Ok((piece, source)) => (Ok((piece, source)), rest.skip(piece.length())),
                Err(error) => (Err(error), rest.skip(rest.length())),
            })
        });
        let work = &work;
        let done = pieces.map(|piece| async move {
            match piece {
                Ok((piece, source)) => work(piece, source).await,
                Err(error) => Err(error),
            }
        });
        let both = |sum: Result<()>, one| ready(sum.and(one));
        done.buffer_unordered(TOGETHER).fold(Ok(()), both).await
    }

    async fn next_piece(&self, rest: ByteRange) -> Result<(ByteRange, Source)> {
        let extent = self.format.map(rest, Intent::Read).await?;
        Ok(match extent.state {
            ExtentState::Mapped { .. } | ExtentState::Compressed { .. } => {
                (extent.guest.truncate(PIECE), Source::Own)
            }
            ExtentState::Zero => (extent.guest, Source::Zeros),
            ExtentState::Hole | ExtentState::Backing => {
                (extent.guest.truncate(PIECE), Source::Behind)
            }
        })
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
        let (unmap, effort) = (Unmap::Allowed, Effort::Any);
        self.submit(Request::WriteZeroes { range, unmap, effort, durability: Durability::None })
            .await
    }
}
