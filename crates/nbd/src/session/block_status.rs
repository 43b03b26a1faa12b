//! Block status: allocated and zero ranges, and dirty ranges of bitmaps. A reply has as many as
//! fit.

use blockhouse_core::{Buffer, ByteRange, Error, ErrorKind, Result, Storage, WorkBudget};
use blockhouse_disk::{BlockStatus, BlockStatusCache};

use super::reply_queue::{DataReply, HEAD_ROOM, Reply};
use super::state::SessionState;
use crate::command::ReqOne;
use crate::handshake::MetaContext;
use crate::proto::reply::{
    ReplyTo, StatusChunk, descriptor_length, encode_descriptor, encode_status_head,
    status_head_length,
};
use crate::proto::{DIRTY, Framing, StatusFlags};

/// Bytes of memory of a reply. They hold about a thousand extents with 64-bit lengths, or two
/// thousand with 32-bit lengths, of all contexts together. For the rest the client sends another
/// request, as the protocol specifies.
pub const REPLY_BYTES: usize = HEAD_ROOM + (16 << 10);

/// Maximum number of extents that are looked up for each context of a reply. The memory alone would
/// not limit this work, because adjacent extents of the same status share one descriptor.
const MAX_LOOKUPS: usize = 8192;

/// Describes the range, which is not empty, in each of these contexts. If the range has more
/// extents than fit, only its first part is described.
pub async fn describe<'a, S: Storage>(
    state: &SessionState<S>,
    to: ReplyTo,
    range: ByteRange,
    req_one: ReqOne,
    contexts: impl ExactSizeIterator<Item = &'a (u32, MetaContext)>,
) -> Result<Reply> {
    let (framing, count) = (state.options.framing, contexts.len());
    let buffer = state.pool.get(REPLY_BYTES)?;
    let mut chunks = Chunks { buffer, framing, to, end: HEAD_ROOM - status_head_length(framing) };
    let start = chunks.end;
    for (index, (id, context)) in contexts.enumerate() {
        let left = count - index;
        let mut list = chunks.begin(left);
        match context {
            MetaContext::Allocation => allocation(state, range, req_one, &mut list).await?,
            MetaContext::DirtyBitmap(name) => {
                dirty_bitmap(state, name, range, req_one, &mut list).await?;
            }
            MetaContext::AllocationDepth => {
                let depth = async |range| state.disk.allocation_depth(range).await;
                runs(range, req_one, &mut list, depth).await?;
            }
        }
        let (count, end) = (list.count, list.end);
        chunks.finish(StatusChunk { context: *id, count, is_last: left == 1 }, end);
    }
    chunks.buffer.set_len(chunks.end);
    Ok(Reply::Data(DataReply::new(chunks.buffer, start)))
}

/// The allocation of a range.
async fn allocation<S: Storage>(
    state: &SessionState<S>,
    range: ByteRange,
    req_one: ReqOne,
    list: &mut List<'_>,
) -> Result<()> {
    // The cache is used for this request only, so that the reply includes all writes that were
    // acknowledged before it.
    let mut cache = BlockStatusCache::default();
    let flags = async |range| {
        let (status, length) = state.disk.block_status(range, &mut cache).await?;
        Ok((allocation_flags(status), length))
    };
    runs(range, req_one, list, flags).await
}

/// Lists the runs of equal flags in a range; only the first run if one is wanted. `ask` returns the
/// flags of the first bytes of a range, and the number of these bytes.
async fn runs(
    range: ByteRange,
    req_one: ReqOne,
    list: &mut List<'_>,
    mut ask: impl AsyncFnMut(ByteRange) -> Result<(u32, u64)>,
) -> Result<()> {
    // The budget makes the task yield, because look-ups of cached metadata complete without
    // waiting.
    let budget = WorkBudget::new();
    let (mut current, mut length) = ask(range).await?;
    let mut rest = range.skip(length);
    let mut lookups = 1;
    while !rest.is_empty() && !list.is_nearly_full() {
        if lookups == MAX_LOOKUPS {
            break;
        }
        lookups += 1;
        // On an error the extents found so far are a valid reply.
        let Ok((flags, more)) = ask(rest).await else { break };
        if flags == current {
            length += more;
        } else if req_one == ReqOne::Set {
            break;
        } else {
            list.push(length, current);
            (current, length) = (flags, more);
        }
        rest = rest.skip(more);
        budget.spend(WorkBudget::LOOK_UP).await;
    }
    list.push(length, current);
    Ok(())
}

fn allocation_flags(status: BlockStatus) -> u32 {
    let flags = match status {
        BlockStatus::Data => StatusFlags::empty(),
        BlockStatus::Zero => StatusFlags::ZERO,
        BlockStatus::Hole => StatusFlags::HOLE | StatusFlags::ZERO,
    };
    flags.bits()
}

/// The dirty ranges of the bitmap of this name. If the bitmap records changes, they include all
/// changes that were acknowledged before the request, and perhaps later ones.
async fn dirty_bitmap<S: Storage>(
    state: &SessionState<S>,
    name: &str,
    range: ByteRange,
    req_one: ReqOne,
    list: &mut List<'_>,
) -> Result<()> {
    let wanted = if req_one == ReqOne::Set { 1 } else { list.capacity() };
    let Some(bitmap) = state.bitmaps.iter().find(|bitmap| bitmap.name() == name) else {
        // The bitmap was negotiated with another process, before this one resumed the connection.
        let what = format!("the export does not offer the bitmap '{name}'");
        return Err(Error::new(ErrorKind::InvalidInput, what).on(state.disk.name()));
    };
    let extents = bitmap.extents(&state.disk, range, wanted).await?;
    for extent in extents.into_iter().take(wanted) {
        list.push(extent.length, if extent.is_dirty { DIRTY } else { 0 });
    }
    Ok(())
}

/// The chunks of a reply, one for each context.
struct Chunks {
    buffer: Buffer,
    framing: Framing,
    to: ReplyTo,
    /// Start of the next chunk.
    end: usize,
}

impl Chunks {
    /// Begins the descriptors of the next chunk; `left` chunks share the rest of the buffer.
    fn begin(&mut self, left: usize) -> List<'_> {
        let Self { buffer, framing, end, .. } = self;
        let limit = *end + (buffer.len() - *end) / left;
        let (bytes, end) = (buffer.bytes_mut(), *end + status_head_length(*framing));
        List { bytes: &mut bytes[..limit], framing: *framing, end, count: 0 }
    }

    /// Ends a chunk at `end`, and writes its header.
    fn finish(&mut self, chunk: StatusChunk, end: usize) {
        let head = &mut self.buffer.bytes_mut()[self.end..];
        encode_status_head(head, self.framing, self.to, chunk);
        self.end = end;
    }
}

/// The descriptors of a chunk.
struct List<'a> {
    bytes: &'a mut [u8],
    framing: Framing,
    end: usize,
    count: usize,
}

impl List<'_> {
    /// How many more descriptors fit.
    fn capacity(&self) -> usize {
        (self.bytes.len() - self.end) / descriptor_length(self.framing)
    }

    /// Whether one more descriptor fits, but not two.
    fn is_nearly_full(&self) -> bool {
        self.capacity() < 2
    }

    fn push(&mut self, length: u64, flags: u32) {
        self.end += encode_descriptor(&mut self.bytes[self.end..], self.framing, length, flags);
        self.count += 1;
    }
}

#[cfg(test)]
mod tests {
    use blockhouse_engine::{Engine, EngineChoice, EventLoop};

    use super::*;

    /// The runs of a disk whose clusters are looked up one by one, and whose first three have the
    /// same status.
    fn told(req_one: ReqOne) -> Vec<(u32, u32)> {
        let mut bytes = [0; 256];
        let mut list = List { bytes: &mut bytes, framing: Framing::Structured, end: 0, count: 0 };
        let range = ByteRange::between(0, 5 * 4096);
        let ask = async |range: ByteRange| Ok((u32::from(range.offset() >= 3 * 4096), 4096));
        let mut event_loop = EventLoop::new(EngineChoice::Only(Engine::Threads)).expect("a loop");
        event_loop.block_on(runs(range, req_one, &mut list, ask)).expect("no error");
        let end = list.end;
        let number = |at: &[u8]| u32::from_be_bytes(at.try_into().expect("four bytes"));
        bytes[..end].chunks(8).map(|one| (number(&one[..4]), number(&one[4..]))).collect()
    }

    #[test]
    fn equal_neighbours_are_one_run_also_where_one_is_wanted() {
        assert_eq!(told(ReqOne::Unset), [(3 * 4096, 0), (2 * 4096, 1)]);
        assert_eq!(told(ReqOne::Set), [(3 * 4096, 0)]);
    }
}
