//! Tracks whether answered writes may still be in the server's volatile cache, and which flush
//! covers them.
//!
//! Guarantees:
//! - A write, zero write or trim without FUA is counted as unflushed from its answer until the end
//!   of a flush that was begun afterwards on the oldest stream. A write with FUA is not counted,
//!   because it is durable when it is answered.
//! - If the oldest stream ends while writes are unflushed, this is recorded permanently, because
//!   the server may have lost the writes.
//! - Memory use is constant (some counters), however much a guest writes.
//!
//! Only a flush on the oldest stream proves that the writes are durable. Reason: its answer proves
//! that one server process has run since before the other streams were opened. So this process has
//! answered all unflushed writes. A flush on a younger stream may be answered by a restarted server
//! that has lost the writes of older streams. Since only the oldest stream is relevant, the result
//! does not depend on when a loop detects the end of a younger stream, or whether that loop still
//! runs.

use std::sync::Arc;

use blockhouse_core::sync::ErrorLatch;
use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_nbd_protocol::CommandFlags;
use blockhouse_nbd_protocol::request::{RequestHeader, kind};
use parking_lot::Mutex;

/// The hint about answered writes that may be lost.
const LOST_HINT: &str =
    "the server may have lost them: check the guest's file systems, and open the image again";

/// The writes of a storage that no flush has covered, and its streams.
pub(super) struct UnflushedWrites {
    /// The name of the export, for messages.
    name: String,
    /// Whether the server supports FLUSH. Without FLUSH, no write is volatile.
    has_flush: bool,
    state: Mutex<State>,
    lost: ErrorLatch,
}

#[derive(Default)]
struct State {
    writes: Count,
    /// The connections whose streams are in use, the oldest stream first.
    streams: Vec<usize>,
    /// Whether the storage was closed, so that lost writes are not reported.
    is_closed: bool,
}

/// Answered writes.
#[derive(Debug, Default)]
struct Count {
    /// How many writes were answered in total.
    answered: u64,
    /// How many of the answered writes, from the first one on, a flush has covered.
    flushed: u64,
}

/// The writes that a flush covers: the number of writes that were answered before the flush was
/// begun.
#[derive(Clone, Copy, Debug)]
pub(super) struct FlushMark(u64);

/// A stream in use. Dropping the guard records the end of the stream.
pub(super) struct StreamGuard {
    unflushed: Arc<UnflushedWrites>,
    connection: usize,
}

impl UnflushedWrites {
    /// The state of an export that has no writes yet.
    pub(super) fn new(name: &str, has_flush: bool) -> Self {
        let (name, lost) = (name.into(), ErrorLatch::new(LOST_HINT));
        Self { name, has_flush, state: Mutex::default(), lost }
    }

    /// Records a new stream of a connection, over which nothing was sent yet.
    pub(super) fn begin_stream(self: &Arc<Self>, connection: usize) -> StreamGuard {
        self.state.lock().streams.push(connection);
        StreamGuard { unflushed: Arc::clone(self), connection }
    }

    /// Records that a request other than a flush was answered with success.
    pub(super) fn answered(&self, header: &RequestHeader) {
        let is_write = matches!(header.kind, kind::WRITE | kind::WRITE_ZEROES | kind::TRIM);
        if is_write && self.has_flush && !header.flags.contains(CommandFlags::FUA) {
            self.state.lock().writes.answered += 1;
        }
    }

    /// Begins a flush. Returns the connection with the oldest stream (`None` if there is no stream:
    /// then any connection will do), and the writes that the flush covers.
    pub(super) fn begin_flush(&self) -> (Option<usize>, FlushMark) {
        let state = self.state.lock();
        (state.streams.first().copied(), FlushMark(state.writes.answered))
    }

    /// Records that a flush has succeeded. If the stream that the flush was first sent on has
    /// ended, the flush was sent again on another stream. That is correct: at the end of the first
    /// stream, every write that the flush covers was either flushed or recorded as lost.
    pub(super) fn flushed(&self, FlushMark(covered): FlushMark) {
        let writes = &mut self.state.lock().writes;
        writes.flushed = writes.flushed.max(covered);
    }

    /// # Errors
    /// Every call fails once answered writes may have been lost.
    pub(super) fn check(&self) -> Result<()> {
        self.lost.check()
    }

    /// Records that the storage is closed. Unflushed writes are not reported as lost after that.
    pub(super) fn close(&self) {
        self.state.lock().is_closed = true;
    }

    fn end_stream(&self, connection: usize) {
        let mut state = self.state.lock();
        let is_oldest = state.streams.first() == Some(&connection);
        state.streams.retain(|stream| *stream != connection);
        let count = if is_oldest && !state.is_closed { state.writes.take() } else { 0 };
        if count > 0 {
            let what =
                format!("the connection broke when answered writes were not flushed ({count})");
            let lost = Error::new(ErrorKind::Io, what).on(&self.name);
            tracing::error!("{lost}; every flush fails from now on");
            // The error is set under the lock, so that a flush that finds no unflushed writes also
            // finds the error.
            self.lost.set(&lost);
        }
    }
}

impl Drop for StreamGuard {
    fn drop(&mut self) {
        self.unflushed.end_stream(self.connection);
    }
}

impl Count {
    /// Returns the number of unflushed writes, and resets it to 0.
    fn take(&mut self) -> u64 {
        let count = self.answered - self.flushed;
        self.flushed = self.answered;
        count
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CONNECTIONS: usize = 3;

    /// The event at one of the connections.
    #[derive(Clone, Copy, Debug)]
    enum Step {
        Connect,
        Write {
            is_fua: bool,
        },
        Read,
        Flush,
        /// The client notices that its stream has ended.
        Break,
        /// The server loses its cache and restarts. Earlier streams never answer again.
        LosePower,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => Just(Step::Connect),
            4 => any::<bool>().prop_map(|is_fua| Step::Write { is_fua }),
            1 => Just(Step::Read),
            3 => Just(Step::Flush),
            2 => Just(Step::Break),
            1 => Just(Step::LosePower),
        ]
    }

    fn header(kind: u16, is_fua: bool) -> RequestHeader {
        let flags = if is_fua { CommandFlags::FUA } else { CommandFlags::NO_HOLE };
        RequestHeader { flags, kind, cookie: 0, offset: 0, length: 512 }
    }

    proptest! {
        /// Against a server that tracks its lost writes: a flush succeeds only if there are none.
        /// And flushes fail only after a stream has ended with unflushed writes.
        #[test]
        fn a_flush_that_succeeds_covers_every_answered_write(
            steps in prop::collection::vec((0..CONNECTIONS, step()), 1..200),
        ) {
            let writes = Arc::new(UnflushedWrites::new("export", true));
            let mut streams: [Option<(StreamGuard, u32)>; CONNECTIONS] = [const { None }; CONNECTIONS];
            // The server: how often it lost its cache, its cached writes, and whether any write was
            // ever lost.
            let (mut server, mut cached, mut has_lost) = (0, 0, false);
            let mut may_fail = false;
            for (connection, step) in steps {
                // Whether the server that the stream leads to is still there.
                let life = streams[connection].as_ref().map(|(_, life)| *life);
                let answers = life == Some(server);
                match step {
                    Step::Connect if life.is_none() => {
                        streams[connection] = Some((writes.begin_stream(connection), server));
                    }
                    Step::Write { is_fua } if answers => {
                        let kinds = [kind::WRITE, kind::WRITE_ZEROES, kind::TRIM];
                        writes.answered(&header(kinds[connection], is_fua));
                        cached += u32::from(!is_fua);
                    }
                    Step::Read if answers => writes.answered(&header(kind::READ, false)),
                    Step::Flush => {
                        let (Some(oldest), mark) = writes.begin_flush() else { continue };
                        if streams[oldest].as_ref().is_some_and(|(_, life)| *life == server) {
                            cached = 0;
                            writes.flushed(mark);
                            match writes.check() {
                                Ok(()) => prop_assert!(!has_lost),
                                Err(_) => prop_assert!(may_fail),
                            }
                        }
                    }
                    Step::Break if life.is_some() => {
                        may_fail |= cached > 0 || has_lost;
                        streams[connection] = None;
                    }
                    Step::LosePower => {
                        has_lost |= cached > 0;
                        (server, cached) = (server + 1, 0);
                    }
                    _ => {}
                }
            }
        }
    }

    #[test]
    fn only_the_end_of_the_oldest_stream_loses_writes() {
        let writes = Arc::new(UnflushedWrites::new("export", true));
        let (first, second) = (writes.begin_stream(0), writes.begin_stream(1));
        writes.answered(&header(kind::WRITE, false));
        drop(second);
        writes.check().unwrap();
        let second = writes.begin_stream(1);
        let (oldest, mark) = writes.begin_flush();
        assert_eq!(oldest, Some(0));
        writes.answered(&header(kind::TRIM, false));
        writes.flushed(mark);
        drop(first);
        let line = writes.check().unwrap_err().to_string();
        assert!(line.contains("not flushed (1)") && line.contains("export"), "{line}");
        assert_eq!(writes.begin_flush().0, Some(1));
        drop(second);
    }
}
