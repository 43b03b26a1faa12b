//! How much one connection may have in flight.
//!
//! A client that sends more is not refused: the server stops reading from it until there is room. What
//! all connections have in flight together is bounded by the [`Budget`] that they share.

use std::cell::Cell;
use std::pin::pin;
use std::sync::Arc;

use futures_util::future::{Either, select};

use super::activity::Activity;
use super::budget::Budget;
use super::condition::Condition;

/// What one connection has in flight: requests that were read and whose replies were not sent yet,
/// and the bytes that they occupy.
pub struct Flow {
    requests: Cell<usize>,
    bytes: Cell<usize>,
    most_requests: usize,
    most_bytes: usize,
    /// Bytes that need not be drawn from the budget: no other connection can have them.
    reserved: usize,
    budget: Arc<Budget>,
    activity: Arc<Activity>,
    changed: Condition,
}

impl Flow {
    /// Nothing in flight, and the limits.
    pub fn new(
        most_requests: usize,
        most_bytes: usize,
        reserved: usize,
        budget: Arc<Budget>,
        activity: Arc<Activity>,
    ) -> Self {
        let (requests, bytes, changed) = (Cell::new(0), Cell::new(0), Condition::default());
        Self { requests, bytes, most_requests, most_bytes, reserved, budget, activity, changed }
    }

    /// A request of this many bytes comes in as soon as there is room. One request is always admitted,
    /// whatever its size. For one task.
    pub async fn enter(&self, bytes: usize) {
        while !self.try_enter(bytes) {
            let returned = self.budget.returned();
            // Looks once more before it waits, so that nothing is missed that came back meanwhile.
            let entered = pin!(self.changed.until(|| self.try_enter(bytes).then_some(())));
            if let Either::Left(_) = select(entered, returned).await {
                return;
            }
        }
    }

    fn try_enter(&self, bytes: usize) -> bool {
        let (requests, held) = (self.requests.get(), self.bytes.get());
        let drawn = held.saturating_sub(self.reserved);
        let more = (held + bytes).saturating_sub(self.reserved) - drawn;
        if requests == 0 {
            self.budget.overdraw(more);
        } else {
            let fits = requests < self.most_requests && held + bytes <= self.most_bytes;
            if !fits || !self.budget.try_draw(more, drawn) {
                return false;
            }
        }
        self.requests.set(requests + 1);
        self.activity.set_in_flight(requests + 1);
        self.bytes.set(held + bytes);
        true
    }

    /// Waits until nothing is in flight.
    pub async fn quiet(&self) {
        self.changed.until(|| (self.requests.get() == 0).then_some(())).await;
    }

    /// Memory of a request is free again, before its reply is sent.
    pub fn free(&self, bytes: usize) {
        let held = self.bytes.get();
        self.bytes.set(held - bytes);
        let drawn = |held: usize| held.saturating_sub(self.reserved);
        self.budget.give_back(drawn(held) - drawn(held - bytes));
        self.changed.notify();
    }

    /// Replies were sent, or nobody is there any more to send them to.
    pub fn leave(&self, requests: usize, bytes: usize) {
        let left = self.requests.get() - requests;
        self.requests.set(left);
        self.activity.set_in_flight(left);
        self.free(bytes);
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        self.budget.give_back(self.bytes.get().saturating_sub(self.reserved));
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Context, Wake, Waker};

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    fn enters(flow: &Flow, bytes: usize) -> bool {
        pin!(flow.enter(bytes)).poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    fn flow(requests: usize, bytes: usize, budget: &Arc<Budget>) -> Flow {
        Flow::new(requests, bytes, 0, Arc::clone(budget), Arc::new(Activity::new()))
    }

    #[test]
    fn one_request_of_any_size_is_admitted_and_then_the_limits_hold() {
        let flow = flow(2, 100, &Arc::new(Budget::new(1 << 20)));
        assert!(enters(&flow, 1000));
        assert!(!enters(&flow, 0), "over the bytes");
        flow.free(950);
        assert!(!enters(&flow, 51) && enters(&flow, 50));
        assert!(!enters(&flow, 0), "over the requests");
        flow.leave(1, 50);
        flow.leave(1, 50);
        assert!(enters(&flow, 101));
    }

    #[test]
    fn connections_share_a_budget_and_each_goes_on_with_one_request() {
        let budget = Arc::new(Budget::new(100));
        let [one, other] = [0; 2].map(|_| flow(10, 100, &budget));
        assert!(enters(&one, 100));
        assert!(!enters(&one, 1), "all is drawn");
        assert!(enters(&other, 70), "its first");
        assert!(!enters(&other, 1));
        one.free(60);
        assert!(!enters(&one, 1), "what was overdrawn counts");
        drop(other);
        assert!(enters(&one, 20), "a connection that is gone has given all back");
    }

    #[test]
    fn those_who_hold_all_they_can_get_leave_a_share_to_the_next() {
        for greedy in [1, 2, 8] {
            let budget = Arc::new(Budget::new(900));
            let flows: Vec<_> = (0..greedy).map(|_| flow(1000, 1000, &budget)).collect();
            while flows.iter().filter(|flow| enters(flow, 1)).count() > 0 {}
            let held = flows.iter().map(|flow| flow.bytes.get()).sum::<usize>();
            let share = 900 / (greedy + 1);
            assert!((share..=share + 2 * greedy).contains(&(900 - held)), "{greedy}: {held}");
            let next = flow(1000, 1000, &budget);
            let requests = (0..1000).take_while(|_| enters(&next, 1)).count();
            assert!((share / 2..=share).contains(&requests), "{greedy}: {requests}");
            assert!(enters(&flows[0], 0), "what needs no memory never waits for it");
        }
    }

    #[test]
    fn what_is_reserved_is_there_whatever_others_hold() {
        let budget = Arc::new(Budget::new(100));
        let reserving =
            || Flow::new(1000, 1000, 10, Arc::clone(&budget), Arc::new(Activity::new()));
        // One after the other: each takes half of what is left, and the last ones their first request.
        let flows: Vec<_> = (0..20).map(|_| reserving()).collect();
        flows.iter().for_each(|flow| while enters(flow, 1) {});
        let next = reserving();
        assert_eq!((0..1000).take_while(|_| enters(&next, 1)).count(), 10);
        drop(flows);
        assert!(enters(&next, 40), "all that was drawn came back");
        next.leave(11, 50);
        assert!(budget.try_draw(100, 0) && !budget.try_draw(1, 0));
    }

    #[test]
    fn who_waits_is_woken_by_what_another_connection_gives_back() {
        let budget = Arc::new(Budget::new(100));
        let [one, other] = [0; 2].map(|_| flow(10, 100, &budget));
        assert!(enters(&one, 99) && enters(&other, 1));
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        let mut waiting = pin!(other.enter(50));
        assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        assert!(!woken.0.load(Ordering::SeqCst));
        one.leave(1, 99);
        assert!(woken.0.load(Ordering::SeqCst));
        assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_ready());
    }
}
