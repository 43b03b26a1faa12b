//! The future of one operation.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use blockhouse_core::metrics::clock;
use rustix::io::Errno;

use crate::driver::operation::{Operation, Token};
use crate::driver::wait_queue::Ticket;
use crate::event_loop::local::{self, Local};

/// Starts `operation` on the current loop when first polled. Resolves to the kernel's result and
/// the operation. From its first poll on the future belongs to that loop, wherever it is polled or
/// dropped. If it is dropped before it is ready, the operation completes by itself, with all that
/// it owns.
pub(crate) fn submit(operation: Operation) -> Submit {
    Submit { operation: Some(operation), stage: Stage::New }
}

pub(crate) struct Submit {
    /// Present until the loop takes the operation.
    operation: Option<Operation>,
    stage: Stage,
}

enum Stage {
    New,
    /// The future waits for a slot in the loop's table.
    Waiting(Rc<Local>, Ticket),
    InFlight(Rc<Local>, Token),
    Over,
}

// Nothing points into the future itself: the parts that must not move are in the loop's table.
impl Unpin for Submit {}

impl Future for Submit {
    type Output = (Result<usize, Errno>, Operation);

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.get_mut();
        match std::mem::replace(&mut this.stage, Stage::Over) {
            Stage::New => local::current(|local| this.begin(local, cx.waker())),
            Stage::Waiting(local, ticket) => this.start(&local, Some(ticket), cx.waker()),
            Stage::InFlight(local, token) => match local.poll_result(token, cx.waker()) {
                Poll::Ready((result, operation)) => Poll::Ready((outcome(result), operation)),
                Poll::Pending => {
                    this.stage = Stage::InFlight(local, token);
                    Poll::Pending
                }
            },
            Stage::Over => panic!("a future is not polled after it was ready"),
        }
    }
}

impl Submit {
    fn begin(&mut self, local: &Rc<Local>, waiter: &Waker) -> Poll<<Self as Future>::Output> {
        if local.tasks.budget.is_spent() {
            // The wake-up makes the task yield, so the loop polls the other tasks first (`task`).
            self.stage = Stage::New;
            waiter.wake_by_ref();
            return Poll::Pending;
        }
        let operation = self.operation.as_ref().expect("it goes with the stage");
        match local.try_inline(operation) {
            Some(result) => {
                local.tasks.budget.spend();
                clock::renew();
                let operation = self.operation.take().expect("it was there the line before");
                Poll::Ready((outcome(result), operation))
            }
            None => self.start(local, None, waiter),
        }
    }

    /// Asks the operation to stop, if it was started.
    fn stop(&self) -> bool {
        match &self.stage {
            Stage::InFlight(local, token) => {
                local.stop(*token);
                true
            }
            Stage::New | Stage::Waiting(..) | Stage::Over => false,
        }
    }

    fn start(
        &mut self,
        local: &Rc<Local>,
        ticket: Option<Ticket>,
        waiter: &Waker,
    ) -> Poll<<Self as Future>::Output> {
        self.stage = match local.start(&mut self.operation, ticket, waiter) {
            Ok(token) => Stage::InFlight(Rc::clone(local), token),
            Err(ticket) => Stage::Waiting(Rc::clone(local), ticket),
        };
        Poll::Pending
    }
}

impl Drop for Submit {
    fn drop(&mut self) {
        match &self.stage {
            Stage::Waiting(local, ticket) => local.cancel_wait(*ticket),
            Stage::InFlight(local, token) => local.detach(*token),
            Stage::New | Stage::Over => {}
        }
    }
}

/// As [`submit`], for an operation that may wait without bound; it is cancelled when `is_stopped`
/// returns true. If `is_stopped` returns false, it has registered the task to be woken. A cancelled
/// operation still completes: with the part done by then, or with ECANCELED if no part is done. So
/// no bytes that the kernel has accepted are lost.
pub(crate) async fn submit_until(
    operation: Operation,
    mut is_stopped: impl FnMut(&Context<'_>) -> bool,
) -> (Result<usize, Errno>, Operation) {
    let mut submit = submit(operation);
    let mut was_asked = false;
    poll_fn(move |context| {
        let is_stopped = !was_asked && is_stopped(context);
        let poll = Pin::new(&mut submit).poll(context);
        if is_stopped && poll.is_pending() {
            // An operation that waits for its start cannot be cancelled yet: this is repeated at
            // the next poll.
            was_asked = submit.stop();
        }
        poll
    })
    .await
}

/// The kernel's encoding of a count or an errno in one number.
fn outcome(result: i32) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| Errno::from_raw_os_error(-result))
}
