//! Divides the time among the cases, and computes the maximum number of bytes written.
//!
//! Guarantees: no case begins after the time is up. A case begins a further round only if the round
//! would end within the case's share of the time, as estimated from earlier rounds. So at most one
//! round of a case exceeds the share.

use std::time::{Duration, Instant};

use super::rows::{Case, Cost};

/// The time to fill the disk.
const FILLING: Duration = Duration::from_secs(4);
/// In a shorter sample its beginning and end would dominate the result.
const MIN_SAMPLE_TIME: Duration = Duration::from_millis(20);
/// A longer sample gives no more information than another round.
const MAX_SAMPLE_TIME: Duration = Duration::from_millis(1500);
/// The time between samples and after their ends, as a fraction of the samples' time.
const BETWEEN: f64 = 0.2;

/// The plan of all cases.
pub struct Schedule {
    /// The time when the plan began.
    pub begin: Instant,
    /// How long one sample lasts.
    pub sample_time: Duration,
    /// The expected use.
    pub expected: Duration,
    /// The upper bound.
    pub most: Duration,
    /// Bytes that are written at most.
    pub written: u64,
    /// The time of the cases that have not begun, in arbitrary units: only the proportions matter.
    outstanding: f64,
}

impl Schedule {
    /// Divides `most` among the cases. The plan begins now.
    pub fn new<'a>(
        most: Duration,
        cases: impl Iterator<Item = &'a Case<'a>>,
        rounds: usize,
    ) -> Self {
        let all: Vec<Cost> =
            cases.flat_map(|case| case.variants.iter().map(|one| one.cost)).collect();
        let extra = all.iter().map(|cost| cost.extra).sum::<Duration>() * rounds as u32;
        let samples = (all.len() * rounds).max(1) as u32;
        let left = most.saturating_sub(FILLING.min(most / 3)).saturating_sub(extra);
        let sample_time = left.div_f64(1.0 + BETWEEN) / samples;
        let sample_time = sample_time.clamp(MIN_SAMPLE_TIME, MAX_SAMPLE_TIME);
        let expected = FILLING + extra + (sample_time * samples).mul_f64(1.0 + BETWEEN);
        let written = all.iter().map(|cost| cost.written).sum::<u64>() * rounds as u64;
        let outstanding = all.iter().map(|&cost| time(cost, sample_time)).sum();
        let expected = expected.min(most);
        Self { begin: Instant::now(), sample_time, expected, most, written, outstanding }
    }

    /// The time until which the next case may run; `None` if no time is left for it.
    pub fn next(&mut self, case: &Case<'_>, now: Instant) -> Option<Instant> {
        let left = (self.begin + self.most).checked_duration_since(now)?;
        let cost: f64 = case.variants.iter().map(|one| time(one.cost, self.sample_time)).sum();
        let share = (cost / self.outstanding).min(1.0);
        self.outstanding -= cost;
        (!left.is_zero()).then(|| now + left.mul_f64(share))
    }
}

fn time(cost: Cost, sample_time: Duration) -> f64 {
    (cost.extra + sample_time.mul_f64(1.0 + BETWEEN)).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::rows::Variant;

    fn case(extra: u64) -> Case<'static> {
        let cost = Cost { extra: Duration::from_secs(extra), written: 5 };
        let variant = |name: &str| Variant {
            name: name.into(),
            run: Box::new(|| unreachable!("it is only planned")),
            published: None,
            cost,
        };
        Case { name: "case".into(), variants: vec![variant("one"), variant("other")] }
    }

    #[test]
    fn the_time_is_shared_out_and_kept() {
        let cases = [case(0), case(1), case(0)];
        let mut schedule = Schedule::new(Duration::from_secs(100), cases.iter(), 7);
        assert_eq!(schedule.written, 3 * 2 * 7 * 5);
        assert!(schedule.expected <= schedule.most);
        let planned = 7 * 2 * (3 * schedule.sample_time + Duration::from_secs(1));
        assert!(planned < schedule.most, "{planned:?}");
        let (mut now, end) = (schedule.begin, schedule.begin + schedule.most);
        for case in &cases {
            let until = schedule.next(case, now).expect("there is time");
            assert!(until > now && until <= end + Duration::from_millis(1));
            now = until;
        }
        assert!(end - now < Duration::from_millis(1), "all of it is given out");
        assert_eq!(schedule.next(&cases[0], end + Duration::from_nanos(1)), None);
    }

    #[test]
    fn a_case_that_was_slow_leaves_less_to_the_others() {
        let cases = [case(0), case(0), case(0)];
        let mut schedule = Schedule::new(Duration::from_secs(30), cases.iter(), 7);
        let begin = schedule.begin;
        assert_eq!(schedule.next(&cases[0], begin).map(|end| (end - begin).as_secs()), Some(10));
        let late = begin + Duration::from_secs(20);
        assert_eq!(schedule.next(&cases[1], late).map(|end| (end - late).as_secs()), Some(5));
    }
}
