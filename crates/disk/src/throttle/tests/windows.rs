//! Random limits and clients: checks the sum of admitted requests in each time window.

use std::num::NonZeroU64;
use std::time::Duration;

use blockhouse_engine::Clock;
use proptest::prelude::*;

use super::super::buckets::Direction;
use super::super::queue::Class;
use super::super::{Burst, RateLimits};
use super::lab::{Gone, Lab, direction};

/// A client of a random run.
#[derive(Clone, Copy, Debug)]
struct Client {
    disk: usize,
    party: usize,
    class: Class,
    bytes: u64,
    depth: usize,
}

fn any_client() -> impl Strategy<Value = Client> {
    let class = prop_oneof![Just(Class::Read), Just(Class::Write), Just(Class::DurableWrite)];
    (0..4usize, 0..3usize, class, 0u64..1 << 20, 1..8usize)
        .prop_map(|(disk, party, class, bytes, depth)| Client { disk, party, class, bytes, depth })
}

fn any_limits() -> impl Strategy<Value = RateLimits> {
    let operations =
        || prop::option::of((20u64..500).prop_map(|rate| NonZeroU64::new(rate).unwrap()));
    let bytes =
        || prop::option::of((1u64 << 20..64 << 20).prop_map(|rate| NonZeroU64::new(rate).unwrap()));
    let burst = prop::option::of((100u32..500, 0u64..2000)).prop_map(|burst| {
        burst.map(|(percent, time)| {
            Burst::new(f64::from(percent) / 100.0, Duration::from_millis(time)).unwrap()
        })
    });
    ([operations(), operations(), operations()], [bytes(), bytes(), bytes()], burst).prop_map(
        |([iops, iops_read, iops_write], [bps, bps_read, bps_write], burst)| RateLimits {
            iops,
            iops_read,
            iops_write,
            bps,
            bps_read,
            bps_write,
            burst,
        },
    )
}

/// Checks that no window of time `t` has more than `rate · (t + 50 ms)`, the tokens that a burst
/// may save, and one request. During a burst, its higher rate is a limit as well.
fn check_windows(
    gone: &[(Duration, u64)],
    rate: u64,
    burst: Option<Burst>,
) -> Result<(), TestCaseError> {
    let saved = burst.map_or(0.0, |burst| (burst.factor() - 1.0) * burst.time().as_secs_f64());
    let rate = rate as f64;
    for first in 0..gone.len() {
        let (mut sum, mut largest) = (0.0, 0u64);
        for &(at, tokens) in &gone[first..] {
            sum += tokens as f64;
            largest = largest.max(tokens);
            let time = (at - gone[first].0).as_secs_f64() + 0.05;
            let sustained = rate * (time + saved);
            let peak = burst.map_or(f64::INFINITY, |burst| rate * burst.factor() * time);
            // The last term is one token for rounding.
            let most = sustained.min(peak) * 1.000_001 + largest as f64 + 1.0;
            prop_assert!(sum <= most, "{sum} of {most} in {time} s at {rate}");
        }
    }
    Ok(())
}

/// Whether a limit counts a request.
type IsOf<'a> = &'a dyn Fn(&Gone) -> bool;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// For random limits and clients, each limit holds in each window, and each client gets a
    /// request admitted.
    #[test]
    fn every_limit_holds_in_every_window_and_none_starves(
        limits in any_limits(),
        clients in prop::collection::vec(any_client(), 1..8),
        seed: u64,
    ) {
        let lab = Lab::new(limits, seed);
        let disks = [(); 4].map(|()| lab.group.join());
        for client in &clients {
            let party = (disks[client.disk], client.party);
            for _ in 0..client.depth {
                let (lab, client) = (lab.clone(), *client);
                lab.clone().spawn(async move {
                    loop {
                        lab.take(party, client.class, client.bytes).await;
                        lab.clock.sleep(Duration::from_millis(10)).await;
                    }
                });
            }
        }
        lab.run(Duration::from_secs(3));
        let gone = lab.gone.borrow();
        let is_any = |_: &Gone| true;
        let is_read = |gone: &Gone| gone.direction == Direction::Read;
        let is_write = |gone: &Gone| gone.direction == Direction::Write;
        let kinds: [(_, _, IsOf<'_>); 3] = [
            (limits.iops, limits.bps, &is_any),
            (limits.iops_read, limits.bps_read, &is_read),
            (limits.iops_write, limits.bps_write, &is_write),
        ];
        for (operations, bytes, is_of) in kinds {
            let of_kind = || gone.iter().filter(|gone| is_of(gone));
            if let Some(rate) = operations {
                let each: Vec<_> = of_kind().map(|gone| (gone.at, 1)).collect();
                check_windows(&each, rate.get(), limits.burst)?;
            }
            if let Some(rate) = bytes {
                let each: Vec<_> = of_kind().map(|gone| (gone.at, gone.bytes)).collect();
                check_windows(&each, rate.get(), limits.burst)?;
            }
        }
        drop(gone);
        for client in &clients {
            let party = (disks[client.disk], client.party);
            let direction = direction(client.class);
            let is_of = |gone: &Gone| gone.party == party && gone.direction == direction;
            // One second for a turn of each class of each party of each disk.
            let mut seconds = 4 * 3 * 3;
            while lab.count(is_of) == 0 && seconds > 0 {
                lab.run(Duration::from_secs(1));
                seconds -= 1;
            }
            prop_assert!(lab.count(is_of) > 0, "{client:?} starves");
        }
    }
}
