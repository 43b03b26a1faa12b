//! Credits and permits of the requests in flight.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use super::*;

#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A permit, if there is one without waiting.
fn acquire(limit: &Rc<InFlightLimit>, bytes: usize) -> Option<Permit> {
    match pin!(limit.acquire(bytes)).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(permit) => Some(permit),
        Poll::Pending => None,
    }
}

fn limit(
    requests: usize,
    bytes: u64,
    reserved: u64,
    byte_limit: &Arc<ByteLimit>,
) -> Rc<InFlightLimit> {
    let limits = InFlightLimits { requests, bytes, ..InFlightLimits::DEFAULT };
    let activity = Arc::new(Activity::new());
    Rc::new(InFlightLimit::new(limits, reserved, Arc::clone(byte_limit), activity))
}

/// Acquires permits of one byte until there are no more.
fn exhaust(limit: &Rc<InFlightLimit>) -> Vec<Permit> {
    std::iter::from_fn(|| acquire(limit, 1)).take(1000).collect()
}

#[test]
fn one_request_of_any_size_is_admitted_and_then_the_limits_hold() {
    let limit = limit(2, 100, 0, &Arc::new(ByteLimit::new(1 << 20)));
    let mut first = acquire(&limit, 1000).unwrap();
    assert!(acquire(&limit, 0).is_none(), "over the bytes");
    first.release_bytes();
    assert!(acquire(&limit, 101).is_none());
    let second = acquire(&limit, 100).unwrap();
    assert!(acquire(&limit, 0).is_none(), "over the requests");
    drop((first, second));
    assert!(acquire(&limit, 101).is_some());
}

#[test]
fn connections_share_a_limit_and_each_goes_on_with_one_request() {
    let byte_limit = Arc::new(ByteLimit::new(100));
    let [one, other] = [0; 2].map(|_| limit(10, 100, 0, &byte_limit));
    let all = acquire(&one, 100).unwrap();
    assert!(acquire(&one, 1).is_none(), "nothing is left");
    let theirs = acquire(&other, 70).expect("its first");
    assert!(acquire(&other, 1).is_none());
    drop(all);
    let _mine = acquire(&one, 40).expect("its first");
    assert!(acquire(&one, 1).is_none(), "what was acquired over the limit counts");
    drop(theirs);
    assert!(acquire(&one, 20).is_some(), "the other connection has returned all");
}

#[test]
fn greedy_connections_leave_a_share_to_the_next() {
    for greedy in [1, 2, 8] {
        let byte_limit = Arc::new(ByteLimit::new(900));
        let limits: Vec<_> = (0..greedy).map(|_| limit(1000, 1000, 0, &byte_limit)).collect();
        let mut permits = Vec::new();
        loop {
            let before = permits.len();
            permits.extend(limits.iter().filter_map(|limit| acquire(limit, 1)));
            if permits.len() == before {
                break;
            }
        }
        let held = limits.iter().map(|limit| limit.in_flight.bytes()).sum::<u64>();
        let share = 900 / (greedy + 1);
        assert!((share..=share + 2 * greedy).contains(&(900 - held)), "{greedy}: {held}");
        let requests = exhaust(&limit(1000, 1000, 0, &byte_limit)).len() as u64;
        assert!((share / 2..=share).contains(&requests), "{greedy}: {requests}");
        assert!(acquire(&limits[0], 0).is_some(), "a request without bytes never waits for bytes");
    }
}

#[test]
fn reserved_bytes_are_there_whatever_others_hold() {
    let byte_limit = Arc::new(ByteLimit::new(100));
    let reserving = || limit(1000, 1000, 10, &byte_limit);
    // One after the other: each takes half of what is left, and the last ones their first request.
    let limits: Vec<_> = (0..20).map(|_| reserving()).collect();
    let held: Vec<_> = limits.iter().map(exhaust).collect();
    let next = reserving();
    let permits = exhaust(&next);
    assert_eq!(permits.len(), 10);
    drop(held);
    let more = acquire(&next, 40).expect("all that was acquired came back");
    drop((permits, more));
    assert!(byte_limit.try_acquire(100, 0) && !byte_limit.try_acquire(1, 0));
}

#[test]
fn a_waiting_connection_is_woken_by_what_another_one_releases() {
    let byte_limit = Arc::new(ByteLimit::new(100));
    let [one, other] = [0; 2].map(|_| limit(10, 100, 0, &byte_limit));
    let most = acquire(&one, 99).unwrap();
    let _rest = acquire(&other, 1).unwrap();
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(Arc::clone(&woken));
    let mut waiting = pin!(other.acquire(50));
    assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    assert!(!woken.0.load(Ordering::SeqCst));
    drop(most);
    assert!(woken.0.load(Ordering::SeqCst));
    assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_ready());
}
