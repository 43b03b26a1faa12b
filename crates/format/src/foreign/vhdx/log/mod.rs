//! The log of a VHDX image (\[MS-VHDX\] 2.3), replayed in memory: changes that a program logged
//! before it died, and may not have written to their offsets.
//!
//! Guarantees: nothing is written. The entries of the active sequence are applied in order; an
//! image that does not fit its log is refused. Time and memory are bounded: logs beyond
//! [`MAX_LENGTH`] are refused, and the checked entries together have at most [`MAX_CHECKED`] times
//! the log's length.

mod entry;

use blockhouse_core::{Result, Storage, WorkBudget};

use super::guid::NIL;
use super::header::Header;
use crate::aligned_read::read;
use crate::foreign::patches::Patches;
use crate::foreign::refusal::{corrupt, unsupported};
use entry::{Entry, SECTOR};

/// Bytes of the longest log that is replayed. Hyper-V and QEMU make logs of 1 MiB for most images.
const MAX_LENGTH: u64 = 64 << 20;
/// Bytes that are read at once in the search for entries: a log without entries is read with few
/// requests, even from a remote storage.
const WINDOW: u64 = 64 << 10;
/// Limit of the bytes read to check entries, valid or not, in multiples of the log's length.
const MAX_CHECKED: u64 = 16;

/// Entries that follow each other.
#[derive(Default)]
struct Sequence {
    entries: Vec<Entry>,
    /// Bytes of all entries.
    length: u64,
}

impl Sequence {
    /// The entry that was written last.
    fn head(&self) -> Option<&Entry> {
        self.entries.last()
    }

    /// The entries from the head's tail on. The tail is the first entry whose changes may be
    /// missing; `None` if the sequence does not contain the tail.
    fn active(&self) -> Option<&[Entry]> {
        let tail = self.head()?.tail;
        let first = self.entries.iter().position(|entry| entry.start == tail)?;
        Some(&self.entries[first..])
    }
}

/// The changes in the log; none if it is empty.
///
/// # Errors
/// `Corrupt` or `Unsupported`, with an offset; errors of the storage.
pub(super) async fn replay<S: Storage>(storage: &S, header: &Header) -> Result<Patches> {
    let mut patches = Patches::default();
    if header.log_guid == NIL || header.log_length == 0 {
        return Ok(patches);
    }
    if header.log_length > MAX_LENGTH {
        let what = format!("a log of {} bytes that was not replayed", header.log_length);
        return Err(unsupported(what, header.log_offset));
    }
    if header.log_offset + header.log_length > storage.size() {
        return Err(corrupt("its log ends past the end of the file", header.log_offset));
    }
    let log = Log { storage, header };
    let Some(sequence) = log.find().await? else { return Ok(patches) };
    for entry in sequence.active().unwrap_or_default() {
        if entry.flushed_size > storage.size() {
            let what = format!(
                "its log was written when the file had {} bytes, and it has {}",
                entry.flushed_size,
                storage.size()
            );
            return Err(corrupt(what, header.log_offset + entry.start));
        }
        let bytes = log.read(entry.start, entry.length).await?;
        entry.apply(&bytes, header.log_offset, &mut patches)?;
        patches.extend_file(entry.last_size);
    }
    Ok(patches)
}

/// Bytes of the log in which entries are looked for.
#[derive(Default)]
struct Window {
    start: u64,
    bytes: Vec<u8>,
}

struct Log<'a, S> {
    storage: &'a S,
    header: &'a Header,
}

impl<S: Storage> Log<'_, S> {
    /// The active sequence: of the sequences that contain the tail of their head, the one with the
    /// highest sequence number.
    async fn find(&self) -> Result<Option<Sequence>> {
        let (mut at, mut best): (u64, Option<Sequence>) = (0, None);
        let number = |sequence: &Sequence| sequence.head().map(|head| head.sequence);
        let (mut checked, mut window) = (0, Window::default());
        while at < self.header.log_length {
            let sequence = self.walk(at, &mut checked, &mut window).await?;
            at += sequence.length.max(SECTOR);
            if sequence.active().is_some()
                && best.as_ref().is_none_or(|best| number(&sequence) > number(best))
            {
                best = Some(sequence);
            }
        }
        Ok(best)
    }

    /// The entries from `start` on, as long as their sequence numbers increase by one.
    async fn walk(&self, start: u64, checked: &mut u64, window: &mut Window) -> Result<Sequence> {
        let mut sequence = Sequence::default();
        let budget = WorkBudget::new();
        while sequence.length < self.header.log_length {
            let at = (start + sequence.length) % self.header.log_length;
            let first = self.sector(at, window).await?;
            budget.spend(SECTOR).await;
            let Some(length) = Entry::length(first, self.header) else { break };
            if length > self.header.log_length - sequence.length {
                break;
            }
            *checked += length;
            if *checked > MAX_CHECKED * self.header.log_length {
                let what = "its log has more entries than it can hold";
                return Err(corrupt(what, self.header.log_offset + at));
            }
            let bytes = self.read(at, length).await?;
            budget.spend(length).await;
            let Some(entry) = Entry::parse(&bytes, at) else { break };
            if sequence
                .head()
                .is_some_and(|head| head.sequence.checked_add(1) != Some(entry.sequence))
            {
                break;
            }
            sequence.length += length;
            sequence.entries.push(entry);
        }
        Ok(sequence)
    }

    /// The sector at `at` of the log.
    async fn sector<'w>(&self, at: u64, window: &'w mut Window) -> Result<&'w [u8]> {
        if !(window.start..window.start + window.bytes.len() as u64).contains(&at) {
            let length = WINDOW.min(self.header.log_length - at);
            *window = Window { start: at, bytes: self.read(at, length).await? };
        }
        let start = (at - window.start) as usize;
        Ok(&window.bytes[start..start + SECTOR as usize])
    }

    /// Reads bytes of the log, which is a circular buffer.
    async fn read(&self, start: u64, length: u64) -> Result<Vec<u8>> {
        let offset = self.header.log_offset;
        let first = length.min(self.header.log_length - start);
        let mut bytes = read(self.storage, offset + start, first as usize).await?;
        if first < length {
            bytes.extend(read(self.storage, offset, (length - first) as usize).await?);
        }
        Ok(bytes)
    }
}
