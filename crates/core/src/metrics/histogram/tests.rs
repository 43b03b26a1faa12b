//! The histogram against a sorted list of the same durations.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// Durations of all magnitudes, and durations at the buckets' bounds and 1 ns beside them.
fn durations() -> impl Strategy<Value = u64> {
    let at_bound = (0..BUCKETS - 1, 0..3_u64).prop_map(|(bucket, shift)| {
        upper_bound(bucket).expect("all but the last are bounded") + shift - 1
    });
    prop_oneof![at_bound, (0..64_u32, any::<u64>()).prop_map(|(shift, value)| value >> shift)]
}

#[test]
fn buckets_follow_each_other_from_a_microsecond_to_two_minutes() {
    let bounds: Vec<_> = (0..BUCKETS).map_while(upper_bound).collect();
    assert_eq!(bounds.len(), BUCKETS - 1);
    assert_eq!(bounds[..6], [1000, 1250, 1500, 1750, 2000, 2500]);
    assert_eq!(bounds.last(), Some(&((1 << 27) * 1000)));
    assert!(bounds.is_sorted_by(|a, b| a < b && *b <= a + a / 4));
    assert_eq!((bucket_of(u64::MAX), bucket_of(0)), (BUCKETS - 1, 0));
}

#[test]
fn an_empty_histogram_has_no_quantile() {
    assert_eq!(Histogram::default().read().quantile(0.5), None);
}

proptest! {
    /// The model: the durations themselves, sorted.
    #[test]
    fn a_reading_says_of_durations_what_a_sorted_list_does(
        mut parts in vec(vec(durations(), 0..50), 1..4),
        quantile in 0.0..=1.0_f64,
    ) {
        let mut reading = HistogramReading::default();
        for part in &parts {
            let histogram = Histogram::default();
            part.iter().for_each(|&duration| histogram.record(duration));
            reading.add(&histogram.read());
        }
        let mut all = parts.concat();
        parts.clear();
        all.sort_unstable();
        prop_assert_eq!(reading.count(), all.len() as u64);
        let sum = all.iter().fold(0, |sum: u64, one| sum.wrapping_add(*one));
        prop_assert_eq!(reading.sum(), Duration::from_nanos(sum));
        let no_longer = |bound: u64| all.iter().filter(|&&one| one <= bound).count() as u64;
        for (bound, count) in reading.powers_of_two() {
            prop_assert_eq!(count, no_longer(bound.as_nanos() as u64), "up to {:?}", bound);
        }
        let mut below = 0;
        for (bucket, count) in reading.buckets().iter().enumerate() {
            let upto = upper_bound(bucket).map_or(all.len() as u64, no_longer);
            prop_assert_eq!(*count, upto - below, "bucket {}", bucket);
            below = upto;
        }
        if !all.is_empty() {
            let rank = ((all.len() as f64 * quantile).ceil() as usize).max(1);
            let exact = all[rank - 1];
            let expected = upper_bound(bucket_of(exact)).map(Duration::from_nanos);
            prop_assert_eq!(reading.quantile(quantile), expected);
        }
    }
}
