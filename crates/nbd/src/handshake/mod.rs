//! The handshake as a state machine. Its input is the client's bytes; its output is the bytes to
//! send and a decision.
//!
//! Fixed newstyle only ("Fixed newstyle negotiation"). Guarantees, for any input: memory stays
//! below [`MAX_OPTION`] plus one feed, and [`OUTPUT_PAUSE`] plus the replies to one option. An
//! option that is unknown, malformed or longer than [`MAX_OPTION`] gets an error reply, and the
//! next option is read. The connection ends only for errors that have no reply in the protocol, and
//! at the limits [`MAX_SKIP`] and [`MAX_OPTIONS`]. The state machine does no I/O, and finds exports
//! through an [`ExportLookup`].

mod negotiation;
mod negotiator;
mod option_reply;
mod parse;

pub use negotiation::{
    ExportInfo, ExportLookup, HandshakeError, MAX_OPTIONS, MetaContext, NegotiatedOptions, TlsState,
};
use negotiator::{Answer, Decision, Negotiator, Padding};

use crate::proto::option::{
    ClientOption, FIXED_NEWSTYLE, INIT_MAGIC, NO_ZEROES, OPTION_HEADER_LENGTH, OPTION_MAGIC,
};

/// Option data of up to this many bytes is parsed; longer data is skipped.
pub const MAX_OPTION: u32 = 64 << 10;
/// Option data of more than this many bytes is not skipped: the connection ends.
pub const MAX_SKIP: u32 = 32 << 20;
/// If this many bytes wait to be sent, no further option is answered before they are sent.
pub const OUTPUT_PAUSE: usize = 16 << 10;

/// The next step of the caller after a feed. Before each step, the caller sends the output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Receive more bytes and feed them.
    More,
    /// Send the output, then call `feed` without bytes, because there are more replies.
    Again,
    /// The transmission phase starts; bytes received early are in [`Handshake::into_rest`].
    Transmit(NegotiatedOptions),
    /// Send the output and do the TLS handshake, then call [`Handshake::tls_started`]. No byte that
    /// was received before belongs to the TLS handshake.
    StartTls,
    /// Close the connection.
    Close(HandshakeError),
}

/// The state of a handshake.
enum State {
    /// The 32 client flags.
    Flags,
    /// An option header.
    Header,
    /// The data of an option.
    Data { option: ClientOption, number: u32, length: usize },
    /// The data of an option that is skipped.
    Skip { number: u32, left: u32 },
    /// Nothing: the handshake is decided.
    Over,
}

/// One client's handshake.
pub struct Handshake {
    state: State,
    /// Bytes that were received and not parsed yet.
    pending: Vec<u8>,
    /// The number of options so far.
    options: u32,
    negotiator: Negotiator,
}

impl Default for Handshake {
    fn default() -> Self {
        Self::new()
    }
}

impl Handshake {
    /// A handshake without TLS at its start. The [`greeting`](Self::greeting) is sent first.
    pub fn new() -> Self {
        Self::with_tls(TlsState::Off)
    }

    /// A handshake at its start, at a socket with TLS or without.
    pub fn with_tls(tls: TlsState) -> Self {
        let (pending, negotiator) = (Vec::new(), Negotiator::new(tls));
        Self { state: State::Flags, pending, options: 0, negotiator }
    }

    /// The bytes that a server sends first.
    pub fn greeting() -> [u8; 18] {
        let mut bytes = [0; 18];
        bytes[..8].copy_from_slice(&INIT_MAGIC.to_be_bytes());
        bytes[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        bytes[16..].copy_from_slice(&(FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
        bytes
    }

    /// Processes the client's bytes, and appends the replies to `output`.
    pub fn feed(
        &mut self,
        input: &[u8],
        exports: &dyn ExportLookup,
        output: &mut Vec<u8>,
    ) -> Progress {
        self.pending.extend_from_slice(input);
        let mut used = 0;
        let progress = loop {
            if output.len() >= OUTPUT_PAUSE {
                break Progress::Again;
            }
            let Some((count, decision)) = self.step(used, exports, output) else {
                break Progress::More;
            };
            used += count;
            let progress = match decision {
                Ok(Answer::Next) => continue,
                Ok(Answer::StartTls) if used == self.pending.len() => break Progress::StartTls,
                // Bytes that follow in plain text could be injected by an attacker ("STARTTLS
                // injection", CVE-2021-3716 of nbdkit).
                Ok(Answer::StartTls) => Progress::Close(HandshakeError::DataBeforeTls),
                Ok(Answer::Transmit(options)) => Progress::Transmit(options),
                Err(error) => Progress::Close(error),
            };
            self.state = State::Over;
            break progress;
        };
        self.pending.drain(..used);
        progress
    }

    /// Continues under TLS. Of the negotiated state only the client's flags are kept.
    pub fn tls_started(&mut self) {
        self.negotiator.start_over_with_tls();
    }

    /// The bytes that arrived after the option that ended the handshake.
    pub fn into_rest(self) -> Vec<u8> {
        self.pending
    }

    /// Handles one item of the pending bytes from `at` on. Returns the number of bytes that the
    /// item took, and the decision; `None` if more bytes are needed.
    fn step(
        &mut self,
        at: usize,
        exports: &dyn ExportLookup,
        output: &mut Vec<u8>,
    ) -> Option<(usize, Decision)> {
        match self.state {
            State::Flags => {
                let flags = u32::from_be_bytes(*self.pending.get(at..)?.first_chunk()?);
                Some((4, self.accept_flags(flags).map(|()| Answer::Next)))
            }
            State::Header => {
                let header = self.pending.get(at..at + OPTION_HEADER_LENGTH)?;
                let magic = u64::from_be_bytes(*header.first_chunk()?);
                let number = u32::from_be_bytes(*header[8..].first_chunk()?);
                let length = u32::from_be_bytes(*header[12..].first_chunk()?);
                let accepted = self.accept_header(magic, number, length);
                Some((OPTION_HEADER_LENGTH, accepted.map(|()| Answer::Next)))
            }
            State::Data { option, number, length } => {
                let data = self.pending.get(at..at + length)?;
                self.state = State::Header;
                let decision = self.negotiator.answer(option, number, data, exports, output);
                Some((length, decision))
            }
            State::Skip { number, left: 0 } => {
                self.state = State::Header;
                Some((0, self.negotiator.answer_skipped(number, exports, output)))
            }
            State::Skip { number, left } => {
                let count = (self.pending.len() - at).min(left as usize);
                self.state = State::Skip { number, left: left - count as u32 };
                (count > 0).then_some((count, Ok(Answer::Next)))
            }
            State::Over => None,
        }
    }

    fn accept_flags(&mut self, flags: u32) -> Result<(), HandshakeError> {
        if flags & !u32::from(FIXED_NEWSTYLE | NO_ZEROES) != 0 {
            return Err(HandshakeError::UnknownFlags(flags));
        }
        if flags & u32::from(NO_ZEROES) != 0 {
            self.negotiator.set_padding(Padding::Omitted);
        }
        self.state = State::Header;
        Ok(())
    }

    fn accept_header(
        &mut self,
        magic: u64,
        number: u32,
        length: u32,
    ) -> Result<(), HandshakeError> {
        if magic != OPTION_MAGIC {
            return Err(HandshakeError::BadMagic(magic));
        }
        self.options += 1;
        if self.options > MAX_OPTIONS {
            return Err(HandshakeError::TooManyOptions);
        }
        if length > MAX_SKIP {
            return Err(HandshakeError::OptionTooLong(length));
        }
        self.state = match ClientOption::from_number(number) {
            Some(option) if length <= MAX_OPTION => {
                State::Data { option, number, length: length as usize }
            }
            _ => State::Skip { number, left: length },
        };
        Ok(())
    }
}

#[cfg(test)]
mod tests;
