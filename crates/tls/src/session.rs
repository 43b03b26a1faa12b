//! One end of a connection under TLS: the handshake, and bytes in both directions.
//!
//! Guarantees: bytes are decrypted into the caller's memory, and what was decrypted and not asked
//! for yet stays here. Bytes that are sent together are encrypted together, in records of 16 KiB
//! where there is as much.

use std::io::{self, Write};

use blockhouse_core::{Buffer, BufferPool};
use openssl::error::ErrorStack;
use openssl::ssl::{self, ErrorCode, Ssl, SslRef, SslStream, SslVersion};

use crate::pipe::Pipe;

/// Bytes that are encrypted and sent at once: while the kernel and the other side have them, the
/// next are encrypted.
pub const SEND_LIMIT: usize = 256 << 10;

/// The most plain bytes of a TLS record (RFC 8446, 5.1).
const RECORD: usize = 16 << 10;

/// Room for as many bytes encrypted: 64 more for each record.
const OUTPUT_SIZE: usize = SEND_LIMIT + SEND_LIMIT / 256 + RECORD;

/// Bytes of answers to the other side's own messages that may wait to be sent: one is 50 bytes at
/// most.
const MAX_ANSWERS: usize = 4 << 10;

/// Why nothing more can be read from the other side.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It breaks TLS, or refuses what this side has shown.
    #[error("{0}")]
    Tls(#[from] ssl::Error),
    /// It wants to renegotiate, which is refused, again and again. Each refusal is memory until
    /// something else is sent.
    #[error("the other side asks for renegotiation again and again")]
    Renegotiation,
}

/// One end of a connection.
pub struct TlsSession {
    tls: SslStream<Pipe>,
    /// The beginning of a record that is to become longer.
    gathered: Vec<u8>,
}

impl TlsSession {
    /// One of which no byte was sent or received. `ssl` knows by its state (`set_accept_state`,
    /// `set_connect_state`) which end it is.
    ///
    /// # Errors
    /// OpenSSL's.
    pub fn new(ssl: Ssl, pool: BufferPool) -> Result<Self, ErrorStack> {
        let tls = SslStream::new(ssl, Pipe::new(pool))?;
        Ok(Self { tls, gathered: Vec::new() })
    }

    /// Goes on with the handshake as far as what was received allows: whether it is done. In any
    /// case there may be [output](Self::take_output), which belongs to the other side, also
    /// where it is an alert that tells of an error.
    ///
    /// # Errors
    /// There will be no TLS with the other side.
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

    /// OpenSSL's view of it: the other side's certificate, the protocol, the cipher.
    pub fn ssl(&self) -> &SslRef {
        self.tls.ssl()
    }

    /// Whether a pre-shared key was used, so that the other side has it, too. No session is resumed
    /// otherwise.
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

    /// Memory to receive into, where [`decrypt`](Self::decrypt) or the handshake needs more.
    ///
    /// # Errors
    /// ENOMEM.
    pub fn take_input(&mut self) -> io::Result<Buffer> {
        self.tls.get_mut().take_input()
    }

    /// Gives that memory back, with this many bytes received.
    pub fn put_input(&mut self, buffer: Buffer, count: usize) {
        self.tls.get_mut().put_input(buffer, count);
    }

    /// The bytes to send to the other side, if there are any.
    pub fn take_output(&mut self) -> Option<Buffer> {
        self.tls.get_mut().take_output()
    }

    /// Decrypts what was received: how many bytes; 0 where the other side has ended. `None` where
    /// what was received is not a whole record.
    ///
    /// The answers of OpenSSL itself are sent with the next batch, so that no record is divided.
    ///
    /// # Errors
    /// There will be nothing more to read.
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

    /// No batch is encrypted while this side reads, so all output there is are answers.
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

    /// Ends a batch: all that was encrypted, to be sent in this order.
    ///
    /// # Errors
    /// As [`encrypt`](Self::encrypt).
    pub fn take_batch(&mut self) -> io::Result<Option<Buffer>> {
        if !self.gathered.is_empty() {
            self.encrypt_gathered()?;
        }
        Ok(self.take_output())
    }

    /// Ends this side: what tells the other one so, if TLS has not ended before.
    pub fn close(&mut self) -> Option<Buffer> {
        // It fails where TLS has ended already.
        let _ = self.tls.shutdown();
        self.take_output()
    }
}
