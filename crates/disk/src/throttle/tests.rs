//! Groups in simulated time: the shares of the disks, and the outcomes of requests that wait.

mod lab;
mod windows;

use std::cell::{Cell, RefCell};
use std::num::NonZeroU64;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_engine::Clock;
use futures_util::future::{Either, select};

use super::queue::{Class, Outcome};
use super::*;
use lab::{Lab, direction};

fn rate(rate: u64) -> Option<NonZeroU64> {
    NonZeroU64::new(rate)
}

fn iops(limit: u64) -> RateLimits {
    RateLimits { iops: rate(limit), ..RateLimits::default() }
}

/// Jain's index of fairness: 1 for equal shares, 1/n if one of n disks gets everything.
fn jain(shares: &[u64]) -> f64 {
    let (sum, squares) = shares.iter().fold((0.0, 0.0), |(sum, squares), &share| {
        (sum + share as f64, squares + (share as f64).powi(2))
    });
    sum * sum / (shares.len() as f64 * squares)
}

#[test]
fn four_disks_of_any_depth_share_a_limit_equally_and_exactly() {
    let lab = Lab::new(iops(2000), 1);
    let disks = [1, 4, 32, 128].map(|depth| (lab.group.join(), depth));
    for (disk, depth) in disks {
        lab.client((disk, 0), depth, Class::Read, 4096);
    }
    lab.run(Duration::from_secs(5));
    let shares = disks.map(|(disk, _)| lab.count(|gone| gone.party.0 == disk));
    let sum: u64 = shares.iter().sum();
    assert!((9_990..=10_010).contains(&sum), "{shares:?}");
    assert!(jain(&shares) > 0.999, "{shares:?}");
}

#[test]
fn a_discard_does_not_wait_for_reads_that_wait_for_a_limit_of_bytes() {
    let lab = Lab::new(RateLimits { bps: rate(1 << 20), ..RateLimits::default() }, 7);
    let disk = lab.group.join();
    lab.client((disk, 0), 4, Class::Read, 1 << 20);
    lab.run(Duration::from_secs(3));
    assert!(lab.begin((disk, 0), Class::Read, 1).is_some());
    assert!(lab.begin((disk, 1), Class::Write, 0).is_none());
    lab.group.set_limits(RateLimits { iops: rate(1), ..lab.group.limits() });
    assert!(lab.begin((disk, 1), Class::Write, 0).is_some(), "it is an operation");
}

#[test]
fn queues_share_what_their_disk_has() {
    let lab = Lab::new(iops(1000), 2);
    let (one, many) = (lab.group.join(), lab.group.join());
    lab.client((one, 0), 16, Class::Read, 4096);
    for queue in 0..8 {
        lab.client((many, queue), 1 + 8 * queue, Class::Write, 4096);
    }
    lab.run(Duration::from_secs(8));
    let of_one = lab.count(|gone| gone.party.0 == one);
    assert!((3990..=4010).contains(&of_one), "{of_one} of 8000");
    let queues =
        [0, 1, 2, 3, 4, 5, 6, 7].map(|queue| lab.count(|gone| gone.party == (many, queue)));
    assert!(jain(&queues) > 0.999, "{queues:?}");
}

#[test]
fn shares_are_of_bytes_where_bytes_are_limited() {
    let limits = RateLimits { bps: rate(100 << 20), iops: rate(1_000_000), ..Default::default() };
    let lab = Lab::new(limits, 3);
    let (small, large) = (lab.group.join(), lab.group.join());
    lab.client((small, 0), 64, Class::Read, 4096);
    lab.client((large, 0), 4, Class::Write, 1 << 20);
    lab.run(Duration::from_secs(4));
    let bytes = |disk| -> u64 {
        let gone = lab.gone.borrow();
        gone.iter().filter(|gone| gone.party.0 == disk).map(|gone| gone.bytes).sum()
    };
    let shares = [bytes(small), bytes(large)];
    assert!(jain(&shares) > 0.999, "{shares:?}");
    let expected = 400 << 20;
    assert!((shares[0] + shares[1]).abs_diff(expected) < 4 << 20, "{shares:?}");
}

#[test]
fn a_durable_write_waits_for_few_turns_whatever_waits() {
    let lab = Lab::new(iops(100), 4);
    let disk = lab.group.join();
    lab.client((disk, 0), 500, Class::Read, 4096);
    lab.client((disk, 0), 500, Class::Write, 4096);
    lab.run(Duration::from_secs(1));
    for _ in 0..20 {
        let (before, waiting) = (lab.gone.borrow().len(), lab.clone());
        let turns = Rc::new(Cell::new(0));
        let result = Rc::clone(&turns);
        lab.spawn(async move {
            waiting.take((disk, 0), Class::DurableWrite, 4096).await;
            result.set(waiting.gone.borrow().len() - before);
        });
        lab.run(Duration::from_millis(50));
        assert!((1..=4).contains(&turns.get()), "after {} turns", turns.get());
    }
}

#[test]
fn durable_writes_other_writes_and_reads_take_turns_while_all_wait() {
    let lab = Lab::new(iops(1000), 10);
    let disk = lab.group.join();
    let classes = [(Class::DurableWrite, 512), (Class::Write, 1024), (Class::Read, 2048)];
    for (class, bytes) in classes {
        lab.client((disk, 0), 8, class, bytes);
    }
    lab.run(Duration::from_secs(4));
    let counts = classes.map(|(_, bytes)| lab.count(|gone| gone.bytes == bytes));
    let expected = [1000, 1000, 2000];
    assert!(counts.iter().zip(expected).all(|(count, e)| count.abs_diff(e) < 20), "{counts:?}");
}

#[test]
fn writes_go_on_while_reads_starve_and_the_other_way_round() {
    for (starved, other) in [(Class::Read, Class::Write), (Class::Write, Class::Read)] {
        let one = rate(1);
        let limits = match starved {
            Class::Read => RateLimits { iops_read: one, iops: rate(1000), ..Default::default() },
            _ => RateLimits { iops_write: one, iops: rate(1000), ..Default::default() },
        };
        let lab = Lab::new(limits, 5);
        let disk = lab.group.join();
        lab.client((disk, 0), 100, starved, 4096);
        lab.client((disk, 0), 8, other, 4096);
        lab.run(Duration::from_millis(4500));
        let others = lab.count(|gone| gone.direction == direction(other));
        let starved = lab.count(|gone| gone.direction == direction(starved));
        assert!((4480..=4510).contains(&others), "{others}");
        assert!((4..=5).contains(&starved), "{starved}");
    }
}

#[test]
fn a_burst_uses_what_was_saved_and_no_more() {
    let burst = Some(Burst::new(4.0, Duration::from_secs(2)).unwrap());
    let lab = Lab::new(RateLimits { burst, ..iops(100) }, 6);
    let disk = lab.group.join();
    lab.client((disk, 0), 64, Class::Read, 4096);
    lab.run(Duration::from_secs(6));
    let until = |seconds| lab.count(|gone| gone.at <= Duration::from_secs(seconds));
    // 400 a second for two seconds, then 100.
    assert!((398..=402).contains(&until(1)), "{}", until(1));
    assert!((798..=802).contains(&until(2)), "{}", until(2));
    assert!((1198..=1203).contains(&until(6)), "{}", until(6));
}

#[test]
fn a_change_of_the_limits_is_in_force_at_once() {
    let lab = Lab::new(iops(1), 7);
    let disk = lab.group.join();
    lab.client((disk, 0), 10, Class::Write, 4096);
    lab.run(Duration::from_millis(4500));
    assert_eq!(lab.count(|_| true), 5);
    lab.group.set_limits(iops(1000));
    lab.run(Duration::from_secs(1));
    let faster = lab.count(|_| true);
    assert!((1000..=1010).contains(&faster), "{faster}");
    lab.group.set_limits(iops(10));
    lab.run(Duration::from_secs(2));
    assert!((faster + 19..=faster + 21).contains(&lab.count(|_| true)));
    lab.group.set_limits(RateLimits::default());
    lab.run(Duration::from_secs(1));
    // Ten requests at a time, about a millisecond each.
    assert!(lab.count(|_| true) > faster + 5_000);
    assert_eq!(lab.group.counts(disk).waiting, 0);
}

#[test]
fn lifted_limits_let_go_what_waits_and_count_nothing() {
    let lab = Lab::new(iops(1), 8);
    let (disk, other) = (lab.group.join(), lab.group.join());
    let outcomes = Rc::new(RefCell::new(Vec::new()));
    let wait = |disk| {
        let (lab, outcomes) = (lab.clone(), Rc::clone(&outcomes));
        lab.clone().spawn(async move {
            if let Some(admission) = lab.begin((disk, 0), Class::Read, 4096) {
                let outcome = admission.await;
                outcomes.borrow_mut().push((disk, outcome, lab.clock.now()));
            }
        });
    };
    (0..2).for_each(|_| wait(other));
    (0..100).for_each(|_| wait(disk));
    lab.run(Duration::from_millis(1));
    assert_eq!((lab.group.counts(disk).waiting, lab.group.counts(other).waiting), (100, 1));
    lab.group.lift(disk);
    assert!(lab.begin((disk, 0), Class::Read, 1 << 30).is_none());
    lab.run(Duration::from_millis(1));
    let lifted = (disk, Outcome::Lifted, Duration::from_millis(1));
    assert_eq!(*outcomes.borrow(), vec![lifted; 100]);
    lab.group.restore(disk);
    assert!(lab.begin((disk, 0), Class::Read, 1).is_some());
    // The other disk's request is admitted in time, although the request with the timer was a
    // request of the first disk.
    lab.run(Duration::from_secs(1));
    let last = outcomes.borrow()[100];
    assert_eq!((last.0, last.1), (other, Outcome::Admitted));
}

#[test]
fn requests_that_wait_go_with_their_disk_into_another_group() {
    let lab = Lab::new(iops(1), 9);
    let throttle = Rc::new(Throttle::default());
    throttle.set_group(Some(Arc::clone(&lab.group)));
    let cost = || {
        let range = blockhouse_core::ByteRange::between(0, 4096);
        let request = blockhouse_core::Request::Prefetch { range };
        let offload = blockhouse_core::Offload::Available;
        RequestCost::of(&request, blockhouse_core::Durability::None, offload)
    };
    let done = Rc::new(Cell::new(0));
    for _ in 0..50 {
        let (throttle, done) = (Rc::clone(&throttle), Rc::clone(&done));
        lab.spawn(async move {
            if let Some(turn) = throttle.admit(cost) {
                turn.await;
            }
            done.set(done.get() + 1);
        });
    }
    lab.run(Duration::from_millis(2500));
    assert_eq!((done.get(), throttle.stats().waiting), (3, 47));
    let faster = ThrottleGroup::with_clock(iops(20), Arc::new(lab.clock.clone()));
    throttle.set_group(Some(faster));
    lab.run(Duration::from_secs(1));
    assert!((22..=24).contains(&done.get()), "{}", done.get());
    throttle.set_group(None);
    lab.run(Duration::from_millis(1));
    assert_eq!(done.get(), 50);
    assert!(throttle.admit(cost).is_none());
}

#[test]
fn futures_that_are_dropped_return_their_turns() {
    for seed in 0..20 {
        let lab = Lab::new(iops(1000), seed);
        let disks = [lab.group.join(), lab.group.join()];
        let dropped = Rc::new(Cell::new(0));
        for number in 0..64 {
            let (lab, dropped) = (lab.clone(), Rc::clone(&dropped));
            let mut random = fastrand::Rng::with_seed(seed << 32 | number as u64);
            let party = (disks[number % 2], number % 8);
            lab.clone().spawn(async move {
                loop {
                    let Some(admission) = lab.begin(party, Class::Write, 4096) else {
                        lab.note(party, Class::Write, 4096);
                        lab.clock.sleep(Duration::from_micros(100)).await;
                        continue;
                    };
                    let patience = lab.clock.sleep(Duration::from_micros(random.u64(1..80_000)));
                    match select(admission, patience).await {
                        Either::Left(_) => lab.note(party, Class::Write, 4096),
                        Either::Right((_, admission)) => {
                            dropped.set(dropped.get() + 1);
                            drop(admission);
                        }
                    }
                }
            });
        }
        lab.run(Duration::from_secs(2));
        let gone = lab.count(|_| true);
        assert!(dropped.get() > 500, "seed {seed}: {} dropped", dropped.get());
        assert!((1990..=2002).contains(&gone), "seed {seed}: {gone}, {} dropped", dropped.get());
    }
}
