//! The byte stream of a connection to a server: the socket's stream, or TLS over the socket.
//!
//! Guarantees: with or without TLS, a receive returns the bytes that have arrived, and a send
//! completes when all bytes are sent. Without TLS each call costs one test of an `Option`. The
//! reader and the writer of a connection share one link: no borrow of the TLS state is held across
//! an await.
//!
//! If memory of a guest vanishes, the kernel refuses it with EFAULT. Only the requests with such
//! memory may fail, so the bytes then go through memory of this process. The copy leaves the
//! vectors of lost memory not intact (`IoVector::is_intact`).

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

use blockhouse_core::{Buffer, BufferPool, IoVectorList, errno};
use blockhouse_engine::{Stream, yield_now};
use blockhouse_tls::{ReadError, SEND_LIMIT, TlsSession};

use super::refusal::Refusal;
use super::tls::ClientTls;

/// Size of the buffer for plain bytes between OpenSSL and the memory of requests: one TLS record.
/// Also the size of a copy of memory that the kernel refuses.
const PLAIN_BYTES: usize = 16 << 10;
/// Memory that a connection keeps for encrypted bytes.
const POOL_BYTES: usize = 1 << 20;

/// A connection. Clones share one connection.
#[derive(Clone)]
pub(super) struct Link {
    stream: Stream,
    tls: Option<Rc<Secured>>,
}

struct Secured {
    tls: Arc<ClientTls>,
    session: RefCell<TlsSession>,
    received: RefCell<Box<[u8]>>,
    sent: RefCell<Box<[u8]>>,
}

impl Link {
    /// A connection without TLS.
    pub(super) fn plain(stream: Stream) -> Self {
        Self { stream, tls: None }
    }

    /// Carries out the TLS handshake with a server that has accepted STARTTLS.
    ///
    /// # Errors
    /// The reason why the handshake failed.
    pub(super) async fn secured(stream: Stream, tls: &Arc<ClientTls>) -> Result<Self, Refusal> {
        let library = |error: openssl::error::ErrorStack| Refusal::from(error.to_string());
        let mut beginning = tls.begin(BufferPool::new(POOL_BYTES)).map_err(library)?;
        loop {
            let step = beginning.session.handshake();
            let sent = send(&stream, beginning.session.take_output()).await;
            if let Err(error) = &step {
                return Err(tls.refusal(beginning.fault(), error));
            }
            sent.map_err(Refusal::of_connection)?;
            if matches!(step, Ok(true)) {
                break;
            }
            let input = beginning.session.take_input().map_err(Refusal::of_connection)?;
            let (result, input) = receive(&stream, input).await;
            let count = result.map_err(Refusal::of_connection)?;
            if count == 0 {
                return Err("the server has closed the connection in the TLS handshake".into());
            }
            beginning.session.put_input(input, count);
            // A step may compute for some milliseconds, so other tasks of the loop run before it.
            yield_now().await;
        }
        tls.check(&beginning.session)?;
        let plain = || RefCell::new(vec![0; PLAIN_BYTES].into_boxed_slice());
        let session = RefCell::new(beginning.session);
        let secured = Secured { tls: Arc::clone(tls), session, received: plain(), sent: plain() };
        Ok(Self { stream, tls: Some(Rc::new(secured)) })
    }

    /// Whether the connection has TLS.
    pub(super) fn is_secured(&self) -> bool {
        self.tls.is_some()
    }

    /// Waits for the first byte, and receives the bytes that have arrived, as many as fit. 0 means
    /// that the server has ended the stream. Returns the list unchanged.
    pub(super) async fn receive(
        &self,
        mut into: IoVectorList,
    ) -> (io::Result<usize>, IoVectorList) {
        let Some(tls) = &self.tls else {
            let (result, into) = self.stream.receive(into).await;
            return if is_fault(&result) {
                self.receive_copied(into).await
            } else {
                (result, into)
            };
        };
        loop {
            match tls.decrypt(&mut into) {
                Ok(Some(count)) => return (Ok(count), into),
                Ok(None) => {}
                Err(error) => return (Err(error), into),
            }
            match self.receive_encrypted(tls).await {
                Ok(1..) => {}
                ended => return (ended, into),
            }
        }
    }

    async fn receive_encrypted(&self, tls: &Secured) -> io::Result<usize> {
        let input = tls.session.borrow_mut().take_input()?;
        let (received, input) = receive(&self.stream, input).await;
        tls.session.borrow_mut().put_input(input, *received.as_ref().unwrap_or(&0));
        received
    }

    /// Sends everything, in order. Returns the list, advanced past the bytes that were sent.
    pub(super) async fn send(&self, mut from: IoVectorList) -> (io::Result<()>, IoVectorList) {
        let Some(tls) = &self.tls else {
            let (result, from) = self.stream.send(from).await;
            return if is_fault(&result) { self.send_copied(from).await } else { (result, from) };
        };
        while !from.is_empty() {
            let sent = match tls.encrypt(&mut from) {
                Ok(batch) => send(&self.stream, batch).await,
                Err(error) => Err(error),
            };
            if sent.is_err() {
                return (sent, from);
            }
        }
        (Ok(()), from)
    }

    /// As [`receive`](Self::receive) without TLS, through a buffer.
    async fn receive_copied(&self, mut into: IoVectorList) -> (io::Result<usize>, IoVectorList) {
        let copy = Buffer::new(into.len().min(PLAIN_BYTES));
        let (result, copy) = receive(&self.stream, copy).await;
        into.copy_from(&copy.bytes()[..*result.as_ref().unwrap_or(&0)]);
        (result, into)
    }

    /// As [`send`](Self::send) without TLS, through a buffer.
    async fn send_copied(&self, mut from: IoVectorList) -> (io::Result<()>, IoVectorList) {
        while !from.is_empty() {
            let mut copy = Buffer::new(from.len().min(PLAIN_BYTES));
            from.copy_to(copy.bytes_mut());
            let count = copy.len();
            let result = send(&self.stream, Some(copy)).await;
            if result.is_err() {
                return (result, from);
            }
            from.advance(count);
        }
        (Ok(()), from)
    }

    /// Sends a few bytes as the last ones. They are lost if the server does not read, or has
    /// disconnected.
    pub(super) fn send_last(&self, bytes: &[u8]) {
        let Some(tls) = &self.tls else { return self.send_now(bytes) };
        let mut session = tls.session.borrow_mut();
        if session.encrypt(bytes).is_ok()
            && let Ok(Some(batch)) = session.take_batch()
        {
            self.send_now(batch.bytes());
        }
    }

    fn send_now(&self, bytes: &[u8]) {
        let flags = rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL;
        // The error is ignored, because the stream ends in any case.
        let _ = rustix::net::send(&self.stream, bytes, flags);
    }

    /// Shuts the connection down in both directions, so that operations in flight on it complete.
    pub(super) fn shutdown(&self) {
        if let Some(tls) = &self.tls
            && let Some(output) = tls.session.borrow_mut().close()
        {
            self.send_now(output.bytes());
        }
        self.stream.shutdown();
    }
}

impl Secured {
    /// Decrypts received bytes into the list; returns their number. `None` if no complete TLS
    /// record was received yet.
    fn decrypt(&self, into: &mut IoVectorList) -> io::Result<Option<usize>> {
        let (mut session, mut plain) = (self.session.borrow_mut(), self.received.borrow_mut());
        let room = into.len().min(plain.len());
        let decrypted = session.decrypt(&mut plain[..room]).map_err(|error| self.failed(&error))?;
        if let Some(count) = decrypted {
            into.copy_from(&plain[..count]);
        }
        Ok(decrypted)
    }

    /// Encrypts the first bytes of the list, and advances the list past them.
    fn encrypt(&self, from: &mut IoVectorList) -> io::Result<Option<Buffer>> {
        let (mut session, mut plain) = (self.session.borrow_mut(), self.sent.borrow_mut());
        let mut done = 0;
        while done < SEND_LIMIT && !from.is_empty() {
            let count = from.copy_to(&mut plain);
            session.encrypt(&plain[..count])?;
            from.advance(count);
            done += count;
        }
        session.take_batch()
    }

    fn failed(&self, error: &ReadError) -> io::Error {
        io::Error::other(match error {
            ReadError::Tls(error) => self.tls.refusal(None, error),
            ReadError::Renegotiation => error.to_string().into(),
        })
    }
}

/// Whether the kernel could not access memory of the operation.
fn is_fault<T>(result: &io::Result<T>) -> bool {
    result.as_ref().is_err_and(|error| error.raw_os_error() == Some(errno::EFAULT))
}

async fn send(stream: &Stream, output: Option<Buffer>) -> io::Result<()> {
    let Some(mut output) = output else { return Ok(()) };
    let mut list = IoVectorList::new();
    list.push(output.lend());
    stream.send(list).await.0
}

async fn receive(stream: &Stream, mut into: Buffer) -> (io::Result<usize>, Buffer) {
    let mut list = IoVectorList::new();
    list.push(into.lend());
    let (result, list) = stream.receive(list).await;
    drop(list);
    (result, into)
}
