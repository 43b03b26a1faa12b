//! Lanes: tasks that carry out one request after the other.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Poll, Waker};

use blockhouse_core::{Error, ErrorKind, Request, Result, Storage, WorkBudget, errno};

use super::ring_side::{Outcome, Pace, Taken};
use super::{Manner, Queue};
use crate::chain::{Chain, Status};
use crate::request::{Plan, plan};
use crate::ring::Broken;

/// What a request that ended at once costs beside its bytes: after 16 of 4 KiB, or a long one, the
/// other tasks get their turn.
const STEP: u64 = WorkBudget::QUANTUM / 32;

/// Where a lane without work waits.
#[derive(Default)]
pub struct Lane {
    woken: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl Lane {
    /// Has the lane look at the ring.
    pub fn wake(&self) {
        self.woken.set(true);
        if let Some(waker) = &*self.waker.borrow() {
            waker.wake_by_ref();
        }
    }

    async fn woken(&self) {
        poll_fn(|context| {
            if self.woken.take() {
                return Poll::Ready(());
            }
            let mut waker = self.waker.borrow_mut();
            match &mut *waker {
                Some(waker) => waker.clone_from(context.waker()),
                None => *waker = Some(context.waker().clone()),
            }
            Poll::Pending
        })
        .await;
    }
}

/// Carries out requests until the queue ends.
pub async fn run<S: Storage>(queue: Rc<Queue<S>>) {
    let lane = Rc::new(Lane::default());
    let mut chain = Chain::default();
    let mut pace = Pace::AtOnce;
    let mut streak = WorkBudget::new();
    while !queue.ended.get() {
        let taken = match queue.stop.get() {
            None if !queue.has_room() => Ok(None),
            None => queue.ring.borrow_mut().take(&mut chain),
            // The base that a stop returns counts these as taken.
            Some(Manner::Orderly) => queue.ring.borrow_mut().resubmit(&mut chain),
            Some(Manner::Abandoned) => Ok(None),
        };
        let taken = match taken {
            Ok(Some(taken)) => taken,
            Ok(None) => {
                rest(&queue, &lane, pace).await;
                streak = WorkBudget::new();
                continue;
            }
            Err(why) => {
                queue.give_up(&why);
                continue;
            }
        };
        let length = chain.length();
        pace = serve(&queue, &taken, &mut chain).await;
        drop(taken);
        match pace {
            Pace::AtOnce => streak.spend(STEP + length).await,
            Pace::Waited => streak = WorkBudget::new(),
        }
    }
}

/// Carries out a request and answers it.
async fn serve<S: Storage>(queue: &Rc<Queue<S>>, taken: &Taken, chain: &mut Chain) -> Pace {
    let length = chain.length();
    queue.in_flight.update(|count| count + 1);
    queue.bytes_in_flight.update(|bytes| bytes + length);
    let (outcome, pace) = match plan(&queue.terms(), &taken.memory, chain) {
        // It was read from memory that is gone: nothing is done.
        _ if queue.has_lost_memory() => {
            (Outcome { status: Status::Failed, written: 0 }, Pace::AtOnce)
        }
        Ok(plan) => {
            let written = plan.written();
            let (status, pace) = carry_out(queue, plan).await;
            (Outcome { status, written }, pace)
        }
        Err(status) => (Outcome { status, written: 0 }, Pace::AtOnce),
    };
    queue.in_flight.update(|count| count - 1);
    queue.bytes_in_flight.update(|bytes| bytes - length);
    if queue.has_lost_memory() {
        // Whatever came of it, its data need not have been the guest's.
        queue.give_up(&Broken::MemoryLost);
    } else if queue.stop.get() != Some(Manner::Abandoned) {
        queue.ring.borrow_mut().answer(taken, chain, outcome, pace);
    }
    pace
}

/// Waits for work. What was done is published at once, unless other lanes may yet end in this round.
async fn rest<S: Storage>(queue: &Rc<Queue<S>>, lane: &Rc<Lane>, pace: Pace) {
    queue.idle.borrow_mut().push(Rc::clone(lane));
    if queue.stop.get().is_none() && (pace == Pace::AtOnce || queue.in_flight.get() == 0) {
        queue.settle();
    } else {
        queue.want_pump();
    }
    lane.woken().await;
}

async fn carry_out<S: Storage>(queue: &Rc<Queue<S>>, plan: Plan) -> (Status, Pace) {
    let (outcome, pace) = match plan {
        Plan::Nothing => (Ok(()), Pace::AtOnce),
        Plan::One(request) => submit(queue, request).await,
        Plan::Many(requests) => {
            let all = async {
                let mut slowest = Pace::AtOnce;
                for request in requests {
                    let (outcome, pace) = submit(queue, request).await;
                    if pace == Pace::Waited {
                        slowest = pace;
                    }
                    if outcome.is_err() {
                        return (outcome, slowest);
                    }
                }
                (Ok(()), slowest)
            };
            Box::pin(all).await
        }
    };
    match outcome {
        Ok(()) => (Status::Ok, pace),
        Err(error) => {
            queue.note(&error);
            let status = match error.kind() {
                ErrorKind::Unsupported => Status::Unsupported,
                _ => Status::Failed,
            };
            (status, pace)
        }
    }
}

/// Has the disk carry out a request. If that means to wait, other lanes go on with the ring.
async fn submit<S: Storage>(queue: &Rc<Queue<S>>, request: Request) -> (Result<()>, Pace) {
    let mut submit = pin!(queue.disk.submit(request));
    let mut pace = Pace::AtOnce;
    let outcome = poll_fn(|context| {
        let poll = submit.as_mut().poll(context);
        if poll.is_pending() && pace == Pace::AtOnce {
            pace = Pace::Waited;
            queue.hand_over();
        }
        poll
    })
    .await;
    if pace == Pace::AtOnce {
        queue.waits.set(false);
    }
    (outcome, pace)
}

impl<S: Storage> Queue<S> {
    /// Says in the log that the host failed, once a queue: a broken disk fails every request.
    fn note(&self, error: &Error) {
        if self.has_lost_memory() {
            // The end of the connection says it.
            return;
        }
        if error.errno() == errno::EFAULT {
            // The guest's own doing, or the first sign of memory that vanishes, of which the end of the
            // connection tells: the host has not failed.
            let disk = self.disk.name();
            tracing::debug!(disk, "no memory is at the addresses of a guest's request: {error}");
            return;
        }
        match error.kind() {
            ErrorKind::InvalidInput
            | ErrorKind::PastEnd
            | ErrorKind::ReadOnly
            | ErrorKind::Unsupported => {}
            ErrorKind::NoSpace | ErrorKind::Locked | ErrorKind::Corrupt | ErrorKind::Io => {
                if !self.failed.replace(true) {
                    tracing::warn!(disk = self.disk.name(), "a guest's request failed: {error}");
                }
            }
        }
    }
}
