//! A simulated disk under a qcow2 image that carries out a wrong order behind the back of a right
//! one. Writes that the fault delays are held back in memory, seen by reads, until after the flush
//! or durable write that should have covered them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blockhouse_core::{Buffer, ByteRange, Durability, IoVector, Result, Storage, SyncMode, Unmap};
use blockhouse_sim::{SimDisk, forward_storage};
use parking_lot::Mutex;

/// The planted fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Nothing: the wrapper itself changes no outcome.
    Right,
    /// Durable writes are plain ones.
    PlainFua,
    /// Flushes do nothing.
    NoFlush,
    /// A reference is durable before the refcount.
    RefcountsLate,
    /// A mapping is durable before its data, a pointer before its table.
    DataLate,
    /// Acknowledged with a mapping that is not durable; places are reused before their reference
    /// is gone.
    EntriesLate,
    /// The file is cut before what is in use ends.
    CutTooFar,
    /// Bits of bitmaps are durable after the changes that they stand for.
    BitsLate,
    /// Bits of bitmaps are not written at all.
    BitsLost,
    /// Zeros count as prepared before they are durable: for images with space to prepare, see
    /// `qcow2_prepared`.
    PreparedEarly,
}

/// Which part of the image a cluster is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Refcounts,
    L2Table,
    /// Bits of bitmaps.
    Bits,
    /// The guest's data, and tables that nothing refers to yet.
    Content,
    /// The header, the L1 table, the refcount table.
    Root,
}

/// A storage that is wrong in this way.
pub struct Broken {
    disk: SimDisk,
    policy: Policy,
    held: Mutex<Vec<(u64, Vec<u8>)>>,
    is_image: bool,
    /// Whether the next full flush does nothing.
    skips_full_flush: AtomicBool,
}

impl Broken {
    pub fn new(disk: SimDisk, policy: Policy) -> Self {
        let is_image = disk.content().starts_with(b"QFI\xfb");
        let skips_full_flush = AtomicBool::new(false);
        Self { disk, policy, held: Mutex::default(), is_image, skips_full_flush }
    }

    fn holds_back(&self, offset: u64) -> bool {
        if !self.is_image {
            return false;
        }
        let part = self.part_at(offset);
        match self.policy {
            Policy::Right
            | Policy::PlainFua
            | Policy::NoFlush
            | Policy::CutTooFar
            | Policy::PreparedEarly
            | Policy::BitsLost => false,
            Policy::BitsLate => part == Part::Bits,
            Policy::RefcountsLate => part == Part::Refcounts,
            Policy::DataLate => part == Part::Content,
            Policy::EntriesLate => part == Part::L2Table,
        }
    }

    /// As the tables on the disk say it now.
    fn part_at(&self, offset: u64) -> Part {
        let image = self.disk.content();
        let word = |at: usize| {
            image.get(at..at + 8).map_or(0, |bytes| u64::from_be_bytes(bytes.try_into().unwrap()))
        };
        let half = |at: usize| u32::from_be_bytes(image[at..at + 4].try_into().unwrap());
        let cluster_size = 1_u64 << half(20);
        let cluster = offset & !(cluster_size - 1);
        let (l1, l1_entries) = (word(40) as usize, half(36) as usize);
        let table = word(48) as usize;
        let table_end = table + (half(56) as usize * cluster_size as usize);
        let offset_bits = (1_u64 << 56) - 512;
        let refers = |mut entries: std::ops::Range<usize>| {
            entries.any(|at| at.is_multiple_of(8) && word(at) & offset_bits == cluster)
        };
        if offset < cluster_size
            || (l1..l1 + l1_entries * 8).contains(&(offset as usize))
            || (table..table_end).contains(&(offset as usize))
        {
            Part::Root
        } else if refers(table..table_end) {
            Part::Refcounts
        } else if refers(l1..l1 + l1_entries * 8) {
            Part::L2Table
        } else if bitmap_tables(&image).into_iter().any(refers) {
            Part::Bits
        } else {
            Part::Content
        }
    }

    /// Writes down what was held back, of `range` or all.
    async fn let_go(&self, range: Option<ByteRange>) -> Result<()> {
        let is_meant = |&mut (offset, ref bytes): &mut (u64, Vec<u8>)| {
            let held = ByteRange::between(offset, offset + bytes.len() as u64);
            range.is_none_or(|range| range.overlaps(held))
        };
        let pieces: Vec<_> = self.held.lock().extract_if(.., is_meant).collect();
        for (offset, bytes) in pieces {
            let mut buffer = Buffer::new(bytes.len());
            buffer.bytes_mut().copy_from_slice(&bytes);
            self.disk.write(offset, buffer.lend(), Durability::None).await?;
        }
        Ok(())
    }

    /// A write that is carried out at once, with everything that was held back.
    pub async fn write_through(
        &self,
        offset: u64,
        from: IoVector,
        durability: Durability,
    ) -> Result<()> {
        self.let_go(None).await?;
        self.disk.write(offset, from, durability).await
    }
}

/// Where the tables of bitmaps are in an image.
fn bitmap_tables(image: &[u8]) -> Vec<std::ops::Range<usize>> {
    let word = |at: usize| u64::from_be_bytes(image[at..at + 8].try_into().unwrap()) as usize;
    let half = |at: usize| u32::from_be_bytes(image[at..at + 4].try_into().unwrap()) as usize;
    let magic = 0x2385_2875_u32.to_be_bytes();
    let Some(found) = image[..512].windows(4).position(|window| window == magic) else {
        return Vec::new();
    };
    let (count, mut at) = (half(found + 8), word(found + 24));
    let mut tables = Vec::new();
    for _ in 0..count {
        if at + 24 > image.len() {
            break;
        }
        let (table, entries) = (word(at), half(at + 8));
        if table + entries * 8 <= image.len() {
            tables.push(table..table + entries * 8);
        }
        at += (24 + (half(at + 16) & 0xffff) + half(at + 20)).next_multiple_of(8);
    }
    tables
}

impl Storage for Broken {
    forward_storage!(disk: name, capabilities, size, free_space, discard, block_status, prefetch);

    async fn last_change(&self) -> Result<Option<Duration>> {
        self.disk.last_change().await
    }

    async fn read(&self, offset: u64, mut into: IoVector) -> Result<()> {
        let mut buffer = Buffer::new(into.len());
        self.disk.read(offset, buffer.lend()).await?;
        for &(start, ref bytes) in &*self.held.lock() {
            for (at, &byte) in (start..).zip(bytes) {
                if let Some(place) = at.checked_sub(offset)
                    && let Some(seen) = buffer.bytes_mut().get_mut(place as usize)
                {
                    *seen = byte;
                }
            }
        }
        into.copy_from(buffer.bytes());
        Ok(())
    }

    async fn write(&self, offset: u64, from: IoVector, durability: Durability) -> Result<()> {
        let range = ByteRange::between(offset, offset + from.len() as u64);
        if self.holds_back(offset) {
            let mut bytes = vec![0; from.len()];
            from.copy_to(&mut bytes);
            self.held.lock().push((offset, bytes));
            return Ok(());
        }
        if self.policy == Policy::BitsLost && self.is_image && self.part_at(offset) == Part::Bits {
            return Ok(());
        }
        self.let_go(Some(range)).await?;
        let durability = match self.policy {
            Policy::PlainFua => Durability::None,
            _ => durability,
        };
        self.disk.write(offset, from, durability).await?;
        if durability == Durability::None { Ok(()) } else { self.let_go(None).await }
    }

    async fn write_zeroes(&self, range: ByteRange, unmap: Unmap) -> Result<()> {
        self.let_go(None).await?;
        self.disk.write_zeroes(range, unmap).await
    }

    async fn prepare_zeroes(&self, range: ByteRange, held: IoVector) -> Result<()> {
        self.let_go(None).await?;
        let is_early = self.policy == Policy::PreparedEarly;
        self.skips_full_flush.store(is_early, Ordering::Relaxed);
        self.disk.prepare_zeroes(range, held).await
    }

    /// Faults of other implementations are easier to find where files grow by what is written.
    async fn extend_hint(&self, size: u64) {
        if self.policy == Policy::PreparedEarly {
            self.disk.extend_hint(size).await;
        }
    }

    async fn flush(&self, sync: SyncMode) -> Result<()> {
        let is_skipped =
            sync == SyncMode::Full && self.skips_full_flush.swap(false, Ordering::Relaxed);
        if self.policy == Policy::NoFlush || is_skipped {
            return Ok(());
        }
        self.disk.flush(sync).await?;
        self.let_go(None).await
    }

    async fn resize(&self, size: u64) -> Result<()> {
        let too_far = if self.policy == Policy::CutTooFar { 512 } else { 0 };
        self.disk.resize(size - too_far).await
    }
}
