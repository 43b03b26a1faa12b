//! The handshake of a client (`doc/proto.md`, "Newstyle negotiation"): TLS where the URI says so, extended headers or else
//! structured replies where the server has them, a metadata context, then GO.
//!
//! Guarantees: with TLS nothing but the wish for it is said before. Every length that a server sends is bounded before memory is taken for it. What it says about an export
//! is checked: sizes and block sizes that no request could be made for are refused.

use std::sync::Arc;

use blockhouse_core::{Buffer, IoVectorList};
use blockhouse_engine::Stream;
use blockhouse_nbd_protocol::option::{
    ClientOption, FIXED_NEWSTYLE, INIT_MAGIC, InfoType, NO_ZEROES, OPTION_MAGIC,
    REPLY_HEADER_LENGTH, REPLY_MAGIC, ReplyType,
};
use blockhouse_nbd_protocol::{Framing, MAX_PAYLOAD, TransmissionFlags};

use super::link::Link;
use super::refusal::Refusal;
use super::tls::ClientTls;

/// The longest reply to an option: a name of 4096 bytes and what is around it, with much to spare.
const MAX_REPLY: u32 = 64 << 10;
/// How many replies one option may have.
const MAX_REPLIES: usize = 1000;
/// The longest a block may be that must be written whole.
const MAX_MINIMUM_BLOCK: u32 = 64 << 10;

/// Set in the types of replies that refuse an option.
const ERROR_BIT: u32 = 1 << 31;
const ERR_POLICY: u32 = ReplyType::ErrPolicy as u32;
const ERR_TLS_REQUIRED: u32 = ReplyType::ErrTlsReqd as u32;
const ERR_SHUTDOWN: u32 = ReplyType::ErrShutdown as u32;

/// What was agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Negotiated {
    pub(super) framing: Framing,
    pub(super) size: u64,
    pub(super) flags: TransmissionFlags,
    /// What requests must be multiples of, in bytes; a power of two.
    pub(super) minimum_block: u32,
    /// The longest read or write, in bytes: a multiple of the former.
    pub(super) max_payload: u32,
    /// Whether block status tells of the context that was asked for.
    pub(super) has_block_status: bool,
}

/// What a client asks for.
pub(super) struct Wish<'a> {
    pub(super) export: &'a str,
    /// The metadata context.
    pub(super) context: &'a str,
    /// TLS, which the server must have.
    pub(super) tls: Option<&'a Arc<ClientTls>>,
}

/// A reply to an option.
struct OptionReply {
    kind: u32,
    data: Vec<u8>,
}

/// Agrees with a server on an export.
pub(super) async fn negotiate(
    stream: Stream,
    wish: Wish<'_>,
) -> Result<(Link, Negotiated), Refusal> {
    let Wish { export, context, tls } = wish;
    let mut wire = Wire { link: Link::plain(stream.clone()) };
    let greeting = wire.read(18).await?;
    if greeting[..8] != INIT_MAGIC.to_be_bytes() {
        return Err("the server does not speak NBD".into());
    }
    let flags = u16::from_be_bytes([greeting[16], greeting[17]]);
    if greeting[8..16] != OPTION_MAGIC.to_be_bytes() || flags & FIXED_NEWSTYLE == 0 {
        return Err(
            "the server speaks the NBD protocol of before 2012, which is not supported".into()
        );
    }
    let flags = u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES));
    wire.write(&flags.to_be_bytes()).await?;
    if let Some(tls) = tls {
        start_tls(&mut wire).await?;
        wire.link = Link::secured(stream, tls).await?;
    }
    let framing = framing(&mut wire).await?;
    let has_block_status = framing.has_chunks() && block_status(&mut wire, export, context).await?;
    let mut agreed = Negotiated {
        framing,
        size: 0,
        flags: TransmissionFlags::empty(),
        minimum_block: 1,
        max_payload: MAX_PAYLOAD,
        has_block_status,
    };
    go(&mut wire, export, &mut agreed).await?;
    Ok((wire.link, agreed))
}

/// Has the server begin with TLS.
async fn start_tls(wire: &mut Wire) -> Result<(), Refusal> {
    wire.option(ClientOption::StartTls, &[]).await?;
    let reply = wire.reply(ClientOption::StartTls).await?;
    if reply.kind == ReplyType::Ack as u32 {
        return Ok(());
    }
    let hint = "nbd:// does without, if nobody else can listen on the way to it";
    Err(Refusal { what: "the server has no TLS".into(), hint: Some(hint) })
}

/// The richest framing that the server has.
async fn framing(wire: &mut Wire) -> Result<Framing, Refusal> {
    let offers = [
        (ClientOption::ExtendedHeaders, Framing::Extended),
        (ClientOption::StructuredReply, Framing::Structured),
    ];
    for (option, framing) in offers {
        wire.option(option, &[]).await?;
        let reply = wire.reply(option).await?;
        if reply.kind == ReplyType::Ack as u32 {
            return Ok(framing);
        }
        check_not_final(&reply)?;
    }
    Ok(Framing::Simple)
}

/// Selects a metadata context; whether the export has it.
async fn block_status(wire: &mut Wire, export: &str, context: &str) -> Result<bool, Refusal> {
    let mut data = string(export);
    data.extend(1u32.to_be_bytes());
    data.extend(string(context));
    let option = ClientOption::SetMetaContext;
    wire.option(option, &data).await?;
    let mut found = false;
    for _ in 0..MAX_REPLIES {
        let reply = wire.reply(option).await?;
        match reply.kind {
            kind if kind == ReplyType::MetaContext as u32 => {
                found |= reply.data.get(4..) == Some(context.as_bytes());
            }
            kind if kind == ReplyType::Ack as u32 => return Ok(found),
            kind if kind & ERROR_BIT != 0 => {
                check_not_final(&reply)?;
                return Ok(false);
            }
            _ => {}
        }
    }
    Err(TOO_MANY.into())
}

const TOO_MANY: &str = "the server sends replies without end";

/// Chooses the export.
async fn go(wire: &mut Wire, export: &str, agreed: &mut Negotiated) -> Result<(), Refusal> {
    let mut data = string(export);
    data.extend(1u16.to_be_bytes());
    data.extend((InfoType::BlockSize as u16).to_be_bytes());
    let option = ClientOption::Go;
    wire.option(option, &data).await?;
    let mut has_export = false;
    for _ in 0..MAX_REPLIES {
        let reply = wire.reply(option).await?;
        match reply.kind {
            kind if kind == ReplyType::Info as u32 => has_export |= info(&reply.data, agreed)?,
            kind if kind == ReplyType::Ack as u32 && has_export => return Ok(()),
            kind if kind == ReplyType::Ack as u32 => {
                return Err("the server does not tell the size of the export".into());
            }
            kind if kind & ERROR_BIT != 0 => return Err(refusal(&reply, export)),
            _ => {}
        }
    }
    Err(TOO_MANY.into())
}

/// Takes over what the server tells; whether that was the export's size.
fn info(data: &[u8], agreed: &mut Negotiated) -> Result<bool, Refusal> {
    const MALFORMED: &str = "the server tells something about the export that cannot be understood";
    let number = |at: usize, length: usize| {
        let bytes = data.get(at..at + length).ok_or(MALFORMED)?;
        Ok::<_, Refusal>(bytes.iter().fold(0, |value, &byte| value << 8 | u64::from(byte)))
    };
    let kind = number(0, 2)?;
    if kind == InfoType::Export as u64 {
        agreed.size = number(2, 8)?;
        agreed.flags = TransmissionFlags::from_bits_truncate(number(10, 2)? as u16);
        // As POSIX has it for files.
        if i64::try_from(agreed.size).is_err() {
            return Err(format!("the export claims to have {} bytes", agreed.size).into());
        }
        return Ok(true);
    }
    if kind == InfoType::BlockSize as u64 {
        let (minimum, maximum) = (number(2, 4)? as u32, number(10, 4)? as u32);
        if !minimum.is_power_of_two() || minimum > MAX_MINIMUM_BLOCK || maximum < minimum {
            return Err(format!(
                "the export claims to have blocks of {minimum} to {maximum} bytes"
            )
            .into());
        }
        agreed.minimum_block = minimum;
        agreed.max_payload = maximum.min(MAX_PAYLOAD) / minimum * minimum;
    }
    Ok(false)
}

/// An option that was refused in a way that no other option would help.
fn check_not_final(reply: &OptionReply) -> Result<(), Refusal> {
    match reply.kind {
        ERR_POLICY | ERR_TLS_REQUIRED | ERR_SHUTDOWN => Err(refusal(reply, "")),
        _ => Ok(()),
    }
}

fn refusal(reply: &OptionReply, export: &str) -> Refusal {
    let (what, hint) = match reply.kind {
        kind if kind == ReplyType::ErrUnknown as u32 => {
            (format!("the server has no export named {export:?}"), None)
        }
        ERR_TLS_REQUIRED => {
            ("the server demands TLS".into(), Some("write nbds:// or nbds+unix:// in the URI"))
        }
        ERR_POLICY => ("the server does not allow this client".into(), None),
        ERR_SHUTDOWN => ("the server is shutting down".into(), None),
        kind if kind == ReplyType::ErrUnsup as u32 => {
            ("the server is too old: it does not know the option GO".into(), None)
        }
        kind => (
            format!("the server refuses the export {export:?} (error {})", kind & !ERROR_BIT),
            None,
        ),
    };
    let message = String::from_utf8_lossy(&reply.data);
    let message: String = message.chars().filter(|letter| !letter.is_control()).take(200).collect();
    let what = if message.is_empty() { what } else { format!("{what}: {message}") };
    Refusal { what, hint }
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat()
}

/// The connection while it negotiates.
struct Wire {
    link: Link,
}

impl Wire {
    async fn option(&mut self, option: ClientOption, data: &[u8]) -> Result<(), Refusal> {
        let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend(option.number().to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.write(&bytes).await
    }

    /// The next reply, which must be to this option.
    async fn reply(&mut self, option: ClientOption) -> Result<OptionReply, Refusal> {
        let head = self.read(REPLY_HEADER_LENGTH).await?;
        let number =
            |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        if head[..8] != REPLY_MAGIC.to_be_bytes() || number(8) != option.number() {
            return Err("the server replies to something that was not asked".into());
        }
        let (kind, length) = (number(12), number(16));
        if length > MAX_REPLY {
            return Err(format!("the server sends a reply of {length} bytes to an option").into());
        }
        Ok(OptionReply { kind, data: self.read(length as usize).await? })
    }

    async fn write(&mut self, bytes: &[u8]) -> Result<(), Refusal> {
        let mut buffer = buffer(bytes.len())?;
        buffer.bytes_mut().copy_from_slice(bytes);
        let mut list = IoVectorList::new();
        list.push(buffer.lend());
        let (result, _) = self.link.send(list).await;
        let Err(error) = result else { return Ok(()) };
        // A server that refuses a client says why before it closes the connection.
        let said = self.read(1).await.err().filter(|_| self.link.is_secured());
        Err(said.unwrap_or_else(|| Refusal::of_connection(error)))
    }

    async fn read(&mut self, length: usize) -> Result<Vec<u8>, Refusal> {
        let mut buffer = buffer(length)?;
        let mut list = IoVectorList::new();
        if length > 0 {
            list.push(buffer.lend());
        }
        while !list.is_empty() {
            let (result, received) = self.link.receive(list).await;
            list = received;
            match result {
                Ok(0) => return Err("the server has closed the connection".into()),
                Ok(count) => list.advance(count),
                Err(error) => return Err(Refusal::of_connection(error)),
            }
        }
        drop(list);
        Ok(buffer.bytes().to_vec())
    }
}

fn buffer(length: usize) -> Result<Buffer, Refusal> {
    Buffer::try_new(length).map_err(|error| error.to_string().into())
}
