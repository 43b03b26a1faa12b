//! The baseline, "the bare kernel": the same writes as a server's, by a program that does nothing
//! else.

use std::fs::{File, OpenOptions};
use std::io::IoSlice;
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use rustix::fs::OFlags;
use rustix::io::{ReadWriteFlags, pwritev2};

/// Bytes in a write.
pub const BLOCK: usize = 4096;
/// How many writes are counted.
pub const WRITES: u64 = 20;
/// Bytes from one write to the next: one write to each cluster of a qcow2 image, no two of them
/// adjacent.
pub const STRIDE: u64 = 64 * 1024;

/// Whether writes go through the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    Direct,
    PageCache,
}

/// How writes are made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteMethod {
    /// Each write with FUA, one after the other.
    Each,
    /// Each write with FUA, all at the same time.
    Together,
    /// A flush after each write.
    FlushEach,
    /// One flush after all writes.
    FlushOnce,
    /// Plain writes to a server whose cache mode makes every write durable. The bare kernel writes
    /// each with FUA.
    Write,
}

impl WriteMethod {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Each => "FUA",
            Self::Together => "FUA, all at once",
            Self::FlushEach => "write, flush",
            Self::FlushOnce => "writes, one flush",
            Self::Write => "writes",
        }
    }
}

/// Writes to `path`.
pub fn run(path: &Path, method: WriteMethod, caching: Caching) -> Result<()> {
    let target = Target::open(path, caching)?;
    let data = |index| index * STRIDE;
    let durably = |index| target.write(data(index), ReadWriteFlags::DSYNC);
    match method {
        WriteMethod::Each | WriteMethod::Write => (0..WRITES).try_for_each(durably),
        WriteMethod::Together => std::thread::scope(|scope| {
            let durably = &durably;
            let start = |index| scope.spawn(move || durably(index));
            let threads: Vec<_> = (0..WRITES).map(start).collect();
            let results = threads.into_iter().map(|thread| thread.join().expect("it never panics"));
            results.collect()
        }),
        WriteMethod::FlushEach => (0..WRITES).try_for_each(|index| {
            target.write(data(index), PLAIN)?;
            target.flush()
        }),
        WriteMethod::FlushOnce => {
            (0..WRITES).try_for_each(|index| target.write(data(index), PLAIN))?;
            target.flush()
        }
    }
}

/// Does on `path`, with direct I/O, the minimum that a format with metadata needs to allocate a
/// cluster: it writes the data and the refcount, and only after a flush the entry that refers to
/// the cluster. The metadata is at `tables`, in space that was written before.
pub fn run_allocating(path: &Path, method: WriteMethod, tables: u64) -> Result<()> {
    let target = Target::open(path, Caching::Direct)?;
    let publish = |data: Range<u64>| {
        data.map(|index| index * STRIDE).try_for_each(|offset| target.write(offset, PLAIN))?;
        target.write(tables, PLAIN)?;
        target.flush()?;
        target.write(tables + STRIDE, ReadWriteFlags::DSYNC)
    };
    match method {
        WriteMethod::Each | WriteMethod::FlushEach | WriteMethod::Write => {
            (0..WRITES).try_for_each(|index| publish(index..index + 1))
        }
        WriteMethod::Together | WriteMethod::FlushOnce => publish(0..WRITES),
    }
}

const PLAIN: ReadWriteFlags = ReadWriteFlags::empty();

/// An open file or device, and the data that is written to it.
struct Target {
    file: File,
    name: String,
    space: Vec<u8>,
}

impl Target {
    fn open(path: &Path, caching: Caching) -> Result<Self> {
        let file = open(path, caching)?;
        Ok(Self { file, name: path.display().to_string(), space: vec![0x5a; 2 * BLOCK] })
    }

    fn write(&self, offset: u64, flags: ReadWriteFlags) -> Result<()> {
        let block = &self.space[self.space.as_ptr().align_offset(BLOCK)..][..BLOCK];
        let count = pwritev2(&self.file, &[IoSlice::new(block)], offset, flags)
            .with_context(|| format!("cannot write to {}", self.name))?;
        ensure!(count == BLOCK, "a short write of {count} bytes");
        Ok(())
    }

    fn flush(&self) -> Result<()> {
        self.file.sync_data().with_context(|| format!("cannot flush {}", self.name))
    }
}

fn open(path: &Path, caching: Caching) -> Result<File> {
    let flags = match caching {
        Caching::Direct => OFlags::DIRECT,
        Caching::PageCache => OFlags::empty(),
    };
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(flags.bits() as i32);
    options.open(path).with_context(|| format!("cannot open {}", path.display()))
}
