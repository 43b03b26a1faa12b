//! The rate of background copies while a guest uses the disk.
//!
//! If a guest keeps a fixed number of requests in flight, its rate falls by the factor by which the
//! time of its requests grows. So the pace depends on that time. In each cycle the copier rests for
//! one window, in which the time of the guest's reads and writes without copies is measured. In the
//! other windows the time with copies is compared with it, and the rate is raised or lowered. A
//! window with fewer than `MIN_REQUESTS` requests is prolonged. A disk with few and short requests
//! is copied without a limit. The user's limit applies if it is lower.
//!
//! Guarantee: outside of rests, the rate of the pace is never less than `MIN_RATE`, so a job ends
//! under any load.
//!
//! A [`Schedule`] determines when the pieces of a job may begin at the allowed rate.

use std::cell::Cell;
use std::num::NonZeroU64;
use std::time::Duration;

use blockhouse_disk::ExportLoad;

/// How long the rate stays the same, if the guest has `MIN_REQUESTS` requests in that time.
const WINDOW: Duration = Duration::from_millis(50);
/// How long the rate stays the same at most.
const MAX_WINDOW: Duration = Duration::from_millis(500);
/// Windows of a cycle, the first of which is the rest.
const CYCLE: u32 = 10;
/// A window with fewer requests goes on, because their times are not significant. A guest with
/// fewer requests per `WINDOW` counts as idle if they took less than half of the time. Otherwise
/// they are few because each takes long, and copies may be the reason. A request that is in flight
/// during a whole window counts as one that took that time.
const MIN_REQUESTS: u64 = 8;
/// Requests may take this many times as long as in a rest.
const MAX_SLOWDOWN: f64 = 1.25;
/// The minimum rate of copying, under any load, in bytes per second.
const MIN_RATE: f64 = (4 << 20) as f64;
/// The maximum rate: no disk is faster.
const MAX_RATE: f64 = (64_u64 << 30) as f64;
/// The longest wait that remains of an earlier rate when the rate changes.
const MAX_OLD_WAIT: Duration = Duration::from_millis(100);
/// The rate that a job begins with.
const FIRST_RATE: f64 = (64 << 20) as f64;

/// The bytes that may be copied now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Allowance {
    /// Without a limit.
    Unlimited,
    /// Bytes per second.
    Rate(u64),
    /// Nothing until this time.
    Rest(Duration),
}

impl Allowance {
    /// The allowance, reduced to the user's limit.
    pub(crate) fn limited(self, speed: Option<NonZeroU64>) -> Self {
        match (self, speed) {
            (Self::Unlimited, Some(speed)) => Self::Rate(speed.get()),
            (Self::Rate(rate), Some(speed)) => Self::Rate(rate.min(speed.get())),
            (allowance, _) => allowance,
        }
    }
}

/// When the next piece of a job may begin.
#[derive(Default)]
pub(crate) struct Schedule {
    next: Cell<Duration>,
    /// The rate that the pieces follow.
    rate: Cell<Option<NonZeroU64>>,
}

impl Schedule {
    /// Paces pieces by this rate from now on, in bytes per second. A wait due to an earlier rate
    /// ends after [`MAX_OLD_WAIT`].
    pub(crate) fn follow(&self, rate: Option<NonZeroU64>, now: Duration) {
        if self.rate.replace(rate) != rate {
            self.next.set(self.next.get().min(now + MAX_OLD_WAIT));
        }
    }

    /// The time until the next piece may begin.
    pub(crate) fn wait(&self, now: Duration) -> Duration {
        self.next.get().saturating_sub(now)
    }

    /// Lets no piece begin before this time.
    pub(crate) fn rest_until(&self, time: Duration) {
        self.next.set(self.next.get().max(time));
    }

    /// Records that a piece of this many bytes begins. The next one may begin after the time that
    /// these bytes take at this rate.
    pub(crate) fn begin(&self, bytes: u64, rate: Option<NonZeroU64>, now: Duration) {
        if let Some(rate) = rate {
            let time = Duration::from_secs_f64(bytes as f64 / rate.get() as f64);
            self.next.set(now.max(self.next.get()) + time);
        }
    }
}

/// See the module's page.
pub(crate) struct Pace {
    /// When the window began.
    began: Duration,
    /// When the window ends, or is prolonged.
    end: Duration,
    /// The number of the window in its cycle: 0 is the rest.
    window: u32,
    /// The guest's counters when the window began.
    before: ExportLoad,
    /// The time of a request in a rest, in seconds; `None` before the end of the first rest.
    undisturbed: Option<f64>,
    /// The rate in bytes per second.
    rate: f64,
    /// Bytes that were copied in the window.
    copied: u64,
    is_guest_idle: bool,
}

impl Pace {
    /// A pace that begins with a rest.
    pub(crate) fn new(now: Duration, load: ExportLoad) -> Self {
        let (began, end, window, before) = (now, now + WINDOW, 0, load);
        let (undisturbed, rate, copied, is_guest_idle) = (None, FIRST_RATE, 0, false);
        Self { began, end, window, before, undisturbed, rate, copied, is_guest_idle }
    }

    /// The bytes that may be copied at this time. `load` returns the guest's counters until now; it
    /// is called once in a window.
    pub(crate) fn allowance(
        &mut self,
        now: Duration,
        load: impl FnOnce() -> ExportLoad,
    ) -> Allowance {
        if now >= self.end {
            self.next_window(now, load());
        }
        match self.window {
            _ if self.is_guest_idle => Allowance::Unlimited,
            0 => Allowance::Rest(self.end),
            _ => Allowance::Rate(self.rate as u64),
        }
    }

    /// Counts bytes that were copied.
    pub(crate) fn count(&mut self, bytes: u64) {
        self.copied += bytes;
    }

    fn next_window(&mut self, now: Duration, load: ExportLoad) {
        let requests = load.requests.saturating_sub(self.before.requests);
        let time = load.time.saturating_sub(self.before.time);
        let length = now.saturating_sub(self.began);
        self.end = now + WINDOW;
        // Each request that has ended may be one of those that were in flight at the beginning. The
        // times of enough requests are significant, however many others wait.
        let long = match requests < MIN_REQUESTS {
            true => self.before.in_flight.saturating_sub(requests),
            false => 0,
        };
        // A new job does not wait long for requests.
        let is_unused = requests + long == 0 && self.undisturbed.is_none();
        if requests < MIN_REQUESTS && length < MAX_WINDOW && !is_unused {
            return;
        }
        let (requests, time) = (requests + long, time + length.saturating_mul(long as u32));
        let copied = std::mem::take(&mut self.copied) as f64 / length.as_secs_f64();
        (self.before, self.began) = (load, now);
        let in_window = requests as f64 * WINDOW.as_secs_f64() / length.as_secs_f64();
        if in_window < MIN_REQUESTS as f64 && time < length / 2 {
            // The first window with requests is a rest.
            (self.is_guest_idle, self.window) = (true, CYCLE - 1);
            return;
        }
        let time = time.as_secs_f64() / requests as f64;
        if self.is_guest_idle {
            (self.is_guest_idle, self.window) = (false, 0);
            return;
        }
        match (self.window, self.undisturbed) {
            // The requests in flight may take any time.
            (0, _) if long > 0 => {}
            (0, Some(known)) => self.undisturbed = Some((known + time) / 2.0),
            (0, None) => self.undisturbed = Some(time),
            // A rest does not show how long requests take that are longer than a rest.
            (_, Some(known)) if long > 0 || time > MAX_WINDOW.as_secs_f64() => {
                self.adapt(time / known, 0.0);
            }
            (_, Some(known)) => self.adapt(time / known, copied),
            (_, None) => {}
        }
        self.window = (self.window + 1) % CYCLE;
    }

    /// Adapts the rate to the slowdown of the guest. `copied` is the rate that was reached, or 0 if
    /// the slowdown may be larger than is known. If it is less than half of the allowed rate, the
    /// rate is not raised: the disks are no quicker, or there is nothing to copy.
    fn adapt(&mut self, slowdown: f64, copied: f64) {
        let factor = match slowdown > MAX_SLOWDOWN {
            true => 0.75,
            false if copied < self.rate / 2.0 => 1.0,
            false => 1.2,
        };
        self.rate = (self.rate * factor).clamp(MIN_RATE, MAX_RATE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a guest that sends one request after the other. Each takes `time` seconds without
    /// copies, and `time` * rate / `capacity` seconds more with copies. Returns the rates of the
    /// last 200 windows at most.
    fn rates(time: f64, capacity: f64, windows: u32) -> Vec<f64> {
        let (mut now, mut load) = (Duration::ZERO, ExportLoad::default());
        let mut pace = Pace::new(now, load);
        let mut rates = Vec::new();
        for _ in 0..windows {
            let rate = match pace.allowance(now, || load) {
                Allowance::Unlimited => MAX_RATE,
                Allowance::Rate(rate) => rate as f64,
                Allowance::Rest(end) => {
                    assert_eq!(end, now + WINDOW);
                    0.0
                }
            };
            rates.push(rate);
            pace.count((rate * WINDOW.as_secs_f64()) as u64);
            let each = time * (1.0 + rate / capacity);
            load.requests += (WINDOW.as_secs_f64() / each) as u64;
            load.time += WINDOW;
            now += WINDOW;
        }
        rates.split_off(rates.len().saturating_sub(200))
    }

    #[test]
    fn the_rate_settles_where_requests_take_as_much_longer_as_they_may() {
        for capacity in [64e6, 1e9, 20e9] {
            let rates = rates(1e-4, capacity, 2000);
            let mean = rates.iter().sum::<f64>() / rates.len() as f64;
            let expected = capacity * (MAX_SLOWDOWN - 1.0);
            assert!((0.5..1.5).contains(&(mean / expected)), "{mean} of {expected}");
            assert_eq!(rates.iter().filter(|rate| **rate == 0.0).count(), 20, "rests");
        }
    }

    /// A guest with one request in flight that takes 5 ms, or five times as long beside copies
    /// without a limit.
    #[test]
    fn a_slow_disk_is_not_taken_for_an_idle_one() {
        let (mut now, mut load, mut begun) = (Duration::ZERO, ExportLoad::default(), 0.0);
        let mut pace = Pace::new(now, load);
        let (capacity, time) = (100e6, 5e-3);
        for number in 0..4000 {
            let rate = match pace.allowance(now, || load) {
                Allowance::Unlimited => 4.0 * capacity,
                Allowance::Rate(rate) => (rate as f64).min(4.0 * capacity),
                Allowance::Rest(_) => 0.0,
            };
            assert!(number < 1000 || rate < capacity / 2.0, "{rate} in window {number}");
            pace.count((rate * WINDOW.as_secs_f64()) as u64);
            begun += WINDOW.as_secs_f64() / (time * (1.0 + rate / capacity));
            (load.requests, now) = (begun as u64, now + WINDOW);
            load.time = now;
        }
    }

    /// A guest with one request in flight, each of which takes this many windows.
    #[test]
    fn a_request_longer_than_a_window_is_no_idleness() {
        for windows in [16, 64, 1000] {
            let (mut now, mut load) = (Duration::ZERO, ExportLoad::default());
            let mut pace = Pace::new(now, load);
            let (mut rests, mut most) = (0, 0);
            for number in 0..4000_u32 {
                match pace.allowance(now, || load) {
                    // The first window ends before the first request.
                    Allowance::Unlimited => assert!(number < 20, "{number} of {windows}"),
                    Allowance::Rate(rate) => {
                        assert!(rate as f64 <= FIRST_RATE, "{rate} of {windows}");
                        rests = 0;
                    }
                    Allowance::Rest(_) => rests += 1,
                }
                most = most.max(rests);
                load.in_flight = 1;
                if number % windows == windows - 1 {
                    load.requests += 1;
                    load.time += WINDOW * windows;
                }
                now += WINDOW;
            }
            assert!(most <= 2 * (MAX_WINDOW.as_millis() / WINDOW.as_millis()), "{most} rests");
        }
    }

    /// A guest with 64 requests in flight, each of which takes two windows whatever is copied.
    #[test]
    fn requests_that_wait_in_a_deep_queue_limit_no_job_that_does_not_disturb_them() {
        let (mut now, mut load) = (Duration::ZERO, ExportLoad::default());
        let mut pace = Pace::new(now, load);
        let mut rate = 0;
        for _ in 0..200 {
            if let Allowance::Rate(allowed) = pace.allowance(now, || load) {
                rate = allowed;
                pace.count((allowed as f64 * WINDOW.as_secs_f64()) as u64);
            }
            load.in_flight = 64;
            load.requests += 32;
            load.time += 64 * WINDOW;
            now += WINDOW;
        }
        assert!(rate as f64 > 8.0 * FIRST_RATE, "{rate}");
    }

    #[test]
    fn a_guest_with_few_short_requests_counts_as_idle() {
        let (mut now, mut load) = (Duration::ZERO, ExportLoad::default());
        let mut pace = Pace::new(now, load);
        for number in 0..100_u32 {
            let allowance = pace.allowance(now, || load);
            assert!(number < 10 || allowance == Allowance::Unlimited, "{allowance:?}");
            load.requests += 1;
            load.time += Duration::from_millis(1);
            now += WINDOW;
        }
    }

    #[test]
    fn a_job_goes_on_however_slow_the_disk_is() {
        let rates = rates(1e-4, 1.0, 2000);
        assert!(rates.iter().all(|rate| *rate == 0.0 || *rate >= MIN_RATE));
    }

    #[test]
    fn an_idle_disk_is_copied_without_a_limit_until_it_is_used() {
        let (mut now, mut load) = (Duration::ZERO, ExportLoad::default());
        let mut pace = Pace::new(now, load);
        assert_eq!(pace.allowance(now, || load), Allowance::Rest(WINDOW));
        now += WINDOW;
        assert_eq!(pace.allowance(now, || load), Allowance::Unlimited);
        load.requests += 100;
        load.time += WINDOW;
        now += WINDOW;
        assert_eq!(pace.allowance(now, || load), Allowance::Rest(now + WINDOW));
    }
}
