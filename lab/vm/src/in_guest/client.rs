//! A small NBD client: every kind of change, one at a time or many at once, and single reads.
//!
//! The handshake and the layout of requests are those of the comparison's light client. An error in
//! a reply, or a missing reply, is an error here.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use lab_nbd::{command, flag, handshake, wire};

/// The longest time without a reply, although emulation is slow.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A request that changes the disk or flushes. Offsets and lengths in bytes.
#[derive(Clone, Debug)]
pub enum Change {
    /// Data without durability.
    Write { offset: u64, data: Vec<u8> },
    /// Data that is durable when it is answered.
    WriteFua { offset: u64, data: Vec<u8> },
    /// Zeros that are durable when they are answered.
    ZeroesFua { offset: u64, length: u32 },
    /// Makes everything answered so far durable.
    Flush,
}

/// A connection.
pub struct Client {
    stream: UnixStream,
}

impl Client {
    /// Connects to the export without a name behind `socket`.
    pub fn connect(socket: &Path) -> Result<Self> {
        let (stream, export) = handshake::open(socket, "")?;
        ensure!(export.has_fua(), "the export offers no FUA");
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        Ok(Self { stream })
    }

    /// Does one change.
    pub fn change(&mut self, change: &Change) -> Result<()> {
        self.together(std::slice::from_ref(change))
    }

    /// Sends all `changes` and waits for all replies, which may come in any order.
    pub fn together(&mut self, changes: &[Change]) -> Result<()> {
        let requests = changes.iter().zip(0..).map(|(change, cookie)| request(change, cookie));
        self.stream.write_all(&requests.collect::<Vec<_>>().concat()).context("cannot send")?;
        let mut open = vec![true; changes.len()];
        for _ in changes {
            let mut header = [0; wire::REPLY];
            self.stream.read_exact(&mut header).context("no reply")?;
            let cookie = wire::parse_reply(&header)?;
            let slot = open.get_mut(cookie as usize).context("a reply to nothing")?;
            ensure!(std::mem::take(slot), "a second reply to request {cookie}");
        }
        Ok(())
    }

    /// Reads `length` bytes at `offset`.
    pub fn read(&mut self, offset: u64, length: u32) -> Result<Vec<u8>> {
        let request = wire::header(command::READ, 0, 0, offset, length);
        self.stream.write_all(&request).context("cannot send")?;
        let mut reply = vec![0; wire::REPLY + length as usize];
        self.stream.read_exact(&mut reply[..wire::REPLY]).context("no reply")?;
        wire::parse_reply(reply.first_chunk().expect("a reply is longer than its header"))?;
        self.stream.read_exact(&mut reply[wire::REPLY..]).context("a reply without its data")?;
        Ok(reply.split_off(wire::REPLY))
    }

    /// Ends the connection with `NBD_CMD_DISC`.
    pub fn close(mut self) -> Result<()> {
        self.stream.write_all(&wire::disconnect()).context("cannot send the farewell")
    }
}

fn request(change: &Change, cookie: u64) -> Vec<u8> {
    use wire::header;
    let with_data = |flags, offset, data: &[u8]| {
        let mut bytes = header(command::WRITE, flags, cookie, offset, data.len() as u32);
        bytes.extend_from_slice(data);
        bytes
    };
    match change {
        Change::Write { offset, data } => with_data(0, *offset, data),
        Change::WriteFua { offset, data } => with_data(flag::FUA, *offset, data),
        Change::ZeroesFua { offset, length } => {
            header(command::WRITE_ZEROES, flag::FUA, cookie, *offset, *length)
        }
        Change::Flush => header(command::FLUSH, 0, cookie, 0, 0),
    }
}
