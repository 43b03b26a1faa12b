//! The opening of an NBD connection, from both sides: fixed newstyle, `NBD_OPT_GO`, simple replies.
//!
//! Numbers and layouts are those of the NBD protocol specification (doc/proto.md), "Fixed newstyle
//! negotiation". Nothing else is negotiated: the fewer bytes a reply has, the less the client costs.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

const MAGIC: u64 = 0x4e42_444d_4147_4943; // "NBDMAGIC"
const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054; // "IHAVEOPT"
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const FIXED_NEWSTYLE: u16 = 1;
const CLIENT_FIXED_NEWSTYLE: u32 = 1;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const REPLY_ERROR: u32 = 1 << 31;
const INFO_EXPORT: u16 = 0;
const HAS_FLAGS: u16 = 1 << 0;
const READ_ONLY: u16 = 1 << 1;
const HAS_FUA: u16 = 1 << 3;
/// Longer answers to `NBD_OPT_GO` do not exist; they are garbage.
const MAX_REPLY: u32 = 64 * 1024;
/// A server that is silent for this long has hung.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// What the server says of an export.
#[derive(Clone, Copy, Debug)]
pub struct Export {
    /// Size in bytes.
    pub size: u64,
    flags: u16,
}

impl Export {
    /// Whether writes may carry `NBD_CMD_FLAG_FUA`.
    pub fn has_fua(&self) -> bool {
        self.flags & HAS_FUA != 0
    }

    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.flags & READ_ONLY != 0
    }
}

/// Connects to the export `name` behind `socket`.
pub fn connect(socket: &Path, name: &str) -> Result<(UnixStream, Export)> {
    let mut stream = UnixStream::connect(socket)
        .with_context(|| format!("cannot connect to {}", socket.display()))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let export = negotiate(&mut stream, name)
        .with_context(|| format!("NBD handshake on {} failed", socket.display()))?;
    Ok((stream, export))
}

fn negotiate<S: Read + Write>(stream: &mut S, name: &str) -> Result<Export> {
    ensure!(u64::from_be_bytes(take(stream)?) == MAGIC, "not an NBD server");
    ensure!(u64::from_be_bytes(take(stream)?) == OPTION_MAGIC, "not a newstyle NBD server");
    let flags = u16::from_be_bytes(take(stream)?);
    ensure!(flags & FIXED_NEWSTYLE != 0, "not a fixed newstyle NBD server");

    let mut hello = CLIENT_FIXED_NEWSTYLE.to_be_bytes().to_vec();
    hello.extend(OPTION_MAGIC.to_be_bytes());
    hello.extend(OPTION_GO.to_be_bytes());
    let name_length = u32::try_from(name.len())?;
    // The name with its length, and a count of no information requests.
    hello.extend((4 + name_length + 2).to_be_bytes());
    hello.extend(name_length.to_be_bytes());
    hello.extend(name.as_bytes());
    hello.extend(0_u16.to_be_bytes());
    stream.write_all(&hello)?;

    let mut export = None;
    loop {
        match option_reply(stream)? {
            (REPLY_ACK, _) => return export.context("the server told no size"),
            (REPLY_INFO, data) => export = parse_info(&data).or(export),
            (kind, data) if kind & REPLY_ERROR != 0 => {
                bail!("export \"{name}\" refused: {kind:#x} {}", String::from_utf8_lossy(&data))
            }
            (kind, _) => bail!("unknown option reply {kind:#x}"),
        }
    }
}

/// The type and the data of the next answer to our option.
fn option_reply<S: Read>(stream: &mut S) -> Result<(u32, Vec<u8>)> {
    ensure!(u64::from_be_bytes(take(stream)?) == OPTION_REPLY_MAGIC, "bad option reply magic");
    let option = u32::from_be_bytes(take(stream)?);
    ensure!(option == OPTION_GO, "answer to option {option}, which nobody sent");
    let kind = u32::from_be_bytes(take(stream)?);
    let length = u32::from_be_bytes(take(stream)?);
    ensure!(length <= MAX_REPLY, "option reply of {length} bytes");
    let mut data = vec![0; length as usize];
    stream.read_exact(&mut data)?;
    Ok((kind, data))
}

fn parse_info(data: &[u8]) -> Option<Export> {
    let (kind, rest) = data.split_first_chunk()?;
    let (size, rest) = rest.split_first_chunk()?;
    let (flags, _) = rest.split_first_chunk()?;
    (u16::from_be_bytes(*kind) == INFO_EXPORT)
        .then(|| Export { size: u64::from_be_bytes(*size), flags: u16::from_be_bytes(*flags) })
}

/// The server's side of [`connect`], for an export of `size` bytes that takes durable writes.
pub fn accept<S: Read + Write>(stream: &mut S, size: u64) -> Result<()> {
    let mut greeting = MAGIC.to_be_bytes().to_vec();
    greeting.extend(OPTION_MAGIC.to_be_bytes());
    greeting.extend(FIXED_NEWSTYLE.to_be_bytes());
    stream.write_all(&greeting)?;
    let flags = u32::from_be_bytes(take(stream)?);
    ensure!(flags == CLIENT_FIXED_NEWSTYLE, "client flags {flags:#x}");
    ensure!(u64::from_be_bytes(take(stream)?) == OPTION_MAGIC, "bad option magic");
    let option = u32::from_be_bytes(take(stream)?);
    ensure!(option == OPTION_GO, "option {option}, not NBD_OPT_GO");
    let length = u32::from_be_bytes(take(stream)?);
    ensure!(length <= MAX_REPLY, "option of {length} bytes");
    stream.read_exact(&mut vec![0; length as usize])?;

    let mut info = INFO_EXPORT.to_be_bytes().to_vec();
    info.extend(size.to_be_bytes());
    info.extend((HAS_FLAGS | HAS_FUA).to_be_bytes());
    let mut answer = Vec::new();
    for (kind, data) in [(REPLY_INFO, info.as_slice()), (REPLY_ACK, &[])] {
        answer.extend(OPTION_REPLY_MAGIC.to_be_bytes());
        answer.extend(OPTION_GO.to_be_bytes());
        answer.extend(kind.to_be_bytes());
        answer.extend(u32::try_from(data.len())?.to_be_bytes());
        answer.extend(data);
    }
    Ok(stream.write_all(&answer)?)
}

fn take<S: Read, const N: usize>(stream: &mut S) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}
