//! One end of a connection under TLS: the handshake, and bytes in both directions.
//!
//! Guarantees: bytes are decrypted into the caller's memory; decrypted bytes that do not fit stay
//! here for the next call. Bytes of a batch are encrypted together, in records of 16 KiB; only the
//! last record may be shorter.

use std::io::{self, Write};

use blockhouse_core::{Buffer, BufferPool};
use openssl::error::ErrorStack;
use openssl::ssl::{self, ErrorCode, Ssl, SslRef, SslStream, SslVersion};

use crate::pipe::Pipe;

/// Maximum bytes that are encrypted and sent at once. The next bytes are encrypted while the kernel
/// and the other side process these.
pub const SEND_LIMIT: usize = 256 << 10;

/// The most plain bytes of a TLS record (RFC 8446, 5.1).
const RECORD: usize = 16 << 10;

/// Size of the output for [`SEND_LIMIT`] bytes, encrypted: 64 more for each record, and room for
/// one more record.
const OUTPUT_SIZE: usize = SEND_LIMIT + SEND_LIMIT / 256 + RECORD;

/// Maximum bytes of OpenSSL's own answers to the other side that may wait to be sent; one answer is
/// 50 bytes at most.
const MAX_ANSWERS: usize = 4 << 10;

/// Why nothing more can be read from the other side.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The other side violates TLS, or rejects the credentials of this side.
    #[error("{0}")]
    Tls(#[from] ssl::Error),
    /// The other side has requested renegotiation too often. Each request is refused, and each
    /// refusal takes memory until something else is sent.
    #[error("the other side asks for renegotiation again and again")]
    Renegotiation,
}

/// One end of a connection.
pub struct TlsSession {
    tls: SslStream<Pipe>,
    /// Plain bytes of a record that is not full yet.
    gathered: Vec<u8>,
}

impl TlsSession {
    /// A connection of which no byte was sent or received. The state of `ssl` (`set_accept_state`,
    /// `set_connect_state`) decides which end this is.
    ///
    /// # Errors
    /// OpenSSL's.
    pub fn new(ssl: Ssl, pool: BufferPool) -> Result<Self, ErrorStack> {
        let tls = SslStream::new(ssl, Pipe::new(pool))?;
        Ok(Self { tls, gathered: Vec::new() })
    }

    /// Continues the handshake as far as the received bytes allow; returns whether it is done. In
    /// any case, also after an error (an alert), there may be [output](Self::take_output) to send.
    ///
    /// # Errors
    /// The handshake has failed for good.
    pub fn handshake(&mut self) -> Result<bool, ssl::Error> {
        match self.tls.do_handshake() {
            Ok(()) => {
                self.tls.get_mut().set_output_size(OUTPUT_SIZE);
                Ok(true)
            }
            Err(error) if error.code() == ErrorCode::WANT_READ => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// OpenSSL's object of the connection: the other side's certificate, the protocol, the cipher.
    pub fn ssl(&self) -> &SslRef {
        self.tls.ssl()
    }

    /// Whether a pre-shared key was used, which proves that the other side has it too. In TLS 1.3,
    /// OpenSSL reports this as a resumed session; no session is resumed otherwise.
    pub fn is_by_key(&self) -> bool {
        let ssl = self.ssl();
        match ssl.version2() {
            Some(SslVersion::TLS1_3) => ssl.session_reused(),
            _ => ssl.current_cipher().is_some_and(|cipher| cipher.name().contains("PSK")),
        }
    }

    /// Protocol and cipher, for people.
    pub fn describe(&self) -> String {
        let cipher = self.ssl().current_cipher().map_or("no cipher", |cipher| cipher.name());
        format!("{}, {cipher}", self.ssl().version_str())
    }

    /// Memory to receive into, when [`decrypt`](Self::decrypt) or the handshake needs more bytes.
    ///
    /// # Errors
    /// ENOMEM.
    pub fn take_input(&mut self) -> io::Result<Buffer> {
        self.tls.get_mut().take_input()
    }

    /// Gives the memory of [`take_input`](Self::take_input) back, with this many bytes received.
    pub fn put_input(&mut self, buffer: Buffer, count: usize) {
        self.tls.get_mut().put_input(buffer, count);
    }

    /// The bytes to send to the other side, if there are any.
    pub fn take_output(&mut self) -> Option<Buffer> {
        self.tls.get_mut().take_output()
    }

    /// Decrypts received bytes. Returns their number, 0 if the other side has ended the stream, and
    /// `None` if no whole record was received.
    ///
    /// OpenSSL's own answers are sent with the next batch, so that no record is divided.
    ///
    /// # Errors
    /// Nothing more can be read.
    pub fn decrypt(&mut self, into: &mut [u8]) -> Result<Option<usize>, ReadError> {
        let mut filled = 0;
        while filled < into.len() {
            match self.tls.ssl_read(&mut into[filled..]) {
                Ok(count) => filled += count,
                Err(_) if filled > 0 => break,
                Err(error) => match error.code() {
                    ErrorCode::WANT_READ => return self.check_answers().map(|()| None),
                    ErrorCode::ZERO_RETURN => return Ok(Some(0)),
                    _ => return Err(error.into()),
                },
            }
        }
        self.check_answers().map(|()| Some(filled))
    }

    /// Fails if more than [`MAX_ANSWERS`] bytes of answers wait. No batch is encrypted while this
    /// side reads, so all output consists of OpenSSL's answers.
    fn check_answers(&self) -> Result<(), ReadError> {
        if self.tls.get_ref().output_len() > MAX_ANSWERS {
            Err(ReadError::Renegotiation)
        } else {
            Ok(())
        }
    }

    /// Encrypts bytes of a batch.
    ///
    /// # Errors
    /// ENOMEM; a connection that TLS has ended.
    pub fn encrypt(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        if !self.gathered.is_empty() {
            let (first, rest) = bytes.split_at(bytes.len().min(RECORD - self.gathered.len()));
            self.gathered.extend_from_slice(first);
            bytes = rest;
            if self.gathered.len() == RECORD {
                self.encrypt_gathered()?;
            }
        }
        let (whole, rest) = bytes.split_at(bytes.len() / RECORD * RECORD);
        if !whole.is_empty() {
            self.tls.write_all(whole)?;
        }
        self.gathered.extend_from_slice(rest);
        Ok(())
    }

    fn encrypt_gathered(&mut self) -> io::Result<()> {
        self.tls.write_all(&self.gathered)?;
        self.gathered.clear();
        Ok(())
    }

    /// Ends a batch. Returns its encrypted bytes; batches must be sent in their order.
    ///
    /// # Errors
    /// As [`encrypt`](Self::encrypt).
    pub fn take_batch(&mut self) -> io::Result<Option<Buffer>> {
        if !self.gathered.is_empty() {
            self.encrypt_gathered()?;
        }
        Ok(self.take_output())
    }

    /// Ends the stream of this side. Returns the notification for the other side, if TLS has not
    /// ended before.
    pub fn close(&mut self) -> Option<Buffer> {
        // `shutdown` fails if TLS has ended already.
        let _ = self.tls.shutdown();
        self.take_output()
    }
}
