//! The reader: receives the available bytes, decodes them, and gives every request to a handler.
//!
//! Many small requests are received at once, into the staging buffer. The payload of a large write
//! is received directly into the memory that is passed to the disk. Only bytes that were staged
//! before the header was decoded are copied.
//!
//! A pause loses no bytes: the receive in flight is stopped and awaited. [`Reader::into_unparsed`]
//! returns the received bytes that were not given to a handler.

use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Context;

use blockhouse_core::{Buffer, IoVectorList, Storage};
use blockhouse_engine::{is_stopped, yield_now};

use super::end::{Direction, End};
use super::execute::{dispatch, footprint};
use super::failure::request_error;
use super::handler::Job;
use super::reply_queue::Reply;
use super::shutdown::{ShutdownSignal, Stop};
use super::staging::Staging;
use super::state::SessionState;
use crate::command::{Command, DecodedRequest, EmptyKind, RequestError, decode};
use crate::proto::reply::{ReplyTo, SuccessForm};
use crate::proto::request::RequestHeader;

/// Size of the staging buffer. 64 writes of 4 KiB fill it about twice.
pub const STAGING_BYTES: usize = 128 << 10;

/// After a write of at least this size, another one is expected, and only its header is staged.
const LARGE_WRITE: usize = 32 << 10;

/// After this many requests the reader yields to the handlers, so that replies are sent while
/// further requests are read.
const REQUESTS_PER_YIELD: u32 = 16;

/// The receiving half of a connection.
pub struct Reader<S: Storage> {
    state: Rc<SessionState<S>>,
    shutdown: Arc<ShutdownSignal>,
    staging: Staging,
    list: IoVectorList,
    /// Maximum number of bytes that the next system call stages.
    window: usize,
    /// Requests since the reader yielded last.
    since_yield: u32,
    /// At a pause, the request whose payload was being received: its header, and the received part
    /// of its payload.
    incomplete: Vec<u8>,
}

impl<S: Storage> Reader<S> {
    /// A reader for a connection; `staging` holds the bytes received already.
    pub fn new(
        state: Rc<SessionState<S>>,
        shutdown: Arc<ShutdownSignal>,
        staging: Staging,
    ) -> Self {
        Self {
            state,
            shutdown,
            staging,
            list: IoVectorList::new(),
            window: STAGING_BYTES,
            since_yield: 0,
            incomplete: Vec::new(),
        }
    }

    /// The received bytes that belong to no request given to a handler.
    pub fn into_unparsed(mut self) -> Vec<u8> {
        self.incomplete.extend_from_slice(self.staging.bytes());
        self.incomplete
    }

    /// Reads requests until the connection ends.
    pub async fn run(&mut self) -> End {
        loop {
            if let Err(end) = self.next().await {
                return end;
            }
        }
    }

    /// Handles one request, or receives more bytes if none is complete.
    async fn next(&mut self) -> Result<(), End> {
        if self.shutdown.get() == Some(Stop::Pause) {
            return Err(End::Paused);
        }
        let framing = self.state.options.framing;
        let Some(header) = RequestHeader::parse(framing, self.staging.bytes())? else {
            return if self.staging.bytes().is_empty() {
                self.fill().await
            } else {
                self.fill_inside_request().await
            };
        };
        self.staging.consume(framing.request_length());
        let to = ReplyTo { cookie: header.cookie, offset: header.offset };
        let DecodedRequest { command, payload } = decode(&header, &self.state.options)?;
        self.window = STAGING_BYTES;
        match command {
            Ok(Command::Disconnect) => return Err(End::Disconnected),
            Ok(Command::Empty(kind)) => {
                let form = match kind {
                    EmptyKind::Read => SuccessForm::Chunk,
                    EmptyKind::Other => SuccessForm::Shortest,
                };
                self.reply(to, Reply::Success(form)).await;
            }
            Ok(command) => self.accept(&header, command).await?,
            Err(error) => self.refuse(to, error, payload).await?,
        }
        self.since_yield += 1;
        if self.since_yield >= REQUESTS_PER_YIELD {
            self.since_yield = 0;
            yield_now().await;
        }
        Ok(())
    }

    /// Gives a request to a handler, with its payload.
    async fn accept(&mut self, header: &RequestHeader, command: Command) -> Result<(), End> {
        let to = ReplyTo { cookie: header.cookie, offset: header.offset };
        let permit = {
            let permit = pin!(self.state.in_flight.acquire(footprint(&command)));
            self.state.disk.stats().wait_turn(command.operation(), permit).await
        };
        let payload = match command {
            Command::Write { length, .. } | Command::SelectedStatus { length, .. } => {
                match self.state.pool.get(length as usize) {
                    Ok(buffer) => Some(self.receive_payload(header, buffer).await?),
                    Err(error) => {
                        // The request is not in flight while its payload is skipped.
                        drop(permit);
                        self.state.failures.note(&self.state.options.export, &error);
                        return self.refuse(to, request_error(&error, &command), length).await;
                    }
                }
            }
            _ => None,
        };
        dispatch(&self.state, Job { permit, to, command, payload });
        Ok(())
    }

    /// Skips the payload of a request and replies with an error.
    async fn refuse(&mut self, to: ReplyTo, error: RequestError, payload: u32) -> Result<(), End> {
        let mut left = payload as usize;
        loop {
            left -= self.staging.consume(left);
            if left == 0 {
                break;
            }
            // A pause does not interrupt the skip, because skipped bytes are not kept and the
            // request could not be resumed.
            self.fill_refused().await?;
        }
        self.reply(to, Reply::Error(error)).await;
        Ok(())
    }

    /// Replies to a request that needs no handler.
    async fn reply(&mut self, to: ReplyTo, reply: Reply) {
        let permit = self.state.in_flight.acquire(0).await;
        self.state.replies.push(permit, to, reply);
    }

    /// Receives the payload of a request: the staged part of it, and the rest from the socket.
    async fn receive_payload(
        &mut self,
        header: &RequestHeader,
        mut buffer: Buffer,
    ) -> Result<Buffer, End> {
        let length = buffer.len();
        if length >= LARGE_WRITE {
            self.window = self.state.options.framing.request_length();
        }
        let mut filled = self.staging.copy_to(buffer.bytes_mut());
        while filled < length {
            let payload = Some((&mut buffer, filled));
            let count = match self.receive_inside_request(payload, PAUSE_OR_SHUTDOWN).await {
                Err(End::Paused) => {
                    header.encode(self.state.options.framing, &mut self.incomplete);
                    self.incomplete.extend_from_slice(&buffer.bytes()[..filled]);
                    return Err(End::Paused);
                }
                received => received?,
            };
            let here = count.min(length - filled);
            filled += here;
            self.staging.add_received(count - here);
        }
        Ok(buffer)
    }

    /// Receives into the staging buffer.
    async fn fill(&mut self) -> Result<(), End> {
        self.since_yield = 0;
        let count = self.receive(None, PAUSE_OR_SHUTDOWN).await?;
        self.staging.add_received(count);
        Ok(())
    }

    /// As [`fill`](Self::fill), for the rest of a request.
    async fn fill_inside_request(&mut self) -> Result<(), End> {
        self.fill_rest(PAUSE_OR_SHUTDOWN).await
    }

    /// As [`fill_inside_request`](Self::fill_inside_request), but a pause does not stop it.
    async fn fill_refused(&mut self) -> Result<(), End> {
        self.fill_rest(&[Stop::Shutdown]).await
    }

    async fn fill_rest(&mut self, stops: &[Stop]) -> Result<(), End> {
        self.since_yield = 0;
        let count = self.receive_inside_request(None, stops).await?;
        self.staging.add_received(count);
        Ok(())
    }

    /// As [`receive`](Self::receive), for the rest of a request. The client must make progress
    /// within the limit `stall`.
    async fn receive_inside_request(
        &mut self,
        payload: Option<Payload<'_>>,
        stops: &[Stop],
    ) -> Result<usize, End> {
        self.state.peer_wait.begin(Direction::Receive);
        let count = self.receive(payload, stops).await.map_err(End::inside_request);
        self.state.peer_wait.end(Direction::Receive);
        count
    }

    /// Receives at least one byte: into the rest of a payload first, and the following bytes into
    /// the staging buffer. Ends early at one of `stops`.
    async fn receive(
        &mut self,
        payload: Option<Payload<'_>>,
        stops: &[Stop],
    ) -> Result<usize, End> {
        let Self { state, shutdown, staging, list, window, .. } = self;
        let wanted = |stop: Option<Stop>| stop.filter(|stop| stops.contains(stop));
        // The stop is checked first, so that a client that never stops sending does not delay it.
        if let Some(stop) = wanted(shutdown.get()) {
            return Err(ended_by(stop));
        }
        let is_wanted = |context: &Context<'_>| wanted(shutdown.poll(context)).is_some();
        let result = match &state.tls {
            None => {
                if let Some((buffer, filled)) = payload {
                    list.push(buffer.lend_range(filled, buffer.len() - filled));
                }
                list.push(staging.lend(*window));
                let lent = std::mem::take(list);
                let (result, lent) = state.stream.receive_until(lent, is_wanted).await;
                *list = lent;
                list.clear();
                result
            }
            Some(tls) => {
                let into = match payload {
                    Some((buffer, filled)) => &mut buffer.bytes_mut()[filled..],
                    None => staging.free_mut(*window),
                };
                let progress = || state.peer_wait.step(Direction::Receive);
                tls.read(&state.stream, into, is_wanted, progress).await
            }
        };
        match result {
            Ok(0) => Err(End::Closed),
            Ok(count) => Ok(count),
            Err(error) if is_stopped(&error) => match wanted(shutdown.get()) {
                Some(stop) => Err(ended_by(stop)),
                // The pause was cancelled meanwhile. The receive ends as if paused, and the session
                // continues.
                None => Err(End::Paused),
            },
            Err(error) => Err(error.into()),
        }
    }
}

/// The buffer of a payload, and the number of bytes that it has received.
type Payload<'a> = (&'a mut Buffer, usize);

/// The stops that end a receive by default.
const PAUSE_OR_SHUTDOWN: &[Stop] = &[Stop::Pause, Stop::Shutdown];

fn ended_by(stop: Stop) -> End {
    match stop {
        Stop::Pause => End::Paused,
        Stop::Shutdown => End::Drained,
    }
}
