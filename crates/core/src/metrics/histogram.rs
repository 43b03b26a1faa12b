//! A histogram of durations with logarithmic buckets, four for each power of two.
//!
//! Bucket 0 has all durations up to 1 microsecond. Then each power of two is divided into four
//! buckets of equal width, up to 2^27 microseconds (134 s). The last bucket has everything longer.
//! A bucket includes its upper bound, as those of OpenMetrics do (`le`). So the error of a quantile
//! above 1 microsecond is at most a quarter.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[cfg(test)]
mod tests;

/// Buckets for each power of two.
const SUB_BUCKETS: u64 = 4;
/// How many powers of two above 1 microsecond have buckets of their own.
const DOUBLINGS: u64 = 27;
/// Nanoseconds of a quarter of the smallest bound.
const QUARTER: u64 = 250;

/// The number of buckets, the first and the last included.
pub const BUCKETS: usize = (DOUBLINGS * SUB_BUCKETS) as usize + 2;

/// The bucket of a duration in nanoseconds.
pub const fn bucket_of(nanoseconds: u64) -> usize {
    let quarters = nanoseconds.saturating_sub(1) / QUARTER;
    if quarters < SUB_BUCKETS {
        return 0;
    }
    let doublings = (quarters.ilog2() - SUB_BUCKETS.ilog2()) as u64;
    if doublings >= DOUBLINGS {
        return BUCKETS - 1;
    }
    let sub_bucket = (quarters >> doublings) % SUB_BUCKETS;
    (1 + doublings * SUB_BUCKETS + sub_bucket) as usize
}

/// The longest duration of a bucket, in nanoseconds; `None` for the last one, which has no bound.
pub const fn upper_bound(bucket: usize) -> Option<u64> {
    match bucket as u64 {
        0 => Some(SUB_BUCKETS * QUARTER),
        bucket if bucket < BUCKETS as u64 - 1 => {
            let (doublings, sub_bucket) = ((bucket - 1) / SUB_BUCKETS, (bucket - 1) % SUB_BUCKETS);
            Some(((SUB_BUCKETS + sub_bucket + 1) << doublings) * QUARTER)
        }
        _ => None,
    }
}

/// A histogram of one thread's block, see [`PerThread`](super::PerThread). As with a
/// [`Counter`](super::Counter), one thread records and all threads may read.
#[derive(Debug)]
#[repr(C)]
pub struct Histogram {
    /// The sum of the durations in nanoseconds. It lies before the buckets, because the first
    /// buckets are used most: recording then touches one cache line less.
    sum: AtomicU64,
    buckets: [AtomicU64; BUCKETS],
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: [const { AtomicU64::new(0) }; BUCKETS], sum: AtomicU64::new(0) }
    }
}

impl Histogram {
    /// Records a duration in nanoseconds.
    pub fn record(&self, nanoseconds: u64) {
        let increase = |number: &AtomicU64, by: u64| {
            number.store(number.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
        };
        increase(&self.buckets[bucket_of(nanoseconds)], 1);
        increase(&self.sum, nanoseconds);
    }

    /// The recorded values so far.
    pub fn read(&self) -> HistogramReading {
        let bucket = |index: usize| self.buckets[index].load(Ordering::Relaxed);
        HistogramReading {
            buckets: std::array::from_fn(bucket),
            sum: self.sum.load(Ordering::Relaxed),
        }
    }
}

/// The values of a histogram, or of several together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistogramReading {
    buckets: [u64; BUCKETS],
    /// The sum of the durations in nanoseconds.
    sum: u64,
}

impl Default for HistogramReading {
    fn default() -> Self {
        Self { buckets: [0; BUCKETS], sum: 0 }
    }
}

impl HistogramReading {
    /// A reading from the counts of all buckets and the sum, as [`buckets`](Self::buckets) and
    /// [`sum`](Self::sum) return them.
    pub fn new(buckets: [u64; BUCKETS], sum: Duration) -> Self {
        Self { buckets, sum: u64::try_from(sum.as_nanos()).unwrap_or(u64::MAX) }
    }

    /// Adds the values of another histogram.
    pub fn add(&mut self, other: &Self) {
        for (mine, others) in self.buckets.iter_mut().zip(&other.buckets) {
            *mine = mine.wrapping_add(*others);
        }
        self.sum = self.sum.wrapping_add(other.sum);
    }

    /// How many durations were recorded.
    pub fn count(&self) -> u64 {
        self.buckets.iter().fold(0, |sum, bucket| sum.wrapping_add(*bucket))
    }

    /// The sum of all durations.
    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.sum)
    }

    /// How many durations each bucket has, in the order of the buckets' bounds.
    pub fn buckets(&self) -> &[u64; BUCKETS] {
        &self.buckets
    }

    /// The upper bound of the bucket that has the quantile (0.99 is the 99th percentile). Above 1
    /// microsecond, the bound is at most a quarter more than the quantile itself. `None` if nothing
    /// was recorded, or if the quantile exceeds all bounds.
    pub fn quantile(&self, quantile: f64) -> Option<Duration> {
        let rank = ((self.count() as f64 * quantile).ceil() as u64).max(1);
        let mut seen = 0;
        let bucket = self.buckets.iter().position(|count| {
            seen += count;
            seen >= rank
        })?;
        upper_bound(bucket).map(Duration::from_nanos)
    }

    /// The bounds of 1, 2, 4, ... microseconds, each with the number of durations that were not
    /// longer.
    pub fn powers_of_two(&self) -> impl Iterator<Item = (Duration, u64)> {
        let mut seen = 0;
        let bounded = self.buckets[..BUCKETS - 1].iter().enumerate();
        bounded.filter_map(move |(index, count)| {
            seen += count;
            let is_power = (index as u64).is_multiple_of(SUB_BUCKETS);
            let bound = upper_bound(index).filter(|_| is_power)?;
            Some((Duration::from_nanos(bound), seen))
        })
    }
}
