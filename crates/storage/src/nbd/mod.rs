//! An export of an NBD server as storage.
//!
//! Guarantees:
//! - [`Capabilities`] report only what the server supports; for example, an export without FUA has
//!   no durable writes. Without block status, the whole export is reported as data.
//! - A request that is longer than the server's limit is split.
//! - With `nbds` all data of an export is encrypted, and goes only to a server that has proved its
//!   identity.
//! - If the server supports several connections with consistent caches (`CAN_MULTI_CONN`) and
//!   accepts them, each loop that uses the storage has a connection of its own. Otherwise all loops
//!   share one.
//! - If a connection fails, requests wait for a new connection for the time that the caller allows,
//!   and are sent again; the server may then carry out each of them twice. After that time the
//!   requests fail. A request that is the oldest one at the end of 8 connections, all of which
//!   answered others, is sent alone, and fails if that connection ends, too.
//! - No order is guaranteed between the two executions. A server that continues the requests of a
//!   closed connection may carry out the original request after the repeated one, and after a later
//!   write to the same bytes. The protocol has no request that waits for such executions. The order
//!   is kept if the server exits with its connections, or drops their requests when they are
//!   closed.
//! - If the connection fails while answered writes are not flushed, every flush fails from then on,
//!   until the storage is opened again. With several connections only the failure of the oldest
//!   connection has this effect, because all flushes are sent over it. Reason: a server that has
//!   lost its volatile cache answers the next flush with success, and a client cannot detect the
//!   loss. The client keeps no copies of answered writes to send them again. Memory would limit the
//!   number of copies, and after a reconnect each read of each connection would have to wait for
//!   them.

mod answer_time;
mod connect;
mod connection;
mod connections;
mod dial;
mod export_list;
mod handshake;
mod link;
mod parts;
mod pending;
mod reader;
mod refusal;
mod tls;
mod transmission;
mod unflushed;
mod writer;

use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{
    Alignment, Allocation, ByteRange, Capabilities, Durability, Error, ErrorKind, Fua, FuaCost,
    GroupCommit, IoVector, Offload, ReadAfterDiscard, Result, Storage, SyncMode, Unmap, WriteCache,
    errno,
};
use blockhouse_nbd_protocol::request::kind;
use blockhouse_nbd_protocol::uri::ClientUri;
use blockhouse_nbd_protocol::{
    BASE_ALLOCATION, CommandFlags, DIRTY, DIRTY_BITMAP, Framing, StatusFlags, TransmissionFlags,
};

use answer_time::AnswerTime;
use connections::Connections;
use dial::Dial;
pub use export_list::{ListedExport, list_exports};
use handshake::Negotiated;
use parts::Parts;
use pending::{BlockStatus, Body};
use transmission::Command;

/// The longest range of one zero write or trim with compact headers, whose length field has 32
/// bits.
const MAX_COMPACT_RANGE: u64 = 1 << 30;
/// The longest range of one zero write or trim with extended headers.
const MAX_EXTENDED_RANGE: u64 = 1 << 40;

/// How long a request waits for its answer while the storage is being closed. The limit is this
/// long because a flush may take minutes.
const CLOSE_TIME: Duration = Duration::from_secs(120);

/// An export of an NBD server.
pub struct NbdStorage {
    dial: Arc<Dial>,
    connections: Connections,
    answer_time: AnswerTime,
}

impl NbdStorage {
    /// Connects to a server. If the connection fails later, requests wait for `reconnect_time`
    /// until the server is back.
    ///
    /// If there were answered writes without a flush when the connection failed, the server may
    /// have lost them, so every flush fails with EIO from then on.
    ///
    /// # Errors
    /// The failure, with the URI: there is no server, the server refuses the export, connecting or
    /// the handshake takes longer than 30 seconds, or TLS with the server fails.
    ///
    /// # Panics
    /// Outside of an event loop.
    pub async fn connect(uri: ClientUri, reconnect_time: Duration) -> Result<Self> {
        Self::connect_for(uri, reconnect_time, BASE_ALLOCATION.to_owned()).await
    }

    /// Connects for queries of a bitmap by [`dirty_extent`](Self::dirty_extent). Block status is
    /// available only for this bitmap.
    ///
    /// # Errors
    /// As [`connect`](Self::connect); `InvalidInput` if the server does not offer the bitmap.
    ///
    /// # Panics
    /// Outside of an event loop.
    pub async fn connect_for_bitmap(
        uri: ClientUri,
        reconnect_time: Duration,
        bitmap: &str,
    ) -> Result<Self> {
        let context = format!("{DIRTY_BITMAP}{bitmap}");
        let connected = Self::connect_for_context(uri, reconnect_time, &context).await;
        connected.map_err(|error| match error.kind() {
            ErrorKind::InvalidInput => {
                error.hint("nbdinfo tells which contexts (qemu:dirty-bitmap:NAME) it has")
            }
            _ => error,
        })
    }

    /// Connects for the block status in a context of any name, by
    /// [`context_extent`](Self::context_extent). [`Storage::block_status`] uses this context alone.
    ///
    /// # Errors
    /// As [`connect`](Self::connect); `InvalidInput` if the server does not offer the context.
    ///
    /// # Panics
    /// Outside of an event loop.
    pub async fn connect_for_context(
        uri: ClientUri,
        reconnect_time: Duration,
        context: &str,
    ) -> Result<Self> {
        let storage = Self::connect_for(uri, reconnect_time, context.to_owned()).await?;
        if storage.export().has_block_status {
            Ok(storage)
        } else {
            let what = format!("the server does not offer the context '{context}'");
            Err(Error::new(ErrorKind::InvalidInput, what).on(storage.dial.name()))
        }
    }

    /// The status of the first bytes of `range` in the context of the connection, and the number of
    /// bytes that have this status. `range` is inside of the export and not empty.
    ///
    /// # Errors
    /// Errors of the server.
    pub async fn context_extent(&self, range: ByteRange) -> Result<(u32, u64)> {
        let (flags, length) = self.first_status(range).await?;
        Ok((flags.bits(), length))
    }

    async fn connect_for(
        uri: ClientUri,
        reconnect_time: Duration,
        context: String,
    ) -> Result<Self> {
        let (dial, stream) = Dial::connect(uri, reconnect_time, context).await?;
        let dial = Arc::new(dial);
        let connections = Connections::new(Arc::clone(&dial), stream)?;
        Ok(Self { dial, connections, answer_time: AnswerTime::default() })
    }

    /// Whether the first bytes of `range` are dirty in the bitmap of the connection, and the number
    /// of bytes with this state. `range` is inside of the export and not empty.
    ///
    /// # Errors
    /// Errors of the server.
    pub async fn dirty_extent(&self, range: ByteRange) -> Result<(bool, u64)> {
        let (flags, length) = self.first_status(range).await?;
        Ok((flags.bits() & DIRTY != 0, length))
    }

    /// The flags of the first bytes of a range, and the number of bytes that have these flags.
    async fn first_status(&self, range: ByteRange) -> Result<(StatusFlags, u64)> {
        // The range is extended to whole blocks of the server; the end of the export may cut the
        // last block short.
        let block = u64::from(self.export().minimum_block);
        let skipped = range.offset() % block;
        let (offset, size) = (range.offset() - skipped, self.export().size);
        let wanted = (range.length() + skipped).next_multiple_of(block).min(size - offset);
        let length = wanted.min(MAX_COMPACT_RANGE);
        let (kind, flags, body) = (kind::BLOCK_STATUS, CommandFlags::REQ_ONE, Body::Status);
        let status = self.request(Command { kind, flags, offset, length, body }).await?;
        let told = status.and_then(|(told, flags)| Some((told.checked_sub(skipped)?, flags)));
        match told {
            Some((told @ 1.., flags)) => Ok((flags, told.min(range.length()))),
            _ => Err(self.dial.error("the server tells no block status").at(offset)),
        }
    }

    /// The name of the export.
    pub fn export_name(&self) -> &str {
        self.dial.export_name()
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

    async fn request(&self, command: Command) -> Result<Option<BlockStatus>> {
        let offset = command.offset;
        let submitted = self.connections.own().await?.submit(command);
        let answer = self.answer_time.wait(self.dial.name(), submitted);
        answer.await.map_err(|error| error.at(offset))
    }

    /// From now on a request fails if the server does not answer within this time. With `None`, the
    /// default, requests wait without limit. The limit is at least the reconnect time.
    pub fn set_answer_time(&self, time: Option<Duration>) {
        self.answer_time.set(time.map(|time| time.max(self.dial.reconnect_time())));
    }

    /// A zero write or trim of a range, in as many requests as the limits need.
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

    /// Closes the connections to the server. Every later request fails.
    pub fn disconnect(&self) {
        self.connections.close();
    }

    fn unsupported(&self, what: &'static str) -> Error {
        Error::new(ErrorKind::Unsupported, what).on(self.dial.name())
    }
}

impl Storage for NbdStorage {
    fn name(&self) -> &str {
        self.dial.name()
    }

    fn capabilities(&self) -> Capabilities {
        let offload = |flag| if self.has(flag) { Offload::Available } else { Offload::Unavailable };
        let has_flush = self.has(TransmissionFlags::SEND_FLUSH);
        Capabilities {
            fua: if self.has(TransmissionFlags::SEND_FUA) { Fua::Native } else { Fua::Emulated },
            fua_cost: FuaCost::NoFlush,
            // A server without FLUSH has nothing to flush (proto.md, "Request types").
            write_cache: if has_flush { WriteCache::Volatile } else { WriteCache::None },
            // Many servers flush after each write with FUA.
            group_commit: if has_flush {
                GroupCommit::Measured { shares_first: false }
            } else {
                GroupCommit::Never
            },
            alignment: Alignment { offset: self.export().minimum_block, memory: 1 },
            write_zeroes: offload(TransmissionFlags::SEND_WRITE_ZEROES),
            prepare_zeroes: Offload::Unavailable,
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
        let is_fua = match durability {
            Durability::None => false,
            Durability::Data if self.has(TransmissionFlags::SEND_FUA) => true,
            Durability::Data | Durability::Full => {
                let what = "the server cannot make a single write as durable as this";
                return Err(self.unsupported(what).at(offset));
            }
        };
        let mut flags = match self.export().framing {
            Framing::Extended => CommandFlags::PAYLOAD_LEN,
            Framing::Simple | Framing::Structured => CommandFlags::empty(),
        };
        flags.set(CommandFlags::FUA, is_fua);
        from.leave_pages();
        if !from.is_intact() {
            // The payload would be shorter than its header says.
            let lost = std::io::Error::from_raw_os_error(errno::EFAULT);
            return Err(Error::host("cannot write", lost).on(self.dial.name()).at(offset));
        }
        while !from.is_empty() {
            let length = from.len().min(self.export().max_payload as usize);
            let rest = from.split_off(length);
            let body = Body::Payload(std::mem::replace(&mut from, rest));
            let (length, kind) = (length as u64, kind::WRITE);
            self.request(Command { kind, flags, offset, length, body }).await?;
            offset += length;
        }
        Ok(())
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
        let flushed = async {
            self.connections.drained().await?;
            if self.has(TransmissionFlags::SEND_FLUSH) {
                self.connections.flush().await
            } else {
                Ok(())
            }
        };
        self.answer_time.wait_for_sync(self.dial.name(), flushed).await
    }

    fn begin_close(&self) {
        self.set_answer_time(Some(CLOSE_TIME));
    }

    fn check_size(&self, size: u64) -> Result<()> {
        if size == self.export().size {
            Ok(())
        } else {
            Err(self.unsupported("the size of an NBD export cannot be changed by a client"))
        }
    }

    async fn resize(&self, size: u64) -> Result<()> {
        self.check_size(size)
    }

    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        let inside = self.export().size.saturating_sub(range.offset()).min(range.length());
        if inside == 0 {
            return Ok((Allocation::Hole, range.length()));
        }
        if !self.export().has_block_status {
            return Ok((Allocation::Data, inside));
        }
        let (flags, told) = self.first_status(range.truncate(inside)).await?;
        // Only ranges that certainly read as zeros may be skipped.
        let allocation =
            if flags.contains(StatusFlags::ZERO) { Allocation::Hole } else { Allocation::Data };
        Ok((allocation, told))
    }

    async fn prefetch(&self, _range: ByteRange) -> Result<()> {
        Ok(())
    }
}
