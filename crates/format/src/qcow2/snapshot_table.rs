//! The snapshot table: what an image keeps of its snapshots, entry by entry.
//!
//! An entry is 40 bytes, then extra data, id and name, padded to a multiple of 8 (QEMU's
//! `docs/interop/qcow2.txt`, "Snapshots"). Extra data that is not understood is kept as it is.
//! Nothing is believed before it is inside its bounds.

use std::time::Duration;

use blockhouse_core::{Error, ErrorKind, Result, Storage};

use super::entry::{be32, be64};
use super::header::Header;
use super::table_io;

/// What an entry is made of besides extra data, id and name.
const FIXED: usize = 40;
/// Limits of what is read and written, those that QEMU has.
pub(crate) const MOST_SNAPSHOTS: usize = 65_536;
const MOST_EXTRA: usize = 1024;
const MOST_TABLE: usize = 64 << 20;
const MOST_L1_ENTRIES: u32 = (32 << 20) / 8;
/// Longer names are cut off where QEMU lists them.
pub(crate) const MOST_NAME: usize = 255;
/// Extra data of new entries: size of the VM state, size of the disk, instruction count.
const EXTRA: usize = 24;
const NO_INSTRUCTION_COUNT: u64 = u64::MAX;
/// How much is read at a time.
const CHUNK: usize = 64 << 10;

/// A snapshot, as told to users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Unique in the image; a number in decimal where QEMU or we made it.
    pub id: String,
    /// The name that the user gave it.
    pub name: String,
    /// When it was taken, since 1970-01-01 UTC.
    pub created: Duration,
    /// How long the machine had run.
    pub vm_clock: Duration,
    /// Bytes of the machine's state; 0 for a snapshot of the disk alone.
    pub vm_state_size: u64,
    /// Bytes of the guest's disk when it was taken.
    pub disk_size: u64,
    /// How many instructions the machine had executed, where it counted them.
    pub instruction_count: Option<u64>,
}

/// An entry of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SnapshotEntry {
    pub(crate) l1_offset: u64,
    pub(crate) l1_entries: u32,
    pub(crate) id: Vec<u8>,
    pub(crate) name: Vec<u8>,
    pub(crate) created: Duration,
    pub(crate) vm_clock: Duration,
    short_vm_state_size: u32,
    /// Whole, also what is not understood.
    extra: Vec<u8>,
}

/// What a new entry says.
pub(crate) struct EntryFacts<'a> {
    pub(crate) name: &'a str,
    pub(crate) created: Duration,
    pub(crate) vm_clock: Duration,
    pub(crate) vm_state_size: u64,
    pub(crate) disk_size: u64,
}

impl SnapshotEntry {
    pub(crate) fn new(id: Vec<u8>, l1_offset: u64, l1_entries: u32, facts: &EntryFacts) -> Self {
        let extra = [facts.vm_state_size, facts.disk_size, NO_INSTRUCTION_COUNT];
        Self {
            l1_offset,
            l1_entries,
            id,
            name: facts.name.as_bytes().to_vec(),
            created: facts.created,
            vm_clock: facts.vm_clock,
            short_vm_state_size: u32::try_from(facts.vm_state_size).unwrap_or(0),
            extra: table_io::bytes_of(&extra)[..EXTRA].to_vec(),
        }
    }

    fn extra_word(&self, index: usize) -> Option<u64> {
        (self.extra.len() >= (index + 1) * 8).then(|| be64(&self.extra, index * 8))
    }

    pub(crate) fn vm_state_size(&self) -> u64 {
        self.extra_word(0).unwrap_or(u64::from(self.short_vm_state_size))
    }

    /// Of the guest's disk, if the entry says it (always in version 3): a multiple of 512.
    pub(crate) fn disk_size(&self) -> Option<u64> {
        self.extra_word(1).map(|size| size & !511)
    }

    pub(crate) fn described(&self, image_size: u64) -> Snapshot {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Snapshot {
            id: text(&self.id),
            name: text(&self.name),
            created: self.created,
            vm_clock: self.vm_clock,
            vm_state_size: self.vm_state_size(),
            disk_size: self.disk_size().unwrap_or(image_size),
            instruction_count: self.extra_word(2).filter(|&count| count != NO_INSTRUCTION_COUNT),
        }
    }

    fn put(&self, bytes: &mut Vec<u8>) {
        bytes.extend(self.l1_offset.to_be_bytes());
        bytes.extend(self.l1_entries.to_be_bytes());
        bytes.extend((self.id.len() as u16).to_be_bytes());
        bytes.extend((self.name.len() as u16).to_be_bytes());
        bytes.extend((self.created.as_secs() as u32).to_be_bytes());
        bytes.extend(self.created.subsec_nanos().to_be_bytes());
        bytes.extend((self.vm_clock.as_nanos() as u64).to_be_bytes());
        bytes.extend(self.short_vm_state_size.to_be_bytes());
        bytes.extend((self.extra.len() as u32).to_be_bytes());
        bytes.extend(&self.extra);
        bytes.extend(&self.id);
        bytes.extend(&self.name);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    }

    /// `bytes` holds the whole entry.
    fn take(bytes: &[u8]) -> Self {
        let (id, name, extra) = lengths(bytes);
        let (extra_end, id_end) = (FIXED + extra, FIXED + extra + id);
        Self {
            l1_offset: be64(bytes, 0),
            l1_entries: be32(bytes, 8),
            id: bytes[extra_end..id_end].to_vec(),
            name: bytes[id_end..id_end + name].to_vec(),
            // Nanoseconds of a second and more are no reason to refuse an image.
            created: Duration::from_secs(be32(bytes, 16).into())
                + Duration::from_nanos(be32(bytes, 20).into()),
            vm_clock: Duration::from_nanos(be64(bytes, 24)),
            short_vm_state_size: be32(bytes, 32),
            extra: bytes[FIXED..extra_end].to_vec(),
        }
    }
}

/// The lengths of id, name and extra data.
fn lengths(fixed: &[u8]) -> (usize, usize, usize) {
    let names = be32(fixed, 12);
    ((names >> 16) as usize, (names & 0xffff) as usize, be32(fixed, 36) as usize)
}

/// The table's bytes.
pub(crate) fn to_bytes(entries: &[SnapshotEntry]) -> Vec<u8> {
    let mut bytes = Vec::new();
    entries.iter().for_each(|entry| entry.put(&mut bytes));
    bytes
}

/// Whether a table of these entries is within the limits.
pub(crate) fn fits(entries: &[SnapshotEntry]) -> bool {
    entries.len() <= MOST_SNAPSHOTS && to_bytes(entries).len() <= MOST_TABLE
}

/// The table, and how many bytes it takes.
pub(crate) struct Table {
    pub(crate) entries: Vec<SnapshotEntry>,
    pub(crate) length: u64,
}

/// Reads the table that the header names.
///
/// # Errors
/// `Corrupt` where an entry is out of its bounds.
pub(crate) async fn read<S: Storage>(storage: &S, header: &Header) -> Result<Table> {
    let mut reader = Reader { storage, start: header.snapshots_offset, bytes: Vec::new() };
    let mut entries = Vec::new();
    let mut at = 0;
    for _ in 0..header.snapshots {
        reader.need(at + FIXED).await?;
        let (id, name, extra) = lengths(&reader.bytes[at..]);
        let refuse = |what: String| {
            Error::new(ErrorKind::Corrupt, what)
                .on(storage.name())
                .at(header.snapshots_offset + at as u64)
                .hint("check the image before using it")
        };
        if extra > MOST_EXTRA {
            return Err(refuse(format!("a snapshot with {extra} bytes of extra data")));
        }
        let length = FIXED + extra + id + name;
        reader.need(at + length).await?;
        let entry = SnapshotEntry::take(&reader.bytes[at..at + length]);
        let is_aligned = header.geometry.is_cluster_aligned(entry.l1_offset);
        if entry.l1_entries > MOST_L1_ENTRIES || !is_aligned {
            let (entries, offset) = (entry.l1_entries, entry.l1_offset);
            let what = format!("a snapshot's L1 table of {entries} entries at offset {offset}");
            return Err(refuse(what));
        }
        entries.push(entry);
        at = (at + length).next_multiple_of(8);
    }
    Ok(Table { entries, length: at as u64 })
}

/// Bytes from `start` on, as far as they were needed.
struct Reader<'a, S> {
    storage: &'a S,
    start: u64,
    bytes: Vec<u8>,
}

impl<S: Storage> Reader<'_, S> {
    async fn need(&mut self, length: usize) -> Result<()> {
        while self.bytes.len() < length {
            if self.bytes.len() >= MOST_TABLE {
                let what = "the snapshot table is longer than 64 MiB";
                return Err(Error::new(ErrorKind::Corrupt, what)
                    .on(self.storage.name())
                    .at(self.start));
            }
            let at = self.start + self.bytes.len() as u64;
            self.bytes.extend(table_io::read(self.storage, at, CHUNK).await?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(vm_state_size: u64) -> SnapshotEntry {
        let facts = EntryFacts {
            name: "before the update",
            created: Duration::new(1_700_000_000, 5),
            vm_clock: Duration::from_millis(1234),
            vm_state_size,
            disk_size: 1 << 30,
        };
        SnapshotEntry::new(b"7".to_vec(), 9 << 16, 3, &facts)
    }

    #[test]
    fn an_entry_comes_back_as_it_was_stored_with_what_is_not_understood() {
        let mut one = entry(77);
        one.extra.extend([9; 13]);
        let bytes = to_bytes(&[one.clone(), entry(1 << 40)]);
        assert_eq!(bytes.len() % 8, 0);
        assert_eq!(SnapshotEntry::take(&bytes), one);
        let second = (FIXED + EXTRA + 13 + 1 + 17_usize).next_multiple_of(8);
        assert_eq!(SnapshotEntry::take(&bytes[second..]), entry(1 << 40));
    }

    #[test]
    fn a_large_state_is_told_by_the_extra_data_alone() {
        let large = entry(1 << 40);
        assert_eq!((large.short_vm_state_size, large.vm_state_size()), (0, 1 << 40));
        let mut short = entry(77);
        short.extra.clear();
        assert_eq!((short.vm_state_size(), short.disk_size()), (77, None));
        assert_eq!(short.described(4096).disk_size, 4096);
        assert_eq!(short.described(4096).instruction_count, None);
    }

    #[test]
    fn a_table_has_65536_snapshots_and_64_mib_at_most() {
        let many = vec![entry(0); MOST_SNAPSHOTS];
        assert!(fits(&many));
        assert!(!fits(&[&many[..], &many[..1]].concat()), "one more");
        let mut large = entry(0);
        large.extra.resize(MOST_EXTRA, 0);
        large.name = vec![b'x'; MOST_NAME];
        let room = MOST_TABLE / to_bytes(std::slice::from_ref(&large)).len();
        assert!(room < MOST_SNAPSHOTS);
        assert!(fits(&vec![large.clone(); room]));
        assert!(!fits(&vec![large; room + 1]), "more bytes");
    }
}
