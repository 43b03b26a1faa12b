//! The opening of an NBD connection, from both sides: fixed newstyle.
//!
//! Numbers and layouts are those of the NBD protocol specification (doc/proto.md), "Fixed newstyle
//! negotiation".

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::protocol::{option, reply, transmission};

const MAGIC: u64 = 0x4e42_444d_4147_4943; // "NBDMAGIC"
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054; // "IHAVEOPT"
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const FIXED_NEWSTYLE: u16 = 1;
const CLIENT_FIXED_NEWSTYLE: u32 = 1;
const REPLY_ERROR: u32 = 1 << 31;
const INFO_EXPORT: u16 = 0;
/// The longest reply to an option; a longer one is an error.
const MAX_REPLY: u32 = 16 << 20;
/// A server that is silent for this long has hung.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// The server's description of an export.
#[derive(Clone, Copy, Debug)]
pub struct Export {
    /// Size in bytes.
    pub size: u64,
    /// The transmission flags.
    pub flags: u16,
}

impl Export {
    /// Parses the data of a reply to GO or INFO; `None` if it is not `NBD_INFO_EXPORT`.
    pub fn parse(data: &[u8]) -> Option<Self> {
        let (kind, rest) = data.split_first_chunk()?;
        let (size, rest) = rest.split_first_chunk()?;
        let (flags, _) = rest.split_first_chunk()?;
        (u16::from_be_bytes(*kind) == INFO_EXPORT)
            .then(|| Self { size: u64::from_be_bytes(*size), flags: u16::from_be_bytes(*flags) })
    }

    /// Whether writes may carry `NBD_CMD_FLAG_FUA`.
    pub fn has_fua(&self) -> bool {
        self.flags & transmission::SEND_FUA != 0
    }

    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.flags & transmission::READ_ONLY != 0
    }
}

/// One reply to an option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OptionReply {
    /// One of [`reply`].
    pub kind: u32,
    /// The bytes that come with it.
    pub data: Vec<u8>,
}

impl OptionReply {
    /// Whether no other reply to the option follows.
    pub fn is_last(&self) -> bool {
        self.kind == reply::ACK || self.is_error()
    }

    /// Whether the option is refused.
    pub fn is_error(&self) -> bool {
        self.kind & REPLY_ERROR != 0
    }
}

/// Reads the server's greeting and answers with the client's flags.
pub fn greet<S: Read + Write>(stream: &mut S, client_flags: u32) -> Result<()> {
    ensure!(u64::from_be_bytes(take(stream)?) == MAGIC, "not an NBD server");
    ensure!(u64::from_be_bytes(take(stream)?) == OPTION_MAGIC, "not a newstyle NBD server");
    let flags = u16::from_be_bytes(take(stream)?);
    ensure!(flags & FIXED_NEWSTYLE != 0, "not a fixed newstyle NBD server");
    Ok(stream.write_all(&client_flags.to_be_bytes())?)
}

/// The head of an option that claims to have `length` bytes of data.
pub fn option_head(number: u32, length: u32) -> Vec<u8> {
    [&OPTION_MAGIC.to_be_bytes()[..], &number.to_be_bytes(), &length.to_be_bytes()].concat()
}

/// The next reply to the option `number`.
pub fn read_option_reply<S: Read>(stream: &mut S, number: u32) -> Result<OptionReply> {
    ensure!(u64::from_be_bytes(take(stream)?) == OPTION_REPLY_MAGIC, "bad option reply magic");
    let option = u32::from_be_bytes(take(stream)?);
    ensure!(option == number, "a reply to option {option} instead of {number}");
    let kind = u32::from_be_bytes(take(stream)?);
    let length = u32::from_be_bytes(take(stream)?);
    ensure!(length <= MAX_REPLY, "option reply of {length} bytes");
    let mut data = vec![0; length as usize];
    stream.read_exact(&mut data)?;
    Ok(OptionReply { kind, data })
}

/// The data of INFO and GO without information requests.
pub fn go_data(name: &str) -> Vec<u8> {
    [&(name.len() as u32).to_be_bytes(), name.as_bytes(), &[0, 0]].concat()
}

/// The data of SET_META_CONTEXT that asks for block status.
pub fn allocation_query(name: &str) -> Vec<u8> {
    let string = |text: &str| [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat();
    [string(name), 1u32.to_be_bytes().to_vec(), string("base:allocation")].concat()
}

/// Connects to the export `name` behind `socket`, with simple replies: they have the fewest bytes,
/// so the client costs least.
pub fn open(socket: &Path, name: &str) -> Result<(UnixStream, Export)> {
    let mut stream = UnixStream::connect(socket)
        .with_context(|| format!("cannot connect to {}", socket.display()))?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    let export = negotiate(&mut stream, name)
        .with_context(|| format!("NBD handshake on {} failed", socket.display()))?;
    Ok((stream, export))
}

fn negotiate<S: Read + Write>(stream: &mut S, name: &str) -> Result<Export> {
    greet(stream, CLIENT_FIXED_NEWSTYLE)?;
    let data = go_data(name);
    let head = option_head(option::GO, u32::try_from(data.len())?);
    stream.write_all(&[head, data].concat())?;
    let mut export = None;
    loop {
        let reply = read_option_reply(stream, option::GO)?;
        match reply.kind {
            reply::ACK => return export.context("the server told no size"),
            reply::INFO => export = Export::parse(&reply.data).or(export),
            kind if reply.is_error() => {
                let text = String::from_utf8_lossy(&reply.data);
                bail!("export \"{name}\" refused: {kind:#x} {text}")
            }
            kind => bail!("unknown option reply {kind:#x}"),
        }
    }
}

/// The server's side of [`open`]: offers one export, whatever name is asked for, and refuses all
/// other options.
pub fn accept<S: Read + Write>(stream: &mut S, export: Export) -> Result<()> {
    let mut greeting = MAGIC.to_be_bytes().to_vec();
    greeting.extend(OPTION_MAGIC.to_be_bytes());
    greeting.extend(FIXED_NEWSTYLE.to_be_bytes());
    stream.write_all(&greeting)?;
    let flags = u32::from_be_bytes(take(stream)?);
    ensure!(flags & CLIENT_FIXED_NEWSTYLE != 0, "client flags {flags:#x}");
    loop {
        ensure!(u64::from_be_bytes(take(stream)?) == OPTION_MAGIC, "bad option magic");
        let number = u32::from_be_bytes(take(stream)?);
        let length = u32::from_be_bytes(take(stream)?);
        ensure!(length <= MAX_REPLY, "option of {length} bytes");
        stream.read_exact(&mut vec![0; length as usize])?;
        if number == option::GO {
            let mut info = INFO_EXPORT.to_be_bytes().to_vec();
            info.extend(export.size.to_be_bytes());
            info.extend((transmission::HAS_FLAGS | export.flags).to_be_bytes());
            let replies =
                [option_reply(number, reply::INFO, &info), option_reply(number, reply::ACK, &[])];
            return Ok(stream.write_all(&replies.concat())?);
        }
        stream.write_all(&option_reply(number, reply::ERR_UNSUP, &[]))?;
    }
}

fn option_reply(number: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
    for field in [number, kind, data.len() as u32] {
        bytes.extend(field.to_be_bytes());
    }
    bytes.extend(data);
    bytes
}

fn take<S: Read, const N: usize>(stream: &mut S) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}
