//! The reader: receives as much as there is, understands it, and gives every request to a lane.
//!
//! Small requests arrive in bulk in the staging memory. The payload of a long write is received
//! straight into memory that the disk takes as it is; only what was staged before anybody knew of
//! the write is copied there.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use blockhouse_core::{Buffer, Error, IoVectorList, Storage};
use blockhouse_engine::yield_now;

use super::job::Job;
use super::lane::{dispatch, footprint, note, refusal};
use super::leave::Leave;
use super::link::Link;
use super::outbox::Answer;
use super::peer_wait::Direction;
use super::staging::Staging;
use crate::command::{Command, Idle, Incoming, PayloadTooLong, Refusal, understand};
use crate::proto::reply::{Bare, ReplyTo};
use crate::proto::request::{BadMagic, RequestHeader};

/// The memory between socket and requests, in bytes: 64 requests of 4 KiB writes take two fills.
pub const STAGING: usize = 128 << 10;

/// After a write of this many bytes another one is expected, and only its header is staged.
const LONG: usize = 32 << 10;

/// After this many requests the lanes get their turn, so that replies leave while the rest is still
/// being read.
const QUANTUM: u32 = 16;

/// Why the transmission phase ended.
#[derive(Debug, thiserror::Error)]
pub enum End {
    /// The client said goodbye.
    #[error("the client disconnected")]
    Disconnected,
    /// The client closed the connection without a word.
    #[error("the client closed the connection")]
    Closed,
    /// The client closed it in the middle of a request.
    #[error("the connection ended inside of a request")]
    Truncated,
    /// The server asked it to end: it ends itself, or makes room for another client.
    #[error("the server ended it")]
    Drained,
    /// The client did not take its replies, or did not send the rest of a request.
    #[error("the client {} for {limit:?}", match direction {
        Direction::Send => "did not take its replies",
        Direction::Receive => "did not send the rest of a request",
    })]
    Stalled {
        /// What it did not do.
        direction: Direction,
        /// For how long, at least.
        limit: Duration,
    },
    /// The client asked for nothing.
    #[error("the client asked for nothing for {0:?}")]
    Idle(Duration),
    /// The connection broke.
    #[error("the connection failed: {0}")]
    Failed(#[from] io::Error),
    /// There is no memory for a connection.
    #[error("{0}")]
    NoMemory(Error),
    /// The two ends are out of step.
    #[error(transparent)]
    BadMagic(#[from] BadMagic),
    /// A payload beyond all limits.
    #[error(transparent)]
    PayloadTooLong(#[from] PayloadTooLong),
}

/// The receiving half of a connection.
pub struct Reader<S: Storage> {
    link: Rc<Link<S>>,
    leave: Arc<Leave>,
    staging: Staging,
    list: IoVectorList,
    /// How much to stage at most with the next system call.
    window: usize,
    /// Requests since the lanes had their turn.
    taken: u32,
}

impl<S: Storage> Reader<S> {
    /// A reader for a connection; `staging` holds what was received already.
    pub fn new(link: Rc<Link<S>>, leave: Arc<Leave>, staging: Staging) -> Self {
        Self { link, leave, staging, list: IoVectorList::new(), window: STAGING, taken: 0 }
    }

    /// Reads requests until the connection ends, for whatever reason.
    pub async fn run(&mut self) -> End {
        loop {
            if let Err(end) = self.next().await {
                return end;
            }
        }
    }

    /// Understands one request, or receives more bytes where none is complete.
    async fn next(&mut self) -> Result<(), End> {
        let framing = self.link.terms.framing;
        let Some(header) = RequestHeader::parse(framing, self.staging.bytes())? else {
            return match self.staging.bytes().is_empty() {
                true => self.fill().await,
                false => self.fill_inside().await,
            };
        };
        self.staging.consume(framing.request_length());
        let to = ReplyTo { cookie: header.cookie, offset: header.offset };
        let Incoming { command, payload } = understand(&header, &self.link.terms)?;
        self.window = STAGING;
        match command {
            Ok(Command::Disconnect) => return Err(End::Disconnected),
            Ok(Command::Nothing(Idle::Read)) => self.answer(to, Answer::Done(Bare::Chunk)).await,
            Ok(Command::Nothing(Idle::Other)) => {
                self.answer(to, Answer::Done(Bare::Shortest)).await;
            }
            Ok(command) => self.accept(to, command).await?,
            Err(refusal) => self.refuse(to, refusal, payload).await?,
        }
        self.taken += 1;
        if self.taken >= QUANTUM {
            self.taken = 0;
            yield_now().await;
        }
        Ok(())
    }

    async fn accept(&mut self, to: ReplyTo, command: Command) -> Result<(), End> {
        let footprint = footprint(&command);
        self.link.flow.enter(footprint).await;
        let payload = match command {
            Command::Write { length, .. } => {
                let buffer = match self.link.pool.get(length as usize) {
                    Ok(buffer) => buffer,
                    Err(error) => {
                        self.link.flow.leave(1, footprint);
                        note(&self.link, &error);
                        return self.refuse(to, refusal(&error, &command), length).await;
                    }
                };
                let received = self.payload(buffer).await;
                // One that never arrives as a whole is nobody's any more.
                Some(received.inspect_err(|_| self.link.flow.leave(1, footprint))?)
            }
            _ => None,
        };
        dispatch(&self.link, Job { to, command, payload });
        Ok(())
    }

    async fn refuse(&mut self, to: ReplyTo, refusal: Refusal, payload: u32) -> Result<(), End> {
        let mut left = payload as usize;
        loop {
            left -= self.staging.consume(left);
            if left == 0 {
                break;
            }
            self.fill_inside().await?;
        }
        self.answer(to, Answer::Failed(refusal)).await;
        Ok(())
    }

    /// Answers a request that needs no lane.
    async fn answer(&mut self, to: ReplyTo, answer: Answer) {
        self.link.flow.enter(0).await;
        self.link.reply(to, answer);
    }

    /// The payload of a write: what is staged of it, and the rest from the socket.
    async fn payload(&mut self, mut buffer: Buffer) -> Result<Buffer, End> {
        let length = buffer.len();
        if length >= LONG {
            self.window = self.link.terms.framing.request_length();
        }
        let mut filled = self.staging.take(buffer.bytes_mut());
        while filled < length {
            self.list.push(buffer.lend_range(filled, length - filled));
            self.list.push(self.staging.lend(self.window));
            let count = self.receive_inside().await?;
            let here = count.min(length - filled);
            filled += here;
            self.staging.filled(count - here);
        }
        Ok(buffer)
    }

    /// Receives into the staging memory.
    async fn fill(&mut self) -> Result<(), End> {
        self.list.push(self.staging.lend(self.window));
        self.taken = 0;
        let count = self.receive().await?;
        self.staging.filled(count);
        Ok(())
    }

    /// As [`fill`](Self::fill), for the rest of a request.
    async fn fill_inside(&mut self) -> Result<(), End> {
        self.list.push(self.staging.lend(self.window));
        self.taken = 0;
        let count = self.receive_inside().await?;
        self.staging.filled(count);
        Ok(())
    }

    /// As [`receive`](Self::receive), for the rest of a request: the client owes it.
    async fn receive_inside(&mut self) -> Result<usize, End> {
        self.link.peer_wait.begin(Direction::Receive);
        let count = self.receive().await.map_err(End::inside);
        self.link.peer_wait.end(Direction::Receive);
        count
    }

    /// Receives at least one byte into the list, which is empty afterwards.
    async fn receive(&mut self) -> Result<usize, End> {
        let list = std::mem::take(&mut self.list);
        let mut receive = pin!(self.link.stream.receive(list));
        let received = poll_fn(|context| match self.leave.is_asked(context) {
            true => Poll::Ready(None),
            false => receive.as_mut().poll(context).map(Some),
        });
        let (result, list) = received.await.ok_or(End::Drained)?;
        self.list = list;
        self.list.clear();
        match result? {
            0 => Err(End::Closed),
            count => Ok(count),
        }
    }
}

impl End {
    /// What an end means while a request is incomplete.
    fn inside(self) -> Self {
        match self {
            Self::Closed => Self::Truncated,
            other => other,
        }
    }
}
