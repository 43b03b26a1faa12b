//! Lanes: tasks that carry out one request after the other.
//!
//! A connection has as many as it has requests in flight; they start when they are first needed and
//! stay, so that a request costs no task and no allocation of its own.

use std::rc::Rc;

use blockhouse_core::{Buffer, Error, ErrorKind, Request, Result, Storage};
use blockhouse_engine::spawn_detached;

use super::job::{Job, Lane};
use super::link::Link;
use super::outbox::{Answer, HEAD_ROOM, Whole};
use super::status;
use crate::command::{Command, Refusal};
use crate::proto::Errno;
use crate::proto::reply::{Bare, ReplyTo, put_read_head, read_head_length};

/// How many bytes a request occupies while it is in flight.
pub fn footprint(command: &Command) -> usize {
    match command {
        Command::Read { length, .. } | Command::Write { length, .. } => *length as usize,
        Command::BlockStatus { .. } => status::LENGTH,
        _ => 0,
    }
}

/// Gives a request to a lane. The caller has entered it into the flow.
pub fn dispatch<S: Storage>(link: &Rc<Link<S>>, job: Job) {
    let idle = link.idle.borrow_mut().pop();
    let lane = idle.unwrap_or_else(|| {
        let lane = Rc::new(Lane::default());
        spawn_detached(run(Rc::clone(link), Rc::clone(&lane)));
        lane
    });
    lane.give(job);
}

async fn run<S: Storage>(link: Rc<Link<S>>, lane: Rc<Lane>) {
    while let Some(Job { to, command, payload }) = lane.next().await {
        let answer = match carry_out(&link, to, &command, payload).await {
            Ok(answer) => answer,
            Err(error) => {
                note(&link, &error);
                Answer::Failed(refusal(&error, &command))
            }
        };
        // A payload that was written is back in the pool, and what a failed request had as well.
        let kept = match &answer {
            Answer::Whole(whole) => whole.footprint,
            _ => 0,
        };
        link.flow.free(footprint(&command) - kept);
        link.idle.borrow_mut().push(Rc::clone(&lane));
        link.reply(to, answer);
    }
}

async fn carry_out<S: Storage>(
    link: &Link<S>,
    to: ReplyTo,
    command: &Command,
    payload: Option<Buffer>,
) -> Result<Answer> {
    let request = match *command {
        Command::Read { offset, length } => return read(link, to, offset, length as usize).await,
        Command::BlockStatus { range, extents } => {
            return status::describe(link, to, range, extents).await;
        }
        Command::Write { offset, durability, .. } => {
            let mut payload = payload.expect("the reader gives every write its payload");
            let from = payload.lend();
            link.disk.submit(Request::Write { offset, from, durability }).await?;
            return Ok(Answer::Done(Bare::Shortest));
        }
        Command::WriteZeroes { range, unmap, fallback, durability } => {
            Request::WriteZeroes { range, unmap, fallback, durability }
        }
        Command::Trim { range, durability } => Request::Discard { range, durability },
        Command::Flush => Request::Flush,
        Command::Cache { range } => Request::Prefetch { range },
        Command::Nothing(_) | Command::Disconnect => unreachable!("the reader deals with these"),
    };
    link.disk.submit(request).await?;
    Ok(Answer::Done(Bare::Shortest))
}

async fn read<S: Storage>(
    link: &Link<S>,
    to: ReplyTo,
    offset: u64,
    length: usize,
) -> Result<Answer> {
    let mut buffer = link.pool.get(HEAD_ROOM + length)?;
    let into = buffer.lend_range(HEAD_ROOM, length);
    link.disk.submit(Request::Read { offset, into }).await?;
    let framing = link.terms.framing;
    let start = HEAD_ROOM - read_head_length(framing);
    put_read_head(&mut buffer.bytes_mut()[start..], framing, to, length);
    Ok(Answer::Whole(Whole { buffer, start, footprint: length }))
}

/// Says in the log that the host failed, once a connection: a broken disk fails every request.
pub fn note<S: Storage>(link: &Link<S>, error: &Error) {
    match error.kind() {
        ErrorKind::InvalidInput
        | ErrorKind::PastEnd
        | ErrorKind::ReadOnly
        | ErrorKind::Unsupported => return,
        ErrorKind::NoSpace | ErrorKind::Locked | ErrorKind::Corrupt | ErrorKind::Io => {}
    }
    if link.failures.get() == 0 {
        tracing::warn!(export = link.terms.export, "a request failed: {error}");
    }
    link.failures.update(|failures| failures + 1);
}

/// What the client is told. Paths of the host are none of its business.
pub fn refusal(error: &Error, command: &Command) -> Refusal {
    let message = match error.kind() {
        ErrorKind::InvalidInput => "the request does not fit the export",
        ErrorKind::PastEnd => "the range reaches past the end of the export",
        ErrorKind::NoSpace => "the host has no space left",
        ErrorKind::ReadOnly => "the export is read-only",
        ErrorKind::Unsupported => "the disk cannot do this",
        ErrorKind::Locked => "somebody else uses the disk",
        ErrorKind::Corrupt => "the disk image is damaged",
        ErrorKind::Io => "the host failed the operation",
    };
    let errno = match Errno::from_linux(error.errno()) {
        // Reserved for this one command.
        Errno::NotSup if !matches!(command, Command::WriteZeroes { .. }) => Errno::Inval,
        errno => errno,
    };
    Refusal { errno, message }
}
