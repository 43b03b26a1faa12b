//! Block status: what is allocated and what is zero, as far as one reply has room.

use blockhouse_core::{Buffer, ByteRange, Result, Storage, WorkBudget};
use blockhouse_disk::{BlockStatus, BlockStatusCache};

use super::link::Link;
use super::outbox::{Answer, HEAD_ROOM, Whole};
use crate::command::Extents;
use crate::proto::reply::{
    ReplyTo, descriptor_length, put_descriptor, put_status_head, status_head_length,
};
use crate::proto::{Framing, StatusFlags};

/// The memory of a reply: about a thousand extents with 64-bit lengths, two thousand with 32-bit
/// ones. A client that wants to know more asks again, as the protocol foresees.
pub const LENGTH: usize = HEAD_ROOM + (16 << 10);

/// Extents that are looked up for a reply, at most: neighbours of the same status become one descriptor,
/// so the memory of the reply alone would not limit the work.
const MAX_LOOKUPS: usize = 8192;

/// Describes the range, which is not empty, from its start on, and of a fragmented image only the first
/// part of it.
pub async fn describe<S: Storage>(
    link: &Link<S>,
    to: ReplyTo,
    range: ByteRange,
    extents: Extents,
) -> Result<Answer> {
    let framing = link.terms.framing;
    let mut list = List::new(link.pool.get(LENGTH)?, framing);
    // Of this question alone, so that the answer has all data that was acknowledged before.
    let mut cache = BlockStatusCache::default();
    // Tables that are cached are looked up without waiting.
    let budget = WorkBudget::new();
    let (mut current, mut length) = link.disk.block_status(range, &mut cache).await?;
    let mut rest = range.skip(length);
    let mut lookups = 1;
    while extents == Extents::Many && !rest.is_empty() && !list.is_nearly_full() {
        if lookups == MAX_LOOKUPS {
            break;
        }
        lookups += 1;
        // What is known already is an answer too.
        let Ok((status, more)) = link.disk.block_status(rest, &mut cache).await else { break };
        if status == current {
            length += more;
        } else {
            list.push(current, length);
            (current, length) = (status, more);
        }
        rest = rest.skip(more);
        budget.spend(WorkBudget::LOOK_UP).await;
    }
    list.push(current, length);
    Ok(Answer::Whole(list.finish(to)))
}

/// The descriptors of a reply.
struct List {
    buffer: Buffer,
    framing: Framing,
    end: usize,
    count: usize,
}

impl List {
    fn new(buffer: Buffer, framing: Framing) -> Self {
        Self { buffer, framing, end: HEAD_ROOM, count: 0 }
    }

    /// Whether there is room for just one more.
    fn is_nearly_full(&self) -> bool {
        self.end + 2 * descriptor_length(self.framing) > self.buffer.len()
    }

    fn push(&mut self, status: BlockStatus, length: u64) {
        let flags = match status {
            BlockStatus::Data => StatusFlags::empty(),
            BlockStatus::Zero => StatusFlags::ZERO,
            BlockStatus::Hole => StatusFlags::HOLE | StatusFlags::ZERO,
        };
        let out = &mut self.buffer.bytes_mut()[self.end..];
        self.end += put_descriptor(out, self.framing, length, flags);
        self.count += 1;
    }

    fn finish(mut self, to: ReplyTo) -> Whole {
        let start = HEAD_ROOM - status_head_length(self.framing);
        put_status_head(&mut self.buffer.bytes_mut()[start..], self.framing, to, self.count);
        self.buffer.set_len(self.end);
        Whole { buffer: self.buffer, start, footprint: LENGTH }
    }
}
