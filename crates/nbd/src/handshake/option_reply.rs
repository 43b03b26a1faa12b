//! Replies to one option, appended to the output.

use super::negotiation::{ExportInfo, MetaContext};
use super::parse::Malformed;
use crate::proto::option::{InfoType, REPLY_MAGIC, ReplyType};
use crate::proto::{MAX_PAYLOAD, TransmissionFlags};

/// The error of an option. The client may send another option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionError {
    kind: ReplyType,
    message: &'static str,
}

impl OptionError {
    /// An error of this type; `message` is for the client's user.
    pub fn new(kind: ReplyType, message: &'static str) -> Self {
        Self { kind, message }
    }

    /// The option names an export that does not exist.
    pub fn no_such_export() -> Self {
        Self::new(ReplyType::ErrUnknown, "there is no export of this name")
    }
}

impl From<Malformed> for OptionError {
    fn from(malformed: Malformed) -> Self {
        Self::new(ReplyType::ErrInvalid, malformed.0)
    }
}

/// The replies to one option.
pub struct OptionReplies<'a> {
    option: u32,
    output: &'a mut Vec<u8>,
}

impl<'a> OptionReplies<'a> {
    /// Replies to the option with this number.
    pub fn new(option: u32, output: &'a mut Vec<u8>) -> Self {
        Self { option, output }
    }

    fn reply(&mut self, kind: ReplyType, parts: &[&[u8]]) {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        self.output.extend(REPLY_MAGIC.to_be_bytes());
        self.output.extend(self.option.to_be_bytes());
        self.output.extend((kind as u32).to_be_bytes());
        self.output.extend((length as u32).to_be_bytes());
        for part in parts {
            self.output.extend_from_slice(part);
        }
    }

    /// Replies that the option has succeeded.
    pub fn ack(&mut self) {
        self.reply(ReplyType::Ack, &[]);
    }

    /// Replies that the option failed.
    pub fn error(&mut self, error: OptionError) {
        self.reply(error.kind, &[error.message.as_bytes()]);
    }

    /// Replies with one export of the list.
    pub fn server(&mut self, info: &ExportInfo) {
        let length = (info.name.len() as u32).to_be_bytes();
        let parts = [&length[..], info.name.as_bytes(), info.description.as_bytes()];
        self.reply(ReplyType::Server, &parts);
    }

    /// Replies with the export's size and flags.
    pub fn export(&mut self, size: u64, flags: TransmissionFlags) {
        self.info(InfoType::Export, &[&size.to_be_bytes(), &flags.bits().to_be_bytes()]);
    }

    /// Replies with the canonical name.
    pub fn name(&mut self, name: &str) {
        self.info(InfoType::Name, &[name.as_bytes()]);
    }

    /// Replies with the export's description, if there is one.
    pub fn description(&mut self, description: &str) {
        if !description.is_empty() {
            self.info(InfoType::Description, &[description.as_bytes()]);
        }
    }

    /// Replies with the block sizes.
    pub fn block_size(&mut self, smallest: u32, preferred: u32) {
        let sizes = [smallest, preferred, MAX_PAYLOAD];
        let [smallest, preferred, payload] = sizes.map(u32::to_be_bytes);
        self.info(InfoType::BlockSize, &[&smallest, &preferred, &payload]);
    }

    fn info(&mut self, info: InfoType, parts: &[&[u8]]) {
        let payload = [&(info as u16).to_be_bytes(), &parts.concat()[..]].concat();
        self.reply(ReplyType::Info, &[&payload]);
    }

    /// Replies with a metadata context and its id, which is 0 in lists.
    pub fn context(&mut self, id: u32, context: &MetaContext) {
        let name = context.to_string();
        self.reply(ReplyType::MetaContext, &[&id.to_be_bytes(), name.as_bytes()]);
    }
}
