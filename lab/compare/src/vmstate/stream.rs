//! The state of a machine as a producer sends it: writes of 64 bytes to 32 KiB, small ones as often
//! as large ones.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use blockhouse_core::Buffer;

use crate::caching::Caching;
use crate::interrupt::Interrupt;
use lab_tools::process::line;

const MIB: usize = 1 << 20;
/// Bytes of data that are sent repeatedly.
const REPEAT: usize = 64 * MIB;
/// The blocks of direct I/O.
const BLOCK: u64 = 4096;
/// How long a process gets until it is idle.
const REST: Duration = Duration::from_millis(300);

/// Bytes that cannot be compressed, always the same (xorshift, Marsaglia 2003).
pub struct RandomData {
    state: u64,
    chunk: Vec<u8>,
}

impl RandomData {
    pub fn new() -> Self {
        Self { state: 0x9e37_79b9_7f4a_7c15, chunk: vec![0; MIB] }
    }

    fn next(&mut self) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        self.state
    }

    /// The next MiB.
    pub fn chunk(&mut self) -> &[u8] {
        for at in (0..MIB).step_by(8) {
            let word = self.next().to_le_bytes();
            self.chunk[at..at + 8].copy_from_slice(&word);
        }
        &self.chunk
    }
}

/// Sizes of writes: each of the nine doublings from 64 bytes on is equally likely.
struct WriteSizes(RandomData);

impl WriteSizes {
    fn new() -> Self {
        Self(RandomData::new())
    }

    fn next(&mut self) -> usize {
        let random = self.0.next() >> 8;
        let doubling = 6 + random % 9;
        let most = 1_u64 << doubling;
        (most + (random >> 16) % most).min(32 << 10) as usize
    }
}

/// The measured parts of a save.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum SaveFigure {
    /// The time.
    Time,
    /// The memory.
    Memory,
}

/// The cost of a save.
pub struct SaveResult {
    /// The time until the command has ended.
    pub spent: Duration,
    /// Bytes of memory beyond those of the process before the first write; `None` if not measured.
    pub memory: Option<u64>,
}

/// Sends a state of `size` bytes to `command`.
pub fn save(
    mut command: Command,
    data: &Path,
    size: u64,
    figure: SaveFigure,
    interrupt: &Interrupt,
) -> Result<SaveResult> {
    let mut repeated = vec![0; REPEAT.min(size as usize)];
    File::open(data)?.read_exact(&mut repeated)?;
    let began = Instant::now();
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
    let mut pipe = child.stdin.take().context("a pipe was asked for")?;
    let idle = match figure {
        SaveFigure::Time => None,
        SaveFigure::Memory => {
            std::thread::sleep(REST);
            Some(most_memory(&child)?)
        }
    };
    let mut sizes = WriteSizes::new();
    let (mut sent, mut at) = (0, 0);
    while sent < size {
        let length = sizes.next().min((size - sent) as usize).min(repeated.len() - at);
        pipe.write_all(&repeated[at..at + length])
            .context("the command does not take the state")?;
        sent += length as u64;
        at = (at + length) % repeated.len();
        if at < length {
            interrupt.check()?;
        }
    }
    let memory = idle.map(|idle| {
        std::thread::sleep(REST);
        Ok::<_, anyhow::Error>(most_memory(&child)?.saturating_sub(idle))
    });
    drop(pipe);
    wait(child, &command)?;
    Ok(SaveResult { spent: began.elapsed(), memory: memory.transpose()? })
}

/// The peak memory of a process, in bytes.
fn most_memory(child: &Child) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kibibytes = line.and_then(|line| line.trim().strip_suffix(" kB"));
    let kibibytes = kibibytes.and_then(|number| number.parse::<u64>().ok());
    Ok(kibibytes.context("the kernel does not tell a process's memory")? * 1024)
}

/// Takes a state of `size` bytes from `command` as fast as it comes.
pub fn load(mut command: Command, size: u64, interrupt: &Interrupt) -> Result<Duration> {
    let mut buffer = vec![0; MIB];
    let began = Instant::now();
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let mut pipe = child.stdout.take().context("a pipe was asked for")?;
    let mut received = 0;
    loop {
        match pipe.read(&mut buffer)? {
            0 => break,
            count => received += count as u64,
        }
        interrupt.check()?;
    }
    wait(child, &command)?;
    let spent = began.elapsed();
    ensure!(received == size, "{received} bytes came back instead of {size}");
    Ok(spent)
}

fn wait(mut child: Child, command: &Command) -> Result<()> {
    let status = child.wait()?;
    ensure!(status.success(), "{} failed: {status}", line(command));
    Ok(())
}

/// Writes each small write to `file` as it comes, and makes all durable at the end. With direct
/// I/O, a write includes the other bytes of the blocks that it touches.
pub fn save_unbuffered(
    file: &Path,
    size: u64,
    caching: Caching,
    interrupt: &Interrupt,
) -> Result<Duration> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true);
    if caching == Caching::Direct {
        options.custom_flags(rustix::fs::OFlags::DIRECT.bits().cast_signed());
    }
    let file = options.open(file)?;
    let mut data = RandomData::new();
    let data = data.chunk();
    let mut blocks = Buffer::new(64 << 10);
    let mut sizes = WriteSizes::new();
    let mut at = 0;
    let began = Instant::now();
    while at < size {
        interrupt.check()?;
        let length = sizes.next().min((size - at) as usize);
        let bytes = &data[(at as usize % (MIB / 2))..][..length];
        match caching {
            Caching::Direct => write_blocks(&file, at, bytes, blocks.bytes_mut())?,
            Caching::Cached | Caching::Null => file.write_all_at(bytes, at)?,
        }
        at += length as u64;
    }
    file.sync_data()?;
    Ok(began.elapsed())
}

/// Writes `bytes` at `at`, the end of the data so far, in whole blocks.
fn write_blocks(file: &File, at: u64, bytes: &[u8], blocks: &mut [u8]) -> Result<()> {
    let first = at / BLOCK * BLOCK;
    let end = at + bytes.len() as u64;
    let blocks = &mut blocks[..(end.next_multiple_of(BLOCK) - first) as usize];
    let inside = (at - first) as usize;
    if inside > 0 {
        file.read_exact_at(&mut blocks[..BLOCK as usize], first)?;
    }
    blocks[inside..inside + bytes.len()].copy_from_slice(bytes);
    blocks[inside + bytes.len()..].fill(0);
    Ok(file.write_all_at(blocks, first)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writes_are_of_all_sizes() {
        let mut sizes = WriteSizes::new();
        let lengths: Vec<usize> = (0..10_000).map(|_| sizes.next()).collect();
        assert!(lengths.iter().all(|length| (64..=32 << 10).contains(length)));
        for doubling in 6..15 {
            let within = lengths.iter().filter(|length| length.ilog2() == doubling);
            assert!((900..1400).contains(&within.count()), "{doubling}");
        }
    }

    #[test]
    fn whole_blocks_hold_what_small_writes_held() {
        let folder = tempfile::tempdir().expect("a folder");
        let files = ["direct", "cached"].map(|name| folder.path().join(name));
        for (file, caching) in files.iter().zip([Caching::Direct, Caching::Cached]) {
            save_unbuffered(file, 300_000, caching, &Interrupt::default()).expect("room");
        }
        let [direct, cached] = files.map(|file| std::fs::read(file).expect("a file"));
        assert_eq!(cached.len(), 300_000);
        assert!(direct[..300_000] == cached && direct[300_000..].iter().all(|byte| *byte == 0));
    }
}
