//! The commands of a device's thread to a running queue.

use std::sync::Arc;

use blockhouse_engine::GuestMemory;
use futures_channel::oneshot;

use super::call::Call;
use super::dirty_log::DirtyLog;
use super::kicks::Kick;
use crate::ring::{Broken, RingAddresses};

/// A command to a running queue.
pub enum QueueCommand {
    /// The guest's memory, or the ring's addresses in it, have changed.
    Move(Arc<GuestMemory>, RingAddresses),
    /// The guest kicks in another way.
    SetKick(Kick),
    /// The driver is notified in another way.
    SetCall(Option<Call>),
    /// Where changed pages are logged, the used ring's address for that, and how the front-end is
    /// told.
    SetLog(Option<DirtyLog>, Option<u64>, Option<Call>),
    /// The queue pops no more requests. It ends when those in flight have completed; in a graceful
    /// stop also those that an earlier server had begun, since the returned base counts them as
    /// popped.
    Stop(StopMode),
    /// Requests in flight in the queue wait no longer for room on the host (`Disk::hold`):
    /// they fail.
    EndHolding,
    /// The queue goes on, if it was told to stop in a graceful way and has not ended yet.
    Continue,
}

/// How a queue ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopMode {
    /// The driver learns of everything that completed.
    Graceful,
    /// The front-end is gone: ring and in-flight log stay as they are, so that a later front-end
    /// has the requests executed again whose completion was not published.
    Disconnected,
}

/// A command, and the receiver of its outcome when it is applied.
pub struct QueueRequest {
    /// The command.
    pub command: QueueCommand,
    /// The outcome.
    pub done: oneshot::Sender<Result<(), Broken>>,
}
