//! A regular file or block device of the host as a [`Storage`].
//!
//! Guarantees: a short transfer is continued and never turned into an error of its own; a durable
//! write is one request (`RWF_DSYNC`), and is refused if the kernel or the file does not support
//! that; every error names the file, an error of a transfer also the offset, and a host's error
//! keeps its errno; a flush reports each writeback failure, even if a durable write has reported it
//! already. All operations run on the loop of the thread that polls them, so one `HostFile` may
//! serve many threads; `capabilities` describes the engine of the calling thread's loop.

mod change_time;
mod device_writes;
pub(crate) mod fixed_file_probe;
mod new_file;
mod open;
mod open_files;
pub(crate) mod page_cache;
pub(crate) mod probe;
pub(crate) mod same_file;
mod write_out;
mod written_zeros;

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use blockhouse_core::{
    Alignment, Allocation, Buffer, ByteRange, Capabilities, Durability, Error, ErrorKind, Fua,
    FuaCost, GroupCommit, IoVector, Offload, ReadAfterDiscard, Result, Storage, SyncMode, Unmap,
    WriteCache,
};
use rustix::fs::{Advice, FallocateFlags, SeekFrom};
use rustix::io::Errno;

use crate::driver::engine::Engine;
use crate::driver::file::{Caching, File, Medium};
use crate::driver::operation::{Operation, Transfer, WriteThrough, is_fua_refusal};
use crate::driver::thread_pool::blocking;
use crate::event_loop::local;
use crate::event_loop::submit::submit;
use crate::host_file::probe::FileKind;
use device_writes::WriteCounter;
use write_out::write_out;

pub use device_writes::DeviceWrites;
pub use new_file::NewFile;
pub use open::{OpenMode, PageCache};
pub use open_files::OpenFiles;

/// `BLKDISCARD` from `<linux/fs.h>`.
const BLKDISCARD: libc::Ioctl = 0x1277;

/// An open file or block device.
pub struct HostFile {
    file: Arc<File>,
    /// The same file through the page cache, for the last partial block, which direct I/O cannot
    /// access. In a file that is open for writing, a block is then at least a page. So direct I/O
    /// and the page cache never access the same page.
    tail: Option<Arc<File>>,
    /// The open file that is flushed. The kernel reports a failure to write back once to each open
    /// file (`errseq_t`, Linux 4.13), to its next fsync or durable write. So if our bytes may be in
    /// the page cache, durable writes use an open file of their own, and a flush gets every
    /// failure.
    flushed: Arc<File>,
    name: String,
    kind: FileKind,
    size: AtomicU64,
    alignment: Alignment,
    /// Bytes of the blocks that the device zeroes and discards only as a whole; 1 for a file.
    offload_block: u32,
    /// Whether the kernel supports `RWF_DSYNC` for the file, as probed at the opening.
    probed_fua: Fua,
    fua_cost: FuaCost,
    write_cache: WriteCache,
    /// The operations that the kernel has refused so far. Support is detected once for each file.
    unsupported: Unsupported,
    /// The count of the sectors written, for a block device.
    writes: Option<WriteCounter>,
    file_system: u64,
}

#[derive(Default)]
struct Unsupported {
    punch_hole: AtomicBool,
    zero_range: AtomicBool,
    set_aside: AtomicBool,
    discard: AtomicBool,
    extend: AtomicBool,
    prepare_zeroes: AtomicBool,
}

impl HostFile {
    /// Whether the storage is a regular file or a block device.
    pub fn kind(&self) -> FileKind {
        self.kind
    }

    /// The number of the file's file system, which no other mounted one of this host has. It is
    /// known since the opening, so a file system that hangs is not asked.
    pub fn file_system(&self) -> u64 {
        self.file_system
    }

    /// The free space of the file's file system, as far as this process may use it, and its total
    /// space, in bytes.
    ///
    /// # Errors
    /// The host's error.
    pub async fn query_file_system(&self) -> Result<(u64, u64)> {
        let found = written_zeros::file_system(&self.file).await;
        found.map_err(|error| self.error("cannot find the free space", error))
    }

    /// As [`query_file_system`](Self::query_file_system), without a future: blocks if the file
    /// system hangs.
    ///
    /// # Errors
    /// The host's error.
    pub fn file_system_room(&self) -> Result<(u64, u64)> {
        let found = written_zeros::room_of(&self.file);
        found.map_err(|error| self.error("cannot find the free space", error))
    }

    /// The bytes that all processes of this host have written to the block device; `None` for a
    /// file, and if the kernel does not count. Every completed write is included: the page cache is
    /// written out first.
    ///
    /// # Errors
    /// The host's error.
    pub async fn device_writes(&self) -> Result<Option<DeviceWrites>> {
        let Some(counter) = &self.writes else { return Ok(None) };
        self.write_out(ByteRange::between(0, self.size())).await?;
        Ok(counter.read())
    }

    /// Writes out the page cache of a range of the device.
    async fn write_out(&self, range: ByteRange) -> Result<()> {
        let outcome = write_out(&self.file, range).await;
        outcome.map_err(|error| {
            let what = "cannot write out what the page cache holds";
            Error::host(what, error).on(&self.name).at(range.offset())
        })
    }

    /// Writes out the device's page cache of a range, before the range is zeroed or discarded.
    /// Reason: the kernel then drops the range's pages, and acknowledged writes may be only in
    /// them.
    async fn keep_answered(&self, range: ByteRange) -> Result<()> {
        match (self.kind, self.file.caching) {
            (FileKind::BlockDevice, Caching::PageCache) => self.write_out(range).await,
            _ => Ok(()),
        }
    }

    /// The open file, for locks and the like; not for data.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&*self.file)
    }

    /// The size of the file on the host, which another process may have changed.
    ///
    /// # Errors
    /// The host's error.
    pub fn query_size(&self) -> Result<u64> {
        let size = probe::size(&*self.file);
        size.map_err(|error| Error::host("cannot find the size", error).on(&self.name))
    }

    /// The space that the file takes on the host in bytes; for a block device, its size.
    ///
    /// # Errors
    /// The host's error.
    pub fn query_allocated(&self) -> Result<u64> {
        match self.kind {
            FileKind::BlockDevice => self.query_size(),
            FileKind::Regular => {
                let status = rustix::fs::fstat(&*self.file);
                let status =
                    status.map_err(|error| self.error("cannot find the space taken", error))?;
                // In units of 512 bytes, for any block size of the file system.
                Ok((status.st_blocks as u64).saturating_mul(512))
            }
        }
    }

    /// Records that the file is at least this long.
    pub fn set_min_size(&self, size: u64) {
        self.size.fetch_max(size, Relaxed);
    }

    fn error(&self, what: &'static str, error: Errno) -> Error {
        Error::host(what, error.into()).on(&self.name)
    }

    fn error_at(&self, what: &'static str, error: Errno, offset: u64) -> Error {
        self.error(what, error).at(offset)
    }

    /// The open file for this range. The last partial block uses `tail`.
    fn file_for(&self, offset: u64, length: usize) -> Arc<File> {
        match &self.tail {
            Some(tail) if self.is_in_tail(offset, length) => Arc::clone(tail),
            _ => Arc::clone(&self.file),
        }
    }

    /// Whether the range is the last partial block, which goes through the page cache.
    fn is_in_tail(&self, offset: u64, length: usize) -> bool {
        let bits = (offset | length as u64) & (u64::from(self.alignment.offset) - 1);
        bits != 0 && self.tail.is_some()
    }

    /// The error of a write that the kernel failed, marked as confined if it affects only the
    /// write's range.
    fn write_failed(&self, error: Errno, offset: u64, through: WriteThrough) -> Error {
        let failed = self.error_at("cannot write", error, offset);
        let is_direct = self.file.caching != Caching::PageCache;
        let failed = match error {
            // Some file systems (mergerfs) refuse direct I/O only when it writes.
            Errno::INVAL if is_direct && self.kind == FileKind::Regular => {
                failed.hint("if its file system takes no direct writes: --cache writeback")
            }
            _ => failed,
        };
        let is_confined = match failed.kind() {
            // The kernel found no memory at the data's addresses: it stops before it syncs
            // anything. So a guest that removes its memory does not make flushes of others fail.
            _ if error == Errno::FAULT => true,
            // The next flush also reports the losses of older writes.
            ErrorKind::NoSpace => through == WriteThrough::Yes && self.reports_twice(),
            _ => false,
        };
        if is_confined { failed.confined() } else { failed }
    }

    /// Whether the next flush also reports a writeback failure that a durable write has reported.
    /// True for files in memory and for direct I/O, because they have no such failure.
    fn reports_twice(&self) -> bool {
        !Arc::ptr_eq(&self.file, &self.flushed)
            || self.file.medium == Medium::Memory
            || self.file.caching == Caching::Direct
    }

    /// Writes all bytes. Updates the recorded size, even if only a part was written.
    async fn write_all(&self, offset: u64, from: IoVector, through: WriteThrough) -> Result<()> {
        let end = offset.saturating_add(from.len() as u64);
        let outcome = self.transfer_all(offset, from, through).await;
        if end > self.size() {
            match &outcome {
                Ok(()) => self.set_min_size(end),
                Err(_) => self.note_part_written(),
            }
        }
        outcome
    }

    /// Updates the recorded size after a failed write, which may have made the file longer.
    fn note_part_written(&self) {
        self.query_size().into_iter().for_each(|size| self.set_min_size(size));
    }

    async fn transfer_all(&self, offset: u64, from: IoVector, through: WriteThrough) -> Result<()> {
        let file = self.file_for(offset, from.len());
        let mut transfer = Transfer { file, offset, vector: from };
        while !transfer.vector.is_empty() {
            let (result, operation) = submit(Operation::Write(transfer, through)).await;
            let Operation::Write(back, _) = operation else { unreachable!("{CAME_BACK}") };
            transfer = back;
            match result {
                Err(error) if is_refusal_of_pages(error, &transfer) => {}
                Err(error)
                    if through == WriteThrough::Yes && is_fua_refusal(error.raw_os_error()) =>
                {
                    return Err(self.unsupported(DURABLE_WRITE).at(transfer.offset));
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(self.write_failed(error, transfer.offset, through)),
                // The bytes could not be copied from the kernel's pages, so nothing was written.
                Ok(0) if !transfer.vector.is_intact() => {
                    return Err(self.write_failed(Errno::FAULT, transfer.offset, through));
                }
                Ok(0) => {
                    let what = "cannot write (the host takes nothing)";
                    return Err(self.error_at(what, Errno::IO, transfer.offset));
                }
                Ok(count) if count == transfer.vector.len() => break,
                Ok(count) => advance(&mut transfer, count),
            }
        }
        Ok(())
    }

    /// Continues a read whose first operation returned `result`.
    async fn read_rest(
        &self,
        mut transfer: Transfer,
        mut result: Result<usize, Errno>,
    ) -> Result<()> {
        loop {
            match result {
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) if is_refusal_of_pages(error, &transfer) => {}
                Err(error) => return Err(self.error_at("cannot read", error, transfer.offset)),
                Ok(count) if count == transfer.vector.len() => return Ok(()),
                // A short read is the end of the file or a partial transfer. Another read would
                // decide, but at the end of the file the remaining range is usually not aligned for
                // O_DIRECT. So the size decides.
                Ok(count) => {
                    advance(&mut transfer, count);
                    self.check_not_cut(transfer.offset)?;
                    if count == 0 || self.ends_at(transfer.offset)? {
                        transfer.vector.fill(0);
                        return Ok(());
                    }
                }
            }
            let (answer, operation) = submit(Operation::Read(transfer)).await;
            let Operation::Read(back) = operation else { unreachable!("{CAME_BACK}") };
            (transfer, result) = (back, answer);
        }
    }

    /// Refuses a read at `offset`, where the kernel found the end of the file, if this process
    /// knows of bytes there. Zeros in their place would be other data than was stored.
    fn check_not_cut(&self, offset: u64) -> Result<()> {
        // The recorded size is read again last, because this process may have cut the file
        // meanwhile.
        let had_bytes = || self.size() > offset;
        if !(had_bytes() && self.ends_at(offset)? && had_bytes()) {
            return Ok(());
        }
        let error = self.error_at("cannot read: the file has been cut", Errno::IO, offset);
        Err(error.hint("another program has made it shorter: restore it from a backup"))
    }

    /// Whether the file ends at `offset` or before. The size is queried from the host, because
    /// another process may have made the file longer: without the query, bytes past the recorded
    /// end would read as zeros.
    fn ends_at(&self, offset: u64) -> Result<bool> {
        let size = probe::size(&*self.file);
        let size =
            size.map_err(|error| Error::host("cannot find the end", error).on(&self.name))?;
        Ok(size <= offset)
    }

    /// `fallocate(2)` with `mode`, which keeps the size. `refused` records that the kernel does not
    /// support the mode.
    async fn allocate(
        &self,
        mode: FallocateFlags,
        range: ByteRange,
        refused: &AtomicBool,
        texts: &ErrorText,
    ) -> Result<()> {
        if refused.load(Relaxed) {
            return Err(self.unsupported(texts.unsupported));
        }
        self.keep_answered(range).await?;
        let mode = (mode | FallocateFlags::KEEP_SIZE).bits() as i32;
        loop {
            let operation =
                Operation::Allocate { file: Arc::clone(&self.file), mode, range, held: None };
            match submit(operation).await.0 {
                Ok(_) => return Ok(()),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NODEV) => {
                    refused.store(true, Relaxed);
                    return Err(self.unsupported(texts.unsupported));
                }
                Err(error) => return Err(self.error_at(texts.failed, error, range.offset())),
            }
        }
    }

    /// Zeroes a range and leaves its space allocated. If the file system cannot do that in one step
    /// (tmpfs, NFS), punches a hole and then allocates it.
    async fn zero_with_space(&self, range: ByteRange) -> Result<()> {
        let Unsupported { punch_hole, zero_range, set_aside, .. } = &self.unsupported;
        match self.allocate(FallocateFlags::ZERO_RANGE, range, zero_range, &ZEROES).await {
            Err(error)
                if error.kind() == ErrorKind::Unsupported
                    && self.kind == FileKind::Regular
                    && !set_aside.load(Relaxed) => {}
            outcome => return outcome,
        }
        self.allocate(FallocateFlags::PUNCH_HOLE, range, punch_hole, &ZEROES).await?;
        self.allocate(FallocateFlags::empty(), range, set_aside, &ZEROES).await
    }

    /// Whether a durable write is one request. The kernel may refuse that. Also, the kernel adds a
    /// flush to each synchronous durable direct write to a block device. The engine `threads` has
    /// only synchronous writes, so for it a plain write and a flush, which several writes can
    /// share, are cheaper.
    fn fua(&self) -> Fua {
        let is_direct_device =
            self.kind == FileKind::BlockDevice && self.file.caching == Caching::Direct;
        let pays_twice = is_direct_device && local::engine() == Some(Engine::Threads);
        if pays_twice { Fua::Emulated } else { self.probed_fua }
    }

    /// A file in memory has nothing to flush. Through the page cache, a durable write is a write
    /// and a flush on any disk.
    fn fua_cost(&self) -> FuaCost {
        match (self.file.medium, self.file.caching) {
            (Medium::Memory, _) => FuaCost::NoFlush,
            (_, Caching::PageCache) => FuaCost::ExtraFlush,
            (_, Caching::Direct) => self.fua_cost,
        }
    }

    /// With direct I/O, durable writes run in parallel, and those in flight share flushes in the
    /// kernel, which may be slower than one flush for all, for example if each write occupies a
    /// thread (the engine `threads`). Through the page cache, durable writes to one file run one
    /// after the other, each with its own flush.
    fn group_commit(&self) -> GroupCommit {
        match self.fua_cost() {
            FuaCost::ExtraFlush => {
                GroupCommit::Measured { shares_first: self.file.caching == Caching::PageCache }
            }
            FuaCost::NoFlush => GroupCommit::Never,
        }
    }

    /// Whether zeros can be written without sending them. For a file in memory that would save
    /// nothing.
    fn can_prepare_zeroes(&self) -> Offload {
        let is_refused = self.unsupported.prepare_zeroes.load(Relaxed);
        if is_refused || self.file.medium == Medium::Memory {
            Offload::Unavailable
        } else {
            Offload::Available
        }
    }

    fn unsupported(&self, what: &str) -> Error {
        Error::new(ErrorKind::Unsupported, format!("{what} is not supported here")).on(&self.name)
    }

    fn fixed_size(&self) -> Error {
        self.unsupported("resizing a block device").hint("resize the device itself")
    }

    /// Writes zeros to a range of less than two blocks of a device.
    async fn write_few_zeros(&self, range: ByteRange) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        let zeros = Buffer::try_new(range.length() as usize)?.lend();
        self.write_all(range.offset(), zeros, WriteThrough::No).await
    }

    async fn discard_on_device(&self, range: ByteRange) -> Result<()> {
        self.keep_answered(range).await?;
        let file = Arc::clone(&self.file);
        let result = blocking(move || {
            let range = [range.offset(), range.length()];
            // SAFETY: BLKDISCARD reads two 64-bit numbers, start and length; the file is open.
            match unsafe { libc::ioctl(file.raw(), BLKDISCARD, range.as_ptr()) } {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
        let error = match result.await {
            Ok(()) => return Ok(()),
            Err(error) => Error::host(DISCARD.failed, error).on(&self.name).at(range.offset()),
        };
        if error.kind() == ErrorKind::Unsupported {
            self.unsupported.discard.store(true, Relaxed);
        }
        Err(error)
    }
}

/// Texts of an operation's errors.
struct ErrorText {
    failed: &'static str,
    unsupported: &'static str,
}

const ZEROES: ErrorText =
    ErrorText { failed: "cannot zero", unsupported: "zeroing a range without writing it" };
const PREPARE: ErrorText = ErrorText {
    failed: "cannot write zeros without sending them",
    unsupported: "writing zeros without sending them",
};
const DISCARD: ErrorText =
    ErrorText { failed: "cannot discard", unsupported: "discarding a range" };

const DURABLE_WRITE: &str = "a durable write as one request";

/// The reason why an operation that is returned has the kind that was submitted.
const CAME_BACK: &str = "an operation comes back as it went";

/// Whether the kernel may have refused a transfer because of where its bytes are in the kernel's
/// pages: direct I/O wants them aligned. If so, the next attempt uses memory.
fn is_refusal_of_pages(error: Errno, transfer: &Transfer) -> bool {
    matches!(error, Errno::INVAL | Errno::FAULT) && transfer.vector.leave_pages()
}

fn advance(transfer: &mut Transfer, count: usize) {
    transfer.offset += count as u64;
    transfer.vector.advance(count);
}

impl Storage for HostFile {
    fn name(&self) -> &str {
        &self.name
    }

    fn capabilities(&self) -> Capabilities {
        let all = |flags: &[&AtomicBool]| {
            if flags.iter().all(|flag| flag.load(Relaxed)) {
                Offload::Unavailable
            } else {
                Offload::Available
            }
        };
        let Unsupported { punch_hole, zero_range, discard, .. } = &self.unsupported;
        Capabilities {
            fua: self.fua(),
            fua_cost: self.fua_cost(),
            write_cache: self.write_cache,
            group_commit: self.group_commit(),
            alignment: self.alignment,
            write_zeroes: all(&[punch_hole, zero_range]),
            prepare_zeroes: self.can_prepare_zeroes(),
            discard: match self.kind {
                FileKind::Regular => all(&[punch_hole]),
                FileKind::BlockDevice => all(&[discard]),
            },
            read_after_discard: match self.kind {
                FileKind::Regular => ReadAfterDiscard::Zeros,
                FileKind::BlockDevice => ReadAfterDiscard::Undefined,
            },
        }
    }

    fn size(&self) -> u64 {
        self.size.load(Relaxed)
    }

    async fn read(&self, offset: u64, into: IoVector) -> Result<()> {
        if into.is_empty() {
            return Ok(());
        }
        let transfer = Transfer { file: self.file_for(offset, into.len()), offset, vector: into };
        let (result, operation) = submit(Operation::Read(transfer)).await;
        let Operation::Read(transfer) = operation else { unreachable!("{CAME_BACK}") };
        if result == Ok(transfer.vector.len()) {
            return Ok(());
        }
        // Boxed, so that the future of the common case stays small.
        Box::pin(self.read_rest(transfer, result)).await
    }

    async fn write(&self, offset: u64, from: IoVector, durability: Durability) -> Result<()> {
        match durability {
            Durability::None => self.write_all(offset, from, WriteThrough::No).await,
            // The last partial block uses the open file that is flushed: a durable write would
            // consume the report of a writeback error before the next flush.
            Durability::Data
                if self.fua() == Fua::Native && !self.is_in_tail(offset, from.len()) =>
            {
                self.write_all(offset, from, WriteThrough::Yes).await
            }
            Durability::Data | Durability::Full => Err(self.unsupported(DURABLE_WRITE).at(offset)),
        }
    }

    fn grows_with_zeros(&self) -> bool {
        self.kind == FileKind::Regular
    }

    /// Zeroes the whole blocks first, because only this can be refused. The partial blocks at the
    /// edges of a device's range are then written.
    async fn write_zeroes(&self, range: ByteRange, unmap: Unmap) -> Result<()> {
        let Some(whole) = range.align_inward(self.offload_block.into()) else {
            return self.write_few_zeros(range).await;
        };
        let punch_hole = &self.unsupported.punch_hole;
        match unmap {
            Unmap::Allowed => {
                self.allocate(FallocateFlags::PUNCH_HOLE, whole, punch_hole, &ZEROES).await?
            }
            Unmap::Forbidden => self.zero_with_space(whole).await?,
        }
        let head = ByteRange::between(range.offset(), whole.offset());
        self.write_few_zeros(head).await?;
        self.write_few_zeros(ByteRange::between(whole.end(), range.end())).await
    }

    async fn prepare_zeroes(&self, range: ByteRange, held: IoVector) -> Result<()> {
        if self.can_prepare_zeroes() == Offload::Unavailable {
            return Err(self.unsupported(PREPARE.unsupported));
        }
        let failed = |error| self.error_at(PREPARE.failed, error, range.offset());
        if self.kind == FileKind::BlockDevice && range.end() > self.size() {
            return Err(failed(Errno::NOSPC));
        }
        self.keep_answered(range).await?;
        match written_zeros::write(&self.file, range, held).await {
            Ok(()) => {
                self.size.fetch_max(range.end(), Relaxed);
                Ok(())
            }
            Err(error) if written_zeros::is_refusal(error) => {
                if !self.unsupported.prepare_zeroes.swap(true, Relaxed) {
                    tracing::debug!("{}: {}", self.name, written_zeros::REFUSED);
                }
                Err(self.unsupported(PREPARE.unsupported))
            }
            Err(error) => {
                self.note_part_written();
                Err(failed(error))
            }
        }
    }

    async fn free_space(&self) -> Result<Option<u64>> {
        if self.kind == FileKind::BlockDevice {
            return Ok(None);
        }
        let left = written_zeros::free_space(&self.file).await;
        left.map(Some).map_err(|error| self.error("cannot find the free space", error))
    }

    async fn discard(&self, range: ByteRange) -> Result<()> {
        match self.kind {
            FileKind::Regular => {
                let refused = &self.unsupported.punch_hole;
                self.allocate(FallocateFlags::PUNCH_HOLE, range, refused, &DISCARD).await
            }
            FileKind::BlockDevice if self.unsupported.discard.load(Relaxed) => {
                Err(self.unsupported(DISCARD.unsupported))
            }
            FileKind::BlockDevice => match range.align_inward(self.offload_block.into()) {
                Some(whole) => self.discard_on_device(whole).await,
                None => Ok(()),
            },
        }
    }

    async fn flush(&self, sync: SyncMode) -> Result<()> {
        self.file.detached_syncs.drained().await;
        let result = loop {
            let operation = Operation::Sync { file: Arc::clone(&self.flushed), sync };
            match submit(operation).await.0 {
                Err(Errno::AGAIN | Errno::INTR) => {}
                other => break other,
            }
        };
        // Both failures are taken in any case, because each is reported only once.
        let earlier = self.file.detached_syncs.take_failure();
        result.and(earlier).map_err(|error| self.error("cannot flush", error))
    }

    /// Sets the file's position, which no request uses: the kernel refuses a position beyond the
    /// maximum file size of the file system.
    fn check_size(&self, size: u64) -> Result<()> {
        if self.kind == FileKind::BlockDevice && size != self.size() {
            return Err(self.fixed_size());
        }
        match rustix::fs::seek(&*self.file, SeekFrom::Start(size)) {
            Err(Errno::INVAL) if self.kind == FileKind::Regular => {
                let what = format!("its file system has no files of {size} bytes");
                Err(Error::new(ErrorKind::NoSpace, what).on(&self.name))
            }
            _ => Ok(()),
        }
    }

    async fn resize(&self, size: u64) -> Result<()> {
        if self.kind == FileKind::BlockDevice {
            return Err(self.fixed_size());
        }
        let file = Arc::clone(&self.file);
        // A smaller size is recorded first, because `check_not_cut` relies on it.
        let before = self.size.fetch_min(size, Relaxed);
        let result = blocking(move || rustix::fs::ftruncate(&*file, size)).await;
        self.size.fetch_max(if result.is_ok() { size } else { before }, Relaxed);
        result.map_err(|error| self.error("cannot resize", error))
    }

    async fn last_change(&self) -> Result<Option<Duration>> {
        change_time::last_change(self).await
    }

    /// Allocates the last sector. Unlike `ftruncate` to the larger size, this can never cut off
    /// bytes that a concurrent write has stored beyond it.
    async fn extend_hint(&self, size: u64) {
        let refused = &self.unsupported.extend;
        if size <= self.size() || refused.load(Relaxed) {
            return;
        }
        let range = ByteRange::between(size.saturating_sub(512), size);
        let file = Arc::clone(&self.file);
        let operation = Operation::Allocate { file, mode: 0, range, held: None };
        match submit(operation).await.0 {
            Ok(_) => {
                self.size.fetch_max(size, Relaxed);
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => refused.store(true, Relaxed),
        }
    }

    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        let file = Arc::clone(&self.file);
        let result = blocking(move || next_status(&file, range)).await;
        result.map_err(|error| self.error_at("cannot find holes", error, range.offset()))
    }

    async fn prefetch(&self, range: ByteRange) -> Result<()> {
        let length = std::num::NonZeroU64::new(range.length());
        if self.file.caching == Caching::PageCache && length.is_some() {
            let file = Arc::clone(&self.file);
            let advise =
                move || rustix::fs::fadvise(&*file, range.offset(), length, Advice::WillNeed);
            // An error is ignored, because this is only advice to the kernel.
            let _ = blocking(advise).await;
        }
        Ok(())
    }

    fn takes_kernel_pages(&self) -> bool {
        self.file.medium != Medium::Memory
    }

    fn cached_file(&self, range: ByteRange) -> Option<BorrowedFd<'_>> {
        let is_cached =
            self.file.caching == Caching::PageCache && page_cache::has_all(&self.file, range);
        is_cached.then(|| self.descriptor())
    }
}

/// `SEEK_DATA` and `SEEK_HOLE` (`lseek(2)`): the status at the start of `range` and its length.
fn next_status(file: &File, range: ByteRange) -> rustix::io::Result<(Allocation, u64)> {
    use rustix::fs::SeekFrom;
    let (start, end) = (range.offset(), range.end());
    loop {
        let data = match rustix::fs::seek(file, SeekFrom::Data(start)) {
            Ok(data) => data.min(end),
            // No data from here to the end of the file.
            Err(Errno::NXIO) => end,
            // A file system without this query: everything may be data.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok((Allocation::Data, range.length())),
            Err(error) => return Err(error),
        };
        if data > start {
            return Ok((Allocation::Hole, data - start));
        }
        match rustix::fs::seek(file, SeekFrom::Hole(start)) {
            Ok(hole) if hole > start => return Ok((Allocation::Data, hole.min(end) - start)),
            // The data that the previous call found has vanished: try again.
            Ok(_) | Err(Errno::NXIO) => {}
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok((Allocation::Data, range.length())),
            Err(error) => return Err(error),
        }
    }
}

impl fmt::Debug for HostFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostFile({}, {:?}, {} bytes)", self.name, self.kind, self.size())
    }
}
