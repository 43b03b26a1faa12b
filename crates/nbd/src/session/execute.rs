//! The work of a handler: it executes requests on the disk and replies to them.

use std::rc::Rc;

use blockhouse_core::{Buffer, ByteRange, Error, ErrorKind, Request, Result, Storage};
use blockhouse_disk::{Access, ExportKind, Operation};
use blockhouse_engine::{Pages, spawn_detached};

use super::block_status;
use super::failure::request_error;
use super::handler::{Handler, Job};
use super::reply_queue::{DataReply, HEAD_ROOM, Reply};
use super::state::SessionState;
use crate::command::{Command, ReqOne};
use crate::handshake::MetaContext;
use crate::proto::reply::{ReplyTo, SuccessForm, encode_read_head, read_head_length};
use crate::status_payload::SelectedStatus;

/// The shortest read that is sent from the page cache without a copy. For a shorter read the system
/// calls take more time than the copy.
const MIN_PAGES: usize = 64 << 10;

/// How many bytes of memory a request occupies while it is in flight.
pub fn footprint(command: &Command) -> usize {
    match command {
        Command::Read { length, .. } | Command::Write { length, .. } => *length as usize,
        Command::BlockStatus { .. } | Command::SelectedStatus { .. } => block_status::REPLY_BYTES,
        _ => 0,
    }
}

/// Gives a request to an idle handler, or to a new one.
pub fn dispatch<S: Storage>(state: &Rc<SessionState<S>>, job: Job) {
    let handler = state.idle_handlers.pop().unwrap_or_else(|| {
        let handler = Rc::new(Handler::default());
        spawn_detached(run(Rc::clone(state), Rc::clone(&handler)));
        handler
    });
    handler.give(job);
}

/// Executes requests until the connection ends.
async fn run<S: Storage>(state: Rc<SessionState<S>>, handler: Rc<Handler>) {
    while let Some(Job { permit, to, command, payload }) = handler.next().await {
        let reply = match execute(&state, to, &command, payload).await {
            Ok(reply) => reply,
            Err(error) => {
                state.failures.note(&state.options.export, &error);
                Reply::Error(request_error(&error, &command))
            }
        };
        state.idle_handlers.push(Rc::clone(&handler));
        state.replies.push(permit, to, reply);
    }
}

async fn execute<S: Storage>(
    state: &SessionState<S>,
    to: ReplyTo,
    command: &Command,
    payload: Option<Buffer>,
) -> Result<Reply> {
    if state.access == Access::ReadOnly && command.is_change() {
        let what = "a change by way of an export that is read-only";
        return Err(Error::new(ErrorKind::ReadOnly, what));
    }
    let request = match *command {
        Command::Read { offset, length } => return read(state, to, offset, length as usize).await,
        Command::BlockStatus { range, req_one } => {
            return status(state, to, range, req_one, state.options.contexts.iter()).await;
        }
        Command::SelectedStatus { offset, req_one, .. } => {
            let payload = payload.ok_or_else(|| unexpected(command))?;
            let contexts = &state.options.contexts;
            let selected = match SelectedStatus::parse(payload.bytes(), offset, contexts) {
                Ok(selected) => selected,
                Err(error) => return Ok(Reply::Error(error)),
            };
            return status(state, to, selected.range, req_one, selected.contexts.into_iter()).await;
        }
        Command::Write { offset, durability, .. } => {
            let mut payload = payload.ok_or_else(|| unexpected(command))?;
            let from = payload.lend();
            let write = Request::Write { offset, from, durability };
            state.disk.submit_from(ExportKind::Nbd, write).await?;
            return Ok(Reply::Success(SuccessForm::Shortest));
        }
        Command::WriteZeroes { range, unmap, fallback, durability } => {
            Request::WriteZeroes { range, unmap, fallback, durability }
        }
        Command::Trim { range, durability } => Request::Discard { range, durability },
        Command::Flush => Request::Flush,
        Command::Cache { range } => Request::Prefetch { range },
        Command::Empty(_) | Command::Disconnect => return Err(unexpected(command)),
    };
    state.disk.submit_from(ExportKind::Nbd, request).await?;
    Ok(Reply::Success(SuccessForm::Shortest))
}

/// The error for a command that the reader handles itself, so that a handler does not get it.
fn unexpected(command: &Command) -> Error {
    Error::new(ErrorKind::InvalidInput, format!("a command that has no reply here: {command:?}"))
}

/// Describes a range in some of the contexts that were negotiated.
async fn status<'a, S: Storage>(
    state: &SessionState<S>,
    to: ReplyTo,
    range: ByteRange,
    req_one: ReqOne,
    contexts: impl ExactSizeIterator<Item = &'a (u32, MetaContext)>,
) -> Result<Reply> {
    let (operation, bytes) = (Operation::BlockStatus, range.length());
    let timer = state.disk.stats().measure(ExportKind::Nbd, operation, bytes);
    let reply = block_status::describe(state, to, range, req_one, contexts).await;
    timer.end(&reply);
    reply
}

async fn read<S: Storage>(
    state: &SessionState<S>,
    to: ReplyTo,
    offset: u64,
    length: usize,
) -> Result<Reply> {
    let framing = state.options.framing;
    let head = read_head_length(framing);
    if let Some(pages) = cached_pages(state, offset, length) {
        let mut buffer = state.pool.get(head)?;
        encode_read_head(buffer.bytes_mut(), framing, to, length);
        return Ok(Reply::Data(DataReply::of_pages(buffer, pages)));
    }
    let mut buffer = state.pool.get(HEAD_ROOM + length)?;
    let into = buffer.lend_range(HEAD_ROOM, length);
    state.disk.submit_from(ExportKind::Nbd, Request::Read { offset, into }).await?;
    let start = HEAD_ROOM - head;
    encode_read_head(&mut buffer.bytes_mut()[start..], framing, to, length);
    Ok(Reply::Data(DataReply::new(buffer, start)))
}

/// The data of a read, if it is in the page cache and can be sent from there. Then no other read is
/// needed.
fn cached_pages<S: Storage>(state: &SessionState<S>, offset: u64, length: usize) -> Option<Pages> {
    if length < MIN_PAGES || state.tls.is_some() {
        return None;
    }
    let range = ByteRange::new(offset, length as u64)?;
    let file = state.disk.cached_file(range)?;
    let pipe = state.pipes.take(length)?;
    let timer = state.disk.stats().measure(ExportKind::Nbd, Operation::Read, length as u64);
    let pages = pipe.fill(file, range)?;
    timer.end(&Ok(()));
    Some(pages)
}
