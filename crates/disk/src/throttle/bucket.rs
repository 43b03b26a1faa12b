//! One token bucket, kept as a time.
//!
//! `paid_at` is the time at which all admitted tokens are paid off at the bucket's rate. The bucket
//! is full if `paid_at` has passed, and in debt if `paid_at` is further away than the capacity.
//! Requests are admitted while the bucket is not in debt, so the debt is one request at most. In
//! any time `t`, at most `rate · t + capacity` tokens are admitted, and one request in addition.
//! (This is the generic cell rate algorithm of ATM; QEMU's leaky bucket admits by the same rule.)
//!
//! A late timer loses no tokens as long as the tokens fit into the bucket.

use std::num::NonZeroU64;
use std::time::Duration;

use super::limits::MAX_RATE;

/// Nanoseconds since the clock's origin.
pub(super) type Nanos = u64;

/// The number of bits for a fraction of a nanosecond, so that high rates are exact.
const FRACTION: u32 = 32;
/// A second in units of that fraction.
const SECOND: u128 = 1_000_000_000 << FRACTION;

/// See the module's page.
#[derive(Clone, Debug)]
pub(super) struct Bucket {
    /// The time of one token.
    token: u128,
    /// The time in which an empty bucket fills.
    capacity: u128,
    paid_at: u128,
}

fn fixed(time: Nanos) -> u128 {
    u128::from(time) << FRACTION
}

impl Bucket {
    /// A bucket for `percent` hundredths of `rate` tokens a second. An empty bucket fills in
    /// `capacity`; this bucket fills in `missing` from now.
    pub(super) fn new(
        rate: NonZeroU64,
        percent: u32,
        capacity: Duration,
        missing: Duration,
        now: Nanos,
    ) -> Self {
        let rate = u128::from(rate.get().min(MAX_RATE)) * u128::from(percent.max(1));
        let fixed_of = |time: Duration| time.as_nanos() << FRACTION;
        Self {
            token: (SECOND * 100 / rate).max(1),
            capacity: fixed_of(capacity),
            paid_at: fixed(now) + fixed_of(missing.min(capacity)),
        }
    }

    /// The time at which the bucket is out of debt; in the past if it is not in debt.
    pub(super) fn ready_at(&self) -> Nanos {
        let at = self.paid_at.saturating_sub(self.capacity);
        // Rounded up, so that the bucket is out of debt at the returned time.
        u64::try_from((at + ((1 << FRACTION) - 1)) >> FRACTION).unwrap_or(u64::MAX)
    }

    /// Takes tokens out, even if that puts the bucket into debt.
    pub(super) fn take(&mut self, tokens: u64, now: Nanos) {
        self.paid_at = self.paid_at.max(fixed(now)) + u128::from(tokens) * self.token;
    }

    /// Puts tokens back that were taken.
    pub(super) fn put_back(&mut self, tokens: u64) {
        self.paid_at = self.paid_at.saturating_sub(u128::from(tokens) * self.token);
    }

    /// The time in which the bucket gains this many tokens.
    pub(super) fn time_of(&self, tokens: u64) -> Nanos {
        u64::try_from((u128::from(tokens) * self.token) >> FRACTION).unwrap_or(u64::MAX)
    }

    /// Continues from `former`, a bucket with other limits: its credit or debt stays, as far as it
    /// fits.
    pub(super) fn carry_over(&mut self, former: &Self, now: Nanos) {
        let now = fixed(now);
        let missing = former.paid_at.saturating_sub(now);
        let tokens = |time: u128| time / former.token;
        self.paid_at = match former.capacity.checked_sub(missing) {
            Some(level) => {
                now + self.capacity.saturating_sub(tokens(level).saturating_mul(self.token))
            }
            None => {
                let debt = tokens(missing - former.capacity);
                now + self.capacity + debt.saturating_mul(self.token).min(SECOND << 32)
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: Nanos = 1_000_000;

    fn bucket(rate: u64, capacity: Duration) -> Bucket {
        Bucket::new(NonZeroU64::new(rate).unwrap(), 100, capacity, Duration::ZERO, 0)
    }

    #[test]
    fn what_is_larger_than_the_bucket_is_let_go_and_paid_off() {
        let mut bucket = bucket(1000, Duration::from_millis(100));
        bucket.take(1000, 0);
        assert_eq!(bucket.ready_at(), 900 * MS);
        bucket.take(1, 900 * MS);
        assert_eq!(bucket.ready_at(), 901 * MS);
        bucket.put_back(1);
        assert_eq!(bucket.ready_at(), 900 * MS);
    }

    #[test]
    fn a_rest_saves_no_more_than_the_capacity() {
        let mut bucket = bucket(1000, Duration::from_millis(10));
        let now = 5000 * MS;
        let count = (0..1000).take_while(|_| {
            let is_ready = bucket.ready_at() <= now;
            bucket.take(1, now);
            is_ready
        });
        // Ten tokens from the credit, and the token that brings the bucket into debt.
        assert_eq!(count.count(), 11);
    }

    #[test]
    fn a_change_keeps_what_was_saved_and_what_is_owed() {
        let mut former = bucket(1000, Duration::from_secs(1));
        former.take(400, 0);
        let mut faster = bucket(10_000, Duration::from_secs(1));
        faster.carry_over(&former, 0);
        // The bucket has 600 of 10,000 tokens, so 601 more are admitted.
        faster.take(600, 0);
        assert_eq!(faster.ready_at(), 0);
        faster.take(1, 0);
        assert!(faster.ready_at() > 0);

        former.take(1600, 0);
        faster.carry_over(&former, 0);
        assert_eq!(faster.ready_at(), 100 * MS, "1000 are owed");
        let mut smaller = bucket(10_000, Duration::from_millis(1));
        smaller.carry_over(&bucket(1000, Duration::from_secs(1)), 0);
        smaller.take(10, 0);
        assert_eq!(smaller.ready_at(), 0, "it is full with ten");
        smaller.take(1, 0);
        assert!(smaller.ready_at() > 0);
    }

    proptest! {
        /// The bound of the module's page, in every window, for requests at any times.
        #[test]
        fn no_window_has_more_than_the_rate_and_the_capacity(
            rate in 1u64..1_000_000_000,
            capacity in 0u64..2000,
            requests in prop::collection::vec((0u64..50 * MS, 1u64..100_000), 1..60),
        ) {
            let mut bucket = bucket(rate, Duration::from_millis(capacity));
            let (mut now, mut gone): (Nanos, Vec<(Nanos, u64)>) = (0, Vec::new());
            for (pause, tokens) in requests {
                now = (now + pause).max(bucket.ready_at());
                bucket.take(tokens, now);
                gone.push((now, tokens));
            }
            for first in 0..gone.len() {
                let mut sum = 0u128;
                for &(at, tokens) in &gone[first..] {
                    let time = u128::from(at - gone[first].0) + u128::from(capacity * MS);
                    // The last request is left out, because it may bring the bucket into debt. One
                    // token is for rounding.
                    prop_assert!(sum <= u128::from(rate) * time / 1_000_000_000 + 1);
                    sum += u128::from(tokens);
                }
            }
        }

        /// A request that waits only for its bucket gets the rate exactly, even if timers are late,
        /// as long as the delay is within the capacity.
        #[test]
        fn nothing_is_lost_by_timers_that_are_late(
            rate in 100u64..1_000_000,
            delays in prop::collection::vec(0u64..40 * MS, 100..300),
        ) {
            let mut bucket = bucket(rate, Duration::from_millis(50));
            bucket.take(rate / 20, 0);
            let (mut now, mut sum) = (0, 0u64);
            for delay in delays {
                now = now.max(bucket.ready_at()) + delay;
                while bucket.ready_at() <= now {
                    bucket.take(1, now);
                    sum += 1;
                }
            }
            let expected = u128::from(rate) * u128::from(now) / 1_000_000_000;
            prop_assert!(u128::from(sum).abs_diff(expected) <= 2, "{sum} of {expected}");
        }
    }
}
