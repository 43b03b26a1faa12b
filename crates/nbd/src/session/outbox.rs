//! Replies on their way from the lanes to the writer.
//!
//! A reply without a payload is a few bytes, and all of them that leave at once share one piece of
//! memory; a reply with a payload leaves from the memory that the disk has filled. The order of
//! replies is free (proto.md, "Ordering of messages and writes").

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use blockhouse_core::{Buffer, BufferPool, Result};

use super::condition::Condition;
use crate::command::Refusal;
use crate::proto::Framing;
use crate::proto::reply::{Bare, MAX_BARE, ReplyTo, put_error, put_success};

/// The data of a reply starts here in its buffer: at a page, as direct I/O likes it. The head stands
/// right before it, so that both leave as one piece.
pub const HEAD_ROOM: usize = blockhouse_core::BLOCK_ALIGNMENT;

/// What a reply says.
pub enum Answer {
    /// The request succeeded and returns nothing.
    Done(Bare),
    /// It failed.
    Failed(Refusal),
    /// It succeeded and returns a payload.
    Whole(Whole),
}

/// A reply with a payload, head and all.
pub struct Whole {
    /// The memory. The reply reaches to its end.
    pub buffer: Buffer,
    /// Where the reply starts.
    pub start: usize,
    /// How much the request counts in the flow.
    pub footprint: usize,
}

/// Replies that can leave together.
pub struct Batch {
    /// The bytes of the replies without a payload.
    pub bare: Buffer,
    /// How many of those bytes there are.
    pub bare_end: usize,
    /// How many replies they are.
    pub bare_count: usize,
    /// The replies with a payload.
    pub whole: VecDeque<Whole>,
}

impl Batch {
    /// Room for `most` replies.
    ///
    /// # Errors
    /// ENOMEM where memory runs out.
    pub fn new(pool: &BufferPool, most: usize) -> Result<Self> {
        let bare = pool.get(most * MAX_BARE)?;
        Ok(Self { bare, bare_end: 0, bare_count: 0, whole: VecDeque::new() })
    }

    fn is_empty(&self) -> bool {
        self.bare_count == 0 && self.whole.is_empty()
    }

    fn add(&mut self, framing: Framing, to: ReplyTo, answer: Answer) {
        let out = &mut self.bare.bytes_mut()[self.bare_end..];
        let length = match answer {
            Answer::Done(bare) => put_success(out, framing, to, bare),
            Answer::Failed(Refusal { errno, message }) => {
                put_error(out, framing, to, errno, message)
            }
            Answer::Whole(whole) => return self.whole.push_back(whole),
        };
        self.bare_end += length;
        self.bare_count += 1;
    }
}

/// The replies that wait for the writer.
pub struct Outbox {
    waiting: RefCell<Batch>,
    state: Cell<State>,
    changed: Condition,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Broken,
    Closed,
}

/// What the writer has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Errand {
    /// Send the batch.
    Send,
    /// Drop the batch: the client is gone.
    Discard,
    /// End: there is nothing left.
    End,
}

impl Outbox {
    /// Room for `most` replies, which whoever pushes does not exceed.
    ///
    /// # Errors
    /// ENOMEM where memory runs out.
    pub fn new(pool: &BufferPool, most: usize) -> Result<Self> {
        let waiting = RefCell::new(Batch::new(pool, most)?);
        Ok(Self { waiting, state: Cell::new(State::Open), changed: Condition::default() })
    }

    /// Leaves a reply for the writer.
    pub fn push(&self, framing: Framing, to: ReplyTo, answer: Answer) {
        self.waiting.borrow_mut().add(framing, to, answer);
        self.changed.notify();
    }

    /// Waits for replies, or the end, and moves all there are into `batch`, which is empty.
    pub async fn collect(&self, batch: &mut Batch) -> Errand {
        let errand = self.changed.until(|| {
            let empty = self.waiting.borrow().is_empty();
            match self.state.get() {
                State::Closed if empty => Some(Errand::End),
                _ if empty => None,
                State::Broken => Some(Errand::Discard),
                State::Open | State::Closed => Some(Errand::Send),
            }
        });
        let errand = errand.await;
        std::mem::swap(&mut *self.waiting.borrow_mut(), batch);
        errand
    }

    /// From now on replies are dropped.
    pub fn break_off(&self) {
        self.state.set(State::Broken);
    }

    /// There will be no more replies, and all there were are gone.
    pub fn close(&self) {
        self.state.set(State::Closed);
        self.changed.notify();
    }
}
