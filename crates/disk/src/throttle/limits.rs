//! The limits of a disk.

use std::num::NonZeroU64;
use std::time::Duration;

/// Limits on the rates of a disk or of a group of disks. `None` is no limit. All limits that are
/// set apply at the same time.
///
/// A read, write, zero write, discard or prefetch is one operation, whatever its length. The bytes
/// of reads, writes and prefetches count, and the bytes of zero writes if the host has to write
/// zeros. Flushes do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// Operations a second.
    pub iops: Option<NonZeroU64>,
    /// Reads and prefetches a second.
    pub iops_read: Option<NonZeroU64>,
    /// Writes, zero writes and discards a second.
    pub iops_write: Option<NonZeroU64>,
    /// Bytes a second.
    pub bps: Option<NonZeroU64>,
    /// Bytes read a second.
    pub bps_read: Option<NonZeroU64>,
    /// Bytes written a second.
    pub bps_write: Option<NonZeroU64>,
    /// The factor and the time by which each rate may be exceeded after a time of lower use.
    pub burst: Option<Burst>,
}

/// The highest rate: any higher rate is reduced to it.
pub const MAX_RATE: u64 = 1_000_000_000_000_000;

impl RateLimits {
    /// Whether nothing is limited.
    pub fn is_unlimited(&self) -> bool {
        self.rates().iter().all(Option::is_none)
    }

    /// All rates: first of operations, then of bytes; each for all requests, for reads and for
    /// writes.
    pub(super) fn rates(&self) -> [Option<NonZeroU64>; 6] {
        [self.iops, self.iops_read, self.iops_write, self.bps, self.bps_read, self.bps_write]
    }
}

/// A permission to exceed rates for a while: up to `factor` times the rate for `time`, from saved
/// credit.
///
/// The unused part of a limit of rate `r` is saved, up to `(factor - 1) · r · time`. So after a
/// rest a disk may run at `factor · r` for `time`, and then runs at `r`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Burst {
    percent: u32,
    time: Duration,
}

impl Burst {
    /// The default length of a burst.
    pub const DEFAULT_TIME: Duration = Duration::from_secs(1);
    /// The largest factor.
    pub const MAX_FACTOR: f64 = 1000.0;
    /// The longest time of a burst: a day.
    pub const MAX_TIME: Duration = Duration::from_secs(24 * 3600);

    /// A burst of `factor` times the rates, in steps of a hundredth, for `time`.
    ///
    /// # Errors
    /// One line with the reason, if `factor` is not from 1 to 1000, or `time` is longer than a day.
    pub fn new(factor: f64, time: Duration) -> Result<Self, String> {
        if !(1.0..=Self::MAX_FACTOR).contains(&factor) {
            return Err(format!(
                "a burst is a number of times the rate from 1 to {}, not {factor}",
                Self::MAX_FACTOR
            ));
        }
        if time > Self::MAX_TIME {
            return Err(format!("a burst lasts {} seconds at most", Self::MAX_TIME.as_secs()));
        }
        Ok(Self { percent: (factor * 100.0).round() as u32, time })
    }

    /// The highest rate of a burst, as a multiple of the limit's rate.
    pub fn factor(&self) -> f64 {
        f64::from(self.percent) / 100.0
    }

    /// The length of a burst after a long enough rest.
    pub fn time(&self) -> Duration {
        self.time
    }

    /// The factor in hundredths.
    pub(super) fn percent(&self) -> u32 {
        self.percent
    }

    /// The time in which a limit's rate saves the credit of a burst.
    pub(super) fn saved_time(&self) -> Duration {
        self.time * (self.percent - 100) / 100
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_saves_what_exceeds_the_rate() {
        let burst = Burst::new(2.5, Duration::from_secs(60)).unwrap();
        assert_eq!(burst.saved_time(), Duration::from_secs(90));
        assert_eq!(Burst::new(1.0, Burst::MAX_TIME).unwrap().saved_time(), Duration::ZERO);
        for factor in [0.99, 1000.1, f64::NAN, f64::INFINITY, -1.0] {
            assert!(Burst::new(factor, Duration::ZERO).is_err(), "{factor}");
        }
    }
}
