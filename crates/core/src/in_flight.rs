//! How much one party may have in flight: the one answer for all exports.
//!
//! A party is a client's connection or a guest's queue: what can ask for more without the consent of
//! anybody else. Each export announces and enforces these limits in the words of its protocol, and
//! the event loop takes the length of a turn from here. A longer request than allowed is an error of
//! that request alone; more requests or bytes wait where they are (in a socket, in a ring).

use std::time::Duration;

/// The limits of one party. [`InFlightLimits::default`] is what exports start from; an export states
/// why where it differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InFlightLimits {
    /// Bytes of data that one request may move. A request without data (a discard, a zero write) is
    /// bounded by its protocol; the I/O path cuts it and yields between the pieces.
    pub request_bytes: u64,
    /// Requests that were taken and not answered.
    pub requests: usize,
    /// Bytes of data of all requests that were taken and not answered. A party that has nothing in
    /// flight is let in with one request whatever its length.
    pub bytes: u64,
    /// How long the party's tasks may compute while tasks of other parties on the same event loop
    /// wait. Not exact: a task that is polled is not interrupted (see
    /// [`WorkBudget`](crate::WorkBudget) for how long that takes).
    pub turn: Duration,
}

impl InFlightLimits {
    /// 32 MiB a request (what an NBD client may assume without asking), 128 requests, 64 MiB in all, and
    /// turns of 50 microseconds: about what a loop spends on a batch of short requests.
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
}
