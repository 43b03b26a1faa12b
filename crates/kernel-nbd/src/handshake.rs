//! The handshake with a server of this program (`doc/proto.md`, "Newstyle negotiation"): chooses
//! the default export, with simple replies, because the kernel supports no others.
//!
//! Guarantees: every length that the server sends is limited, and no read or write waits longer
//! than ten seconds. Afterwards the socket has no timeouts, because the kernel would keep them.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use blockhouse_nbd_protocol::TransmissionFlags;
use blockhouse_nbd_protocol::option::{
    ClientOption, FIXED_NEWSTYLE, INIT_MAGIC, InfoType, NO_ZEROES, OPTION_MAGIC,
    REPLY_HEADER_LENGTH, REPLY_MAGIC, ReplyType,
};

const LIMIT: Duration = Duration::from_secs(10);
/// The longest reply, in bytes: a message why there is no export.
const MAX_REPLY: usize = 64 << 10;
/// How many replies there may be.
const MAX_REPLIES: usize = 100;

/// An export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Export {
    /// The bytes.
    pub(crate) size: u64,
    /// The flags.
    pub(crate) flags: TransmissionFlags,
    /// The server's minimum block size, in bytes.
    pub(crate) block: u64,
}

/// Chooses the default export of a server.
///
/// # Errors
/// Errors of the socket, or the server's message.
pub(crate) fn negotiate(stream: &mut UnixStream) -> io::Result<Export> {
    stream.set_read_timeout(Some(LIMIT))?;
    stream.set_write_timeout(Some(LIMIT))?;
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting)?;
    let [first, second] = [0, 8].map(|start| number(&greeting[start..start + 8]));
    if (first, second) != (INIT_MAGIC, OPTION_MAGIC) {
        return Err(io::Error::other("it does not speak NBD"));
    }
    stream.write_all(&u32::from(FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes())?;
    // The default export, and a request for its block sizes.
    let data = [0, 0, 0, 0, 0, 1, 0, InfoType::BlockSize as u8];
    let mut option = OPTION_MAGIC.to_be_bytes().to_vec();
    option.extend(ClientOption::Go.number().to_be_bytes());
    option.extend((data.len() as u32).to_be_bytes());
    option.extend(data);
    stream.write_all(&option)?;
    let export = read_export(stream)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    Ok(export)
}

fn read_export(stream: &mut UnixStream) -> io::Result<Export> {
    let (mut export, mut smallest) = (None, 1);
    for _ in 0..MAX_REPLIES {
        let (kind, data) = read_reply(stream)?;
        if kind == ReplyType::Ack as u32 {
            let export = export.map(|export| Export { block: smallest, ..export });
            return export.ok_or_else(|| io::Error::other("it does not describe the export"));
        }
        if kind == ReplyType::Info as u32 {
            export = parse_export(&data).or(export);
            smallest = parse_smallest_block(&data).unwrap_or(smallest);
        } else if kind >> 31 == 1 {
            let said = String::from_utf8_lossy(&data).into_owned();
            return Err(io::Error::other(format!("it refuses the export: {said}")));
        }
    }
    Err(io::Error::other("it sends replies without end"))
}

fn read_reply(stream: &mut UnixStream) -> io::Result<(u32, Vec<u8>)> {
    let mut header = [0; REPLY_HEADER_LENGTH];
    stream.read_exact(&mut header)?;
    let length = number(&header[16..20]) as usize;
    if number(&header[..8]) != REPLY_MAGIC || length > MAX_REPLY {
        return Err(io::Error::other("it breaks the protocol"));
    }
    let mut data = vec![0; length];
    stream.read_exact(&mut data)?;
    Ok((number(&header[12..16]) as u32, data))
}

/// Parses information of the kind that has the size.
fn parse_export(data: &[u8]) -> Option<Export> {
    let kind = number(data.get(..2)?);
    let flags = TransmissionFlags::from_bits_retain(number(data.get(10..12)?) as u16);
    let size = number(&data[2..10]);
    (kind == InfoType::Export as u64).then_some(Export { size, flags, block: 1 })
}

/// Parses information of the kind that has the block sizes.
fn parse_smallest_block(data: &[u8]) -> Option<u64> {
    let kind = number(data.get(..2)?);
    let smallest = number(data.get(2..6)?);
    (kind == InfoType::BlockSize as u64).then_some(smallest)
}

/// A number of up to 8 bytes.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// The outcome with a server that sends `said` after its greeting.
    fn with_server(said: Vec<u8>) -> io::Result<Export> {
        let (mut client, mut server) = UnixStream::pair()?;
        let server = thread::spawn(move || {
            let mut greeting = INIT_MAGIC.to_be_bytes().to_vec();
            greeting.extend(OPTION_MAGIC.to_be_bytes());
            greeting.extend(FIXED_NEWSTYLE.to_be_bytes());
            server.write_all(&greeting)?;
            let mut asked = [0; 4 + 16 + 8];
            server.read_exact(&mut asked)?;
            assert_eq!(asked[12..16], ClientOption::Go.number().to_be_bytes());
            server.write_all(&said)
        });
        let outcome = negotiate(&mut client);
        drop(client);
        // The client may have left before everything was said.
        let _ = server.join().expect("the server ends");
        outcome
    }

    fn reply(kind: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = REPLY_MAGIC.to_be_bytes().to_vec();
        bytes.extend(ClientOption::Go.number().to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        bytes
    }

    fn info(size: u64, flags: u16) -> Vec<u8> {
        let data = [&[0, 0][..], &size.to_be_bytes(), &flags.to_be_bytes()].concat();
        reply(ReplyType::Info as u32, &data)
    }

    #[test]
    fn an_export_is_what_the_server_says() {
        let ack = reply(ReplyType::Ack as u32, &[]);
        let other = reply(ReplyType::Info as u32, &[0, 2, 0, 0]);
        let said = [info(1 << 40, 0x10d), other, ack.clone()].concat();
        let export = with_server(said).expect("an export");
        assert_eq!((export.size, export.flags.bits(), export.block), (1 << 40, 0x10d, 1));
        let blocks = reply(ReplyType::Info as u32, &[0, 3, 0, 0, 16, 0, 0, 0, 16, 0, 2, 0, 0, 0]);
        let export = with_server([blocks, info(1 << 40, 0x10d), ack.clone()].concat());
        assert_eq!(export.expect("an export").block, 4096);
        assert!(with_server(ack).is_err(), "nothing was described");
    }

    #[test]
    fn refusals_and_nonsense_are_errors() {
        let refused = reply(ReplyType::ErrUnknown as u32, b"no such export");
        let error = with_server(refused).expect_err("it is refused");
        assert!(error.to_string().contains("no such export"), "{error}");
        let mut long = reply(ReplyType::Info as u32, &[]);
        long[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
        for nonsense in [Vec::new(), vec![7; 100], long, info(1, 1).repeat(MAX_REPLIES + 1)] {
            assert!(with_server(nonsense).is_err());
        }
    }
}
