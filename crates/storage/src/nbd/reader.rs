//! The receiving task of a connection.
//!
//! Headers and short payloads are received in bulk into a buffer of fixed size. Data of reads is
//! received straight into the memory of the request; only the bytes that came together with the
//! header are copied. Every length that a server sends is checked against the request; a length
//! that is too large ends the connection.

use std::sync::Arc;

use blockhouse_core::{Buffer, Error, ErrorKind, IoVector, IoVectorList, Result, WorkBudget};
use blockhouse_nbd_protocol::Framing;
use blockhouse_nbd_protocol::reply::chunk;
use blockhouse_nbd_protocol::reply_header::{
    ReplyHeader, parse_error, parse_first_status, parse_hole,
};

use super::link::Link;
use super::pending::Violation;
use super::transmission::Transmission;

/// Size of the buffer for bytes that are received in bulk.
const STAGING_BYTES: usize = 128 << 10;
/// The longest chunk without data: an error has a message of 4096 bytes at most, and block status
/// is requested for one extent.
const MAX_SMALL_PAYLOAD: u64 = 64 << 10;
/// After data of at least this many bytes, more such data is expected, so only a header is received
/// in bulk and the data needs no copy.
const LARGE_DATA: usize = 32 << 10;
/// Bytes received in bulk after large data: a header, and the offset of a chunk's data.
const HEADER_WINDOW: usize = 40;

/// The receiving half.
pub(super) struct Reader {
    transmission: Arc<Transmission>,
    stream: Link,
    staging: Buffer,
    start: usize,
    end: usize,
    list: IoVectorList,
    /// How many bytes the next system call receives in bulk.
    window: usize,
    /// Makes the task yield, because a server may divide a reply into any number of chunks.
    budget: WorkBudget,
}

/// The reason why the reader ends.
enum End {
    /// The server has closed the connection.
    Closed,
    Host(std::io::Error),
    Violation(String),
}

impl From<Violation> for End {
    fn from(Violation(what): Violation) -> Self {
        Self::Violation(what.into())
    }
}

impl From<std::io::Error> for End {
    fn from(error: std::io::Error) -> Self {
        Self::Host(error)
    }
}

impl Reader {
    /// A reader of a stream from which nothing was received yet.
    ///
    /// # Errors
    /// ENOMEM if memory runs out.
    pub(super) fn new(transmission: Arc<Transmission>, stream: Link) -> Result<Self> {
        let (staging, list) = (Buffer::try_new(STAGING_BYTES)?, IoVectorList::new());
        let (window, budget) = (STAGING_BYTES, WorkBudget::new());
        Ok(Self { transmission, stream, staging, start: 0, end: 0, list, window, budget })
    }

    /// Receives replies until the connection ends.
    pub(super) async fn run(mut self) {
        let end = loop {
            if let Err(end) = self.next().await {
                break end;
            }
        };
        let transmission = &self.transmission;
        let error = |what| Error::new(ErrorKind::Io, what).on(transmission.name());
        transmission.link_failed(match end {
            End::Closed => error("the server has closed the connection".into()),
            End::Host(error) => transmission.host_error(error),
            End::Violation(what) => error(format!("the server breaks the NBD protocol: {what}")),
        });
        // The shutdown makes the writer end too.
        self.stream.shutdown();
    }

    /// Handles one reply or chunk.
    async fn next(&mut self) -> Result<(), End> {
        let framing = self.transmission.framing();
        let header = loop {
            match ReplyHeader::parse(framing, self.staged()) {
                Ok(Some((header, length))) => {
                    self.start += length;
                    break header;
                }
                Ok(None) => self.fill().await?,
                Err(error) => return Err(End::Violation(error.to_string())),
            }
        };
        self.window = STAGING_BYTES;
        match header {
            ReplyHeader::Simple { cookie, error } => self.simple(framing, cookie, error).await,
            ReplyHeader::Chunk { cookie, is_last, kind, length } => {
                self.budget.spend(WorkBudget::LOOK_UP).await;
                match kind {
                    chunk::OFFSET_DATA => self.data(cookie, length).await?,
                    _ => self.small_chunk(cookie, kind, length).await?,
                }
                if is_last { self.complete(cookie) } else { Ok(()) }
            }
        }
    }

    async fn simple(&mut self, framing: Framing, cookie: u64, error: u32) -> Result<(), End> {
        let transmission = &self.transmission;
        if error != 0 {
            transmission.with_pending(|pending, _| {
                pending.set_error(cookie, server_error(transmission.name(), error, ""))
            })?;
        } else if transmission.with_pending(|pending, _| pending.is_read(cookie))? {
            if framing != Framing::Simple {
                return Err(Violation("a simple reply to a read").into());
            }
            let part = transmission.with_pending(|pending, _| pending.take_memory(cookie, None))?;
            self.receive_part(cookie, part).await?;
        }
        self.complete(cookie)
    }

    fn complete(&self, cookie: u64) -> Result<(), End> {
        let waker = self
            .transmission
            .with_pending(|pending, detached| pending.complete(cookie, detached))?;
        if let Some(waker) = waker {
            waker.wake();
        }
        Ok(())
    }

    /// A chunk of data.
    async fn data(&mut self, cookie: u64, length: u64) -> Result<(), End> {
        let length = length.checked_sub(8).filter(|&length| length > 0);
        let length = length.ok_or(Violation("a chunk of data without data"))?;
        let length = usize::try_from(length).map_err(|_| Violation("a chunk that is too long"))?;
        while self.staged().len() < 8 {
            self.fill().await?;
        }
        let mut offset = [0; 8];
        offset.copy_from_slice(&self.staged()[..8]);
        self.start += 8;
        let range = Some((u64::from_be_bytes(offset), length));
        let part =
            self.transmission.with_pending(|pending, _| pending.take_memory(cookie, range))?;
        self.receive_part(cookie, part).await
    }

    /// A chunk without data.
    async fn small_chunk(&mut self, cookie: u64, kind: u16, length: u64) -> Result<(), End> {
        if length > MAX_SMALL_PAYLOAD {
            return Err(Violation("a chunk that is too long").into());
        }
        let length = length as usize;
        while self.staged().len() < length {
            self.fill().await?;
        }
        let malformed = Violation("a chunk that cannot be understood");
        let payload = &self.staging.bytes()[self.start..self.start + length];
        if kind == chunk::OFFSET_HOLE {
            let hole = parse_hole(payload).ok_or(malformed)?;
            self.start += length;
            return self.hole(cookie, hole).await;
        }
        let transmission = &self.transmission;
        transmission.with_pending(|pending, _| match kind {
            chunk::NONE if length == 0 => Ok(()),
            chunk::BLOCK_STATUS | chunk::BLOCK_STATUS_EXT => {
                let (_, length, flags) = parse_first_status(kind, payload).ok_or(malformed)?;
                pending.set_status(cookie, (length, flags))
            }
            kind if kind & chunk::ERROR_BIT != 0 => {
                let (error, message) = parse_error(payload).ok_or(malformed)?;
                pending.set_error(cookie, server_error(transmission.name(), error, &message))
            }
            _ => Err(Violation("a chunk of an unknown type")),
        })?;
        self.start += length;
        Ok(())
    }

    /// Zeros. They are filled in without the lock of the connection: there may be 32 MiB of them.
    async fn hole(&mut self, cookie: u64, (offset, length): (u64, u32)) -> Result<(), End> {
        let range = Some((offset, length as usize));
        let (offset, mut memory) =
            self.transmission.with_pending(|pending, _| pending.take_memory(cookie, range))?;
        memory.fill(0);
        self.transmission.with_pending(|pending, _| pending.return_memory(cookie, offset, memory));
        self.budget.spend(length.into()).await;
        Ok(())
    }

    fn staged(&self) -> &[u8] {
        &self.staging.bytes()[self.start..self.end]
    }

    /// Moves the unconsumed bytes to the front of the buffer, and lends the free memory after them.
    fn lend_free(&mut self) -> IoVector {
        if self.start > 0 {
            self.staging.bytes_mut().copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let free = self.staging.len() - self.end;
        self.staging.lend_range(self.end, free.min(self.window))
    }

    /// Receives in bulk.
    async fn fill(&mut self) -> Result<(), End> {
        // An incomplete header or short payload is staged, so the buffer has free memory.
        let free = self.lend_free();
        self.list.push(free);
        let count = self.receive().await?;
        self.list.clear();
        self.end += count;
        Ok(())
    }

    /// Receives data of a read, and the bytes that follow the data. The memory is returned to its
    /// request, even if the stream fails.
    async fn receive_part(
        &mut self,
        cookie: u64,
        (offset, mut into): (u64, IoVector),
    ) -> Result<(), End> {
        if into.len() >= LARGE_DATA {
            self.window = HEADER_WINDOW;
        }
        let here = into.len().min(self.end - self.start);
        into.copy_from(&self.staged()[..here]);
        self.start += here;
        let mut missing = into.len() - here;
        self.list.push(into);
        self.list.advance(here);
        let mut result = Ok(());
        if missing > 0 {
            let free = self.lend_free();
            self.list.push(free);
        }
        while missing > 0 && result.is_ok() {
            result = self.receive().await.map(|count| {
                self.list.advance(count);
                self.end += count.saturating_sub(missing);
                missing = missing.saturating_sub(count);
            });
        }
        // The memory of the read is the first in the list.
        let into = self.list.take_vectors().next();
        self.transmission.with_pending(|pending, _| {
            into.into_iter().for_each(|into| pending.return_memory(cookie, offset, into));
        });
        result
    }

    /// Receives at least one byte into the list.
    async fn receive(&mut self) -> Result<usize, End> {
        let (result, list) = self.stream.receive(std::mem::take(&mut self.list)).await;
        self.list = list;
        match result? {
            0 => Err(End::Closed),
            count => Ok(count),
        }
    }
}

/// The error that a server has sent. The protocol's error numbers are equal to Linux's errno
/// values; an unknown number becomes EIO.
fn server_error(name: &str, error: u32, message: &str) -> Error {
    let code = match error {
        1 | 5 | 12 | 22 | 28 | 75 | 95 | 108 => error as i32,
        _ => blockhouse_core::errno::EIO,
    };
    let source = std::io::Error::from_raw_os_error(code);
    let message: String = message.chars().filter(|letter| !letter.is_control()).take(200).collect();
    let what = if message.is_empty() {
        "the server answers with an error".into()
    } else {
        format!("the server answers with an error ({message})")
    };
    Error::host(what, source).on(name)
}
