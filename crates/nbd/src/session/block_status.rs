//! Block status: which ranges are allocated and which are zero, as far as they fit into one reply.

use blockhouse_core::{Buffer, ByteRange, Result, Storage, WorkBudget};
use blockhouse_disk::{BlockStatus, BlockStatusCache};

use super::reply_queue::{DataReply, HEAD_ROOM, Reply};
use super::state::SessionState;
use crate::command::ReqOne;
use crate::proto::reply::{
    ReplyTo, descriptor_length, encode_descriptor, encode_status_head, status_head_length,
};
use crate::proto::{Framing, StatusFlags};

/// Bytes of memory of a reply: about a thousand extents with 64-bit lengths, two thousand with 32-bit
/// ones. A client that wants to know more asks again, as the protocol foresees.
pub const REPLY_BYTES: usize = HEAD_ROOM + (16 << 10);

/// ReqOne that are looked up for a reply, at most: neighbours of the same status become one descriptor,
/// so the memory of the reply alone would not limit the work.
const MAX_LOOKUPS: usize = 8192;

/// Describes the range, which is not empty, from its start on, and of a fragmented image only the first
/// part of it.
pub async fn describe<S: Storage>(
    state: &SessionState<S>,
    to: ReplyTo,
    range: ByteRange,
    req_one: ReqOne,
) -> Result<Reply> {
    let framing = state.options.framing;
    let mut list = List::new(state.pool.get(REPLY_BYTES)?, framing);
    // For this request alone, so that the reply has all data that was acknowledged before it.
    let mut cache = BlockStatusCache::default();
    // Cached metadata is looked up without waiting.
    let budget = WorkBudget::new();
    let (mut current, mut length) = state.disk.block_status(range, &mut cache).await?;
    let mut rest = range.skip(length);
    let mut lookups = 1;
    while req_one == ReqOne::Unset && !rest.is_empty() && !list.is_nearly_full() {
        if lookups == MAX_LOOKUPS {
            break;
        }
        lookups += 1;
        // The extents that are known already are a valid reply.
        let Ok((status, more)) = state.disk.block_status(rest, &mut cache).await else { break };
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
    Ok(Reply::Data(list.finish(to)))
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

    /// Whether one more descriptor fits, but not two.
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
        self.end += encode_descriptor(out, self.framing, length, flags);
        self.count += 1;
    }

    fn finish(mut self, to: ReplyTo) -> DataReply {
        let start = HEAD_ROOM - status_head_length(self.framing);
        encode_status_head(&mut self.buffer.bytes_mut()[start..], self.framing, to, self.count);
        self.buffer.set_len(self.end);
        DataReply::new(self.buffer, start)
    }
}
