//! Counts the requests to a disk, by the event that blktrace calls "D": request issued.
//!
//! It reads the kernel's tracing directly, so no tool is needed. Requests of all programs to the
//! disk are counted; the caller makes sure that no other program uses the disk.

use std::fmt;
use std::os::linux::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result};

use super::system;

const TRACING: &str = "/sys/kernel/tracing";

/// The requests to a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Writes of data with FUA.
    pub fua: u32,
    /// Writes of data without FUA.
    pub plain: u32,
    /// Writes that a file system marks as metadata.
    pub metadata: u32,
    /// Flushes of the write cache.
    pub flushes: u32,
    /// Discards and the like.
    pub other: u32,
    /// Bytes of data in all writes except the file system's metadata. The kernel often merges
    /// adjacent writes into one request.
    pub bytes: u64,
}

impl Counts {
    /// All requests.
    pub fn total(self) -> u32 {
        self.fua + self.plain + self.metadata + self.flushes + self.other
    }

    /// Counts one request by its letters: F for a flush ahead, the operation, F for FUA, then
    /// A, S, M for read-ahead, synchronous, metadata. Reads do not count.
    fn add(&mut self, letters: &str, bytes: u64) {
        let ahead = letters.strip_prefix('F');
        let operation = ahead.unwrap_or(letters);
        match operation.chars().next() {
            Some('R') => {}
            // Write Zeroes, without a data transfer.
            Some('W') if operation[1..].starts_with('Z') => self.other += 1,
            Some('W') if operation.contains('M') => self.metadata += 1,
            Some('W') => {
                self.bytes += bytes;
                let is_fua = operation[1..].starts_with('F');
                *if is_fua { &mut self.fua } else { &mut self.plain } += 1;
            }
            _ if ahead.is_some() => self.flushes += 1,
            _ => self.other += 1,
        }
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { fua, plain, metadata, flushes, other, .. } = self;
        let parts = [
            (fua, "FUA"),
            (plain, "write"),
            (metadata, "metadata"),
            (flushes, "flush"),
            (other, "other"),
        ];
        let parts: Vec<_> = parts.iter().filter(|(count, _)| **count > 0).collect();
        if parts.is_empty() {
            return formatter.pad("nothing");
        }
        let words: Vec<_> = parts.iter().map(|(count, name)| format!("{count} {name}")).collect();
        formatter.pad(&words.join(" + "))
    }
}

/// Makes the kernel ready to record. Later only a flag switches recording on and off: enabling an
/// event patches the kernel's code, which is slow or fails under emulation.
pub fn prepare() -> Result<()> {
    let file = |name: &str| Path::new(TRACING).join(name);
    system::write(file("tracing_on"), "0")?;
    // Recording the names of programs needs more events.
    system::write(file("options/record-cmd"), "0")?;
    system::write(file("events/block/block_rq_issue/enable"), "1")
}

/// Counts the requests to `disk` while `work` runs; relies on [`prepare`].
pub fn count(disk: &Path, work: impl FnOnce() -> Result<()>) -> Result<Counts> {
    let file = |name: &str| Path::new(TRACING).join(name);
    system::write(file("trace"), "")?;
    system::write(file("tracing_on"), "1")?;
    let outcome = work();
    system::write(file("tracing_on"), "0")?;
    outcome?;
    let number = disk.metadata().context("the disk is gone")?.st_rdev();
    let device = format!("{},{}", rustix::fs::major(number), rustix::fs::minor(number));
    Ok(parse(&system::read(&file("trace"))?, &device))
}

/// As [`count`], after a sync of all dirty data.
pub fn count_synced(disk: &Path, work: impl FnOnce() -> Result<()>) -> Result<Counts> {
    rustix::fs::sync();
    count(disk, work)
}

/// How often threads of this name call `io_uring_enter` while `work` runs.
pub fn count_enters(thread: &str, work: impl FnOnce() -> Result<()>) -> Result<u64> {
    let of_thread = format!("common_pid == {}", pid_of(thread)?);
    count_events(SYSTEM_CALL, &format!("id == {IO_URING_ENTER} && {of_thread}"), work)
}

/// How a server's data moves between the requests of a ublk device and the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moves {
    /// Transfers of a ring that name a slot of its table: the kernel's pages.
    pub by_pages: u64,
    /// System calls that copy data between the pages and the server's memory.
    pub copies: u64,
}

/// Counts the moves of the server whose loop has a thread of this name, while `work` runs.
pub fn count_moves(thread: &str, work: impl FnOnce() -> Result<()>) -> Result<Moves> {
    let of_thread = format!("common_pid == {}", pid_of(thread)?);
    let fixed = format!("(opcode == {READ_FIXED} || opcode == {WRITE_FIXED}) && {of_thread}");
    let calls = format!("(id == {PREAD} || id == {PWRITE}) && {of_thread}");
    let mut by_pages = 0;
    let copies = count_events(SYSTEM_CALL, &calls, || {
        by_pages = count_events("io_uring/io_uring_submit_req", &fixed, work)?;
        Ok(())
    })?;
    Ok(Moves { by_pages, copies })
}

/// How often an event for which `condition` holds occurs while `work` runs.
fn count_events(event: &str, condition: &str, work: impl FnOnce() -> Result<()>) -> Result<u64> {
    let event = Path::new(TRACING).join("events").join(event);
    // The kernel counts in a histogram, so no event is lost.
    let histogram = format!("hist:keys=common_pid if {condition}");
    system::write(event.join("trigger"), &histogram)?;
    let outcome = work();
    let counts = system::read(&event.join("hist"));
    system::write(event.join("trigger"), &format!("!{histogram}"))?;
    outcome?;
    counts.map(|counts| hits(&counts))
}

const SYSTEM_CALL: &str = "raw_syscalls/sys_enter";
/// Numbers of system calls (`<asm/unistd.h>`).
const IO_URING_ENTER: u32 = 426;
const PREAD: u32 = 17;
const PWRITE: u32 = 18;
/// `IORING_OP_READ_FIXED` and `IORING_OP_WRITE_FIXED` (`<linux/io_uring.h>`).
const READ_FIXED: u32 = 4;
const WRITE_FIXED: u32 = 5;

/// The thread of this name.
fn pid_of(thread: &str) -> Result<u32> {
    let tasks = std::fs::read_dir("/proc")?.flatten();
    let mut tasks = tasks.filter_map(|process| std::fs::read_dir(process.path().join("task")).ok());
    let found = tasks.find_map(|tasks| {
        let mut tasks = tasks.flatten();
        tasks.find(|task| system::read(&task.path().join("comm")).is_ok_and(|name| name == thread))
    });
    let name = found.context("no such thread")?.file_name();
    name.to_str().and_then(|name| name.parse().ok()).context("a thread without a number")
}

/// The sum of a histogram: "Hits: 12".
fn hits(histogram: &str) -> u64 {
    let totals = histogram.lines().filter_map(|line| line.trim().strip_prefix("Hits: "));
    totals.filter_map(|hits| hits.trim().parse::<u64>().ok()).sum()
}

fn parse(trace: &str, device: &str) -> Counts {
    let mut counts = Counts::default();
    for line in trace.lines() {
        let Some((_, event)) = line.split_once("block_rq_issue: ") else { continue };
        let mut words = event.split_whitespace();
        if words.next() == Some(device)
            && let (Some(letters), Some(bytes)) = (words.next(), words.next())
        {
            counts.add(letters, bytes.parse().unwrap_or_default());
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_has_a_sum() {
        let text = "{ common_pid: 7 } hitcount: 12\n\nTotals:\n    Hits: 12\n    Entries: 1\n";
        assert_eq!(hits(text), 12);
    }

    #[test]
    fn letters_are_told_apart() {
        let trace = "# tracer: nop\n\
            x-1 [000] ..... 1.0: block_rq_issue: 259,0 WFS 4096 () 8 + 8 be,0,4 [x]\n\
            x-1 [000] ..... 1.0: block_rq_issue: 259,1 WFS 4096 () 8 + 8 be,0,4 [x]\n\
            x-1 [000] ..... 1.0: block_rq_issue: 259,0 WS 4096 () 8 + 8 be,0,4 [x]\n\
            x-1 [000] ..... 1.0: block_rq_issue: 259,0 WFSM 4096 () 8 + 8 be,0,4 [x]\n\
            x-1 [000] ..... 1.0: block_rq_issue: 259,0 FF 0 () 0 + 0 be,0,4 [x]\n\
            x-1 [000] ..... 1.0: block_rq_issue: 259,0 FN 0 () 0 + 0 be,0,4 [x]\n\
            x-1 [000] ..... 1.0: block_rq_issue: 259,0 RA 0 () 0 + 8 be,0,4 [x]\n\
            x-1 [000] ..... 1.0: block_rq_issue: 259,0 WZS 524288 () 0 + 1024 be,0,4 [x]\n\
            x-1 [000] ..... 1.0: block_rq_issue: 259,0 DS 0 () 0 + 8 be,0,4 [x]\n";
        let counts = Counts { fua: 1, plain: 1, metadata: 1, flushes: 2, other: 2, bytes: 8192 };
        assert_eq!(parse(trace, "259,0"), counts);
        assert_eq!(counts.total(), 7);
        assert_eq!(counts.to_string(), "1 FUA + 1 write + 1 metadata + 2 flush + 2 other");
        assert_eq!(Counts::default().to_string(), "nothing");
    }
}
