//! The sending task of a connection: one system call sends up to `MAX_REQUESTS` queued requests.

use std::mem::{replace, take};
use std::sync::Arc;

use blockhouse_core::{Buffer, IoVector, IoVectorList, Result};
use blockhouse_nbd_protocol::request::{EXTENDED_LENGTH, RequestHeader, kind};
use blockhouse_nbd_protocol::{CommandFlags, Framing};

use super::link::Link;
use super::transmission::Transmission;

/// Maximum number of requests that one system call sends.
const MAX_REQUESTS: usize = 64;

/// Requests that are sent together.
pub(super) struct Batch {
    requests: Vec<(RequestHeader, Option<IoVector>)>,
    /// The cookies of the requests with a payload, in the order of the list.
    payloads: Vec<u64>,
    encoded: Vec<u8>,
    headers: Buffer,
    list: IoVectorList,
}

impl Batch {
    /// An empty batch with memory for the headers of one system call.
    ///
    /// # Errors
    /// ENOMEM if memory runs out.
    pub(super) fn new() -> Result<Self> {
        let length = (MAX_REQUESTS + 1) * EXTENDED_LENGTH;
        Ok(Self {
            requests: Vec::with_capacity(MAX_REQUESTS),
            payloads: Vec::with_capacity(MAX_REQUESTS),
            encoded: Vec::with_capacity(length),
            headers: Buffer::try_new(length)?,
            list: IoVectorList::new(),
        })
    }

    /// Puts the requests into the list, each header before its payload.
    fn fill(&mut self, framing: Framing) {
        self.encoded.clear();
        for (header, _) in &self.requests {
            header.encode(framing, &mut self.encoded);
        }
        self.headers.bytes_mut()[..self.encoded.len()].copy_from_slice(&self.encoded);
        let mut rest = self.headers.lend_range(0, self.encoded.len());
        // Headers without a payload between them form one vector.
        let mut length = 0;
        for (header, payload) in self.requests.drain(..) {
            length += framing.request_length();
            if let Some(payload) = payload {
                let after = rest.split_off(replace(&mut length, 0));
                self.list.push(replace(&mut rest, after));
                self.list.push(payload);
                self.payloads.push(header.cookie);
            }
        }
        if !rest.is_empty() {
            self.list.push(rest);
        }
    }

    /// Returns the payloads to their requests.
    fn give_back(&mut self, transmission: &Transmission) {
        let mut vectors = self.list.take_vectors();
        for cookie in self.payloads.drain(..) {
            // A vector of headers precedes each payload.
            let _headers = vectors.next();
            if let Some(payload) = vectors.next() {
                transmission.give_back(cookie, payload);
            }
        }
    }
}

/// Sends requests until the stream ends. If this end closes the connection, or its loop ends, the
/// last request is `NBD_CMD_DISC`.
pub(super) async fn run(transmission: Arc<Transmission>, stream: Link, mut batch: Batch) {
    let mut end = StreamEnd { stream: &stream, framing: transmission.framing(), tells: true };
    while transmission.next_requests(&mut batch.requests, MAX_REQUESTS).await {
        end.tells = false;
        batch.fill(transmission.framing());
        let (result, sent) = stream.send(take(&mut batch.list)).await;
        batch.list = sent;
        batch.give_back(&transmission);
        if let Err(error) = result {
            transmission.link_failed(transmission.host_error(error));
        }
        end.tells = true;
    }
    end.tells = transmission.is_closing();
}

/// Shuts a stream down when the writer ends, or its loop drops the writer.
struct StreamEnd<'a> {
    stream: &'a Link,
    framing: Framing,
    /// Whether the server gets a disconnect request. Not in the middle of other requests.
    tells: bool,
}

impl Drop for StreamEnd<'_> {
    fn drop(&mut self) {
        if self.tells {
            let (flags, kind) = (CommandFlags::empty(), kind::DISC);
            let mut request = Vec::with_capacity(EXTENDED_LENGTH);
            RequestHeader { flags, kind, cookie: 0, offset: 0, length: 0 }
                .encode(self.framing, &mut request);
            self.stream.send_last(&request);
        }
        self.stream.shutdown();
    }
}
