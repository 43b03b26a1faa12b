//! How long the client has made no progress in the middle of a request or a reply.
//!
//! Guarantee: a client that does not receive its replies, or does not send the rest of a request,
//! is detected within 1.25 times the limit; a client that makes progress is not. Progress is each
//! receive, each part of a reply that the socket accepts, and each decrease of the socket's send
//! queue. The send queue shows progress earliest, because the kernel accepts more data only when
//! much of the queue is free. A Unix socket frees the queue in units of up to 36 KiB, TCP as the
//! peer's window allows. An idle client is never detected here. The cost of a request is a few
//! stores. A timer runs only while the connection is busy; it fires every quarter of the limit, and
//! makes one system call if a reply waits to be sent.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use blockhouse_core::sync::LocalCondvar;
use blockhouse_engine::{Stream, sleep, unsent_bytes};

use super::end::{Direction, End};
use super::shutdown::ShutdownSignal;

/// Whether a connection waits for its client in each direction, and how often the client made
/// progress.
#[derive(Default)]
pub struct PeerWait {
    waits: [Cell<bool>; 2],
    steps: [Cell<u64>; 2],
    has_begun: Cell<bool>,
    changed: LocalCondvar,
}

impl PeerWait {
    /// Starts to wait for the peer in `direction`.
    pub fn begin(&self, direction: Direction) {
        self.waits[direction as usize].set(true);
        if !self.has_begun.replace(true) {
            self.changed.notify();
        }
    }

    /// Ends the wait for the peer in `direction`. The end is progress.
    pub fn end(&self, direction: Direction) {
        self.waits[direction as usize].set(false);
        self.step(direction);
    }

    /// Counts progress of the peer in `direction`.
    pub fn step(&self, direction: Direction) {
        self.steps[direction as usize].update(|steps| steps.wrapping_add(1));
    }

    /// Resolves when the peer made no progress for `limit`, or for `limit_at_end` after shutdown
    /// was requested.
    pub async fn stalled(
        &self,
        stream: &Stream,
        mut limit: Duration,
        limit_at_end: Duration,
        shutdown: &ShutdownSignal,
    ) -> End {
        loop {
            self.changed.wait_until(|| self.has_begun.take().then_some(())).await;
            let mut progress = Progress::new(self);
            loop {
                let is_ending = pause(limit / 4, (limit > limit_at_end).then_some(shutdown)).await;
                if is_ending {
                    limit = limit_at_end;
                    progress = Progress::new(self);
                }
                if let Some(direction) = progress.stalled(self, stream, limit) {
                    return End::Stalled { direction, limit };
                }
                if !self.waits.iter().any(Cell::get) && !self.has_begun.take() {
                    break;
                }
            }
        }
    }
}

/// The peer's progress at the last check.
struct Progress {
    /// Bytes in the socket's send queue at the last check.
    unsent: Option<usize>,
    /// For each direction: the count of steps, and since when it has not changed.
    steps: [(u64, Instant); 2],
}

impl Progress {
    fn new(peer_wait: &PeerWait) -> Self {
        let now = Instant::now();
        Self { unsent: None, steps: [0, 1].map(|index| (peer_wait.steps[index].get(), now)) }
    }

    /// Checks again. Returns the direction in which the peer has made no progress for `limit`, if
    /// any.
    fn stalled(
        &mut self,
        peer_wait: &PeerWait,
        stream: &Stream,
        limit: Duration,
    ) -> Option<Direction> {
        let now = Instant::now();
        if peer_wait.waits[Direction::Send as usize].get() {
            // Between two steps the server adds nothing to the send queue, so a shorter queue is
            // progress of the peer.
            let before = std::mem::replace(&mut self.unsent, unsent_bytes(stream).ok());
            if self.unsent < before {
                peer_wait.step(Direction::Send);
            }
        }
        Direction::BOTH.into_iter().find(|&direction| {
            let steps = peer_wait.steps[direction as usize].get();
            let seen = &mut self.steps[direction as usize];
            if !peer_wait.waits[direction as usize].get() || seen.0 != steps {
                *seen = (steps, now);
                return false;
            }
            now - seen.1 >= limit
        })
    }
}

/// Waits for `time`; ends earlier, with true, when shutdown is requested.
async fn pause(time: Duration, shutdown: Option<&ShutdownSignal>) -> bool {
    let mut time = pin!(sleep(time));
    poll_fn(|context| {
        if shutdown.is_some_and(|shutdown| shutdown.poll_requested(context)) {
            return Poll::Ready(true);
        }
        time.as_mut().poll(context).map(|()| false)
    })
    .await
}
