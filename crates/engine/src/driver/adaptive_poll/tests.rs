//! The governor with a simulated clock, in a loop whose events come at scripted times.

use blockhouse_core::metrics::clock;

use super::*;

const KICK: EventSource = EventSource(1);
const DISK: EventSource = EventSource(2);
const OTHER: EventSource = EventSource(3);
const NEXT: EventSource = EventSource(4);

/// A loop that only waits: what its governor decides, and what that costs and gains.
struct Loop {
    governor: PollGovernor,
    now: Timestamp,
    /// The delay until a sleeping loop sees an event.
    waking: Duration,
    /// How long the loop works for an event, and has worked in all.
    work: Duration,
    worked: Duration,
    hits: u32,
    blocked: u32,
    /// Polled without an event.
    wasted: Duration,
}

impl Loop {
    fn new() -> Self {
        let governor = PollGovernor::new(DEFAULT_POLLING);
        let (now, wasted, worked) = (clock::now(), Duration::ZERO, Duration::ZERO);
        let (waking, work) = (us(8), us(15));
        Self { governor, now, waking, work, worked, hits: 0, blocked: 0, wasted }
    }

    /// After `source`, the next event comes `interval` later. Returns whether polling saw it.
    fn wait(&mut self, source: EventSource, interval: Duration) -> bool {
        self.now = self.now + self.work;
        self.worked += self.work;
        self.governor.note_event(source);
        let poll_time = self.governor.poll_time(self.now);
        // The event that ends the wait is recorded before the estimate is updated.
        self.governor.note_event(NEXT);
        self.now = self.now + interval;
        let hits = poll_time.is_some_and(|poll_time| interval < poll_time);
        if hits {
            self.hits += 1;
            self.governor.update(interval, PollResult::Hit);
        } else {
            let wasted = poll_time.unwrap_or_default();
            self.blocked += 1;
            self.wasted += wasted;
            self.now = self.now + self.waking;
            self.governor.update(interval + self.waking, PollResult::Slept { wasted });
        }
        hits
    }
}

fn us(count: u64) -> Duration {
    Duration::from_micros(count)
}

#[test]
fn a_slow_disk_with_quick_followers_keeps_polling() {
    let mut events = Loop::new();
    for _ in 0..1000 {
        events.wait(KICK, us(400));
        events.wait(DISK, us(6));
    }
    assert!(events.hits >= 980, "{} followers were hit", events.hits);
    assert!(events.wasted < us(500), "the disk's time was polled through: {:?}", events.wasted);
}

#[test]
fn a_disk_of_ten_milliseconds_never_makes_the_loop_spin() {
    let mut events = Loop::new();
    (0..1000).for_each(|_| _ = events.wait(DISK, us(10_000)));
    assert_eq!(events.hits, 0);
    assert!(events.wasted <= us(100), "only before anything was known: {:?}", events.wasted);
}

#[test]
fn one_slow_source_does_not_stop_polling_for_a_quick_one() {
    let mut events = Loop::new();
    let mut hits = 0;
    for round in 0..1000 {
        if round % 10 == 0 {
            events.wait(OTHER, us(5_000));
        }
        hits += u32::from(events.wait(KICK, us(10)));
    }
    assert!(hits >= 980, "{hits} hits");
}

#[test]
fn a_disk_that_answers_no_sooner_is_slept_for() {
    let mut events = Loop::new();
    events.waking = Duration::ZERO;
    for _ in 0..10_000 {
        events.wait(DISK, us(40));
        events.wait(KICK, us(2_000));
    }
    assert!(events.hits <= 150, "{} were polled for", events.hits);
}

#[test]
fn whether_polling_wins_is_measured_again() {
    let mut events = Loop::new();
    for _ in 0..5 {
        events.waking = us(1);
        (0..5_000).for_each(|_| _ = events.wait(DISK, us(40)));
        let before = events.hits;
        (0..1_000).for_each(|_| _ = events.wait(DISK, us(40)));
        assert!(events.hits <= before + 20, "{} for nothing", events.hits - before);
        events.waking = us(30);
        (0..5_000).for_each(|_| _ = events.wait(DISK, us(20)));
        let before = events.hits;
        (0..1_000).for_each(|_| _ = events.wait(DISK, us(20)));
        assert!(events.hits >= before + 980, "{} hits", events.hits - before);
    }
}

#[test]
fn slow_wake_ups_do_not_end_polling_that_wins() {
    for (interval, waking) in [(10, 60), (20, 50), (30, 30), (40, 30)] {
        let mut events = Loop::new();
        events.waking = us(waking);
        (0..10_000).for_each(|_| _ = events.wait(DISK, us(interval)));
        assert!(events.hits >= 9_900, "{interval} and {waking}: {} hits", events.hits);
    }
}

#[test]
fn a_change_of_pace_is_noticed_within_twenty_events() {
    let mut events = Loop::new();
    for _ in 0..20 {
        (0..50).for_each(|_| _ = events.wait(KICK, us(2_000)));
        assert!(!events.wait(KICK, us(10)), "it was slow for long");
        let before = events.hits;
        (0..40).for_each(|_| _ = events.wait(KICK, us(10)));
        assert!(events.hits >= before + 20, "quick again: {} of 40", events.hits - before);
        let wasted = events.wasted;
        (0..50).for_each(|_| _ = events.wait(KICK, us(2_000)));
        assert!(events.wasted <= wasted + us(20 * 50), "slow again");
    }
}

#[test]
fn wasted_polling_is_bounded() {
    let mut events = Loop::new();
    // The worst case: events are quick just often enough to keep the estimate low.
    for round in 0..100_000 {
        events.wait(KICK, us(if round % 8 == 0 { 60 } else { 45 }));
        events.wait(DISK, us(if round % 2 == 0 { 1 } else { 90 }));
    }
    let limit = events.worked / 8 + us(1_000) + us(50);
    assert!(events.wasted <= limit, "{:?} of {limit:?}", events.wasted);
}

#[test]
fn no_polling_where_it_is_off() {
    let mut governor = PollGovernor::new(Duration::ZERO);
    assert_eq!(governor.poll_time(clock::now()), None);
}
