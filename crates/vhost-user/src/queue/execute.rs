//! The work of handlers: they pop requests, execute them on the disk, complete them, and wake one
//! another.

use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;

use blockhouse_core::{ErrorKind, Request, Result, Storage, WorkBudget};
use blockhouse_disk::ExportKind;
use blockhouse_engine::spawn_detached;

use super::command::StopMode;
use super::handler::{Handler, NextHandler};
use super::state::Queue;
use super::virtqueue::{CompletionKind, Element, Outcome};
use crate::block::{BlockRequests, Status, decode};
use crate::ring::{Broken, Chain};

/// The cost of a request that completed inline, in addition to its bytes. The handler yields to
/// other tasks after 16 requests of 4 KiB, or after one long request.
const REQUEST_COST: u64 = WorkBudget::QUANTUM / 32;

/// Publishes completed requests, and wakes handlers for the available requests.
pub fn process_ring<S: Storage>(queue: &Rc<Queue<S>>) {
    if queue.stop_mode() == Some(StopMode::Disconnected) {
        return;
    }
    let mut virtqueue = queue.virtqueue.borrow_mut();
    virtqueue.publish();
    if queue.stop_mode().is_some() {
        drop(virtqueue);
        wake_handlers(queue, queue.left_to_resubmit());
        return;
    }
    let available = virtqueue.available();
    drop(virtqueue);
    match available {
        Ok(0) => {}
        Ok(count) => wake_handlers(queue, if queue.recently_async.get() { count } else { 1 }),
        Err(why) => queue.break_off(&why),
    }
}

/// Wakes up to `count` handlers.
fn wake_handlers<S: Storage>(queue: &Rc<Queue<S>>, count: usize) {
    if !queue.has_room() {
        // The handler whose request completes pops the next one.
        return;
    }
    for _ in 0..count {
        match queue.handlers.next() {
            NextHandler::Idle(handler) => handler.notify(),
            NextHandler::New => spawn_detached(run(Rc::clone(queue))),
            // All handlers are busy; each pops the next request when its own completes.
            NextHandler::None => return,
        }
    }
}

/// Called when a handler has to wait: other handlers pop the available requests, and completed
/// requests are published.
fn wake_others<S: Storage>(queue: &Rc<Queue<S>>) {
    queue.recently_async.set(true);
    let virtqueue = queue.virtqueue.borrow();
    let (available, has_unsignalled) = (virtqueue.cached_available(), virtqueue.has_unsignalled());
    drop(virtqueue);
    if has_unsignalled {
        queue.wake_ring_task();
    }
    wake_handlers(queue, available);
}

/// Executes requests until the queue ends.
async fn run<S: Storage>(queue: Rc<Queue<S>>) {
    let handler = Rc::new(Handler::default());
    let mut chain = Chain::default();
    let mut kind = CompletionKind::Inline;
    let mut budget = WorkBudget::new();
    while !queue.is_ended() {
        let element = match queue.stop_mode() {
            None if !queue.has_room() => Ok(None),
            None => queue.virtqueue.borrow_mut().pop(&mut chain),
            // The base that a graceful stop returns counts these requests as popped, so they are
            // executed first.
            Some(StopMode::Graceful) => queue.virtqueue.borrow_mut().pop_resubmit(&mut chain),
            Some(StopMode::Disconnected) => Ok(None),
        };
        let element = match element {
            Ok(Some(element)) => element,
            Ok(None) => {
                park(&queue, &handler, kind).await;
                budget = WorkBudget::new();
                continue;
            }
            Err(why) => {
                queue.break_off(&why);
                continue;
            }
        };
        let length = chain.length();
        kind = serve(&queue, element, &mut chain, length).await;
        match kind {
            CompletionKind::Inline => budget.spend(REQUEST_COST + length).await,
            CompletionKind::Async => budget = WorkBudget::new(),
        }
    }
}

/// Waits for requests. Completed requests are published at once, unless other handlers may complete
/// more in this iteration of the loop.
async fn park<S: Storage>(queue: &Rc<Queue<S>>, handler: &Rc<Handler>, kind: CompletionKind) {
    queue.handlers.push_idle(Rc::clone(handler));
    let is_last = kind == CompletionKind::Inline || queue.in_flight.is_idle();
    if queue.stop_mode().is_none() && is_last {
        process_ring(queue);
    } else {
        queue.wake_ring_task();
    }
    handler.notified().await;
}

/// Executes a request with a chain of `length` bytes, and completes it.
async fn serve<S: Storage>(
    queue: &Rc<Queue<S>>,
    element: Element,
    chain: &mut Chain,
    length: u64,
) -> CompletionKind {
    let permit = queue.in_flight.acquire(length);
    let failed = |status| (Outcome { status, written: 0 }, CompletionKind::Inline);
    let (outcome, kind) = match decode(&queue.request_context(), &element.memory, chain) {
        // The request was read from memory that can no longer be accessed, so it may be wrong and
        // is not executed.
        _ if queue.has_lost_memory() => failed(Status::Failed),
        Ok(requests) => {
            let written = requests.written();
            let (status, kind) = execute(queue, requests).await;
            (Outcome { status, written }, kind)
        }
        Err(status) => failed(status),
    };
    drop(permit);
    if queue.has_lost_memory() {
        // The request may have used zeros in place of the guest's data, even if it succeeded.
        queue.break_off(&Broken::MemoryLost);
    } else if queue.stop_mode() != Some(StopMode::Disconnected) {
        queue.virtqueue.borrow_mut().complete(&element, chain, outcome, kind);
    }
    kind
}

async fn execute<S: Storage>(
    queue: &Rc<Queue<S>>,
    requests: BlockRequests,
) -> (Status, CompletionKind) {
    let (outcome, kind) = match requests {
        BlockRequests::None => (Ok(()), CompletionKind::Inline),
        BlockRequests::One(request) => submit(queue, request).await,
        BlockRequests::Many(requests) => Box::pin(submit_all(queue, requests)).await,
    };
    let status = match outcome {
        Ok(()) => Status::Ok,
        Err(error) => {
            queue.log_failure(&error);
            match error.kind() {
                ErrorKind::Unsupported => Status::Unsupported,
                _ => Status::Failed,
            }
        }
    };
    (status, kind)
}

/// Makes the disk execute requests one after the other, until one fails.
async fn submit_all<S: Storage>(
    queue: &Rc<Queue<S>>,
    requests: Vec<Request>,
) -> (Result<()>, CompletionKind) {
    let mut slowest = CompletionKind::Inline;
    for request in requests {
        let (outcome, kind) = submit(queue, request).await;
        if kind == CompletionKind::Async {
            slowest = kind;
        }
        if outcome.is_err() {
            return (outcome, slowest);
        }
    }
    (Ok(()), slowest)
}

/// Submits a request to the disk. If it has to wait, other handlers continue with the ring.
async fn submit<S: Storage>(
    queue: &Rc<Queue<S>>,
    request: Request,
) -> (Result<()>, CompletionKind) {
    if let Err(refused) = queue.check_access(&request) {
        return (Err(refused), CompletionKind::Inline);
    }
    let mut submit = pin!(queue.disk.submit_from(ExportKind::VhostUser, request));
    let mut kind = CompletionKind::Inline;
    let outcome = poll_fn(|context| {
        let poll = submit.as_mut().poll(context);
        if poll.is_pending() && kind == CompletionKind::Inline {
            kind = CompletionKind::Async;
            wake_others(queue);
        }
        poll
    })
    .await;
    if kind == CompletionKind::Inline {
        queue.recently_async.set(false);
    }
    (outcome, kind)
}
