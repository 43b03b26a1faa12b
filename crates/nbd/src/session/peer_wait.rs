//! Waiting for the peer: how long a connection has stood still in the middle of something.
//!
//! Guarantee: a peer that does not take what it asked for, or does not send the rest of a request, is
//! found within one and a quarter of the limit, and one that goes on is not. Each receive is a step forward, and
//! so is each part of a reply that the socket takes, and each time that the send queue is seen to be shorter.
//! The last is the finest: the kernel takes more only once much of its queue is free, but a Unix socket
//! frees it in units of up to 36 KiB, and TCP as the peer's window lets it. An idle peer owes nothing and is
//! never found here. The cost of a request is a few stores; a timer runs only while the connection is busy,
//! one in a quarter of the limit, with one system call where a reply waits to be sent.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use blockhouse_engine::{Stream, sleep, unsent_bytes};

use super::condition::Condition;
use super::leave::Leave;
use super::reader::End;

/// What the peer has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Receive its replies.
    Send,
    /// Send the rest of a request.
    Receive,
}

impl Direction {
    const BOTH: [Self; 2] = [Self::Send, Self::Receive];
}

/// What a connection waits for, and how often that came.
#[derive(Default)]
pub struct PeerWait {
    waits: [Cell<bool>; 2],
    steps: [Cell<u64>; 2],
    began: Cell<bool>,
    changed: Condition,
}

impl PeerWait {
    /// Starts to wait for the peer in `direction`.
    pub fn begin(&self, direction: Direction) {
        self.waits[direction as usize].set(true);
        if !self.began.replace(true) {
            self.changed.notify();
        }
    }

    /// Ends the wait for the peer in `direction`, which counts as progress.
    pub fn end(&self, direction: Direction) {
        self.waits[direction as usize].set(false);
        self.step(direction);
    }

    /// It did a part of it.
    pub fn step(&self, direction: Direction) {
        self.steps[direction as usize].update(|steps| steps.wrapping_add(1));
    }

    /// Resolves when the peer did not move for `limit`, or for `limit_at_end` from when the connection
    /// was asked to leave.
    pub async fn stalled(
        &self,
        stream: &Stream,
        limit: Duration,
        limit_at_end: Duration,
        leave: &Leave,
    ) -> End {
        let mut limit = limit;
        loop {
            self.changed.until(|| self.began.take().then_some(())).await;
            let mut unsent = None;
            let mut seen = [0, 1].map(|index| (self.steps[index].get(), Instant::now()));
            loop {
                let is_asked = pause(limit / 4, (limit > limit_at_end).then_some(leave)).await;
                if is_asked {
                    limit = limit_at_end;
                }
                let now = Instant::now();
                if self.waits[Direction::Send as usize].get() {
                    // Between two steps the server adds nothing: a shorter queue is the peer's work.
                    let before = std::mem::replace(&mut unsent, unsent_bytes(stream).ok());
                    if unsent < before {
                        self.step(Direction::Send);
                    }
                }
                for direction in Direction::BOTH {
                    let index = direction as usize;
                    let steps = self.steps[index].get();
                    if !self.waits[index].get() || seen[index].0 != steps || is_asked {
                        seen[index] = (steps, now);
                    } else if now - seen[index].1 >= limit {
                        return End::Stalled { direction, limit };
                    }
                }
                if !self.waits.iter().any(Cell::get) && !self.began.take() {
                    break;
                }
            }
        }
    }
}

/// Waits for `time`; ends earlier, with true, when the connection is asked to leave.
async fn pause(time: Duration, leave: Option<&Leave>) -> bool {
    let mut time = pin!(sleep(time));
    poll_fn(|context| {
        if leave.is_some_and(|leave| leave.is_asked(context)) {
            return Poll::Ready(true);
        }
        time.as_mut().poll(context).map(|()| false)
    })
    .await
}
