//! The server's answer to each option of a client, for any bytes in the option's data.

use blockhouse_disk::Access;

use super::negotiation::{
    ExportInfo, ExportLookup, HandshakeError, MetaContext, NegotiatedOptions, TlsState,
};
use super::option_reply::{OptionError, OptionReplies};
use super::parse::{self, ExportRequest, MetaQueries};
use crate::proto::option::{ClientOption, InfoType, PADDING_LENGTH, ReplyType};
use crate::proto::{Framing, TransmissionFlags};

/// Whether the reply to EXPORT_NAME is padded (`NBD_FLAG_C_NO_ZEROES`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Padding {
    /// The reply is padded, because the client has not set the flag.
    Sent,
    /// The reply is not padded, because the client has set the flag.
    Omitted,
}

/// The answer to an option.
pub enum Answer {
    /// Wait for another option.
    Next,
    /// Do the TLS handshake, and then wait for other options.
    StartTls,
    /// Start the transmission phase.
    Transmit(NegotiatedOptions),
}

/// The answer to an option, or the reason why the connection ends.
pub type Decision = Result<Answer, HandshakeError>;

/// The negotiation with a client so far.
pub struct Negotiator {
    tls: TlsState,
    padding: Padding,
    framing: Framing,
    /// The contexts that were selected, and the canonical name of the export that they were
    /// selected for.
    selected: Option<(String, Vec<(u32, MetaContext)>)>,
}

impl Negotiator {
    /// The state before the first option.
    pub fn new(tls: TlsState) -> Self {
        Self { tls, padding: Padding::Sent, framing: Framing::Simple, selected: None }
    }

    /// Discards everything that was negotiated without TLS, except the client's flags, which are
    /// sent before all options.
    pub fn start_over_with_tls(&mut self) {
        *self = Self { padding: self.padding, ..Self::new(TlsState::Active) };
    }

    /// The error of an option that requires TLS, if TLS must begin first.
    fn check_tls(&self, exports: &dyn ExportLookup) -> Result<(), OptionError> {
        if self.tls != TlsState::Required {
            return Ok(());
        }
        exports.refuse_plain();
        Err(OptionError::new(ReplyType::ErrTlsReqd, "this server requires TLS"))
    }

    /// Records the padding that the client's flags request.
    pub fn set_padding(&mut self, padding: Padding) {
        self.padding = padding;
    }

    /// Answers an option whose data was skipped.
    pub fn answer_skipped(
        &mut self,
        number: u32,
        exports: &dyn ExportLookup,
        output: &mut Vec<u8>,
    ) -> Decision {
        let mut replies = OptionReplies::new(number, output);
        let option = ClientOption::from_number(number);
        let has_reply = !matches!(option, Some(ClientOption::Abort | ClientOption::ExportName));
        if let (true, Err(error)) = (has_reply, self.check_tls(exports)) {
            replies.error(error);
            return Ok(Answer::Next);
        }
        let error = match option {
            None => OptionError::new(ReplyType::ErrUnsup, "the option is unknown to this server"),
            Some(ClientOption::Abort) => {
                replies.ack();
                return Err(HandshakeError::Aborted);
            }
            Some(ClientOption::ExportName) => return Err(HandshakeError::NoSuchExport),
            Some(option) => {
                if option == ClientOption::SetMetaContext {
                    self.selected = None;
                }
                OptionError::new(ReplyType::ErrTooBig, "the option is too long")
            }
        };
        replies.error(error);
        Ok(Answer::Next)
    }

    /// Answers an option.
    pub fn answer(
        &mut self,
        option: ClientOption,
        number: u32,
        data: &[u8],
        exports: &dyn ExportLookup,
        output: &mut Vec<u8>,
    ) -> Decision {
        if option == ClientOption::ExportName {
            return self.export_name(data, exports, output).map(Answer::Transmit);
        }
        let mut replies = OptionReplies::new(number, output);
        if option == ClientOption::Abort {
            replies.ack();
            return Err(HandshakeError::Aborted);
        }
        match self.answer_with_replies(option, data, exports, &mut replies) {
            Ok(answer) => {
                replies.ack();
                Ok(answer)
            }
            Err(error) => {
                replies.error(error);
                Ok(Answer::Next)
            }
        }
    }

    /// Carries out an option that has replies. The caller sends the last one, ACK or an error.
    fn answer_with_replies(
        &mut self,
        option: ClientOption,
        data: &[u8],
        exports: &dyn ExportLookup,
        replies: &mut OptionReplies<'_>,
    ) -> Result<Answer, OptionError> {
        if option != ClientOption::StartTls {
            self.check_tls(exports)?;
        }
        match option {
            ClientOption::List
            | ClientOption::StartTls
            | ClientOption::StructuredReply
            | ClientOption::ExtendedHeaders
                if !data.is_empty() =>
            {
                return Err(invalid("the option takes no data"));
            }
            ClientOption::List => exports.list().iter().for_each(|info| replies.server(info)),
            ClientOption::StartTls => return self.start_tls(),
            ClientOption::StructuredReply => self.structured_reply()?,
            ClientOption::ExtendedHeaders => self.extended_headers()?,
            ClientOption::Info => {
                self.describe(option, data, exports, replies)?;
            }
            ClientOption::Go => {
                let info = self.describe(option, data, exports, replies)?;
                return Ok(Answer::Transmit(self.negotiated(info)));
            }
            ClientOption::ListMetaContext => {
                let (info, queries) = Self::query(data, exports)?;
                let contexts = info.contexts().filter(|(_, context)| queries.list(context));
                contexts.for_each(|(_, context)| replies.context(0, &context));
            }
            ClientOption::SetMetaContext => {
                // The previous selection ends, even if this option fails.
                self.selected = None;
                if !self.framing.has_chunks() {
                    return Err(invalid(
                        "metadata contexts need structured replies or extended headers first",
                    ));
                }
                let (info, queries) = Self::query(data, exports)?;
                let contexts = info.contexts().filter(|(_, context)| queries.select(context));
                let contexts: Vec<_> = contexts.collect();
                contexts.iter().for_each(|(id, context)| replies.context(*id, context));
                self.selected = Some((info.name, contexts));
            }
            ClientOption::ExportName | ClientOption::Abort => {
                return Err(invalid("the option has no replies"));
            }
        }
        Ok(Answer::Next)
    }

    fn start_tls(&self) -> Result<Answer, OptionError> {
        match self.tls {
            TlsState::Off => Err(OptionError::new(ReplyType::ErrUnsup, "TLS is not available")),
            TlsState::Active => Err(invalid("TLS is active already")),
            TlsState::Optional | TlsState::Required => Ok(Answer::StartTls),
        }
    }

    fn export_name(
        &self,
        data: &[u8],
        exports: &dyn ExportLookup,
        output: &mut Vec<u8>,
    ) -> Result<NegotiatedOptions, HandshakeError> {
        if self.check_tls(exports).is_err() {
            return Err(HandshakeError::TlsRequired);
        }
        if self.framing == Framing::Extended {
            return Err(HandshakeError::ExportNameForbidden);
        }
        let name = parse::string(data).map_err(|_| HandshakeError::NoSuchExport)?;
        let info = find(exports, name).map_err(|_| {
            if exports.needs_tls(name) {
                HandshakeError::TlsRequired
            } else {
                HandshakeError::NoSuchExport
            }
        })?;
        output.extend(info.size.to_be_bytes());
        let flags = self.transmission_flags(ClientOption::ExportName, &info);
        output.extend(flags.bits().to_be_bytes());
        if self.padding == Padding::Sent {
            output.extend([0; PADDING_LENGTH]);
        }
        Ok(self.negotiated(info))
    }

    fn structured_reply(&mut self) -> Result<(), OptionError> {
        match self.framing {
            Framing::Simple => {
                self.framing = Framing::Structured;
                Ok(())
            }
            Framing::Structured => Err(invalid("structured replies are agreed on already")),
            Framing::Extended => Err(OptionError::new(
                ReplyType::ErrExtHeaderReqd,
                "extended headers are agreed on already",
            )),
        }
    }

    fn extended_headers(&mut self) -> Result<(), OptionError> {
        if self.framing == Framing::Extended {
            return Err(invalid("extended headers are agreed on already"));
        }
        self.framing = Framing::Extended;
        Ok(())
    }

    /// Replies to INFO and GO with the export's properties.
    fn describe(
        &self,
        option: ClientOption,
        data: &[u8],
        exports: &dyn ExportLookup,
        replies: &mut OptionReplies<'_>,
    ) -> Result<ExportInfo, OptionError> {
        let request = ExportRequest::parse(data)?;
        let info = find(exports, request.name)?;
        replies.export(info.size, self.transmission_flags(option, &info));
        if request.asks_for(InfoType::Name) {
            replies.name(&info.name);
        }
        if request.asks_for(InfoType::Description) {
            replies.description(&info.description);
        }
        if request.asks_for(InfoType::BlockSize) {
            replies.block_size(info.smallest_block, info.preferred_block);
        }
        Ok(info)
    }

    /// Parses the queries of LIST_META_CONTEXT and SET_META_CONTEXT, and finds the export.
    fn query<'a>(
        data: &'a [u8],
        exports: &dyn ExportLookup,
    ) -> Result<(ExportInfo, MetaQueries<'a>), OptionError> {
        let queries = MetaQueries::parse(data)?;
        Ok((find(exports, queries.name())?, queries))
    }

    fn negotiated(&self, info: ExportInfo) -> NegotiatedOptions {
        NegotiatedOptions {
            framing: self.framing,
            contexts: self.selected_for(&info).to_vec(),
            export: info.name,
        }
    }

    /// The contexts that were selected for this export.
    fn selected_for(&self, info: &ExportInfo) -> &[(u32, MetaContext)] {
        match &self.selected {
            Some((export, contexts)) if *export == info.name => contexts,
            _ => &[],
        }
    }

    /// The flags that the reply to an option has.
    fn transmission_flags(&self, option: ClientOption, info: &ExportInfo) -> TransmissionFlags {
        use TransmissionFlags as Flag;
        let mut flags = Flag::HAS_FLAGS | Flag::SEND_FLUSH | Flag::SEND_FUA | Flag::SEND_CACHE;
        flags.set(Flag::CAN_MULTI_CONN, info.is_shared);
        flags |= match info.access {
            Access::ReadOnly => Flag::READ_ONLY,
            Access::ReadWrite => Flag::SEND_TRIM | Flag::SEND_WRITE_ZEROES | Flag::SEND_FAST_ZERO,
        };
        if self.framing.has_chunks() {
            flags |= Flag::SEND_DF;
        }
        if self.framing == Framing::Extended {
            // INFO may come before contexts are selected, so it reports the flag whether or not
            // there is a selection.
            let has_status = option == ClientOption::Info || !self.selected_for(info).is_empty();
            flags.set(Flag::BLOCK_STATUS_PAYLOAD, has_status);
        }
        flags
    }
}

/// The export with this name.
fn find(exports: &dyn ExportLookup, name: &str) -> Result<ExportInfo, OptionError> {
    if exports.needs_tls(name) {
        exports.refuse_plain();
        return Err(OptionError::new(ReplyType::ErrTlsReqd, "this export requires TLS"));
    }
    exports.find(name).ok_or_else(OptionError::no_such_export)
}

fn invalid(message: &'static str) -> OptionError {
    OptionError::new(ReplyType::ErrInvalid, message)
}
