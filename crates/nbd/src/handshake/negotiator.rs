//! The server's answer to each option of a client, whatever bytes the option's data has.

use blockhouse_disk::Access;

use super::negotiation::{
    BlockStatusState, ExportInfo, ExportLookup, HandshakeError, NegotiatedOptions,
};
use super::option_reply::{OptionError, OptionReplies};
use super::parse::{self, ExportRequest, MetaQueries, Selection};
use crate::proto::option::{ClientOption, InfoType, PADDING_LENGTH, ReplyType};
use crate::proto::{ALLOCATION_CONTEXT, Framing, TransmissionFlags};

/// Whether the reply to EXPORT_NAME is padded (`NBD_FLAG_C_NO_ZEROES`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Padding {
    /// It is, unless the client says otherwise.
    Sent,
    /// The client does without.
    Omitted,
}

/// What an option ends in: the transmission phase with these options, `None` for another option, or the
/// connection's end.
pub type Decision = Result<Option<NegotiatedOptions>, HandshakeError>;

/// What was negotiated with a client so far.
pub struct Negotiator {
    padding: Padding,
    framing: Framing,
    /// The canonical name of the export that `base:allocation` was selected for.
    allocation_of: Option<String>,
}

impl Negotiator {
    /// The state before the first option.
    pub fn new() -> Self {
        Self { padding: Padding::Sent, framing: Framing::Simple, allocation_of: None }
    }

    /// Takes the client's flags over.
    pub fn set_padding(&mut self, padding: Padding) {
        self.padding = padding;
    }

    /// Answers an option whose data was skipped.
    pub fn answer_skipped(&mut self, number: u32, output: &mut Vec<u8>) -> Decision {
        let mut replies = OptionReplies::new(number, output);
        let error = match ClientOption::from_number(number) {
            None => OptionError::new(ReplyType::ErrUnsup, "the option is unknown to this server"),
            Some(ClientOption::Abort) => {
                replies.ack();
                return Err(HandshakeError::Aborted);
            }
            Some(ClientOption::ExportName) => return Err(HandshakeError::NoSuchExport),
            Some(option) => {
                if option == ClientOption::SetMetaContext {
                    self.allocation_of = None;
                }
                OptionError::new(ReplyType::ErrTooBig, "the option is too long")
            }
        };
        replies.error(error);
        Ok(None)
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
            return self.export_name(data, exports, output).map(Some);
        }
        let mut replies = OptionReplies::new(number, output);
        if option == ClientOption::Abort {
            replies.ack();
            return Err(HandshakeError::Aborted);
        }
        match self.answer_with_replies(option, data, exports, &mut replies) {
            Ok(options) => {
                replies.ack();
                Ok(options)
            }
            Err(error) => {
                replies.error(error);
                Ok(None)
            }
        }
    }

    /// Does what an option asks for that has replies. The last one, ACK or an error, is left to the caller.
    fn answer_with_replies(
        &mut self,
        option: ClientOption,
        data: &[u8],
        exports: &dyn ExportLookup,
        replies: &mut OptionReplies<'_>,
    ) -> Result<Option<NegotiatedOptions>, OptionError> {
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
            ClientOption::StartTls => {
                return Err(OptionError::new(ReplyType::ErrUnsup, "TLS is not available"));
            }
            ClientOption::StructuredReply => self.structured_reply()?,
            ClientOption::ExtendedHeaders => self.extended_headers()?,
            ClientOption::Info => {
                self.describe(data, exports, replies)?;
            }
            ClientOption::Go => {
                let info = self.describe(data, exports, replies)?;
                return Ok(Some(self.negotiated(info)));
            }
            ClientOption::ListMetaContext => {
                let (_, selection) = self.query(data, exports)?;
                if selection.lists_allocation() {
                    replies.allocation_context(0);
                }
            }
            ClientOption::SetMetaContext => {
                // The old selection ends, also when this one fails.
                self.allocation_of = None;
                let (name, selection) = self.query(data, exports)?;
                if selection.sets_allocation() {
                    replies.allocation_context(ALLOCATION_CONTEXT);
                    self.allocation_of = Some(name);
                }
            }
            ClientOption::ExportName | ClientOption::Abort => {
                unreachable!("these have no such replies")
            }
        }
        Ok(None)
    }

    fn export_name(
        &self,
        data: &[u8],
        exports: &dyn ExportLookup,
        output: &mut Vec<u8>,
    ) -> Result<NegotiatedOptions, HandshakeError> {
        if self.framing == Framing::Extended {
            return Err(HandshakeError::ExportNameForbidden);
        }
        let info = parse::string(data).ok().and_then(|name| exports.find(name));
        let info = info.ok_or(HandshakeError::NoSuchExport)?;
        output.extend(info.size.to_be_bytes());
        output.extend(self.transmission_flags(&info).bits().to_be_bytes());
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

    /// Replies to INFO and GO with what is known of the export.
    fn describe(
        &self,
        data: &[u8],
        exports: &dyn ExportLookup,
        replies: &mut OptionReplies<'_>,
    ) -> Result<ExportInfo, OptionError> {
        let request = ExportRequest::parse(data)?;
        let info = exports.find(request.name).ok_or_else(OptionError::no_such_export)?;
        replies.export(info.size, self.transmission_flags(&info));
        if request.asks_for(InfoType::Name) {
            replies.name(&info.name);
        }
        if request.asks_for(InfoType::Description) {
            replies.description(&info.description);
        }
        if request.asks_for(InfoType::BlockSize) {
            replies.block_size(info.preferred_block);
        }
        Ok(info)
    }

    /// Parses the queries of LIST_META_CONTEXT and SET_META_CONTEXT: the canonical name of the export,
    /// and what they select.
    fn query(
        &self,
        data: &[u8],
        exports: &dyn ExportLookup,
    ) -> Result<(String, Selection), OptionError> {
        if !self.framing.has_chunks() {
            return Err(invalid(
                "metadata contexts need structured replies or extended headers first",
            ));
        }
        let queries = MetaQueries::parse(data)?;
        let info = exports.find(queries.name).ok_or_else(OptionError::no_such_export)?;
        Ok((info.name, queries.selection))
    }

    fn negotiated(&self, info: ExportInfo) -> NegotiatedOptions {
        let has_selected = self.allocation_of.as_ref() == Some(&info.name);
        NegotiatedOptions {
            framing: self.framing,
            block_status: match has_selected {
                true => BlockStatusState::Negotiated,
                false => BlockStatusState::NotNegotiated,
            },
            export: info.name,
        }
    }

    fn transmission_flags(&self, info: &ExportInfo) -> TransmissionFlags {
        use TransmissionFlags as Flag;
        let mut flags = Flag::HAS_FLAGS
            | Flag::SEND_FLUSH
            | Flag::SEND_FUA
            | Flag::SEND_CACHE
            | Flag::CAN_MULTI_CONN;
        flags |= match info.access {
            Access::ReadOnly => Flag::READ_ONLY,
            Access::ReadWrite => Flag::SEND_TRIM | Flag::SEND_WRITE_ZEROES | Flag::SEND_FAST_ZERO,
        };
        if self.framing.has_chunks() {
            flags |= Flag::SEND_DF;
        }
        flags
    }
}

fn invalid(message: &'static str) -> OptionError {
    OptionError::new(ReplyType::ErrInvalid, message)
}
