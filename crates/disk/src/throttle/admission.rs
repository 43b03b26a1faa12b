//! The future of a request that waits until the throttle group admits it.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use blockhouse_engine::ClockSleep;

use super::bucket::Nanos;
use super::group::{ThrottleGroup, time_until};
use super::queue::{self, Outcome, QUANTUM, Ticket};

/// Waits until a request is admitted. Dropping the future cancels the request's ticket.
pub(super) struct Admission {
    group: Arc<ThrottleGroup>,
    ticket: Option<Ticket>,
    /// The timer of a timekeeper, and the time when it expires.
    timer: Option<(Nanos, ClockSleep)>,
}

impl Admission {
    pub(super) fn new(group: &Arc<ThrottleGroup>, ticket: Ticket) -> Self {
        Self { group: Arc::clone(group), ticket: Some(ticket), timer: None }
    }

    /// Polls the timer; returns whether the timer has expired. The latest time for the timer is
    /// `ready`, or `QUANTUM` from now if that is later. First sets a timer for the latest time,
    /// unless the present timer expires from `ready` to the latest time.
    fn poll_timer(&mut self, ready: Nanos, cx: &mut Context<'_>) -> bool {
        let now = self.group.now();
        let latest = ready.max(now.saturating_add(QUANTUM));
        if !self.timer.as_ref().is_some_and(|(due, _)| (ready..=latest).contains(due)) {
            let time = time_until(latest, now).min(Duration::from_secs(3600));
            self.timer = Some((latest, self.group.clock().sleep(time)));
        }
        let is_due =
            self.timer.as_mut().is_some_and(|(_, sleep)| sleep.as_mut().poll(cx).is_ready());
        if is_due {
            self.timer = None;
        }
        is_due
    }
}

impl Future for Admission {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Outcome> {
        let this = &mut *self;
        loop {
            let Some(ticket) = this.ticket else { return Poll::Ready(Outcome::Admitted) };
            match this.group.poll(ticket, cx.waker()) {
                queue::Poll::Done(outcome) => {
                    this.ticket = None;
                    this.timer = None;
                    return Poll::Ready(outcome);
                }
                queue::Poll::Wait { until: Some(ready) } => {
                    if !this.poll_timer(ready, cx) {
                        return Poll::Pending;
                    }
                }
                queue::Poll::Wait { until: None } => {
                    this.timer = None;
                    return Poll::Pending;
                }
            }
        }
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.group.cancel(ticket);
        }
    }
}
