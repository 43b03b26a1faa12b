//! A regular file or block device of the host as a [`Storage`].
//!
//! Promises: a short transfer is continued and never turned into an error of its own; a durable
//! write is one request where kernel and file allow it (`RWF_DSYNC`), and otherwise a write and a
//! sync; every error names the file and the offset and keeps its errno. All operations run on the
//! loop of the thread that polls them, so one `HostFile` may serve many threads.

use std::fmt;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use blockhouse_core::{
    Alignment, Buffer, ByteRange, Capabilities, Durability, Error, ErrorKind, Fua, GroupCommit,
    IoVector, Offload, Result, Status, Storage, Sync, Unmap, WriteCache,
};
use rustix::fs::{Advice, FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use crate::file::{Caching, File, Residence};
use crate::operation::{Operation, Transfer, WriteThrough};
use crate::probe::{self, FileKind};
use crate::submit::submit;
use crate::thread_pool::blocking;

/// `BLKDISCARD` from `<linux/fs.h>`.
const BLKDISCARD: libc::Ioctl = 0x1277;

/// Whether an open file may be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenFor {
    /// No write is possible.
    Reading,
    /// Reads and writes.
    Writing,
}

/// Whether the host's page cache is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageCache {
    /// Reads and writes go through it.
    Used,
    /// `O_DIRECT`: around it.
    Bypassed,
}

/// An open file or block device.
pub struct HostFile {
    file: Arc<File>,
    /// For the last partial block, which direct I/O cannot reach: the same file through the page
    /// cache. A block is no less than a page then, so that the two ways never share one.
    tail: Option<Arc<File>>,
    name: String,
    kind: FileKind,
    size: AtomicU64,
    alignment: Alignment,
    write_cache: WriteCache,
    /// What the kernel has refused so far. Support is found out per file, once.
    refused: Refused,
}

#[derive(Default)]
struct Refused {
    fua: AtomicBool,
    punch_hole: AtomicBool,
    zero_range: AtomicBool,
    discard: AtomicBool,
}

impl HostFile {
    /// Makes a new regular file of `size` bytes, all holes, and opens it for writing.
    ///
    /// # Errors
    /// The kernel's: EEXIST for one that exists, which is left alone. When the size cannot be set, or
    /// the new file cannot be opened as it was asked for, it is removed again.
    pub fn create(path: &Path, size: u64, cache: PageCache) -> Result<Self> {
        let failed = |what: &'static str, error: Errno| {
            Error::host(what, error.into()).on(&path.display().to_string())
        };
        // Without O_DIRECT: a file system that does not know it refuses to open what it has just made.
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
        let rights = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH;
        let made = rustix::fs::open(path, flags, rights).map_err(|error| {
            let failed = failed("cannot create", error);
            match error {
                Errno::EXIST => failed.hint("choose another name, or remove it first"),
                _ => failed,
            }
        })?;
        let file = rustix::fs::ftruncate(&made, size)
            .map_err(|error| failed("cannot set the size of the new file", error))
            .and_then(|()| Self::open(path, OpenFor::Writing, cache));
        if file.is_err() {
            // The error that counts is the first one.
            let _ = std::fs::remove_file(path);
        }
        file
    }

    /// Opens an existing file or block device.
    ///
    /// # Errors
    /// The kernel's, and [`ErrorKind::InvalidInput`] for what is neither file nor block device.
    pub fn open(path: &Path, access: OpenFor, cache: PageCache) -> Result<Self> {
        let name = path.display().to_string();
        let failed = |error: Errno| Error::host("cannot open", error.into()).on(&name);
        let (direct, caching) = match cache {
            PageCache::Used => (OFlags::empty(), Caching::PageCache),
            PageCache::Bypassed => (OFlags::DIRECT, Caching::Direct),
        };
        let mode = match access {
            OpenFor::Reading => OFlags::RDONLY,
            OpenFor::Writing => OFlags::RDWR,
        };
        // Opening a pipe for reading would wait for a writer.
        let flags = mode | direct | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let descriptor = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| {
            // What direct I/O says of a folder or a pipe misleads.
            if std::fs::metadata(path).is_ok_and(|found| !is_disk(&found)) {
                return no_disk(&name);
            }
            match advice(error, access, cache) {
                Some(hint) => failed(error).hint(hint),
                None => failed(error),
            }
        })?;
        // To io_uring the flag would mean "fail rather than wait" from here on.
        rustix::fs::fcntl_setfl(&descriptor, mode | direct).map_err(failed)?;
        let residence = probe::residence(&descriptor);
        let file = File::new(descriptor, residence, caching);
        Self::examine(file, name, mode)
    }

    fn examine(file: File, name: String, access: OFlags) -> Result<Self> {
        let failed = |error: std::io::Error| Error::host("cannot examine", error).on(&name);
        let kind = probe::kind(&file).map_err(failed)?.ok_or_else(|| no_disk(&name))?;
        let size = probe::size(&file).map_err(failed)?;
        let mut alignment = probe::alignment(&file, kind).map_err(|error| {
            failed(error).hint("it cannot do direct I/O: try --cache writeback")
        })?;
        if !size.is_multiple_of(u64::from(alignment.offset)) {
            // So that the last partial block, which goes another way, has its page for itself.
            let page = rustix::param::page_size() as u32;
            alignment.offset = alignment.offset.max(page);
        }
        let device = probe::device(&file, kind).map_err(failed)?;
        let tail = match kind {
            FileKind::Regular if alignment.offset > 1 => {
                let tail = file.reopen_cached(access).map_err(|error| failed(error.into()))?;
                Some(Arc::new(tail))
            }
            _ => None,
        };
        let sample = Buffer::new(SAMPLE).lend();
        let refused = Refused {
            fua: (probe::fua(&file, &sample) != Fua::Native).into(),
            punch_hole: (device.write_zeroes == Offload::Unavailable).into(),
            zero_range: (device.write_zeroes == Offload::Unavailable).into(),
            discard: (device.discard == Offload::Unavailable).into(),
        };
        let (file, size, write_cache) = (Arc::new(file), size.into(), device.write_cache);
        Ok(Self { file, tail, name, kind, size, alignment, write_cache, refused })
    }

    /// Whether it is a file or a device.
    pub fn kind(&self) -> FileKind {
        self.kind
    }

    /// The open file, for locks and the like; not for data.
    pub fn descriptor(&self) -> std::os::fd::BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&*self.file)
    }

    fn error(&self, what: &'static str, error: Errno) -> Error {
        Error::host(what, error.into()).on(&self.name)
    }

    fn error_at(&self, what: &'static str, error: Errno, offset: u64) -> Error {
        self.error(what, error).at(offset)
    }

    /// The way to this range: the last partial block takes one of its own.
    fn file_for(&self, offset: u64, length: usize) -> Arc<File> {
        let bits = (offset | length as u64) & (u64::from(self.alignment.offset) - 1);
        match &self.tail {
            Some(tail) if bits != 0 => Arc::clone(tail),
            _ => Arc::clone(&self.file),
        }
    }

    /// Writes everything.
    async fn write_all(&self, offset: u64, from: IoVector, through: WriteThrough) -> Result<()> {
        let file = self.file_for(offset, from.len());
        let end = offset.saturating_add(from.len() as u64);
        let mut transfer = Transfer { file, offset, vector: from };
        while !transfer.vector.is_empty() {
            let (result, operation) = submit(Operation::Write(transfer, through)).await;
            let Operation::Write(back, _) = operation else { unreachable!("{CAME_BACK}") };
            transfer = back;
            match result {
                Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOSYS)
                    if through == WriteThrough::Yes =>
                {
                    return self.write_emulating(transfer).await;
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(self.error_at("cannot write", error, transfer.offset)),
                Ok(0) => {
                    let what = "cannot write (the host takes nothing)";
                    return Err(self.error_at(what, Errno::IO, transfer.offset));
                }
                Ok(count) => pass(&mut transfer, count),
            }
        }
        if end > self.size() {
            self.size.fetch_max(end, Relaxed);
        }
        Ok(())
    }

    /// Whether the file ends at `offset` or before. It is asked anew: somebody else may have made it
    /// longer, and what is called the end here reads as zeros.
    fn ends_at(&self, offset: u64) -> Result<bool> {
        let size = probe::size(&*self.file);
        let size =
            size.map_err(|error| Error::host("cannot find the end", error).on(&self.name))?;
        Ok(size <= offset)
    }

    /// What is done when the kernel refuses `RWF_DSYNC`. If it takes the plain write, then it was
    /// the flag that it did not like, and it is not asked again.
    async fn write_emulating(&self, transfer: Transfer) -> Result<()> {
        Box::pin(self.write_all(transfer.offset, transfer.vector, WriteThrough::No)).await?;
        self.refused.fua.store(true, Relaxed);
        self.flush(Sync::Data).await
    }

    /// `fallocate(2)`, noting in `refused` that it is not supported.
    async fn allocate(
        &self,
        mode: FallocateFlags,
        range: ByteRange,
        refused: &AtomicBool,
        words: &Words,
    ) -> Result<()> {
        if refused.load(Relaxed) {
            return Err(self.unsupported(words.unsupported));
        }
        let mode = (mode | FallocateFlags::KEEP_SIZE).bits() as i32;
        loop {
            let operation = Operation::Allocate { file: Arc::clone(&self.file), mode, range };
            match submit(operation).await.0 {
                Ok(_) => return Ok(()),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NODEV) => {
                    refused.store(true, Relaxed);
                    return Err(self.unsupported(words.unsupported));
                }
                Err(error) => return Err(self.error_at(words.failed, error, range.offset())),
            }
        }
    }

    /// A file in memory has nothing to flush. In the page cache durable writes to one file go one
    /// after the other, each with a flush of its own, while plain ones are copies.
    fn group_commit(&self) -> GroupCommit {
        match (self.file.residence, self.file.caching) {
            (Residence::Device, Caching::PageCache) => GroupCommit::From(2),
            (Residence::Memory, _) | (_, Caching::Direct) => GroupCommit::Never,
        }
    }

    fn unsupported(&self, what: &str) -> Error {
        Error::new(ErrorKind::Unsupported, format!("{what} is not supported here")).on(&self.name)
    }

    async fn discard_on_device(&self, range: ByteRange) -> Result<()> {
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
            self.refused.discard.store(true, Relaxed);
        }
        Err(error)
    }
}

fn is_disk(found: &std::fs::Metadata) -> bool {
    found.is_file() || found.file_type().is_block_device()
}

fn no_disk(name: &str) -> Error {
    let what = "this is a directory, pipe or device, and no disk";
    let error = Error::new(ErrorKind::InvalidInput, what).on(name);
    error.hint("give the path of a disk image or a block device")
}

/// What a person can do about a file that does not open.
fn advice(error: Errno, access: OpenFor, cache: PageCache) -> Option<&'static str> {
    match error {
        Errno::NOENT => Some("check the path, or make the image with 'blockhouse create'"),
        Errno::ACCESS | Errno::PERM | Errno::ROFS if access == OpenFor::Writing => {
            Some("check its permissions, or open it with --read-only")
        }
        Errno::ACCESS | Errno::PERM => Some("check its permissions"),
        Errno::INVAL if cache == PageCache::Bypassed => {
            Some("its file system has no direct I/O: try --cache writeback")
        }
        _ => None,
    }
}

/// What an error says of an operation.
struct Words {
    failed: &'static str,
    unsupported: &'static str,
}

const ZEROES: Words =
    Words { failed: "cannot zero", unsupported: "zeroing a range without writing it" };
const DISCARD: Words = Words { failed: "cannot discard", unsupported: "discarding a range" };

/// Why an operation of another kind cannot come back.
const CAME_BACK: &str = "an operation comes back as it went";

/// How much is read to find out what the kernel takes: one block of any device.
const SAMPLE: usize = 4096;

fn pass(transfer: &mut Transfer, count: usize) {
    transfer.offset += count as u64;
    transfer.vector.advance(count);
}

impl Storage for HostFile {
    fn name(&self) -> &str {
        &self.name
    }

    fn capabilities(&self) -> Capabilities {
        let all = |flags: &[&AtomicBool]| match flags.iter().all(|flag| flag.load(Relaxed)) {
            true => Offload::Unavailable,
            false => Offload::Available,
        };
        let Refused { fua, punch_hole, zero_range, discard } = &self.refused;
        Capabilities {
            fua: if fua.load(Relaxed) { Fua::Emulated } else { Fua::Native },
            write_cache: self.write_cache,
            group_commit: self.group_commit(),
            alignment: self.alignment,
            write_zeroes: all(&[punch_hole, zero_range]),
            discard: match self.kind {
                FileKind::Regular => all(&[punch_hole]),
                FileKind::BlockDevice => all(&[discard]),
            },
        }
    }

    fn size(&self) -> u64 {
        self.size.load(Relaxed)
    }

    async fn read(&self, offset: u64, into: IoVector) -> Result<()> {
        let file = self.file_for(offset, into.len());
        let mut transfer = Transfer { file, offset, vector: into };
        while !transfer.vector.is_empty() {
            let (result, operation) = submit(Operation::Read(transfer)).await;
            let Operation::Read(back) = operation else { unreachable!("{CAME_BACK}") };
            transfer = back;
            match result {
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(self.error_at("cannot read", error, transfer.offset)),
                Ok(count) => {
                    pass(&mut transfer, count);
                    // A short read is the end, or it was cut off on the way. To ask for the rest
                    // would tell, if what an end leaves were aligned enough to be asked for.
                    let is_short = !transfer.vector.is_empty();
                    if is_short && (count == 0 || self.ends_at(transfer.offset)?) {
                        transfer.vector.fill(0);
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    async fn write(&self, offset: u64, from: IoVector, durability: Durability) -> Result<()> {
        let native = !self.refused.fua.load(Relaxed);
        match durability {
            Durability::None => self.write_all(offset, from, WriteThrough::No).await,
            Durability::Data if native => self.write_all(offset, from, WriteThrough::Yes).await,
            Durability::Data | Durability::Full => {
                self.write_all(offset, from, WriteThrough::No).await?;
                let full = durability == Durability::Full;
                self.flush(if full { Sync::Full } else { Sync::Data }).await
            }
        }
    }

    async fn write_zeroes(&self, range: ByteRange, unmap: Unmap) -> Result<()> {
        let Refused { punch_hole, zero_range, .. } = &self.refused;
        match unmap {
            Unmap::Allowed => {
                self.allocate(FallocateFlags::PUNCH_HOLE, range, punch_hole, &ZEROES).await
            }
            Unmap::Forbidden => {
                self.allocate(FallocateFlags::ZERO_RANGE, range, zero_range, &ZEROES).await
            }
        }
    }

    async fn discard(&self, range: ByteRange) -> Result<()> {
        match self.kind {
            FileKind::Regular => {
                let refused = &self.refused.punch_hole;
                self.allocate(FallocateFlags::PUNCH_HOLE, range, refused, &DISCARD).await
            }
            FileKind::BlockDevice if self.refused.discard.load(Relaxed) => {
                Err(self.unsupported(DISCARD.unsupported))
            }
            FileKind::BlockDevice => self.discard_on_device(range).await,
        }
    }

    async fn flush(&self, sync: Sync) -> Result<()> {
        self.file.orphans.gone().await;
        let result = loop {
            let operation = Operation::Sync { file: Arc::clone(&self.file), sync };
            match submit(operation).await.0 {
                Err(Errno::AGAIN | Errno::INTR) => {}
                other => break other,
            }
        };
        // Both in any case: each failure is reported once.
        let earlier = self.file.orphans.take_failure();
        result.and(earlier).map_err(|error| self.error("cannot flush", error))
    }

    async fn resize(&self, size: u64) -> Result<()> {
        if self.kind == FileKind::BlockDevice {
            return Err(self
                .unsupported("resizing a block device")
                .hint("resize the device itself"));
        }
        let file = Arc::clone(&self.file);
        let result = blocking(move || rustix::fs::ftruncate(&*file, size)).await;
        result.map_err(|error| self.error("cannot resize", error))?;
        self.size.store(size, Relaxed);
        Ok(())
    }

    async fn status(&self, range: ByteRange) -> Result<(Status, u64)> {
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
            // Advice: a kernel that does not take it leaves everything as it was.
            let _ = blocking(advise).await;
        }
        Ok(())
    }
}

/// `SEEK_DATA` and `SEEK_HOLE` (`lseek(2)`): the status at the start of `range` and its length.
fn next_status(file: &File, range: ByteRange) -> rustix::io::Result<(Status, u64)> {
    use rustix::fs::SeekFrom;
    let (start, end) = (range.offset(), range.end());
    loop {
        let data = match rustix::fs::seek(file, SeekFrom::Data(start)) {
            Ok(data) => data.min(end),
            // No data from here to the end of the file.
            Err(Errno::NXIO) => end,
            // A file system that does not say: everything may be data.
            Err(Errno::INVAL) => return Ok((Status::Data, range.length())),
            Err(error) => return Err(error),
        };
        if data > start {
            return Ok((Status::Hole, data - start));
        }
        match rustix::fs::seek(file, SeekFrom::Hole(start)) {
            Ok(hole) if hole > start => return Ok((Status::Data, hole.min(end) - start)),
            // What was data the call before is none any more: once again.
            Ok(_) | Err(Errno::NXIO) => {}
            Err(error) => return Err(error),
        }
    }
}

impl fmt::Debug for HostFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostFile({}, {:?}, {} bytes)", self.name, self.kind, self.size())
    }
}
