//! Requests that cannot go down as they are: their bytes travel through aligned buffers.
//!
//! A write that covers its first or last block only in part reads that block first and writes it
//! back whole, as one write with the guest's bytes. The caller holds an exclusive claim on all
//! blocks of the request, so nothing else is written there from the read to the end of the write.
//! A request that is only badly placed in memory is copied and nothing more. Long requests go piece
//! by piece with one buffer, so that memory stays bounded, and yield between the pieces.

use blockhouse_core::{ByteRange, IoVector, Result, Storage, WorkBudget};
use futures_util::future::join;

use crate::Disk;
use crate::durability::RequestSync;
use crate::limits::PIECE;
use crate::tracker::Claim;

impl<S: Storage> Disk<S> {
    /// The whole blocks that `range` touches, up to the end of the disk.
    pub(crate) fn blocks_of(&self, range: ByteRange) -> ByteRange {
        let blocks = range.align_outward(u64::from(self.alignment.offset));
        ByteRange::between(blocks.offset(), blocks.end().min(self.format.end()))
    }

    /// Fills `into` with the bytes of `range`, by way of a buffer.
    pub(crate) async fn read_bounced(&self, range: ByteRange, mut into: IoVector) -> Result<()> {
        let budget = WorkBudget::new();
        let mut rest = self.blocks_of(range);
        let mut buffer = self.bounce_buffers.get(rest.length().min(PIECE as u64) as usize).await?;
        while !rest.is_empty() {
            let piece = rest.truncate(PIECE as u64);
            let guest = common(piece, range);
            self.stats.bounced();
            self.read(piece, buffer.lend_range(0, piece.length() as usize)).await?;
            let start = (guest.offset() - piece.offset()) as usize;
            let length = guest.length() as usize;
            into.copy_from(&buffer.bytes()[start..start + length]);
            // For memory that is lost the rest need not be read.
            into.check_intact()?;
            into.advance(length);
            rest = rest.skip(piece.length());
            // Where nothing was read, because there is only a hole, nothing has waited.
            if !rest.is_empty() {
                budget.spend(piece.length()).await;
            }
        }
        Ok(())
    }

    /// Stores `from` in `range`, by way of a buffer. `claim` covers all blocks of the range.
    pub(crate) async fn write_bounced(
        &self,
        range: ByteRange,
        mut from: IoVector,
        sync: &RequestSync<'_, S>,
        claim: &Claim<'_>,
    ) -> Result<()> {
        let budget = WorkBudget::new();
        let mut rest = self.blocks_of(range);
        // Several pieces are cheaper with one flush for all than with FUA each.
        let of_each_piece = RequestSync::not_required(&self.format);
        let sync = if rest.length() <= PIECE as u64 {
            sync
        } else {
            sync.note_plain_operation();
            &of_each_piece
        };
        let mut buffer = self.bounce_buffers.get(rest.length().min(PIECE as u64) as usize).await?;
        while !rest.is_empty() {
            let piece = rest.truncate(PIECE as u64);
            let guest = common(piece, range);
            self.stats.bounced();
            buffer.set_len(piece.length() as usize);
            self.read_edges(piece, guest, buffer.lend()).await?;
            let start = (guest.offset() - piece.offset()) as usize;
            let length = guest.length() as usize;
            from.copy_to(&mut buffer.bytes_mut()[start..start + length]);
            // Zeros in the place of a guest's lost memory are not to be stored.
            from.check_intact()?;
            from.advance(length);
            let vector = claim.protect(buffer.lend());
            self.write(piece, vector, sync).await?;
            rest = rest.skip(piece.length());
            if !rest.is_empty() {
                budget.spend(piece.length()).await;
            }
        }
        Ok(())
    }

    /// Reads those blocks at the ends of `piece` that `guest` covers only in part to where they
    /// belong in `memory`, which is as long as `piece`.
    async fn read_edges(
        &self,
        piece: ByteRange,
        guest: ByteRange,
        mut memory: IoVector,
    ) -> Result<()> {
        let block = u64::from(self.alignment.offset);
        let head = piece.truncate(block);
        let tail = piece.skip((piece.length() - 1) & !(block - 1));
        let is_cut = |edge: ByteRange| common(edge, guest) != edge;
        match (is_cut(head), is_cut(tail) && tail != head) {
            (false, false) => Ok(()),
            (true, false) => {
                drop(memory.split_off(head.length() as usize));
                self.read(head, memory).await
            }
            (false, true) => {
                memory.advance((tail.offset() - piece.offset()) as usize);
                self.read(tail, memory).await
            }
            (true, true) => {
                let mut rest = memory.split_off(head.length() as usize);
                rest.advance((tail.offset() - head.end()) as usize);
                let (head, tail) = join(self.read(head, memory), self.read(tail, rest)).await;
                head.and(tail)
            }
        }
    }
}

/// The bytes that both have; both touch.
fn common(one: ByteRange, other: ByteRange) -> ByteRange {
    let start = one.offset().max(other.offset());
    ByteRange::between(start, one.end().min(other.end()).max(start))
}
