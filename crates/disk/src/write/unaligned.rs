//! Writes that are not aligned as the storage requires: their bytes are copied through aligned
//! buffers.
//!
//! A write that covers its first or last block only in part reads that block first and writes it
//! back whole, as one write with the guest's bytes. The caller holds an exclusive claim on all
//! blocks of the request, so no other write changes these blocks from the read to the end of the
//! write. If only the memory of a request is unaligned, its bytes are copied, and no block is read.
//! Long requests are written chunk by chunk with one buffer, so that memory stays bounded, and
//! yield between the chunks.

use blockhouse_core::{ByteRange, IoVector, Result, Storage, WorkBudget};

use super::Writer;
use crate::buffers::CHUNK_SIZE;
use crate::claims::Claim;
use crate::durability::RequestSync;
use crate::layer::common;

impl<S: Storage> Writer<S> {
    /// Stores `from` in `range`, through an aligned buffer. `claim` covers all blocks of the range.
    pub(super) async fn write_unaligned(
        &self,
        range: ByteRange,
        mut from: IoVector,
        sync: &RequestSync<'_, S>,
        claim: &Claim<'_>,
    ) -> Result<()> {
        let budget = WorkBudget::new();
        let mut rest = self.layer.blocks_of(range);
        // For several chunks, one flush is cheaper than FUA for each.
        let of_each_chunk = RequestSync::not_required(self.layer.format());
        let sync = if rest.length() <= CHUNK_SIZE as u64 {
            sync
        } else {
            sync.note_plain_operation();
            &of_each_chunk
        };
        let mut buffer =
            self.layer.bounce_buffers().get(rest.length().min(CHUNK_SIZE as u64) as usize).await?;
        while !rest.is_empty() {
            let chunk = rest.truncate(CHUNK_SIZE as u64);
            let guest = common(chunk, range);
            self.layer.stats().bounced();
            buffer.set_len(chunk.length() as usize);
            self.layer.read_edges(chunk, guest, buffer.lend()).await?;
            let start = (guest.offset() - chunk.offset()) as usize;
            let length = guest.length() as usize;
            from.copy_to(&mut buffer.bytes_mut()[start..start + length]);
            // Zeros that replace a guest's lost memory must not be stored.
            from.check_intact()?;
            from.advance(length);
            let vector = claim.attach_to(buffer.lend());
            self.write_aligned(chunk, vector, sync).await?;
            rest = rest.skip(chunk.length());
            if !rest.is_empty() {
                budget.spend(chunk.length()).await;
            }
        }
        Ok(())
    }
}
