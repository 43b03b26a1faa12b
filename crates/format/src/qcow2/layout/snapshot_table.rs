//! The snapshot table: the entries of an image's snapshots.
//!
//! An entry is 40 bytes, then extra data, id and name, padded to a multiple of 8 (QEMU's
//! `docs/interop/qcow2.txt`, "Snapshots"). Unknown extra data is kept as it is. Every value is
//! checked against its bounds before use.

use std::time::Duration;

use blockhouse_core::{Error, ErrorKind, Result, Storage};

use super::header::Header;
use super::limits::{MAX_L1_BYTES, MAX_SNAPSHOT_EXTRA, MAX_SNAPSHOT_TABLE, MAX_SNAPSHOTS};
use super::words::{self, be32, be64};
use super::{names, table_io};

/// The length of an entry without extra data, id and name.
pub(crate) const FIXED: usize = 40;
/// Extra data of new entries: size of the VM state, size of the disk, instruction count.
const EXTRA: usize = 24;
const NO_INSTRUCTION_COUNT: u64 = u64::MAX;
/// Bytes that are read at a time.
const CHUNK: usize = 64 << 10;

/// A snapshot, as shown to users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The id, unique in the image; a decimal number if QEMU or this program made the snapshot.
    pub id: String,
    /// The name that the user chose.
    pub name: String,
    /// Time at which the snapshot was taken, since 1970-01-01 UTC.
    pub created: Duration,
    /// Time that the virtual machine had run.
    pub vm_clock: Duration,
    /// Bytes of the machine's state; 0 for a snapshot of the disk alone.
    pub vm_state_size: u64,
    /// Bytes of the guest's disk when the snapshot was taken.
    pub disk_size: u64,
    /// Number of instructions that the machine had executed, if the machine counted them.
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
    /// All extra data, including unknown parts.
    extra: Vec<u8>,
}

/// The content of a new entry.
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
            extra: words::bytes_of(&extra)[..EXTRA].to_vec(),
        }
    }

    fn extra_word(&self, index: usize) -> Option<u64> {
        (self.extra.len() >= (index + 1) * 8).then(|| be64(&self.extra, index * 8))
    }

    pub(crate) fn vm_state_size(&self) -> u64 {
        self.extra_word(0).unwrap_or(u64::from(self.short_vm_state_size))
    }

    /// Size of the guest's disk, if the entry states it (required in version 3): a multiple of 512.
    pub(crate) fn disk_size(&self) -> Option<u64> {
        self.extra_word(1).map(|size| size & !511)
    }

    pub(crate) fn described(&self, image_size: u64) -> Snapshot {
        Snapshot {
            id: names::listed(&self.id),
            name: names::listed(&self.name),
            created: self.created,
            vm_clock: self.vm_clock,
            vm_state_size: self.vm_state_size(),
            disk_size: self.disk_size().unwrap_or(image_size),
            instruction_count: self.extra_word(2).filter(|&count| count != NO_INSTRUCTION_COUNT),
        }
    }

    /// Whether the entry has neither id nor name. The padding after the last entry reads as such an
    /// entry.
    pub(crate) fn is_empty(&self) -> bool {
        self.id.is_empty() && self.name.is_empty()
    }

    /// Name and id for messages.
    pub(crate) fn called(&self) -> String {
        let [name, id] = [&self.name, &self.id].map(|bytes| names::listed(bytes));
        format!("the snapshot '{}' (id {})", name.escape_default(), id.escape_default())
    }

    /// Whether the entry lacks data that images of this version require.
    pub(crate) fn is_incomplete(&self, version: u32) -> bool {
        version >= 3 && self.disk_size().is_none()
    }

    /// Adds the data that an incomplete entry lacks. The disk of the snapshot is assumed to have
    /// `disk_size` bytes.
    pub(crate) fn complete(&mut self, disk_size: u64) {
        self.extra = words::bytes_of(&[self.vm_state_size(), disk_size]);
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

    /// Decodes an entry: `bytes` has the whole entry, with `extra` bytes of extra data.
    fn take(bytes: &[u8], extra: usize) -> Self {
        let (id, name, _) = lengths(bytes);
        let (extra_end, id_end) = (FIXED + extra, FIXED + extra + id);
        Self {
            l1_offset: be64(bytes, 0),
            l1_entries: be32(bytes, 8),
            id: bytes[extra_end..id_end].to_vec(),
            name: bytes[id_end..id_end + name].to_vec(),
            // A nanoseconds field of a second or more is accepted.
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
    entries.len() <= MAX_SNAPSHOTS as usize && to_bytes(entries).len() <= MAX_SNAPSHOT_TABLE
}

/// The table's entries, and the table's length in bytes.
pub(crate) struct Table {
    pub(crate) entries: Vec<SnapshotEntry>,
    pub(crate) length: u64,
}

/// Reads the table to which the header refers.
///
/// # Errors
/// `Corrupt` if an entry is out of bounds; or errors of the storage.
pub(crate) async fn read<S: Storage>(storage: &S, header: &Header) -> Result<Table> {
    let refuse = |what: String, offset: u64| {
        Error::new(ErrorKind::Corrupt, what)
            .on(storage.name())
            .at(offset)
            .hint("repair the image (check --repair all removes what cannot be used)")
    };
    if let Some(fault) = &header.snapshot_fault {
        return Err(refuse(fault.what.clone(), fault.offset));
    }
    let mut reader = TableReader::new(storage, header.snapshots_offset);
    let mut entries = Vec::new();
    for _ in 0..header.snapshots {
        let at = header.snapshots_offset + reader.position();
        let Some(entry) = reader.next().await? else {
            return Err(refuse("the snapshot table ends before its last entry".into(), at));
        };
        let Some(entry) = entry.filter(|_| !reader.was_guessed()) else {
            return Err(refuse("an entry of the snapshot table is too long".into(), at));
        };
        let is_aligned = header.geometry.is_cluster_aligned(entry.l1_offset);
        if u64::from(entry.l1_entries) * 8 > MAX_L1_BYTES || !is_aligned {
            let (entries, offset) = (entry.l1_entries, entry.l1_offset);
            let what = format!("a snapshot's L1 table of {entries} entries at offset {offset}");
            return Err(refuse(what, at));
        }
        entries.push(entry);
    }
    Ok(Table { entries, length: reader.position() })
}

/// Reads a snapshot table entry by entry, even if entries are invalid.
pub(crate) struct TableReader<'a, S> {
    storage: &'a S,
    start: u64,
    /// The bytes from `start` on that were read so far.
    bytes: Vec<u8>,
    /// Offset of the next entry from `start`.
    at: usize,
    was_guessed: bool,
}

impl<'a, S: Storage> TableReader<'a, S> {
    pub(crate) fn new(storage: &'a S, start: u64) -> Self {
        Self { storage, start, bytes: Vec::new(), at: 0, was_guessed: false }
    }

    /// Bytes of the entries that were read so far.
    pub(crate) fn position(&self) -> u64 {
        self.at as u64
    }

    /// Whether the last entry states an impossible length of its extra data. For such an entry, a
    /// length that occurs in practice is assumed.
    pub(crate) fn was_guessed(&self) -> bool {
        self.was_guessed
    }

    /// The next entry: `None` if the file ends before the entry's end, `Some(None)` if the entry is
    /// too long. No further entry can be found after an entry that is too long.
    ///
    /// # Errors
    /// Errors of the storage only.
    pub(crate) async fn next(&mut self) -> Result<Option<Option<SnapshotEntry>>> {
        if !self.holds(FIXED).await? {
            return Ok(None);
        }
        let (id, name, mut extra) = lengths(&self.bytes[self.at..]);
        self.was_guessed = extra > MAX_SNAPSHOT_EXTRA;
        if self.was_guessed {
            let Some(guessed) = self.guess_extra(id).await? else { return Ok(Some(None)) };
            extra = guessed;
        }
        let length = FIXED + extra + id + name;
        if self.at + length > MAX_SNAPSHOT_TABLE {
            return Ok(Some(None));
        }
        if !self.holds(length).await? {
            return Ok(None);
        }
        let entry = SnapshotEntry::take(&self.bytes[self.at..self.at + length], extra);
        self.at = (self.at + length).next_multiple_of(8);
        Ok(Some(Some(entry)))
    }

    /// The length of extra data after which a decimal id follows. QEMU and this program write
    /// decimal ids.
    async fn guess_extra(&mut self, id: usize) -> Result<Option<usize>> {
        for extra in [EXTRA, 16, 0] {
            if !self.holds(FIXED + extra + id).await? {
                continue;
            }
            let start = self.at + FIXED + extra;
            let found = &self.bytes[start..start + id];
            if !found.is_empty() && found.iter().all(u8::is_ascii_digit) {
                return Ok(Some(extra));
            }
        }
        Ok(None)
    }

    /// Reads `length` bytes of the next entry into memory. Returns whether the file has them.
    async fn holds(&mut self, length: usize) -> Result<bool> {
        let end = self.at + length;
        if self.start.saturating_add(end as u64) > self.storage.size() {
            return Ok(false);
        }
        while self.bytes.len() < end {
            let at = self.start + self.bytes.len() as u64;
            self.bytes.extend(table_io::read(self.storage, at, CHUNK).await?);
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::super::limits::MAX_SNAPSHOT_NAME;
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
        assert_eq!(SnapshotEntry::take(&bytes, EXTRA + 13), one);
        let second = (FIXED + EXTRA + 13 + 1 + 17_usize).next_multiple_of(8);
        assert_eq!(SnapshotEntry::take(&bytes[second..], EXTRA), entry(1 << 40));
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
        let many = vec![entry(0); MAX_SNAPSHOTS as usize];
        assert!(fits(&many));
        assert!(!fits(&[&many[..], &many[..1]].concat()), "one more");
        let mut large = entry(0);
        large.extra.resize(MAX_SNAPSHOT_EXTRA, 0);
        large.name = vec![b'x'; MAX_SNAPSHOT_NAME];
        let room = MAX_SNAPSHOT_TABLE / to_bytes(std::slice::from_ref(&large)).len();
        assert!(room < MAX_SNAPSHOTS as usize);
        assert!(fits(&vec![large.clone(); room]));
        assert!(!fits(&vec![large; room + 1]), "more bytes");
    }
}
