//! One connection under TLS: handshake, and bytes in both directions.
//!
//! Guarantee: the reader and the writer of a session share one channel. No method holds its borrow
//! of the TLS state across an await.

use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::task::Context;
use std::time::{Duration, Instant};

use blockhouse_core::{Buffer, BufferPool, IoVectorList};
use blockhouse_engine::{Stream, sleep, yield_now};
use blockhouse_tls::{SEND_LIMIT, TlsSession, names_of};
use openssl::ssl::Ssl;
use rustix::net::{AddressFamily, SendFlags, sockopt};

use super::credentials::Credential;
use super::refusal::{self, Note, describe};
use super::{ClientIdentity, TlsServer, pace};

/// Why the TLS handshake with a client failed.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    /// The reason why the client, its certificate or its key is refused.
    #[error("{0}")]
    Refused(String),
    /// The client closed the connection.
    #[error("the client closed the connection during the TLS handshake")]
    Closed,
    /// The socket failed.
    #[error("the connection failed: {0}")]
    Failed(#[from] io::Error),
}

/// A connection whose TLS handshake is done.
pub struct TlsChannel {
    session: RefCell<TlsSession>,
    identity: ClientIdentity,
    credential: Arc<Credential>,
}

impl TlsChannel {
    /// Does the handshake. The client has got the reply to STARTTLS, and no byte of its handshake
    /// was received yet.
    ///
    /// # Errors
    /// The reason why the client is refused, for the operator. The client gets a TLS alert.
    pub async fn accept(
        stream: &Stream,
        server: &TlsServer,
        pool: &BufferPool,
    ) -> Result<Self, AcceptError> {
        let library = |error: openssl::error::ErrorStack| AcceptError::Refused(error.to_string());
        let secrets = server.secrets();
        let mut ssl = Ssl::new(secrets.context()).map_err(library)?;
        ssl.set_accept_state();
        let mut session = TlsSession::new(ssl, pool.clone()).map_err(library)?;
        let mut note = Note::default();
        let mut has_input = false;
        loop {
            refusal::swap(&mut note);
            let begin = Instant::now();
            let step = session.handshake();
            // Only steps with input wait. Others would make their mean duration too small.
            if has_input {
                pace::took(begin.elapsed());
            }
            refusal::swap(&mut note);
            let output = session.take_output();
            match step {
                Ok(true) => {
                    send(stream, output).await?;
                    break;
                }
                Ok(false) => {
                    send(stream, output).await?;
                    let mut input = session.take_input()?;
                    let count = receive(stream, &mut input, |_| false).await?;
                    if count == 0 {
                        return Err(AcceptError::Closed);
                    }
                    session.put_input(input, count);
                    has_input = true;
                    // A step may compute for some milliseconds, so other tasks of the loop run
                    // before it.
                    match pace::wait() {
                        Duration::ZERO => yield_now().await,
                        time => sleep(time).await,
                    }
                }
                Err(error) => {
                    // `output` is the alert; the client may have disconnected.
                    send_if_room(stream, output);
                    return Err(AcceptError::Refused(describe(&note, &error)));
                }
            }
        }
        let credential = Arc::new(secrets.credential(session.ssl(), note.identity.as_ref()));
        let identity = identity_of(&session, note);
        make_room(stream);
        Ok(Self { session: RefCell::new(session), identity, credential })
    }

    /// The credential that admitted the client.
    pub fn credential(&self) -> &Arc<Credential> {
        &self.credential
    }

    /// The client's identity.
    pub fn identity(&self) -> &ClientIdentity {
        &self.identity
    }

    /// Protocol and cipher, for the log.
    pub fn describe(&self) -> String {
        self.session.borrow().describe()
    }

    /// Waits for and receives at least one byte; 0 means the end of the stream. `is_stopped` ends
    /// the wait, as in [`Stream::receive_until`]. `progress` is called when bytes arrive, even if
    /// they are not a whole record.
    ///
    /// # Errors
    /// Errors of the socket; an error like EPROTO if the client violates TLS.
    pub async fn read(
        &self,
        stream: &Stream,
        into: &mut [u8],
        mut is_stopped: impl FnMut(&Context<'_>) -> bool,
        progress: impl Fn(),
    ) -> io::Result<usize> {
        loop {
            let decrypted = self.session.borrow_mut().decrypt(into);
            match decrypted {
                Ok(Some(count)) => return Ok(count),
                Ok(None) => {}
                Err(error) => return Err(io::Error::other(format!("TLS: {error}"))),
            }
            let mut input = self.session.borrow_mut().take_input()?;
            let received = receive(stream, &mut input, &mut is_stopped).await;
            let count = *received.as_ref().unwrap_or(&0);
            self.session.borrow_mut().put_input(input, count);
            if received? == 0 {
                return Ok(0);
            }
            progress();
        }
    }

    /// Encrypts bytes of a batch.
    ///
    /// # Errors
    /// ENOMEM; an error if TLS has ended the connection.
    pub fn encrypt(&self, bytes: &[u8]) -> io::Result<()> {
        self.session.borrow_mut().encrypt(bytes)
    }

    /// Ends a batch: all encrypted bytes, to be sent in this order.
    ///
    /// # Errors
    /// As [`encrypt`](Self::encrypt).
    pub fn take_batch(&self) -> io::Result<Option<Buffer>> {
        self.session.borrow_mut().take_batch()
    }

    /// Encrypts and sends bytes.
    ///
    /// # Errors
    /// As [`encrypt`](Self::encrypt), and errors of the socket.
    pub async fn send(&self, stream: &Stream, bytes: &[u8]) -> io::Result<()> {
        self.encrypt(bytes)?;
        let batch = self.take_batch()?;
        send(stream, batch).await
    }

    /// Sends the client the end of the stream, if its socket buffer has space for that.
    pub fn close(&self, stream: &Stream) {
        send_if_room(stream, self.session.borrow_mut().close());
    }
}

fn identity_of(session: &TlsSession, note: Note) -> ClientIdentity {
    let certificate = session.ssl().peer_certificate();
    let names = certificate
        .map_or_else(|| note.identity.into_iter().collect(), |certificate| names_of(&certificate));
    ClientIdentity { names }
}

/// Makes a Unix socket's send buffer large enough for a batch, so that the server can queue a batch
/// while the client reads the previous one. The default size is less than a batch, so both sides
/// would wait for each other. TCP grows its buffer by itself.
fn make_room(stream: &Stream) {
    if sockopt::socket_domain(stream) == Ok(AddressFamily::UNIX) {
        // The kernel doubles the value, and caps it at the host's limit.
        let _ = sockopt::set_socket_send_buffer_size(stream, SEND_LIMIT);
    }
}

async fn send(stream: &Stream, output: Option<Buffer>) -> io::Result<()> {
    let Some(mut output) = output else { return Ok(()) };
    let mut list = IoVectorList::new();
    list.push(output.lend());
    stream.send_directly(list).await.0
}

fn send_if_room(stream: &Stream, output: Option<Buffer>) {
    if let Some(output) = output {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        // An error is ignored: the client may have disconnected, or does not read.
        let _ = rustix::net::send(stream, output.bytes(), flags);
    }
}

async fn receive(
    stream: &Stream,
    into: &mut Buffer,
    is_stopped: impl FnMut(&Context<'_>) -> bool,
) -> io::Result<usize> {
    let mut list = IoVectorList::new();
    list.push(into.lend());
    stream.receive_until(list, is_stopped).await.0
}
