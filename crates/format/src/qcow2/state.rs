//! What of the tables is in memory, and looking things up in it without waiting.
//!
//! Everything here runs under the image's one short lock. A step that finds something missing
//! answers what it is [`Blocked`] by, having changed nothing; whoever called it removes the obstacle
//! without the lock and tries again.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use blockhouse_core::sync::WaitGroup;
use blockhouse_core::{Error, ErrorKind};
use event_listener::EventListener;

use super::deferred_free::DeferredFrees;
use super::entry::{self, Entry, Reference};
use super::frozen::Frozen;
use super::geometry::Geometry;
use super::header::{Header, Incompatible};
use super::pending::Pending;
use super::room::{Need, Room};
use super::slice_cache::{SliceCache, SliceId, SliceKind};
use super::space::Space;

/// Why a step cannot be made now.
pub(crate) enum Blocked {
    /// A slice is not cached.
    Missing(SliceId),
    /// Somebody else is at it.
    Wait(EventListener),
    /// Too much is changed: a round has to write it first.
    Crowded,
    /// Room on the host for a table has to be got first.
    NoRoom(Need),
    /// For good.
    Failed(Error),
}

impl From<Error> for Blocked {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// Writes of the header, counted.
#[derive(Default)]
pub(crate) struct HeaderWrites {
    begun: u64,
    /// The newest of them that ended well.
    pub(crate) ended: u64,
    durable: u64,
}

impl HeaderWrites {
    /// A write begins; the answer is its number.
    pub(crate) fn begin(&mut self) -> u64 {
        self.begun += 1;
        self.begun
    }

    pub(crate) fn ended(&mut self, number: u64) {
        self.ended = self.ended.max(number);
    }

    /// A flush has covered those that had ended up to `number`.
    pub(crate) fn covered(&mut self, number: u64) {
        self.durable = self.durable.max(number);
    }

    /// Whether one was begun whose end is not durable.
    pub(crate) fn is_unsure(&self) -> bool {
        self.durable < self.begun
    }
}

pub(crate) type Step<T> = Result<T, Blocked>;

/// The tables in memory.
pub(crate) struct State {
    pub(crate) geometry: Geometry,
    /// The block of the data file, in bytes: what writes there are aligned to.
    pub(crate) data_block: u64,
    /// Writes to the data file of more than the guest gave.
    pub(crate) fills: WaitGroup,
    pub(crate) name: Arc<str>,
    /// As it should be. What of it is on disk is `disk_header`.
    pub(crate) header: Header,
    pub(crate) disk_header: Header,
    pub(crate) header_writes: HeaderWrites,
    /// The active L1 table, as on disk.
    pub(crate) l1: Vec<u64>,
    /// The refcount table, as on disk.
    pub(crate) refcount_table: Vec<u64>,
    pub(crate) cache: SliceCache,
    pub(crate) space: Space,
    pub(crate) room: Room,
    pub(crate) pending: Pending,
    /// L2 tables and refcount blocks that nothing on disk refers to yet, by offset.
    pub(crate) new_tables: HashMap<u64, SliceKind>,
    /// Entries that differ from the disk.
    pub(crate) l1_changed: BTreeSet<usize>,
    pub(crate) refcount_table_changed: BTreeSet<usize>,
    /// What left the tables in memory and is to be counted down.
    pub(crate) frees: DeferredFrees,
    /// Where compressed data goes next: behind the last one. Its cluster is in use.
    pub(crate) open_end: Option<u64>,
    /// Clusters of the active tables, for not giving them to anybody by mistake.
    pub(crate) metadata: HashSet<u64>,
    /// Counts changes that a flush makes durable; and those that are.
    pub(crate) version: u64,
    pub(crate) durable_version: u64,
    pub(crate) round_is_running: bool,
    /// Where the bytes of the backing file end: 0 for none, the largest number while that is not known.
    pub(crate) backing_end: u64,
    /// While the image is changed as a whole.
    pub(crate) frozen: Option<Frozen>,
}

impl State {
    /// Other tables are in force from now on, all of them on disk. `clusters` is the length of the file.
    pub(crate) fn replace_tables(
        &mut self,
        header: Header,
        l1: Vec<u64>,
        refcount_table: Vec<u64>,
        clusters: u64,
    ) -> Result<(), Error> {
        self.disk_header = header.clone();
        self.header = header;
        self.l1 = l1;
        self.refcount_table = refcount_table;
        self.cache = self.cache.emptied();
        self.space = Space::new(clusters);
        self.space.note_change();
        self.open_end = None;
        self.new_tables.clear();
        self.l1_changed.clear();
        self.refcount_table_changed.clear();
        self.metadata.clear();
        self.note_metadata()
    }

    pub(crate) fn corrupt(&self, what: impl Into<String>, offset: u64) -> Error {
        Error::new(ErrorKind::Corrupt, what.into())
            .on(&self.name)
            .at(offset)
            .hint("check the image before using it")
    }

    /// Whether the header on disk has this bit, durably.
    pub(crate) fn is_marked_durably(&self, bit: Incompatible) -> bool {
        self.disk_header.incompatible.contains(bit) && !self.header_writes.is_unsure()
    }

    /// The L2 table that the L1 entry refers to.
    pub(crate) fn l2_table(&self, l1_index: usize) -> Result<Option<Reference>, Error> {
        let word = self.l1.get(l1_index).copied().unwrap_or(0);
        entry::l1_reference(word, self.geometry).map_err(|violation| {
            let what = format!("entry {l1_index} of the L1 table {violation}");
            self.corrupt(what, self.header.l1_offset + l1_index as u64 * 8)
        })
    }

    /// The slice that holds the L2 entry of a guest cluster, if there is an L2 table.
    pub(crate) fn l2_slice(&self, cluster: u64) -> Result<Option<SliceId>, Error> {
        let place = self.geometry.l2_place(cluster);
        let table = self.l2_table(place.l1_index)?;
        if let Some(table) = table
            && self.geometry.cluster_of(table.offset) >= self.space.end()
        {
            return Err(self.corrupt("an L2 table lies behind the end of the file", table.offset));
        }
        Ok(table.map(|table| SliceId {
            offset: table.offset + place.slice_offset,
            kind: SliceKind::L2,
        }))
    }

    /// The `index`-th entry of a slice of an L2 table.
    pub(crate) fn entry(&mut self, slice: SliceId, index: usize) -> Step<Entry> {
        let geometry = self.geometry;
        self.ensure(slice)?;
        let cached = self.cache.get(slice.offset).expect("a slice that was ensured");
        Entry::read(&cached.bytes, index, geometry).map_err(|violation| {
            let offset = slice.offset + index as u64 * geometry.l2_entry_size();
            Blocked::Failed(self.corrupt(format!("an L2 entry {violation}"), offset))
        })
    }

    /// The refcount block that an entry of the refcount table refers to.
    pub(crate) fn refcount_block(&self, index: u64) -> Result<Option<u64>, Error> {
        let word = self.refcount_table.get(index as usize).copied().unwrap_or(0);
        entry::refcount_block(word, self.geometry).map_err(|violation| {
            let what = format!("entry {index} of the refcount table {violation}");
            self.corrupt(what, self.header.refcount_table_offset + index * 8)
        })
    }
}
