//! Reads that are not aligned as the storage demands: their bytes are copied through aligned
//! buffers.
//!
//! Long reads use one buffer for one chunk after the other, so that memory stays bounded, and yield
//! between the chunks.

use blockhouse_core::{ByteRange, IoVector, Result, Storage, WorkBudget};
use futures_util::future::join;

use super::{Layer, Reader};
use crate::buffers::CHUNK_SIZE;

impl<S: Storage> Layer<S> {
    /// Fills `into` with the bytes of `range`, through a buffer.
    pub(super) async fn read_unaligned(&self, range: ByteRange, mut into: IoVector) -> Result<()> {
        let _claim = self.claims.claim_partial_end(range, self.format.end()).await;
        let budget = WorkBudget::new();
        let mut rest = self.blocks_of(range);
        let mut buffer =
            self.bounce_buffers.get(rest.length().min(CHUNK_SIZE as u64) as usize).await?;
        while !rest.is_empty() {
            let chunk = rest.truncate(CHUNK_SIZE as u64);
            let guest = common(chunk, range);
            self.stats.bounced();
            let memory = buffer.lend_range(0, chunk.length() as usize);
            self.read_aligned(chunk, memory, Reader::Read).await?;
            let start = (guest.offset() - chunk.offset()) as usize;
            let length = guest.length() as usize;
            into.copy_from(&buffer.bytes()[start..start + length]);
            // If the guest's memory is lost, the rest need not be read.
            into.check_intact()?;
            into.advance(length);
            rest = rest.skip(chunk.length());
            // A read of holes alone never waits, so this yields.
            if !rest.is_empty() {
                budget.spend(chunk.length()).await;
            }
        }
        Ok(())
    }

    /// Reads the blocks at the ends of `chunk` that `guest` covers only in part, into `memory` at
    /// the same offsets as in `chunk`. `memory` and `chunk` have the same length.
    pub(crate) async fn read_edges(
        &self,
        chunk: ByteRange,
        guest: ByteRange,
        mut memory: IoVector,
    ) -> Result<()> {
        let block = self.block_size();
        let head = chunk.truncate(block);
        let tail = chunk.skip((chunk.length() - 1) & !(block - 1));
        let is_cut = |edge: ByteRange| common(edge, guest) != edge;
        match (is_cut(head), is_cut(tail) && tail != head) {
            (false, false) => Ok(()),
            (true, false) => {
                drop(memory.split_off(head.length() as usize));
                self.read_aligned(head, memory, Reader::Change).await
            }
            (false, true) => {
                memory.advance((tail.offset() - chunk.offset()) as usize);
                self.read_aligned(tail, memory, Reader::Change).await
            }
            (true, true) => {
                let mut rest = memory.split_off(head.length() as usize);
                rest.advance((tail.offset() - head.end()) as usize);
                let read = |edge, into| self.read_aligned(edge, into, Reader::Change);
                let (head, tail) = join(read(head, memory), read(tail, rest)).await;
                head.and(tail)
            }
        }
    }
}

/// The intersection of two ranges that overlap or touch.
pub(crate) fn common(one: ByteRange, other: ByteRange) -> ByteRange {
    let start = one.offset().max(other.offset());
    ByteRange::between(start, one.end().min(other.end()).max(start))
}
