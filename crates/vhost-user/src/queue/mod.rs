//! One queue of a guest on one event loop.
//!
//! Handlers are long-lived tasks that pop requests from the ring and execute them. If a handler's
//! request completes inline, the handler pops the next request at once. If a handler has to wait,
//! it wakes as many other handlers as there are requests. The ring task is woken for new requests
//! and for commands of the device's thread, and publishes completed requests. While the loop is
//! awake, the ring is polled and the guest need not kick.
//!
//! Guarantees: every request that was popped is executed to its end, unless its memory was lost.
//! One notification covers several requests that complete together; it is delayed only by other
//! requests that complete inline. No request waits in the ring while the loop sleeps (the ring is
//! read once more after kicks were enabled), except requests above the limit of a queue
//! ([`QUEUE_LIMITS`](crate::block::QUEUE_LIMITS)).

mod call;
mod command;
mod dirty_log;
mod execute;
mod handler;
pub mod inflight;
mod kicks;
mod state;
mod virtqueue;

use std::future::poll_fn;
use std::rc::Rc;
use std::task::Poll;

use blockhouse_core::Storage;
use blockhouse_engine::PollSource;
pub use call::Call;
pub use command::{QueueCommand, QueueRequest, StopMode};
pub use dirty_log::DirtyLog;
use execute::process_ring;
use futures_channel::mpsc;
use futures_util::StreamExt;
pub use kicks::Kick;
use kicks::Kicks;
use state::Queue;
pub use state::Setup;
pub use virtqueue::Virtqueue;

use crate::ring::Broken;

/// Runs a queue until the command to stop, or until the sender of commands is dropped. Returns the
/// number of the next available entry.
pub async fn run<S: Storage>(
    setup: Setup<S>,
    mut requests: mpsc::UnboundedReceiver<QueueRequest>,
) -> u16 {
    let (queue, kick) = Queue::new(setup);
    let queue = Rc::new(queue);
    let mut kicks = watch(&queue, kick);
    poll_fn(|context| {
        queue.register_ring_task(context);
        while let Poll::Ready(request) = requests.poll_next_unpin(context) {
            let Some(QueueRequest { command, done }) = request else {
                queue.stop(queue.stop_mode().unwrap_or(StopMode::Disconnected));
                break;
            };
            // The receiver may have been dropped.
            let _ = done.send(handle(&queue, command, &mut kicks));
        }
        if kicks.poll(context, || queue.has_work()) {
            queue.set_wake_pending();
        }
        if queue.take_wake_pending() {
            process_ring(&queue);
        }
        if queue.is_stopped() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    queue.end();
    // The handlers have not dropped their references to the queue yet, so the number is copied.
    let mut virtqueue = queue.virtqueue.borrow_mut();
    if queue.stop_mode() != Some(StopMode::Disconnected) {
        // A handler that has yielded after its request may not have woken the ring task yet.
        virtqueue.publish();
    }
    virtqueue.last_avail_idx()
}

fn watch<S: Storage>(queue: &Rc<Queue<S>>, kick: Kick) -> Kicks {
    queue.set_polled(matches!(kick, Kick::Polled));
    Kicks::new(Rc::clone(queue) as Rc<dyn PollSource>, kick, queue.disk.name())
}

fn handle<S: Storage>(
    queue: &Rc<Queue<S>>,
    command: QueueCommand,
    kicks: &mut Kicks,
) -> Result<(), Broken> {
    let mut virtqueue = queue.virtqueue.borrow_mut();
    match command {
        QueueCommand::Move(memory, addresses) => virtqueue.move_to(memory, addresses)?,
        QueueCommand::SetKick(kick) => *kicks = watch(queue, kick),
        QueueCommand::SetCall(call) => virtqueue.set_call(call),
        QueueCommand::SetLog(log, used, call) => virtqueue.set_log(log, used, call),
        QueueCommand::Stop(mode) => queue.stop(mode),
        QueueCommand::EndHolding => queue.end_holding(),
        QueueCommand::Continue => queue.take_back_stop(),
    }
    queue.set_wake_pending();
    Ok(())
}
