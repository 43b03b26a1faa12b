//! The limit on the requests and bytes that one connection has in flight.
//!
//! If a request exceeds a limit, it is not refused; the server stops reading from the client until
//! permits are released. The [`ByteLimit`] that all connections share bounds the bytes that they
//! have in flight together.

use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;

use blockhouse_core::sync::LocalCondvar;
use blockhouse_core::{InFlight, InFlightLimits, InFlightPermit, ReleaseInFlight};
use futures_util::future::{Either, select};

use super::activity::Activity;
use super::byte_limit::ByteLimit;

/// One or several requests in flight, and the bytes that they occupy. A permit is acquired before
/// the payload of a request is received, and released when the reply was sent, or was dropped
/// because the client has disconnected.
pub type Permit = InFlightPermit<Rc<InFlightLimit>>;

/// The limit of one connection.
pub struct InFlightLimit {
    in_flight: InFlight,
    /// Bytes outside of the shared limit, which no other connection can use.
    reserved: u64,
    byte_limit: Arc<ByteLimit>,
    activity: Arc<Activity>,
    released: LocalCondvar,
}

impl InFlightLimit {
    /// A limit with nothing in flight. `reserved` bytes do not count against `byte_limit`.
    pub fn new(
        limits: InFlightLimits,
        reserved: u64,
        byte_limit: Arc<ByteLimit>,
        activity: Arc<Activity>,
    ) -> Self {
        let (in_flight, released) = (InFlight::new(limits), LocalCondvar::default());
        Self { in_flight, reserved, byte_limit, activity, released }
    }

    /// Waits until a request of this many bytes is within the limits. While nothing is in flight, a
    /// request of any size is admitted. Only one task may call this.
    pub async fn acquire(self: &Rc<Self>, bytes: usize) -> Permit {
        let bytes = bytes as u64;
        while !self.try_acquire(bytes) {
            let released = self.byte_limit.released();
            // `wait_until` tries once more before it waits, so that a release in between is not
            // missed.
            let acquired = pin!(self.released.wait_until(|| self.try_acquire(bytes).then_some(())));
            if let Either::Left(_) = select(acquired, released).await {
                break;
            }
        }
        Permit::new(Rc::clone(self), bytes)
    }

    fn try_acquire(&self, bytes: u64) -> bool {
        let held = self.in_flight.bytes();
        let shared = self.shared(held);
        let more = self.shared(held + bytes) - shared;
        if self.in_flight.is_idle() {
            self.byte_limit.acquire_over_limit(more);
        } else if !self.in_flight.admits(bytes) || !self.byte_limit.try_acquire(more, shared) {
            return false;
        }
        self.in_flight.add(bytes);
        self.activity.set_in_flight(self.in_flight.requests());
        true
    }

    /// How many of the bytes that the connection holds count against the shared limit.
    fn shared(&self, held: u64) -> u64 {
        held.saturating_sub(self.reserved)
    }

    /// Waits until nothing is in flight.
    pub async fn drained(&self) {
        self.released.wait_until(|| self.in_flight.is_idle().then_some(())).await;
    }
}

impl ReleaseInFlight for InFlightLimit {
    fn release(&self, requests: usize, bytes: u64) {
        let held = self.in_flight.bytes();
        self.in_flight.release(requests, bytes);
        if requests > 0 {
            self.activity.set_in_flight(self.in_flight.requests());
        }
        self.byte_limit.release(self.shared(held) - self.shared(held - bytes));
        self.released.notify();
    }
}

#[cfg(test)]
mod tests;
