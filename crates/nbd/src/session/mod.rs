//! The transmission phase of one connection.
//!
//! A reader understands requests, lanes carry them out, a writer sends the replies; all are tasks of
//! one thread. Promises: a request that fails, fails alone; what one connection holds is bounded,
//! and a client that wants more waits; at the end every request that was read is finished, and its
//! reply sent if anybody is there to receive it.

mod activity;
mod budget;
mod condition;
mod flow;
mod job;
mod lane;
mod leave;
mod link;
mod outbox;
mod peer_wait;
mod reader;
mod staging;
mod status;
mod writer;

use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

pub use activity::Activity;
use blockhouse_core::{BufferPool, Result, Storage};
use blockhouse_disk::Disk;
use blockhouse_engine::{Stream, sleep, spawn};
pub use budget::Budget;
use futures_util::future::{Either, select};
pub use leave::Leave;
pub use reader::End;

use flow::Flow;
use link::Link;
use outbox::{Batch, Outbox};
use peer_wait::PeerWait;
use reader::Reader;
use staging::Staging;

use crate::handshake::Terms;

/// What one connection may have in flight, and how long its client may take.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    /// Requests.
    pub requests: usize,
    /// Bytes of their payloads.
    pub bytes: usize,
    /// Bytes of them that no other connection can have.
    pub reserved: usize,
    /// How long the client may stand still while it receives replies or sends a request.
    pub stall: Duration,
    /// The same, once the connection was asked to leave.
    pub stall_at_end: Duration,
    /// How long it may ask for nothing; `None` for ever.
    pub idle: Option<Duration>,
}

/// A connection that has been through its handshake.
pub struct Session<S: Storage> {
    /// The socket.
    pub stream: Stream,
    /// What it serves.
    pub disk: Arc<Disk<S>>,
    /// What was agreed on.
    pub terms: Terms,
    /// Where payloads live.
    pub pool: BufferPool,
    /// How much may be in flight.
    pub allowance: Allowance,
    /// What the payloads of all connections draw from.
    pub budget: Arc<Budget>,
    /// What others see of it.
    pub activity: Arc<Activity>,
}

impl<S: Storage> Session<S> {
    /// Serves the connection to its end. `first` was received already; `leave` ends it early.
    pub async fn run(self, first: &[u8], leave: Arc<Leave>) -> End {
        let Self { stream, disk, terms, pool, allowance, budget, activity } = self;
        let memory = || {
            let outbox = Outbox::new(&pool, allowance.requests)?;
            let batch = Batch::new(&pool, allowance.requests)?;
            let staging = pool.get(reader::STAGING.max(first.len()))?;
            Result::Ok((outbox, batch, Staging::new(staging, first)))
        };
        let (outbox, batch, staging) = match memory() {
            Ok(memory) => memory,
            Err(error) => return End::NoMemory(error),
        };
        let link = Rc::new(Link {
            stream,
            disk,
            terms,
            pool,
            flow: Flow::new(
                allowance.requests,
                allowance.bytes,
                allowance.reserved,
                budget,
                Arc::clone(&activity),
            ),
            outbox,
            peer_wait: PeerWait::default(),
            idle: RefCell::new(Vec::new()),
            failures: Cell::new(0),
        });
        let writer = spawn(writer::run(Rc::clone(&link), batch));
        let served = pin!(serve(&link, Arc::clone(&leave), staging));
        let end = match select(served, pin!(too_slow(&link, allowance, &activity, &leave))).await {
            Either::Left((end, _)) => end,
            Either::Right((end, served)) => {
                link.break_off();
                served.await;
                end
            }
        };
        link.outbox.close();
        link.idle.take().iter().for_each(|lane| lane.end());
        writer.await;
        // Where the client has ended it, nothing is under way on the socket, and closing it is enough.
        if !matches!(end, End::Disconnected | End::Closed) {
            link.stream.shutdown();
        }
        end
    }
}

/// Reads requests until there are no more, and waits for what is in flight.
async fn serve<S: Storage>(link: &Rc<Link<S>>, leave: Arc<Leave>, staging: Staging) -> End {
    let end = Reader::new(Rc::clone(link), leave, staging).run().await;
    if let End::Failed(_) | End::BadMagic(_) | End::PayloadTooLong(_) = end {
        link.break_off();
    }
    link.flow.quiet().await;
    end
}

/// Resolves when the client takes longer than it may.
async fn too_slow<S: Storage>(
    link: &Link<S>,
    allowance: Allowance,
    activity: &Activity,
    leave: &Leave,
) -> End {
    let Allowance { stall, stall_at_end, idle, .. } = allowance;
    let stalled = pin!(link.peer_wait.stalled(&link.stream, stall, stall_at_end, leave));
    match idle {
        None => stalled.await,
        Some(limit) => match select(stalled, pin!(asks_nothing(activity, limit))).await {
            Either::Left((end, _)) => end,
            Either::Right(_) => End::Idle(limit),
        },
    }
}

async fn asks_nothing(activity: &Activity, limit: Duration) {
    loop {
        let left = limit.saturating_sub(activity.idle().unwrap_or_default());
        if left.is_zero() {
            return;
        }
        sleep(left).await;
    }
}
