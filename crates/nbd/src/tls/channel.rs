//! One connection under TLS: handshake, and bytes in both directions.
//!
//! Guarantees: bytes are decrypted into the caller's memory, and what was decrypted and not asked for yet stays
//! here. Replies that are sent together are encrypted together, in records of 16 KiB where there is as much. The
//! reader and the writer of a session may use it by turns between any two awaits.

use std::cell::RefCell;
use std::io::{self, Write};
use std::task::Context;

use blockhouse_core::{Buffer, BufferPool, IoVectorList};
use blockhouse_engine::{Stream, yield_now};
use openssl::ssl::{ErrorCode, Ssl, SslStream};
use rustix::net::SendFlags;

use super::credentials::names_of;
use super::refusal::{self, Note, describe};
use super::{ClientIdentity, Pipe, TlsServer};

/// Bytes of replies that are encrypted and sent at once: while the kernel and the client have them, the next are
/// encrypted.
pub const SEND_LIMIT: usize = 256 << 10;

/// The most plain bytes of a TLS record (RFC 8446, 5.1).
const RECORD: usize = 16 << 10;

/// Room for as many bytes encrypted: 64 more for each record.
const OUTPUT_SIZE: usize = SEND_LIMIT + SEND_LIMIT / 256 + RECORD;

/// Why there is no TLS with a client.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    /// The client's fault, or that of what it has shown.
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
    tls: RefCell<SslStream<Pipe>>,
    /// The beginning of a record that is to become longer.
    gathered: RefCell<Vec<u8>>,
    identity: ClientIdentity,
}

impl TlsChannel {
    /// Does the handshake. The client has been told to begin, and nothing of it was received yet.
    ///
    /// # Errors
    /// Why the client is refused, in words for an operator; it was told by an alert.
    pub async fn accept(
        stream: &Stream,
        server: &TlsServer,
        pool: &BufferPool,
    ) -> Result<Self, AcceptError> {
        let library = |error: openssl::error::ErrorStack| AcceptError::Refused(error.to_string());
        let ssl = Ssl::new(&server.context()).map_err(library)?;
        let mut tls = SslStream::new(ssl, Pipe::new(pool.clone())).map_err(library)?;
        let mut note = Note::default();
        loop {
            refusal::swap(&mut note);
            let step = tls.accept();
            refusal::swap(&mut note);
            let output = tls.get_mut().take_output();
            match step {
                Ok(()) => {
                    send(stream, output).await?;
                    break;
                }
                Err(error) if error.code() == ErrorCode::WANT_READ => {
                    send(stream, output).await?;
                    let mut input = tls.get_mut().take_input()?;
                    let count = receive(stream, &mut input, |_| false).await?;
                    if count == 0 {
                        return Err(AcceptError::Closed);
                    }
                    tls.get_mut().put_input(input, count);
                    // A step is up to some milliseconds of computing: the others first.
                    yield_now().await;
                }
                Err(error) => {
                    // The alert; the client may be gone.
                    send_if_room(stream, output);
                    return Err(AcceptError::Refused(describe(&note, &error)));
                }
            }
        }
        tls.get_mut().set_output_size(OUTPUT_SIZE);
        let identity = identity_of(&tls, note);
        Ok(Self { tls: RefCell::new(tls), gathered: RefCell::default(), identity })
    }

    /// Who the client has shown to be.
    pub fn identity(&self) -> &ClientIdentity {
        &self.identity
    }

    /// Protocol and cipher, for the log.
    pub fn describe(&self) -> String {
        let tls = self.tls.borrow();
        let cipher = tls.ssl().current_cipher().map_or("no cipher", |cipher| cipher.name());
        format!("{}, {cipher}", tls.ssl().version_str())
    }

    /// Receives at least one byte, waiting for the first; 0 is the end. `is_stopped` ends the wait, as in
    /// [`Stream::receive_until`]. `progress` is called when bytes came, also where they were no whole record.
    ///
    /// # Errors
    /// The socket's; EPROTO-like ones where the client breaks TLS.
    pub async fn read(
        &self,
        stream: &Stream,
        into: &mut [u8],
        mut is_stopped: impl FnMut(&Context<'_>) -> bool,
        progress: impl Fn(),
    ) -> io::Result<usize> {
        loop {
            if let Some(count) = self.decrypt(into)? {
                return Ok(count);
            }
            let mut input = self.tls.borrow_mut().get_mut().take_input()?;
            let received = receive(stream, &mut input, &mut is_stopped).await;
            let count = *received.as_ref().unwrap_or(&0);
            self.tls.borrow_mut().get_mut().put_input(input, count);
            if received? == 0 {
                return Ok(0);
            }
            progress();
        }
    }

    /// Decrypts what was received. `None` where that is not a whole record.
    fn decrypt(&self, into: &mut [u8]) -> io::Result<Option<usize>> {
        let mut tls = self.tls.borrow_mut();
        let mut filled = 0;
        while filled < into.len() {
            match tls.ssl_read(&mut into[filled..]) {
                Ok(count) => filled += count,
                Err(_) if filled > 0 => break,
                Err(error) => match error.code() {
                    ErrorCode::WANT_READ => return Ok(None),
                    ErrorCode::ZERO_RETURN => return Ok(Some(0)),
                    _ => return Err(io::Error::other(format!("TLS: {error}"))),
                },
            }
        }
        Ok(Some(filled))
    }

    /// Encrypts bytes of a batch.
    ///
    /// # Errors
    /// ENOMEM; a connection that TLS has ended.
    pub fn encrypt(&self, mut bytes: &[u8]) -> io::Result<()> {
        let (mut tls, mut gathered) = (self.tls.borrow_mut(), self.gathered.borrow_mut());
        if !gathered.is_empty() {
            let (first, rest) = bytes.split_at(bytes.len().min(RECORD - gathered.len()));
            gathered.extend_from_slice(first);
            bytes = rest;
            if gathered.len() == RECORD {
                tls.write_all(&gathered)?;
                gathered.clear();
            }
        }
        let (whole, rest) = bytes.split_at(bytes.len() / RECORD * RECORD);
        if !whole.is_empty() {
            tls.write_all(whole)?;
        }
        gathered.extend_from_slice(rest);
        Ok(())
    }

    /// Ends a batch: all that was encrypted, to be sent in this order.
    ///
    /// # Errors
    /// As [`encrypt`](Self::encrypt).
    pub fn take_batch(&self) -> io::Result<Option<Buffer>> {
        let (mut tls, mut gathered) = (self.tls.borrow_mut(), self.gathered.borrow_mut());
        if !gathered.is_empty() {
            tls.write_all(&gathered)?;
            gathered.clear();
        }
        Ok(tls.get_mut().take_output())
    }

    /// Encrypts and sends bytes.
    ///
    /// # Errors
    /// As [`encrypt`](Self::encrypt), and the socket's.
    pub async fn send(&self, stream: &Stream, bytes: &[u8]) -> io::Result<()> {
        self.encrypt(bytes)?;
        let batch = self.take_batch()?;
        send(stream, batch).await
    }

    /// Tells the client that nothing follows, if its socket has room for that.
    pub fn close(&self, stream: &Stream) {
        let mut tls = self.tls.borrow_mut();
        // It fails where TLS has ended already.
        let _ = tls.shutdown();
        send_if_room(stream, tls.get_mut().take_output());
    }
}

fn identity_of(tls: &SslStream<Pipe>, note: Note) -> ClientIdentity {
    let certificate = tls.ssl().peer_certificate();
    let names = certificate
        .map_or_else(|| note.identity.into_iter().collect(), |certificate| names_of(&certificate));
    ClientIdentity { names }
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
        // The client may be gone, or not read.
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
