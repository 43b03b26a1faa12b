//! The handshake as a state machine: bytes of a client in, bytes for it and a decision out.
//!
//! Fixed newstyle only ("Fixed newstyle negotiation"). It promises, to any input: memory stays below
//! [`MAX_OPTION`] plus one feed and [`OUTPUT_PAUSE`] plus one reply; an option that is unknown,
//! malformed or too large gets its error and the next one is read; only what the protocol gives no
//! reply for ends the connection. It does no I/O and does not know what an export is made of: a
//! [`Directory`] tells.

mod agreement;
mod answer;
mod parse;

pub use agreement::{BlockStatusUse, Directory, Facts, Farewell, Terms};
use answer::Answers;
use blockhouse_disk::Access;
use parse::{ExportRequest, MetaQueries, Selection};

use crate::proto::option::{
    ClientOption, FIXED_NEWSTYLE, INIT_MAGIC, InfoType, NO_ZEROES, OPTION_HEADER_LENGTH,
    OPTION_MAGIC, PADDING_LENGTH, ReplyType,
};
use crate::proto::{Framing, TransmissionFlags};

/// Option data up to this many bytes is looked at; longer data is passed over.
pub const MAX_OPTION: u32 = 64 << 10;
/// Option data beyond this many bytes is not even passed over: the connection ends.
pub const MAX_SKIP: u32 = 32 << 20;
/// A client that has not decided after this many options never will.
pub const MAX_OPTIONS: u32 = 4096;
/// With this many bytes to send, no further option is answered before they are sent.
pub const OUTPUT_PAUSE: usize = 16 << 10;

/// What to do after a feed. Whatever it is, the output is sent first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Receive more and feed it.
    More,
    /// Send the output, then feed nothing: there is more to answer.
    Again,
    /// The transmission phase starts; bytes that came early are in [`Handshake::into_rest`].
    Transmit(Terms),
    /// Close the connection.
    Close(Farewell),
}

enum State {
    /// The 32 client flags come next.
    Flags,
    /// An option header comes next.
    Header,
    /// The data of an option comes next.
    Data { number: u32, length: usize },
    /// The data of an option that will not be looked at comes next.
    Skip { number: u32, left: u32 },
    /// Decided.
    Over,
}

/// One client's handshake.
pub struct Handshake {
    state: State,
    /// Bytes that were received and not yet understood.
    pending: Vec<u8>,
    padding: Padding,
    options: u32,
    framing: Framing,
    /// The canonical name of the export that `base:allocation` was selected for.
    allocation_of: Option<String>,
}

#[derive(PartialEq)]
enum Padding {
    Sent,
    Omitted,
}

impl Default for Handshake {
    fn default() -> Self {
        Self::new()
    }
}

impl Handshake {
    /// A handshake at its start. The [`greeting`](Self::greeting) is sent first.
    pub fn new() -> Self {
        Self {
            state: State::Flags,
            pending: Vec::new(),
            padding: Padding::Sent,
            options: 0,
            framing: Framing::Simple,
            allocation_of: None,
        }
    }

    /// What a server says first.
    pub fn greeting() -> [u8; 18] {
        let mut bytes = [0; 18];
        bytes[..8].copy_from_slice(&INIT_MAGIC.to_be_bytes());
        bytes[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        bytes[16..].copy_from_slice(&(FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes());
        bytes
    }

    /// Takes in what the client sent, and appends to `output` what it gets for it.
    pub fn feed(
        &mut self,
        input: &[u8],
        exports: &dyn Directory,
        output: &mut Vec<u8>,
    ) -> Progress {
        self.pending.extend_from_slice(input);
        let mut used = 0;
        let progress = loop {
            if output.len() >= OUTPUT_PAUSE {
                break Progress::Again;
            }
            let Some((count, step)) = self.step(used, exports, output) else {
                break Progress::More;
            };
            used += count;
            if let Some(progress) = step {
                self.state = State::Over;
                break progress;
            }
        };
        self.pending.drain(..used);
        progress
    }

    /// The bytes that arrived after the option that ended the handshake.
    pub fn into_rest(self) -> Vec<u8> {
        self.pending
    }

    /// Understands one thing of the pending bytes from `at` on: how many bytes it took, and the
    /// decision if there is one. `None` when more bytes are needed.
    fn step(
        &mut self,
        at: usize,
        exports: &dyn Directory,
        output: &mut Vec<u8>,
    ) -> Option<(usize, Option<Progress>)> {
        let available = self.pending.len() - at;
        match self.state {
            State::Flags => {
                let flags = u32::from_be_bytes(*self.pending.get(at..)?.first_chunk()?);
                Some((4, self.accept_flags(flags).err().map(Progress::Close)))
            }
            State::Header => {
                let header = self.pending.get(at..at + OPTION_HEADER_LENGTH)?;
                let magic = u64::from_be_bytes(*header.first_chunk()?);
                let number = u32::from_be_bytes(*header[8..].first_chunk()?);
                let length = u32::from_be_bytes(*header[12..].first_chunk()?);
                let refused = self.accept_header(magic, number, length).err();
                Some((OPTION_HEADER_LENGTH, refused.map(Progress::Close)))
            }
            State::Data { number, length } => {
                if available < length {
                    return None;
                }
                self.state = State::Header;
                let pending = std::mem::take(&mut self.pending);
                let progress = self.answer(number, &pending[at..at + length], exports, output);
                self.pending = pending;
                Some((length, progress))
            }
            State::Skip { number, left: 0 } => {
                self.state = State::Header;
                Some((0, self.answer_skipped(number, output)))
            }
            State::Skip { number, left } => {
                let count = available.min(left as usize);
                self.state = State::Skip { number, left: left - count as u32 };
                (count > 0).then_some((count, None))
            }
            State::Over => None,
        }
    }

    fn accept_flags(&mut self, flags: u32) -> Result<(), Farewell> {
        if flags & !u32::from(FIXED_NEWSTYLE | NO_ZEROES) != 0 {
            return Err(Farewell::UnknownFlags(flags));
        }
        if flags & u32::from(NO_ZEROES) != 0 {
            self.padding = Padding::Omitted;
        }
        self.state = State::Header;
        Ok(())
    }

    fn accept_header(&mut self, magic: u64, number: u32, length: u32) -> Result<(), Farewell> {
        if magic != OPTION_MAGIC {
            return Err(Farewell::BadMagic(magic));
        }
        self.options += 1;
        if self.options > MAX_OPTIONS {
            return Err(Farewell::TooManyOptions);
        }
        if length > MAX_SKIP {
            return Err(Farewell::OptionTooLong(length));
        }
        let known = ClientOption::from_number(number).is_some();
        self.state = if known && length <= MAX_OPTION {
            State::Data { number, length: length as usize }
        } else {
            State::Skip { number, left: length }
        };
        Ok(())
    }

    /// Answers an option whose data was passed over.
    fn answer_skipped(&mut self, number: u32, output: &mut Vec<u8>) -> Option<Progress> {
        let mut answers = Answers::new(number, output);
        match ClientOption::from_number(number) {
            None => answers.error(ReplyType::ErrUnsup, "the option is unknown to this server"),
            Some(ClientOption::Abort) => {
                answers.ack();
                return Some(Progress::Close(Farewell::Aborted));
            }
            Some(ClientOption::ExportName) => return Some(Progress::Close(Farewell::NoSuchExport)),
            Some(option) => {
                if option == ClientOption::SetMetaContext {
                    self.allocation_of = None;
                }
                answers.error(ReplyType::ErrTooBig, "the option is too long");
            }
        }
        None
    }

    fn answer(
        &mut self,
        number: u32,
        data: &[u8],
        exports: &dyn Directory,
        output: &mut Vec<u8>,
    ) -> Option<Progress> {
        let option = ClientOption::from_number(number)?;
        let mut answers = Answers::new(number, output);
        match option {
            ClientOption::ExportName => return Some(self.export_name(data, exports, output)),
            ClientOption::Abort => {
                answers.ack();
                return Some(Progress::Close(Farewell::Aborted));
            }
            ClientOption::List
            | ClientOption::StartTls
            | ClientOption::StructuredReply
            | ClientOption::ExtendedHeaders
                if !data.is_empty() =>
            {
                answers.error(ReplyType::ErrInvalid, "the option takes no data");
            }
            ClientOption::List => {
                for export in exports.list() {
                    answers.server(&export);
                }
                answers.ack();
            }
            ClientOption::StartTls => {
                answers.error(ReplyType::ErrUnsup, "TLS is not available");
            }
            ClientOption::StructuredReply => self.structured_reply(&mut answers),
            ClientOption::ExtendedHeaders => self.extended_headers(&mut answers),
            ClientOption::Info | ClientOption::Go => {
                let terms = self.describe(data, exports, &mut answers)?;
                if option == ClientOption::Go {
                    return Some(Progress::Transmit(terms));
                }
            }
            ClientOption::ListMetaContext => self.list_contexts(data, exports, &mut answers),
            ClientOption::SetMetaContext => self.set_contexts(data, exports, &mut answers),
        }
        None
    }

    fn export_name(
        &mut self,
        data: &[u8],
        exports: &dyn Directory,
        output: &mut Vec<u8>,
    ) -> Progress {
        if self.framing == Framing::Extended {
            return Progress::Close(Farewell::ExportNameForbidden);
        }
        let facts = parse::string(data).ok().and_then(|name| exports.find(name));
        let Some(facts) = facts else { return Progress::Close(Farewell::NoSuchExport) };
        output.extend(facts.size.to_be_bytes());
        output.extend(self.transmission_flags(&facts).bits().to_be_bytes());
        if self.padding == Padding::Sent {
            output.extend([0; PADDING_LENGTH]);
        }
        Progress::Transmit(self.terms(facts))
    }

    fn structured_reply(&mut self, answers: &mut Answers<'_>) {
        match self.framing {
            Framing::Simple => {
                self.framing = Framing::Structured;
                answers.ack();
            }
            Framing::Structured => {
                answers.error(ReplyType::ErrInvalid, "structured replies are agreed on already");
            }
            Framing::Extended => {
                answers
                    .error(ReplyType::ErrExtHeaderReqd, "extended headers are agreed on already");
            }
        }
    }

    fn extended_headers(&mut self, answers: &mut Answers<'_>) {
        if self.framing == Framing::Extended {
            answers.error(ReplyType::ErrInvalid, "extended headers are agreed on already");
        } else {
            self.framing = Framing::Extended;
            answers.ack();
        }
    }

    /// Answers INFO and GO; the terms when that succeeded.
    fn describe(
        &self,
        data: &[u8],
        exports: &dyn Directory,
        answers: &mut Answers<'_>,
    ) -> Option<Terms> {
        let request = match ExportRequest::parse(data) {
            Ok(request) => request,
            Err(malformed) => return answers.malformed(malformed),
        };
        let Some(facts) = exports.find(request.name) else { return answers.no_such_export() };
        answers.export(facts.size, self.transmission_flags(&facts));
        if request.asks_for(InfoType::Name) {
            answers.name(&facts.name);
        }
        if request.asks_for(InfoType::Description) {
            answers.description(&facts.description);
        }
        if request.asks_for(InfoType::BlockSize) {
            answers.block_size(facts.preferred_block);
        }
        answers.ack();
        Some(self.terms(facts))
    }

    fn list_contexts(&self, data: &[u8], exports: &dyn Directory, answers: &mut Answers<'_>) {
        if let Some((_, selection)) = self.query(data, exports, answers) {
            if selection.lists_allocation() {
                answers.allocation_context(0);
            }
            answers.ack();
        }
    }

    fn set_contexts(&mut self, data: &[u8], exports: &dyn Directory, answers: &mut Answers<'_>) {
        // The old selection is gone, also when this one fails.
        self.allocation_of = None;
        if let Some((name, selection)) = self.query(data, exports, answers) {
            if selection.sets_allocation() {
                answers.allocation_context(crate::proto::ALLOCATION_CONTEXT);
                self.allocation_of = Some(name);
            }
            answers.ack();
        }
    }

    /// Reads the queries of LIST_META_CONTEXT and SET_META_CONTEXT: the canonical name of the
    /// export and what was selected. `None` when an error was answered.
    fn query(
        &self,
        data: &[u8],
        exports: &dyn Directory,
        answers: &mut Answers<'_>,
    ) -> Option<(String, Selection)> {
        if !self.framing.has_chunks() {
            let message = "metadata contexts need structured replies or extended headers first";
            return answers.refuse(ReplyType::ErrInvalid, message);
        }
        match MetaQueries::parse(data) {
            Err(malformed) => answers.malformed(malformed),
            Ok(queries) => match exports.find(queries.name) {
                None => answers.no_such_export(),
                Some(facts) => Some((facts.name, queries.selection)),
            },
        }
    }

    fn terms(&self, facts: Facts) -> Terms {
        let negotiated = self.allocation_of.as_ref() == Some(&facts.name);
        Terms {
            framing: self.framing,
            block_status: match negotiated {
                true => BlockStatusUse::Negotiated,
                false => BlockStatusUse::NotNegotiated,
            },
            export: facts.name,
        }
    }

    fn transmission_flags(&self, facts: &Facts) -> TransmissionFlags {
        use TransmissionFlags as Flag;
        let mut flags = Flag::HAS_FLAGS
            | Flag::SEND_FLUSH
            | Flag::SEND_FUA
            | Flag::SEND_CACHE
            | Flag::CAN_MULTI_CONN;
        flags |= match facts.access {
            Access::ReadOnly => Flag::READ_ONLY,
            Access::ReadWrite => Flag::SEND_TRIM | Flag::SEND_WRITE_ZEROES | Flag::SEND_FAST_ZERO,
        };
        if self.framing.has_chunks() {
            flags |= Flag::SEND_DF;
        }
        flags
    }
}

#[cfg(test)]
mod tests;
