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
    /// Sets how the guest kicks.
    SetKick(Kick),
    /// Sets how the driver is notified.
    SetCall(Option<Call>),
    /// The log of changed pages, the used ring's address in it, and the eventfd that notifies the
    /// front-end.
    SetLog(Option<DirtyLog>, Option<u64>, Option<Call>),
    /// The queue pops no more requests, and ends when the requests in flight have completed. A
    /// graceful stop also executes the requests that an earlier server had begun, since the
    /// returned base counts them as popped.
    Stop(StopMode),
    /// Requests in flight in the queue no longer wait for free space on the host (`Disk::hold`):
    /// they fail.
    EndHolding,
    /// Cancels a graceful stop, if the queue has not ended yet.
    Continue,
}

/// How a queue ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopMode {
    /// All completed requests are published to the driver.
    Graceful,
    /// The front-end has disconnected. The ring and the in-flight log stay as they are, so that
    /// requests without a published completion are executed again when a front-end reconnects.
    Disconnected,
}

/// A command, and the receiver of its outcome when it is applied.
pub struct QueueRequest {
    /// The command.
    pub command: QueueCommand,
    /// Receives the outcome of the command.
    pub done: oneshot::Sender<Result<(), Broken>>,
}
