//! The handshake of a client (`doc/proto.md`, "Newstyle negotiation"): TLS if the URI requests it;
//! extended headers, or else structured replies, if the server supports them; a metadata context;
//! then GO.
//!
//! If the server does not support GO, or supports EXPORT_NAME only, the export is chosen by
//! EXPORT_NAME. An oldstyle server has one export without a name.
//!
//! Guarantees: with TLS, only the client flags and the request for TLS are sent in the clear. Every
//! length that a server sends is checked against a limit before memory is allocated for it. The
//! export's size and block sizes are checked: values for which no valid request exists are refused.

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

/// The longest reply to an option that is accepted. A name of 4096 bytes and its fields need much
/// less.
const MAX_REPLY: u32 = 64 << 10;
/// The most replies to one option; more are an error.
pub(super) const MAX_REPLIES: usize = 1000;
/// The largest minimum block size that is accepted.
const MAX_MINIMUM_BLOCK: u32 = 64 << 10;

/// The second magic number of an oldstyle server (`doc/proto.md`, "Oldstyle negotiation").
const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;
/// The zero bytes that a server sends after the flags of an export, unless both sides have
/// negotiated `NO_ZEROES`.
const ZEROES: usize = 124;

/// Set in the types of replies that refuse an option.
pub(super) const ERROR_BIT: u32 = 1 << 31;
const ERR_POLICY: u32 = ReplyType::ErrPolicy as u32;
const ERR_TLS_REQUIRED: u32 = ReplyType::ErrTlsReqd as u32;
const ERR_SHUTDOWN: u32 = ReplyType::ErrShutdown as u32;

/// The result of the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Negotiated {
    pub(super) framing: Framing,
    pub(super) size: u64,
    pub(super) flags: TransmissionFlags,
    /// Offsets and lengths of requests are multiples of this many bytes; a power of two.
    pub(super) minimum_block: u32,
    /// The longest read or write, in bytes: a multiple of `minimum_block`.
    pub(super) max_payload: u32,
    /// Whether block status was negotiated with the requested context.
    pub(super) has_block_status: bool,
}

/// The export and options that a client requests.
pub(super) struct Wish<'a> {
    pub(super) export: &'a str,
    /// The metadata context.
    pub(super) context: &'a str,
    /// TLS, which the server must have.
    pub(super) tls: Option<&'a Arc<ClientTls>>,
    /// Whether to choose the export by EXPORT_NAME and negotiate nothing else, because the server
    /// ends the connection at an option that it does not know.
    pub(super) is_plain: bool,
}

/// Why the negotiation failed.
pub(super) enum Failure {
    /// The first option, without TLS, got no valid reply. The server may support only EXPORT_NAME.
    Options(Refusal),
    Other(Refusal),
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Self::Other(refusal)
    }
}

impl From<&str> for Failure {
    fn from(what: &str) -> Self {
        Self::Other(what.into())
    }
}

/// A reply to an option.
pub(super) struct OptionReply {
    pub(super) kind: u32,
    pub(super) data: Vec<u8>,
}

/// Agrees with a server on an export.
pub(super) async fn negotiate(
    stream: Stream,
    wish: Wish<'_>,
) -> Result<(Link, Negotiated), Failure> {
    let Wish { export, context, tls, is_plain } = wish;
    let mut agreed = Negotiated {
        framing: Framing::Simple,
        size: 0,
        flags: TransmissionFlags::empty(),
        minimum_block: 1,
        max_payload: MAX_PAYLOAD,
        has_block_status: false,
    };
    let (mut wire, flags) = greet(stream, tls).await?;
    let Some(flags) = flags else {
        oldstyle(&mut wire, &wish, &mut agreed).await?;
        return Ok((wire.link, agreed));
    };
    let is_fixed = flags & FIXED_NEWSTYLE != 0;
    if is_fixed && !is_plain {
        agreed.framing = framing(&mut wire).await?;
        agreed.has_block_status =
            agreed.framing.has_chunks() && block_status(&mut wire, export, context).await?;
        if go(&mut wire, export, &mut agreed).await? {
            return Ok((wire.link, agreed));
        }
    }
    let zeroes = if flags & NO_ZEROES == 0 { ZEROES } else { 0 };
    by_name(&mut wire, export, zeroes, &mut agreed).await?;
    Ok((wire.link, agreed))
}

/// Answers the greeting of a server, and starts TLS if it is requested. Returns the handshake flags
/// that both sides have. Returns `None` for an oldstyle server; then only its magic numbers were
/// read.
pub(super) async fn greet(
    stream: Stream,
    tls: Option<&Arc<ClientTls>>,
) -> Result<(Wire, Option<u16>), Refusal> {
    let mut wire = Wire { link: Link::plain(stream.clone()) };
    let greeting = wire.read(16).await?;
    if greeting[..8] != INIT_MAGIC.to_be_bytes() {
        return Err("the server does not speak NBD".into());
    }
    if greeting[8..] == OLDSTYLE_MAGIC.to_be_bytes() {
        return Ok((wire, None));
    }
    if greeting[8..] != OPTION_MAGIC.to_be_bytes() {
        return Err("the server uses an unknown form of the NBD protocol".into());
    }
    let flags = wire.read(2).await?;
    let flags = u16::from_be_bytes([flags[0], flags[1]]) & (FIXED_NEWSTYLE | NO_ZEROES);
    wire.write(&u32::from(flags).to_be_bytes()).await?;
    if let Some(tls) = tls {
        if flags & FIXED_NEWSTYLE == 0 {
            return Err(without_tls());
        }
        start_tls(&mut wire).await?;
        wire.link = Link::secured(stream, tls).await?;
    }
    Ok((wire, Some(flags)))
}

/// Chooses the export by EXPORT_NAME, if the server does not support GO. The server ends the
/// connection if it has no export of this name.
async fn by_name(
    wire: &mut Wire,
    export: &str,
    zeroes: usize,
    agreed: &mut Negotiated,
) -> Result<(), Refusal> {
    wire.option(ClientOption::ExportName, export.as_bytes()).await?;
    let told = wire.read(10 + zeroes).await.map_err(|refusal| Refusal {
        what: format!("the server may have no export named {export:?}: {}", refusal.what),
        hint: refusal.hint,
    })?;
    describe(&told, agreed)
}

/// Accepts the only export of an oldstyle server. The server sends the export's properties without
/// a request.
async fn oldstyle(
    wire: &mut Wire,
    wish: &Wish<'_>,
    agreed: &mut Negotiated,
) -> Result<(), Refusal> {
    if wish.tls.is_some() {
        return Err(without_tls());
    }
    if !wish.export.is_empty() {
        return Err(Refusal {
            what: format!(
                "the server has one export without a name, and none named {:?}",
                wish.export
            ),
            hint: Some("leave the name out of the URI: it uses the NBD protocol of before 2012"),
        });
    }
    let told = wire.read(8 + 4 + ZEROES).await?;
    // The upper half of the server's flags does not describe the export.
    describe(&[&told[..8], &told[10..12]].concat(), agreed)
}

/// Records an export's size and flags.
fn describe(told: &[u8], agreed: &mut Negotiated) -> Result<(), Refusal> {
    info(&[&(InfoType::Export as u16).to_be_bytes(), told].concat(), agreed).map(drop)
}

fn without_tls() -> Refusal {
    let hint = "use nbd:// only if the network to the server is trusted";
    Refusal { what: "the server has no TLS".into(), hint: Some(hint) }
}

/// Requests TLS from the server (STARTTLS).
async fn start_tls(wire: &mut Wire) -> Result<(), Refusal> {
    wire.option(ClientOption::StartTls, &[]).await?;
    let reply = wire.reply(ClientOption::StartTls).await?;
    if reply.kind == ReplyType::Ack as u32 {
        return Ok(());
    }
    Err(without_tls())
}

/// Negotiates the framing: the first of extended headers, structured replies and simple replies
/// that the server accepts.
pub(super) async fn framing(wire: &mut Wire) -> Result<Framing, Failure> {
    let offers = [
        (ClientOption::ExtendedHeaders, Framing::Extended),
        (ClientOption::StructuredReply, Framing::Structured),
    ];
    for (option, framing) in offers {
        let is_first = option == ClientOption::ExtendedHeaders && !wire.link.is_secured();
        let failure = if is_first { Failure::Options } else { Failure::Other };
        let asked = async {
            wire.option(option, &[]).await?;
            wire.reply(option).await
        };
        let reply = asked.await.map_err(failure)?;
        if reply.kind == ReplyType::Ack as u32 {
            return Ok(framing);
        }
        check_not_final(&reply)?;
    }
    Ok(Framing::Simple)
}

/// Selects a metadata context; returns whether the export has it.
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

pub(super) const TOO_MANY: &str = "the server sends too many replies to an option";

/// Chooses the export by GO; `false` if the server does not support GO.
async fn go(wire: &mut Wire, export: &str, agreed: &mut Negotiated) -> Result<bool, Refusal> {
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
            kind if kind == ReplyType::Ack as u32 && has_export => return Ok(true),
            kind if kind == ReplyType::Ack as u32 => {
                return Err("the server does not send the size of the export".into());
            }
            kind if kind == ReplyType::ErrUnsup as u32 => return Ok(false),
            kind if kind & ERROR_BIT != 0 => return Err(refusal(&reply, export)),
            _ => {}
        }
    }
    Err(TOO_MANY.into())
}

/// Records one item of information about the export. Returns whether the item was the export's
/// size.
fn info(data: &[u8], agreed: &mut Negotiated) -> Result<bool, Refusal> {
    const MALFORMED: &str = "the server sends malformed information on the export";
    let number = |at: usize, length: usize| {
        let bytes = data.get(at..at + length).ok_or(MALFORMED)?;
        Ok::<_, Refusal>(bytes.iter().fold(0, |value, &byte| value << 8 | u64::from(byte)))
    };
    let kind = number(0, 2)?;
    if kind == InfoType::Export as u64 {
        agreed.size = number(2, 8)?;
        agreed.flags = TransmissionFlags::from_bits_truncate(number(10, 2)? as u16);
        // The largest size of a file in POSIX (`off_t`).
        if i64::try_from(agreed.size).is_err() {
            return Err(
                format!("the server gives the export a size of {} bytes", agreed.size).into()
            );
        }
        return Ok(true);
    }
    if kind == InfoType::BlockSize as u64 {
        let (minimum, maximum) = (number(2, 4)? as u32, number(10, 4)? as u32);
        if !minimum.is_power_of_two() || minimum > MAX_MINIMUM_BLOCK || maximum < minimum {
            return Err(format!(
                "the server gives the export blocks of {minimum} to {maximum} bytes"
            )
            .into());
        }
        agreed.minimum_block = minimum;
        agreed.max_payload = maximum.min(MAX_PAYLOAD) / minimum * minimum;
    }
    Ok(false)
}

/// Returns an error if the reply is a refusal after which every further option would fail too.
fn check_not_final(reply: &OptionReply) -> Result<(), Refusal> {
    match reply.kind {
        ERR_POLICY | ERR_TLS_REQUIRED | ERR_SHUTDOWN => Err(refusal(reply, "")),
        _ => Ok(()),
    }
}

pub(super) fn refusal(reply: &OptionReply, export: &str) -> Refusal {
    let (what, hint) = match reply.kind {
        kind if kind == ReplyType::ErrUnknown as u32 => {
            (format!("the server has no export named {export:?}"), None)
        }
        ERR_TLS_REQUIRED => {
            ("the server demands TLS".into(), Some("write nbds:// or nbds+unix:// in the URI"))
        }
        ERR_POLICY => ("the server does not allow this client".into(), None),
        ERR_SHUTDOWN => ("the server is shutting down".into(), None),
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

pub(super) fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat()
}

/// The connection while it negotiates.
pub(super) struct Wire {
    link: Link,
}

impl Wire {
    pub(super) async fn option(
        &mut self,
        option: ClientOption,
        data: &[u8],
    ) -> Result<(), Refusal> {
        let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend(option.number().to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.write(&bytes).await
    }

    /// Reads the next reply, which must be to this option.
    pub(super) async fn reply(&mut self, option: ClientOption) -> Result<OptionReply, Refusal> {
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
        // A server that refuses a client sends the reason before it closes the connection.
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
