//! Limits of what one party may have in flight, the same for all exports.
//!
//! A party is a client's connection or a guest's queue. Each export announces and enforces these
//! limits in the words of its protocol, and the event loop takes the length of a task's turn from
//! these limits. Only a request that is longer than allowed fails; requests beyond the other limits
//! wait in the socket or the ring.
//!
//! Guarantee: a party has in flight exactly the requests and bytes that its [`InFlightPermit`]s
//! hold. A permit returns itself when it is dropped, on every path of a request, errors and dropped
//! futures included.

use std::cell::Cell;
use std::mem;
use std::ops::Deref;
use std::time::Duration;

/// The limits of one party. [`InFlightLimits::default`] is the default of exports; an export that
/// differs states why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InFlightLimits {
    /// Bytes of data that one request may move. A request without data (a discard, a zero write)
    /// is bounded by its protocol; the I/O path cuts it and yields between the pieces.
    pub request_bytes: u64,
    /// Requests that were accepted and not answered.
    pub requests: usize,
    /// Bytes of data of all requests that were accepted and not answered. A party with nothing in
    /// flight may begin one request of any length.
    pub bytes: u64,
    /// How long the party's tasks may compute while tasks of other parties on the same event loop
    /// wait. Not exact: a task is not interrupted while it is polled (see
    /// [`WorkBudget`](crate::WorkBudget) for the length of a poll).
    pub turn: Duration,
}

impl InFlightLimits {
    /// 32 MiB a request (what an NBD client may assume without negotiation), 128 requests, 64 MiB
    /// in all. Turns of 50 microseconds: about the time of a loop for a batch of short requests.
    pub const DEFAULT: Self = Self {
        request_bytes: 32 << 20,
        requests: 128,
        bytes: 64 << 20,
        turn: Duration::from_micros(50),
    };

    /// Whether a party that has `requests` and `bytes` in flight may have one more request, of
    /// `length` bytes.
    pub fn admit(&self, requests: usize, bytes: u64, length: u64) -> bool {
        requests == 0 || (requests < self.requests && bytes.saturating_add(length) <= self.bytes)
    }
}

impl Default for InFlightLimits {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// The requests of one party in flight, counted against its limits. For one thread.
#[derive(Debug)]
pub struct InFlight {
    limits: InFlightLimits,
    requests: Cell<usize>,
    bytes: Cell<u64>,
}

impl InFlight {
    /// A counter with nothing in flight.
    pub fn new(limits: InFlightLimits) -> Self {
        Self { limits, requests: Cell::new(0), bytes: Cell::new(0) }
    }

    /// Requests in flight.
    pub fn requests(&self) -> usize {
        self.requests.get()
    }

    /// Bytes of data of the requests in flight.
    pub fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    /// Whether nothing is in flight.
    pub fn is_idle(&self) -> bool {
        self.requests.get() == 0
    }

    /// Whether one more request of `length` bytes is within the limits ([`InFlightLimits::admit`]).
    pub fn admits(&self, length: u64) -> bool {
        self.limits.admit(self.requests.get(), self.bytes.get(), length)
    }

    /// Counts one more request of `length` bytes, whatever the limits say.
    pub fn acquire(&self, length: u64) -> InFlightPermit<&Self> {
        self.add(length);
        InFlightPermit::new(self, length)
    }

    /// As [`acquire`](Self::acquire), without a permit: for a counter that contains this one and
    /// whose permit releases both.
    pub fn add(&self, length: u64) {
        self.requests.update(|requests| requests + 1);
        self.bytes.update(|bytes| bytes + length);
    }
}

/// A counter to which an [`InFlightPermit`] returns its requests and bytes.
pub trait ReleaseInFlight {
    /// Ends requests in flight, with their bytes.
    fn release(&self, requests: usize, bytes: u64);
}

impl ReleaseInFlight for InFlight {
    fn release(&self, requests: usize, bytes: u64) {
        self.requests.update(|count| count - requests);
        self.bytes.update(|count| count - bytes);
    }
}

/// Requests and bytes that a party has in flight. A drop of the permit returns both to the counter
/// to which `C` points.
#[derive(Debug)]
pub struct InFlightPermit<C>
where
    C: Deref,
    C::Target: ReleaseInFlight,
{
    counter: C,
    requests: usize,
    bytes: u64,
}

impl<C> InFlightPermit<C>
where
    C: Deref,
    C::Target: ReleaseInFlight,
{
    /// A permit for one request of `bytes` bytes, which `counter` has counted already.
    pub fn new(counter: C, bytes: u64) -> Self {
        Self { counter, requests: 1, bytes }
    }

    /// Returns the bytes, because their memory is free again; the request stays in flight.
    pub fn release_bytes(&mut self) {
        let bytes = mem::take(&mut self.bytes);
        if bytes > 0 {
            self.counter.release(0, bytes);
        }
    }

    /// Takes over the requests and bytes of `other`, a permit of the same counter; they return when
    /// this permit is dropped.
    pub fn merge(&mut self, mut other: Self) {
        self.requests += mem::take(&mut other.requests);
        self.bytes += mem::take(&mut other.bytes);
    }
}

impl<C> Drop for InFlightPermit<C>
where
    C: Deref,
    C::Target: ReleaseInFlight,
{
    fn drop(&mut self) {
        // A permit that was merged into another one holds nothing.
        if self.requests > 0 {
            self.counter.release(self.requests, self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_request_is_admitted_whatever_its_length_and_then_the_limits_hold() {
        let limits = InFlightLimits { requests: 2, bytes: 100, ..InFlightLimits::DEFAULT };
        assert!(limits.admit(0, 0, 1000));
        assert!(limits.admit(1, 50, 50) && !limits.admit(1, 50, 51));
        assert!(!limits.admit(2, 0, 0), "over the requests");
        assert!(!limits.admit(1, 1, u64::MAX), "no overflow");
    }

    #[test]
    fn permits_return_what_they_hold_when_they_are_dropped() {
        let limits = InFlightLimits { requests: 3, bytes: 100, ..InFlightLimits::DEFAULT };
        let in_flight = InFlight::new(limits);
        let mut first = in_flight.acquire(60);
        let second = in_flight.acquire(40);
        assert!(!in_flight.admits(1) && in_flight.admits(0));
        first.release_bytes();
        assert_eq!((in_flight.requests(), in_flight.bytes()), (2, 40));
        first.merge(second);
        assert_eq!((in_flight.requests(), in_flight.bytes()), (2, 40));
        drop(first);
        assert!(in_flight.is_idle() && in_flight.bytes() == 0);
    }
}
