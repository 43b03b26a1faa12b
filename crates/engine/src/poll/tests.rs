//! The poller under a clock of our own: a loop whose events come when a script says so.

use super::*;

const KICK: Source = Source(1);
const DISK: Source = Source(2);
const OTHER: Source = Source(3);
const NEXT: Source = Source(4);

/// A loop that only rests: what its poller decides, and what that costs and gains.
struct Loop {
    poller: Poller,
    now: Instant,
    /// How much later an event is seen that was slept for.
    waking: Duration,
    caught: u32,
    slept: u32,
    /// Looked out in vain.
    wasted: Duration,
}

impl Loop {
    fn new() -> Self {
        let poller = Poller::new(DEFAULT_POLLING);
        let (now, wasted) = (Instant::now(), Duration::ZERO);
        Self { poller, now, waking: us(8), caught: 0, slept: 0, wasted }
    }

    /// After `source`, the next event comes `gap` later. Says whether it was caught.
    fn rest(&mut self, source: Source, gap: Duration) -> bool {
        self.poller.happened(source);
        let window = self.poller.window(self.now);
        // What ends the rest happens before the rest is learnt from.
        self.poller.happened(NEXT);
        self.now += gap;
        let caught = window.is_some_and(|window| gap < window);
        if caught {
            self.caught += 1;
            self.poller.learn(gap, Outcome::Caught);
        } else {
            let in_vain = window.unwrap_or_default();
            self.slept += 1;
            self.wasted += in_vain;
            self.now += self.waking;
            self.poller.learn(gap + self.waking, Outcome::Slept { in_vain });
        }
        caught
    }
}

fn us(count: u64) -> Duration {
    Duration::from_micros(count)
}

#[test]
fn a_slow_disk_with_quick_followers_keeps_the_look_out() {
    let mut events = Loop::new();
    for _ in 0..1000 {
        events.rest(KICK, us(400));
        events.rest(DISK, us(6));
    }
    assert!(events.caught >= 980, "{} followers were caught", events.caught);
    assert!(events.wasted < us(500), "the disk's time was looked through: {:?}", events.wasted);
}

#[test]
fn a_disk_of_ten_milliseconds_never_makes_the_loop_spin() {
    let mut events = Loop::new();
    (0..1000).for_each(|_| _ = events.rest(DISK, us(10_000)));
    assert_eq!(events.caught, 0);
    assert!(events.wasted <= us(100), "only before anything was known: {:?}", events.wasted);
}

#[test]
fn one_slow_source_does_not_speak_for_a_quick_one() {
    let mut events = Loop::new();
    let mut caught = 0;
    for round in 0..1000 {
        if round % 10 == 0 {
            events.rest(OTHER, us(5_000));
        }
        caught += u32::from(events.rest(KICK, us(10)));
    }
    assert!(caught >= 980, "{caught} were caught");
}

#[test]
fn a_disk_that_answers_no_sooner_is_slept_for() {
    let mut events = Loop::new();
    events.waking = Duration::ZERO;
    for _ in 0..10_000 {
        events.rest(DISK, us(40));
        events.rest(KICK, us(2_000));
    }
    assert!(events.caught <= 150, "{} were looked out for", events.caught);
}

#[test]
fn whether_looking_out_pays_is_found_out_anew() {
    let mut events = Loop::new();
    for _ in 0..5 {
        events.waking = us(1);
        (0..5_000).for_each(|_| _ = events.rest(DISK, us(40)));
        let before = events.caught;
        (0..1_000).for_each(|_| _ = events.rest(DISK, us(40)));
        assert!(events.caught <= before + 20, "{} for nothing", events.caught - before);
        events.waking = us(30);
        (0..5_000).for_each(|_| _ = events.rest(DISK, us(20)));
        let before = events.caught;
        (0..1_000).for_each(|_| _ = events.rest(DISK, us(20)));
        assert!(events.caught >= before + 980, "{} caught", events.caught - before);
    }
}

#[test]
fn a_change_of_pace_is_noticed_within_twenty_events() {
    let mut events = Loop::new();
    for _ in 0..20 {
        (0..50).for_each(|_| _ = events.rest(KICK, us(2_000)));
        assert!(!events.rest(KICK, us(10)), "it was slow for long");
        let before = events.caught;
        (0..40).for_each(|_| _ = events.rest(KICK, us(10)));
        assert!(events.caught >= before + 20, "quick again: {} of 40", events.caught - before);
        let wasted = events.wasted;
        (0..50).for_each(|_| _ = events.rest(KICK, us(2_000)));
        assert!(events.wasted <= wasted + us(20 * 50), "slow again");
    }
}

#[test]
fn looking_out_in_vain_is_bounded() {
    let mut events = Loop::new();
    let begin = events.now;
    // The worst pace: just often enough quick to keep the estimate low.
    for round in 0..100_000 {
        events.rest(KICK, us(if round % 8 == 0 { 60 } else { 45 }));
        events.rest(DISK, us(if round % 2 == 0 { 1 } else { 90 }));
    }
    let most = (events.now - begin) / 10 + us(1_000) + us(50);
    assert!(events.wasted <= most, "{:?} of {most:?}", events.wasted);
}

#[test]
fn no_look_out_where_none_is_wanted() {
    let mut poller = Poller::new(Duration::ZERO);
    assert_eq!(poller.window(Instant::now()), None);
}
