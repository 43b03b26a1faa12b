//! Replies for the writer.
//!
//! A reply without data is a few bytes, and all such replies that are sent together share one
//! buffer. A reply with data is sent from the buffer that the disk has filled. Replies may be sent
//! in any order (proto.md, "Ordering of messages and writes"). Each reply holds its [`Permit`]
//! until it is sent or dropped, so the queue never has more replies than there are permits.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use blockhouse_core::sync::LocalCondvar;
use blockhouse_core::{Buffer, BufferPool, IoVector, IoVectorList};
use blockhouse_engine::Pages;

use super::in_flight::Permit;
use crate::command::RequestError;
use crate::proto::Framing;
use crate::proto::reply::{MAX_SMALL_REPLY, ReplyTo, SuccessForm, encode_error, encode_success};

/// The offset of a reply's data in its buffer. The data is aligned to a page, so that direct I/O
/// can fill it. The header ends right before the data, so that both are sent as one buffer.
pub const HEAD_ROOM: usize = blockhouse_core::BLOCK_ALIGNMENT;

/// The outcome of a request, for the client.
pub enum Reply {
    /// The request succeeded and returns no data.
    Success(SuccessForm),
    /// The request failed.
    Error(RequestError),
    /// The request succeeded and returns data.
    Data(DataReply),
}

/// An encoded reply with its header and its data.
pub struct DataReply {
    /// The header, and the data up to the buffer's end unless it is in `pages`.
    buffer: Buffer,
    /// Start of the bytes that are not lent yet.
    start: usize,
    /// The data after the buffer, if it is not in the buffer.
    pages: Option<Pages>,
}

impl DataReply {
    /// The reply that begins at `start` of `buffer`, and reaches to its end.
    pub fn new(buffer: Buffer, start: usize) -> Self {
        Self { buffer, start, pages: None }
    }

    /// The reply with this header, whose data is in these pages.
    pub fn of_pages(head: Buffer, pages: Pages) -> Self {
        Self { buffer: head, start: 0, pages: Some(pages) }
    }

    /// How many bytes of the buffer were not lent yet.
    fn remaining(&self) -> usize {
        self.buffer.len() - self.start
    }

    fn lend(&mut self, length: usize) -> IoVector {
        let start = self.start;
        self.start += length;
        self.buffer.lend_range(start, length)
    }
}

/// Replies that are sent together.
pub struct Batch {
    /// The bytes of the replies without data.
    small: Buffer,
    /// How many of those bytes there are.
    small_end: usize,
    /// The merged permits of those replies; `None` without such a reply.
    small_permit: Option<Permit>,
    /// The replies with data.
    data: VecDeque<(DataReply, Permit)>,
}

impl Batch {
    /// An empty batch with capacity for `limit` replies.
    ///
    /// # Errors
    /// ENOMEM if memory runs out.
    pub fn new(pool: &BufferPool, limit: usize) -> blockhouse_core::Result<Self> {
        let small = pool.get(limit * MAX_SMALL_REPLY)?;
        Ok(Self { small, small_end: 0, small_permit: None, data: VecDeque::new() })
    }

    /// Whether there is no reply.
    pub fn is_empty(&self) -> bool {
        self.small_permit.is_none() && self.data.is_empty()
    }

    fn add(&mut self, mut permit: Permit, framing: Framing, to: ReplyTo, reply: Reply) {
        let out = &mut self.small.bytes_mut()[self.small_end..];
        self.small_end += match reply {
            Reply::Success(form) => encode_success(out, framing, to, form),
            Reply::Error(RequestError { errno, message }) => {
                encode_error(out, framing, to, errno, message)
            }
            Reply::Data(data) => return self.data.push_back((data, permit)),
        };
        // The payload of a write and the memory of a failed request have been returned to the pool.
        permit.release_bytes();
        match &mut self.small_permit {
            Some(all) => all.merge(permit),
            none => *none = Some(permit),
        }
    }

    /// Lends the next bytes to be sent, `limit` at most. The replies without data are first.
    /// Returns the number of replies with data that end in these bytes; replies with pages do not.
    pub fn lend(&mut self, list: &mut IoVectorList, limit: usize) -> usize {
        if self.small_permit.is_some() {
            list.push(self.small.lend_range(0, self.small_end));
        }
        let mut ended = 0;
        for (reply, _) in &mut self.data {
            let remaining = reply.remaining();
            let length = remaining.min(limit);
            if !list.is_empty() && list.len() + length > limit {
                break;
            }
            list.push(reply.lend(length));
            if length < remaining || reply.pages.is_some() {
                break;
            }
            ended += 1;
        }
        ended
    }

    /// The pages of the next reply with data, after the first `ended` ones, if all bytes before the
    /// pages were lent.
    pub fn next_pages(&mut self, ended: usize) -> Option<&mut Pages> {
        let (reply, _) = self.data.get_mut(ended)?;
        if reply.remaining() == 0 { reply.pages.as_mut() } else { None }
    }

    /// As [`lend`](Self::lend), but passes the bytes of each reply to `take` instead of lending
    /// them. No reply has pages.
    ///
    /// # Errors
    /// The error of `take`.
    pub fn hand_out<E>(
        &mut self,
        limit: usize,
        mut take: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<usize, E> {
        let mut handed = 0;
        if self.small_permit.is_some() {
            take(&self.small.bytes()[..self.small_end])?;
            handed = self.small_end;
        }
        let mut ended = 0;
        for (reply, _) in &mut self.data {
            let remaining = reply.remaining();
            let length = remaining.min(limit - handed.min(limit));
            take(&reply.buffer.bytes()[reply.start..reply.start + length])?;
            reply.start += length;
            handed += length;
            if length < remaining {
                break;
            }
            ended += 1;
        }
        Ok(ended)
    }

    /// Drops replies that were sent: the replies without data, and the first `ended` with data.
    /// Releases their permits.
    pub fn drop_sent(&mut self, ended: usize) {
        self.small_end = 0;
        self.small_permit = None;
        self.data.drain(..ended);
    }

    /// Drops all replies, and releases their permits.
    pub fn clear(&mut self) {
        self.drop_sent(self.data.len());
    }
}

/// The replies that wait for the writer.
pub struct ReplyQueue {
    framing: Framing,
    waiting: RefCell<Batch>,
    state: Cell<State>,
    changed: LocalCondvar,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Aborted,
    Closed,
}

/// The next action of the writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriterAction {
    /// Send the batch.
    Send,
    /// Drop the batch: the connection was aborted.
    Discard,
    /// End, because no reply is left.
    End,
}

impl ReplyQueue {
    /// An empty queue with capacity for `limit` replies, which are encoded in this framing.
    ///
    /// # Errors
    /// ENOMEM if memory runs out.
    pub fn new(pool: &BufferPool, framing: Framing, limit: usize) -> blockhouse_core::Result<Self> {
        let (waiting, state) = (RefCell::new(Batch::new(pool, limit)?), Cell::new(State::Open));
        Ok(Self { framing, waiting, state, changed: LocalCondvar::default() })
    }

    /// Queues a reply for the writer.
    pub fn push(&self, permit: Permit, to: ReplyTo, reply: Reply) {
        self.waiting.borrow_mut().add(permit, self.framing, to, reply);
        self.changed.notify();
    }

    /// Waits for replies, or the end, and moves all replies into `batch`, which is empty.
    pub async fn next_batch(&self, batch: &mut Batch) -> WriterAction {
        let action = self.changed.wait_until(|| {
            let is_empty = self.waiting.borrow().is_empty();
            match self.state.get() {
                State::Closed if is_empty => Some(WriterAction::End),
                _ if is_empty => None,
                State::Aborted => Some(WriterAction::Discard),
                State::Open | State::Closed => Some(WriterAction::Send),
            }
        });
        let action = action.await;
        std::mem::swap(&mut *self.waiting.borrow_mut(), batch);
        action
    }

    /// Makes the writer drop replies from now on.
    pub fn abort(&self) {
        self.state.set(State::Aborted);
    }

    /// Ends the writer. All requests have completed, and no reply is left in the queue.
    pub fn close(&self) {
        self.state.set(State::Closed);
        self.changed.notify();
    }
}
