//! An export of an NBD server as storage.
//!
//! Guarantees:
//! - What the server cannot do is said by [`Capabilities`]: an export without FUA is flushed after durable writes, one
//!   without block status is all data.
//! - A request is split where it is longer than the server takes.
//! - Where the server says that a flush on one connection covers all (`CAN_MULTI_CONN`), each loop that uses the storage
//!   has a connection of its own. Otherwise all share one.
//! - Where a connection fails, requests wait for the server to come back as long as the caller allows, and are sent
//!   again; each of them may then be done twice. Afterwards they fail.

mod connect;
mod connection;
mod dial;
mod handshake;
mod parts;
mod pending;
mod reader;
mod transmission;
mod writer;

use std::sync::Arc;
use std::thread::ThreadId;
use std::time::Duration;

use blockhouse_core::{
    Alignment, Allocation, ByteRange, Capabilities, Durability, Error, ErrorKind, Fua, FuaCost,
    GroupCommit, IoVector, Offload, ReadAfterDiscard, Result, Storage, SyncMode, Unmap, WriteCache,
};
use blockhouse_nbd_protocol::request::kind;
use blockhouse_nbd_protocol::uri::NbdUri;
use blockhouse_nbd_protocol::{CommandFlags, Framing, StatusFlags, TransmissionFlags};
use parking_lot::Mutex;

use crate::detached::DetachedSyncs;
use dial::Dial;
use handshake::Negotiated;
use parts::Parts;
use pending::{BlockStatus, Body};
use transmission::{Command, Transmission};

/// The longest range of one zero write or trim with compact headers, which have 32 bits for it.
const MAX_COMPACT_RANGE: u64 = 1 << 30;
/// The longest range of one zero write or trim with extended headers.
const MAX_EXTENDED_RANGE: u64 = 1 << 40;
/// Connections of one storage.
const MAX_CONNECTIONS: usize = 16;

/// An export of an NBD server.
pub struct NbdStorage {
    dial: Arc<Dial>,
    /// Those of each loop; never empty. Of an export without `CAN_MULTI_CONN`, the only one.
    connections: Mutex<Vec<(ThreadId, Arc<Transmission>)>>,
    detached: Arc<DetachedSyncs>,
}

impl NbdStorage {
    /// Connects to a server. Where the connection fails later, requests wait for `reconnect_time` until the server is
    /// back.
    ///
    /// A server that comes back must have all that it answered, also what no flush had covered: so must one that is
    /// started again on the same host, but not one whose host was started again.
    ///
    /// # Errors
    /// What failed, with the URI: there is no server, it refuses the export, or it takes longer than 30 seconds.
    ///
    /// # Panics
    /// Outside of an event loop.
    pub async fn connect(uri: NbdUri, reconnect_time: Duration) -> Result<Self> {
        let (dial, stream) = Dial::connect(uri, reconnect_time).await?;
        let (dial, detached) = (Arc::new(dial), Arc::<DetachedSyncs>::default());
        let connection = connection::start(Arc::clone(&dial), Arc::clone(&detached), stream)?;
        let connections = Mutex::new(vec![(std::thread::current().id(), connection)]);
        Ok(Self { dial, connections, detached })
    }

    /// Whether the server refuses writes.
    pub fn is_read_only(&self) -> bool {
        self.has(TransmissionFlags::READ_ONLY)
    }

    fn export(&self) -> &Negotiated {
        self.dial.export()
    }

    fn has(&self, flag: TransmissionFlags) -> bool {
        self.export().flags.contains(flag)
    }

    /// The connection of this loop.
    async fn connection(&self) -> Result<Arc<Transmission>> {
        let thread = std::thread::current().id();
        if let Some(connection) = self.known_connection(thread) {
            return Ok(connection);
        }
        let stream = self.dial.again().await?;
        let mut connections = self.connections.lock();
        // Several requests of one loop may have come here.
        if let Some((_, known)) = connections.iter().find(|(of, _)| *of == thread) {
            stream.shutdown();
            return Ok(Arc::clone(known));
        }
        let (dial, detached) = (Arc::clone(&self.dial), Arc::clone(&self.detached));
        let connection = connection::start(dial, detached, stream)?;
        connections.push((thread, Arc::clone(&connection)));
        Ok(connection)
    }

    fn known_connection(&self, thread: ThreadId) -> Option<Arc<Transmission>> {
        let connections = self.connections.lock();
        let is_shared =
            !self.has(TransmissionFlags::CAN_MULTI_CONN) || connections.len() >= MAX_CONNECTIONS;
        let own = connections.iter().find(|(of, _)| *of == thread);
        let found = own.or_else(|| connections.first().filter(|_| is_shared));
        found.map(|(_, connection)| Arc::clone(connection))
    }

    async fn request(&self, command: Command) -> Result<Option<BlockStatus>> {
        let offset = command.offset;
        let submitted = self.connection().await?.submit(command);
        submitted.await.map_err(|error| error.at(offset))
    }

    /// A zero write or trim of a range, in as many requests as it takes.
    async fn change_range(&self, kind: u16, flags: CommandFlags, range: ByteRange) -> Result<()> {
        let limit = match self.export().framing {
            Framing::Extended => MAX_EXTENDED_RANGE,
            Framing::Simple | Framing::Structured => MAX_COMPACT_RANGE,
        };
        let end = range.end().min(self.export().size);
        let mut offset = range.offset();
        while offset < end {
            let length = limit.min(end - offset);
            let body = Body::None;
            self.request(Command { kind, flags, offset, length, body }).await?;
            offset += length;
        }
        Ok(())
    }

    fn unsupported(&self, what: &'static str) -> Error {
        Error::new(ErrorKind::Unsupported, what).on(self.dial.name())
    }
}

impl Drop for NbdStorage {
    fn drop(&mut self) {
        self.connections.get_mut().iter().for_each(|(_, connection)| connection.close());
    }
}

impl Storage for NbdStorage {
    fn name(&self) -> &str {
        self.dial.name()
    }

    fn capabilities(&self) -> Capabilities {
        let offload = |flag| match self.has(flag) {
            true => Offload::Available,
            false => Offload::Unavailable,
        };
        let has_flush = self.has(TransmissionFlags::SEND_FLUSH);
        Capabilities {
            fua: match self.has(TransmissionFlags::SEND_FUA) {
                true => Fua::Native,
                false => Fua::Emulated,
            },
            fua_cost: FuaCost::NoFlush,
            // A server without FLUSH has nothing to flush (proto.md, "Request types").
            write_cache: if has_flush { WriteCache::Volatile } else { WriteCache::None },
            group_commit: match self.has(TransmissionFlags::SEND_FUA) {
                true => GroupCommit::Never,
                false => GroupCommit::From(1),
            },
            alignment: Alignment { offset: self.export().minimum_block, memory: 1 },
            write_zeroes: offload(TransmissionFlags::SEND_WRITE_ZEROES),
            discard: offload(TransmissionFlags::SEND_TRIM),
            read_after_discard: ReadAfterDiscard::Undefined,
        }
    }

    fn size(&self) -> u64 {
        self.export().size
    }

    async fn read(&self, mut offset: u64, mut into: IoVector) -> Result<()> {
        let inside = self.export().size.saturating_sub(offset).min(into.len() as u64) as usize;
        into.split_off(inside).fill(0);
        while !into.is_empty() {
            let length = into.len().min(self.export().max_payload as usize);
            let rest = into.split_off(length);
            let body = Body::Data(Parts::new(offset, std::mem::replace(&mut into, rest)));
            let (flags, length, kind) = (CommandFlags::empty(), length as u64, kind::READ);
            self.request(Command { kind, flags, offset, length, body }).await?;
            offset += length;
        }
        Ok(())
    }

    async fn write(
        &self,
        mut offset: u64,
        mut from: IoVector,
        durability: Durability,
    ) -> Result<()> {
        let end = offset.checked_add(from.len() as u64);
        if end.is_none_or(|end| end > self.export().size) {
            let what = "cannot write past the end of an NBD export";
            return Err(Error::new(ErrorKind::NoSpace, what).on(self.dial.name()).at(offset));
        }
        let has_fua = self.has(TransmissionFlags::SEND_FUA);
        let mut flags = match self.export().framing {
            Framing::Extended => CommandFlags::PAYLOAD_LEN,
            Framing::Simple | Framing::Structured => CommandFlags::empty(),
        };
        flags.set(CommandFlags::FUA, durability == Durability::Data && has_fua);
        while !from.is_empty() {
            let length = from.len().min(self.export().max_payload as usize);
            let rest = from.split_off(length);
            let body = Body::Payload(std::mem::replace(&mut from, rest));
            let (length, kind) = (length as u64, kind::WRITE);
            self.request(Command { kind, flags, offset, length, body }).await?;
            offset += length;
        }
        match durability.sync() {
            Some(sync) if !flags.contains(CommandFlags::FUA) => self.flush(sync).await,
            _ => Ok(()),
        }
    }

    async fn write_zeroes(&self, range: ByteRange, unmap: Unmap) -> Result<()> {
        if !self.has(TransmissionFlags::SEND_WRITE_ZEROES) {
            return Err(self.unsupported("the server cannot write zeros by itself"));
        }
        let flags = match unmap {
            Unmap::Allowed => CommandFlags::empty(),
            Unmap::Forbidden => CommandFlags::NO_HOLE,
        };
        self.change_range(kind::WRITE_ZEROES, flags, range).await
    }

    async fn discard(&self, range: ByteRange) -> Result<()> {
        if !self.has(TransmissionFlags::SEND_TRIM) {
            return Err(self.unsupported("the server cannot discard"));
        }
        self.change_range(kind::TRIM, CommandFlags::empty(), range).await
    }

    async fn flush(&self, _sync: SyncMode) -> Result<()> {
        self.detached.drained().await?;
        if !self.has(TransmissionFlags::SEND_FLUSH) {
            return Ok(());
        }
        let (kind, flags, body) = (kind::FLUSH, CommandFlags::empty(), Body::None);
        self.request(Command { kind, flags, offset: 0, length: 0, body }).await?;
        Ok(())
    }

    async fn resize(&self, size: u64) -> Result<()> {
        match size == self.export().size {
            true => Ok(()),
            false => {
                Err(self.unsupported("the size of an NBD export cannot be changed by a client"))
            }
        }
    }

    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        let inside = self.export().size.saturating_sub(range.offset()).min(range.length());
        if inside == 0 {
            return Ok((Allocation::Hole, range.length()));
        }
        if !self.export().has_block_status {
            return Ok((Allocation::Data, inside));
        }
        // Whole blocks of the server, the last one up to the end.
        let block = u64::from(self.export().minimum_block);
        let skipped = range.offset() % block;
        let (offset, size) = (range.offset() - skipped, self.export().size);
        let wanted = (inside + skipped).next_multiple_of(block).min(size - offset);
        let length = wanted.min(MAX_COMPACT_RANGE);
        let (kind, flags, body) = (kind::BLOCK_STATUS, CommandFlags::REQ_ONE, Body::Status);
        let status = self.request(Command { kind, flags, offset, length, body }).await?;
        let told = status.and_then(|(told, flags)| Some((told.checked_sub(skipped)?, flags)));
        let Some((told @ 1.., flags)) = told else {
            return Err(self.dial.error("the server tells no block status").at(offset));
        };
        // Only what reads as zeros for sure may be skipped.
        let allocation = match flags.contains(StatusFlags::ZERO) {
            true => Allocation::Hole,
            false => Allocation::Data,
        };
        Ok((allocation, told.min(inside)))
    }

    async fn prefetch(&self, _range: ByteRange) -> Result<()> {
        Ok(())
    }
}
