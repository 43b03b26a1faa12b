//! The requests of one connection that wait for their replies.
//!
//! A request is *queued*, then *sent*, then *complete*. After a reconnect, all requests that are
//! not complete are queued again, with the same bytes.
//!
//! Guarantees:
//! - A request's memory is kept until the request is complete, even if its future was dropped. A
//!   future becomes ready only after the connection has stopped using the memory of its request.
//!   Exception: if the connection's loop ends, all futures become ready at once. The loop keeps a
//!   payload that is being sent until the kernel has released it.
//! - A reply to a request that was not sent over the present stream ends the connection.
//! - A server's reply can fill only the memory of the range that the request reads, and each byte
//!   once. Any other reply ends the connection with an error.
//! - A cookie is not reused until a counter of 32 bits wraps, so that a duplicate reply is
//!   detected.
//! - A request whose memory has vanished fails with EFAULT, whatever the server answers.
//! - An answered write is counted as not flushed (`UnflushedWrites`) before its future is ready.
//! - A request that ends each stream is not sent again without a limit ([`MAX_ENDED_STREAMS`]).

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Waker;

use blockhouse_core::{Error, IoVector, Result};
use blockhouse_nbd_protocol::StatusFlags;
use blockhouse_nbd_protocol::request::RequestHeader;
use slab::Slab;

use super::parts::Parts;
use super::unflushed::{FlushMark, UnflushedWrites};
use crate::detached::DetachedSyncs;

/// How many streams may end while a request is the oldest one in flight, although they answered
/// other requests. After that it is sent alone, because the server may end each stream at it, or at
/// a younger one. If that stream ends, too, it fails. Other streams without an answer do not count:
/// the reconnect time limits them.
pub(super) const MAX_ENDED_STREAMS: u32 = 8;

/// The server's status of the first blocks of a range: the number of bytes that have the status,
/// and its flags.
pub(super) type BlockStatus = (u64, StatusFlags);

/// The payload of a request, or the memory for the payload of its reply.
pub(super) enum Body {
    /// No payload; the reply has only success or an error.
    None,
    /// As `None`, for a flush that covers the writes up to this mark.
    Flush(FlushMark),
    /// The bytes to write.
    Payload(IoVector),
    /// The memory for the data of a read.
    Data(Parts),
    /// The reply has the status of the first blocks.
    Status,
    /// A payload that is being sent.
    BeingSent,
}

/// A request whose outcome was not returned yet.
struct Slot {
    header: RequestHeader,
    /// Whether the request was taken out of the queue for the present stream.
    is_sent: bool,
    /// How many streams that answered other requests have ended while this was the oldest one.
    ended_streams: u32,
    /// Whether the request makes data durable: a flush, or a request with FUA.
    is_sync: bool,
    body: Body,
    status: Option<BlockStatus>,
    error: Option<Error>,
    outcome: Option<Result<Option<BlockStatus>>>,
    waker: Option<Waker>,
    is_detached: bool,
}

/// All requests of a connection whose outcome was not returned yet.
pub(super) struct Pending {
    slots: Slab<Slot>,
    /// The cookies of the requests that were not sent.
    queue: VecDeque<u64>,
    unflushed: Arc<UnflushedWrites>,
    /// The upper half of the last cookie.
    generation: u32,
    /// Whether a request was completed since the last [`queue_again`](Self::queue_again).
    has_answered: bool,
    /// The cookie of a request that has ended [`MAX_ENDED_STREAMS`] streams. No other request is
    /// sent before its reply.
    suspect: Option<u64>,
}

/// A reply that the protocol does not allow. It ends the connection.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Violation(pub(super) &'static str);

fn find(slots: &mut Slab<Slot>, cookie: u64) -> Result<&mut Slot, Violation> {
    let slot = slots.get_mut(key(cookie));
    slot.filter(|slot| slot.header.cookie == cookie && slot.is_sent && slot.outcome.is_none())
        .ok_or(Violation("a reply to no request"))
}

fn key(cookie: u64) -> usize {
    (cookie & 0xffff_ffff) as usize
}

impl Pending {
    /// A connection without requests. Answered writes are counted in `unflushed`.
    pub(super) fn new(unflushed: Arc<UnflushedWrites>) -> Self {
        let (slots, queue) = (Slab::new(), VecDeque::new());
        Self { slots, queue, unflushed, generation: 0, has_answered: false, suspect: None }
    }

    /// Whether requests wait, and none was completed since the last
    /// [`queue_again`](Self::queue_again).
    pub(super) fn is_stuck(&self) -> bool {
        !self.has_answered && !self.slots.is_empty()
    }

    /// Queues a request; `is_sync` says whether it makes data durable. Returns the request's
    /// cookie.
    pub(super) fn insert(&mut self, mut header: RequestHeader, body: Body, is_sync: bool) -> u64 {
        self.generation = self.generation.wrapping_add(1);
        let entry = self.slots.vacant_entry();
        let cookie = u64::from(self.generation) << 32 | entry.key() as u64;
        header.cookie = cookie;
        let (status, error, outcome, waker) = (None, None, None, None);
        entry.insert(Slot {
            header,
            is_sent: false,
            ended_streams: 0,
            is_sync,
            body,
            status,
            error,
            outcome,
            waker,
            is_detached: false,
        });
        self.queue.push_back(cookie);
        cookie
    }

    /// Takes the next request to send, with its payload. The caller returns the payload with
    /// [`give_back`](Self::give_back).
    pub(super) fn next_queued(&mut self) -> Option<(RequestHeader, Option<IoVector>)> {
        if self.is_held_back() {
            return None;
        }
        let slot = &mut self.slots[key(self.queue.pop_front()?)];
        slot.is_sent = true;
        let payload = match std::mem::replace(&mut slot.body, Body::None) {
            Body::Payload(payload) => {
                slot.body = Body::BeingSent;
                Some(payload)
            }
            other => {
                slot.body = other;
                None
            }
        };
        Some((slot.header, payload))
    }

    /// Whether no request waits to be sent.
    pub(super) fn is_queue_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether the next request waits for the reply to another one, which is sent alone.
    pub(super) fn is_held_back(&self) -> bool {
        self.suspect.is_some_and(|suspect| self.queue.front() != Some(&suspect))
    }

    /// Gives a payload back after it was sent, or after sending has failed. Returns the task to
    /// wake if the request is complete, since the reply may have arrived before the payload came
    /// back.
    pub(super) fn give_back(
        &mut self,
        cookie: u64,
        payload: IoVector,
        detached: &DetachedSyncs,
    ) -> Option<Waker> {
        let slot = &mut self.slots[key(cookie)];
        let lost = payload.check_intact().err();
        match slot.outcome {
            None => {
                slot.body = Body::Payload(payload);
                slot.error = slot.error.take().or(lost);
                None
            }
            Some(_) => {
                drop(payload);
                slot.body = Body::None;
                if let Some(error) = lost {
                    slot.outcome = Some(Err(error));
                }
                self.publish(cookie, detached)
            }
        }
    }

    fn find(&mut self, cookie: u64) -> Result<&mut Slot, Violation> {
        find(&mut self.slots, cookie)
    }

    /// Takes the memory for the data of `range`, or with `None` the memory of the whole read. Also
    /// returns the offset of the memory's first byte. The caller returns the memory with
    /// [`return_memory`](Self::return_memory).
    pub(super) fn take_memory(
        &mut self,
        cookie: u64,
        range: Option<(u64, usize)>,
    ) -> Result<(u64, IoVector), Violation> {
        match (&mut self.find(cookie)?.body, range) {
            (Body::Data(parts), None) => {
                parts.take_all().ok_or(Violation("a simple reply after chunks"))
            }
            (Body::Data(parts), Some((offset, length))) => {
                let memory = parts.take(offset, length);
                Ok((offset, memory.ok_or(Violation("data that was not asked for"))?))
            }
            _ => Err(Violation("data for a request that is no read")),
        }
    }

    /// Gives memory of a read back, with its data or without.
    pub(super) fn return_memory(&mut self, cookie: u64, offset: u64, memory: IoVector) {
        if let Ok(Slot { body: Body::Data(parts), error, .. }) = self.find(cookie) {
            *error = error.take().or(memory.check_intact().err());
            parts.give_back(offset, memory);
        }
    }

    /// Whether data follows a successful simple reply to this request.
    pub(super) fn is_read(&mut self, cookie: u64) -> Result<bool, Violation> {
        Ok(matches!(self.find(cookie)?.body, Body::Data(_)))
    }

    /// Records the first status that the server sends.
    pub(super) fn set_status(&mut self, cookie: u64, status: BlockStatus) -> Result<(), Violation> {
        let slot = self.find(cookie)?;
        match slot.body {
            Body::Status => slot.status.get_or_insert(status),
            _ => return Err(Violation("block status for a request that did not ask for it")),
        };
        Ok(())
    }

    /// Records an error. Only the first error of a request is kept.
    pub(super) fn set_error(&mut self, cookie: u64, error: Error) -> Result<(), Violation> {
        self.find(cookie)?.error.get_or_insert(error);
        Ok(())
    }

    /// Completes a request whose reply has been received. Returns the task to wake, if any.
    pub(super) fn complete(
        &mut self,
        cookie: u64,
        detached: &DetachedSyncs,
    ) -> Result<Option<Waker>, Violation> {
        let slot = find(&mut self.slots, cookie)?;
        slot.outcome = Some(match (slot.error.take(), &slot.body) {
            (Some(error), _) => Err(error),
            (None, Body::Data(parts)) if !parts.is_complete() => {
                return Err(Violation("a reply that ends before all data has come"));
            }
            (None, _) => Ok(slot.status),
        });
        match (&slot.outcome, &slot.body) {
            (Some(Ok(_)), Body::Flush(mark)) => self.unflushed.flushed(*mark),
            (Some(Ok(_)), _) => self.unflushed.answered(&slot.header),
            _ => {}
        }
        self.has_answered = true;
        self.suspect.take_if(|suspect| *suspect == cookie);
        Ok(self.publish(cookie, detached))
    }

    /// Makes the outcome visible to the future, and returns the task to wake. While the payload is
    /// being sent, leaves both to [`give_back`](Self::give_back).
    fn publish(&mut self, cookie: u64, detached: &DetachedSyncs) -> Option<Waker> {
        let slot = &mut self.slots[key(cookie)];
        if matches!(slot.body, Body::BeingSent) {
            return None;
        }
        slot.body = Body::None;
        if !slot.is_detached {
            return slot.waker.take();
        }
        let slot = self.slots.remove(key(cookie));
        if slot.is_sync {
            detached.complete(slot.outcome.and_then(Result::err));
        }
        None
    }

    /// Queues all requests with incomplete replies again, the oldest first. No request may be in
    /// the middle of being sent, and no reply in the middle of being received.
    pub(super) fn queue_again(&mut self) {
        let open = self.slots.iter().filter(|(_, slot)| slot.outcome.is_none());
        let mut again: Vec<_> = open.map(|(_, slot)| slot.header.cookie).collect();
        // Sorted by age: the distance between the cookie's generation and the last one. The
        // distance is right even after the counter has wrapped.
        let last = self.generation;
        again.sort_by_key(|cookie| std::cmp::Reverse(last.wrapping_sub((cookie >> 32) as u32)));
        let suspect = self.suspect.take();
        if let Some(&oldest) = again.first() {
            let slot = &mut self.slots[key(oldest)];
            let counts = slot.is_sent && (self.has_answered || suspect == Some(oldest));
            slot.ended_streams += u32::from(counts);
            self.suspect = (slot.ended_streams == MAX_ENDED_STREAMS).then_some(oldest);
        }
        for cookie in &again {
            let slot = &mut self.slots[key(*cookie)];
            (slot.is_sent, slot.status, slot.error) = (false, None, None);
            if let Body::Data(parts) = &mut slot.body {
                parts.forget_data();
            }
        }
        self.queue = again.into();
        self.has_answered = false;
    }

    /// Fails the first queued request with an `error` of its header if it has ended
    /// [`MAX_ENDED_STREAMS`] streams, and one over which it was sent alone. Returns the task to
    /// wake.
    pub(super) fn fail_suspect(
        &mut self,
        error: impl FnOnce(&RequestHeader) -> Error,
        detached: &DetachedSyncs,
    ) -> Option<Waker> {
        let cookie = *self.queue.front()?;
        let slot = &mut self.slots[key(cookie)];
        if slot.ended_streams <= MAX_ENDED_STREAMS {
            return None;
        }
        self.queue.pop_front();
        slot.outcome = Some(Err(error(&slot.header)));
        self.publish(cookie, detached)
    }

    /// Ends all requests with an error. Returns the tasks to wake. No payload comes back after
    /// this: the writer has ended, or its loop has, which frees the payloads when the kernel has
    /// released them.
    pub(super) fn fail_all(&mut self, error: &Error, detached: &DetachedSyncs) -> Vec<Waker> {
        self.queue.clear();
        self.suspect = None;
        let is_open = |slot: &Slot| slot.outcome.is_none() || matches!(slot.body, Body::BeingSent);
        let open = |(_, slot): (usize, &Slot)| is_open(slot).then_some(slot.header.cookie);
        let cookies: Vec<_> = self.slots.iter().filter_map(open).collect();
        let fail = |cookie| {
            let slot = &mut self.slots[key(cookie)];
            slot.body = Body::None;
            slot.outcome.get_or_insert_with(|| Err(error.duplicate()));
            self.publish(cookie, detached)
        };
        cookies.into_iter().filter_map(fail).collect()
    }

    /// The outcome of a request, returned once. While there is no outcome, `waker` is stored.
    pub(super) fn poll(
        &mut self,
        cookie: u64,
        waker: &Waker,
    ) -> Option<Result<Option<BlockStatus>>> {
        let slot = &mut self.slots[key(cookie)];
        if slot.outcome.is_some() && !matches!(slot.body, Body::BeingSent) {
            return self.slots.remove(key(cookie)).outcome;
        }
        if slot.waker.as_ref().is_none_or(|known| !known.will_wake(waker)) {
            slot.waker = Some(waker.clone());
        }
        None
    }

    /// Records that the future of a request was dropped before it was ready.
    pub(super) fn detach(&mut self, cookie: u64, detached: &DetachedSyncs) {
        let slot = &mut self.slots[key(cookie)];
        if slot.is_sync {
            detached.detach();
        }
        (slot.is_detached, slot.waker) = (true, None);
        if slot.outcome.is_some() {
            self.publish(cookie, detached);
        }
    }
}

#[cfg(test)]
mod tests {
    use blockhouse_core::{Buffer, ErrorKind};
    use blockhouse_nbd_protocol::CommandFlags;
    use blockhouse_nbd_protocol::request::kind;

    use super::*;

    fn pending() -> (Pending, DetachedSyncs) {
        let unflushed = Arc::new(UnflushedWrites::new("export", true));
        (Pending::new(unflushed), DetachedSyncs::default())
    }

    fn insert_write(pending: &mut Pending) -> u64 {
        let (flags, kind) = (CommandFlags::empty(), kind::WRITE);
        let header = RequestHeader { flags, kind, cookie: 0, offset: 0, length: 512 };
        pending.insert(header, Body::Payload(Buffer::new(512).lend()), false)
    }

    #[test]
    fn a_payload_that_never_comes_back_keeps_no_request() {
        let (mut pending, detached) = pending();
        let [answered, sent] = [0, 1].map(|_| insert_write(&mut pending));
        let _payloads = [0, 1].map(|_| pending.next_queued().unwrap());
        pending.complete(answered, &detached).unwrap();
        for cookie in [answered, sent] {
            assert!(pending.poll(cookie, Waker::noop()).is_none());
        }
        // The loop of the connection ends in the middle of the send.
        let error = Error::new(ErrorKind::Io, "the loop has ended");
        assert_eq!(pending.fail_all(&error, &detached).len(), 2);
        assert!(pending.poll(answered, Waker::noop()).unwrap().is_ok());
        assert!(pending.poll(sent, Waker::noop()).unwrap().is_err());
    }

    #[test]
    fn the_oldest_request_fails_after_the_stream_that_it_ends_alone() {
        let (mut pending, detached) = pending();
        let [oldest, other] = [0, 1].map(|_| insert_write(&mut pending));
        let send_all = |pending: &mut Pending| {
            while let Some((header, payload)) = pending.next_queued() {
                pending.give_back(header.cookie, payload.unwrap(), &detached);
            }
        };
        let fail = |pending: &mut Pending| {
            let error = |_: &RequestHeader| Error::new(ErrorKind::Io, "it ends streams");
            pending.fail_suspect(error, &detached).is_some()
        };
        let is_failed = |pending: &mut Pending, cookie| {
            pending.poll(cookie, Waker::noop()).map(|outcome| outcome.is_err())
        };
        for _ in 0..MAX_ENDED_STREAMS {
            assert_eq!(is_failed(&mut pending, oldest), None);
            assert!(!fail(&mut pending));
            // A stream that answers nothing does not count.
            send_all(&mut pending);
            pending.queue_again();
            let answered = insert_write(&mut pending);
            send_all(&mut pending);
            pending.complete(answered, &detached).unwrap();
            assert_eq!(is_failed(&mut pending, answered), Some(false));
            pending.queue_again();
        }
        assert!(!fail(&mut pending));
        pending.next_queued().and_then(|(header, payload)| {
            pending.give_back(header.cookie, payload.unwrap(), &detached)
        });
        assert!(pending.next_queued().is_none(), "it is sent alone");
        pending.queue_again();
        assert!(fail(&mut pending), "its task is woken");
        assert_eq!(is_failed(&mut pending, oldest), Some(true));
        assert!(!fail(&mut pending));
        send_all(&mut pending);
        pending.complete(other, &detached).unwrap();
        assert_eq!(is_failed(&mut pending, other), Some(false));
    }

    #[test]
    fn a_reply_to_a_request_that_was_not_sent_is_a_violation() {
        let (mut pending, detached) = pending();
        let cookie = insert_write(&mut pending);
        assert!(pending.complete(cookie, &detached).is_err());
        let (_, payload) = pending.next_queued().unwrap();
        pending.give_back(cookie, payload.unwrap(), &detached);
        // The server of the next stream cannot have received it either.
        pending.queue_again();
        assert!(pending.set_error(cookie, Error::new(ErrorKind::Io, "early")).is_err());
        assert!(pending.complete(cookie, &detached).is_err());
        let (_, payload) = pending.next_queued().unwrap();
        pending.give_back(cookie, payload.unwrap(), &detached);
        pending.complete(cookie, &detached).unwrap();
        assert!(pending.poll(cookie, Waker::noop()).unwrap().is_ok());
    }
}
