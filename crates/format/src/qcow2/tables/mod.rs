//! The metadata of an open image: its state in memory, and the part of this state that is on disk.
//!
//! The life cycle of a change:
//!
//! 1. A step looks entries up. A slice that is not cached blocks the step (`step`), and is read
//!    once.
//! 2. The step changes entries in memory. The changed entries are *dirty*.
//! 3. A writeback copies everything that is dirty at one moment (`dirty`). The copy is consistent,
//!    because an L2 entry changes only after the refcounts that it depends on.
//! 4. Once the writeback is durable, the copied entries are clean, unless they changed again. If
//!    the writeback fails, the copied entries are dirty again.
//!
//! Locking: the image has one lock, which protects [`Tables`], and nothing here waits. Writes go
//! through [`writer::TableWriter`], without the lock. The overwrite of a mapped cluster, and every
//! read, needs only this state.

mod change;
mod change_watch;
mod dirty;
mod file_end;
mod freeze;
mod headers;
mod lookup;
mod redo;
mod refcounts;
mod slice_cache;
mod step;
mod top_table;
mod writer;

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use blockhouse_core::{Error, ErrorKind};

use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::layout::header::Header;

pub(crate) use dirty::{WritebackBatch, WritebackReason, WritebackScope};
pub(crate) use file_end::FileEnd;
pub(crate) use freeze::{FreezeState, ThawEvent};
pub(crate) use headers::put_names;
pub(crate) use redo::{EntryRun, LatestChanges, REDO_LOG_WORDS, RedoChange, RedoLog, RedoRecord};
pub(crate) use refcounts::{LastCounted, Scan};
pub(crate) use slice_cache::{DataStability, Fetch, SliceId, SliceKind};
pub(crate) use step::{Blocked, ReserveRequest, Step};
pub(crate) use writer::TableWriter;

use change_watch::ChangeWatch;
use headers::Headers;
use slice_cache::SliceCache;
use top_table::TopTable;

/// The metadata of an open image.
pub(crate) struct Tables {
    geometry: Geometry,
    /// The image's name, for errors.
    name: Arc<str>,
    pub(crate) headers: Headers,
    l1: TopTable,
    refcount_table: TopTable,
    pub(crate) cache: SliceCache,
    /// L2 tables and refcount blocks that nothing on disk refers to yet, by offset.
    new_tables: HashMap<u64, SliceKind>,
    /// Clusters of the active tables. They are never allocated again, even if their refcounts are
    /// wrong.
    pub(crate) active: HashSet<u64>,
    pub(crate) file: FileEnd,
    /// Whether any refcount was changed since the image was opened.
    has_counted: bool,
    /// The number of the last change that a flush must make durable (`version`), and of the last
    /// change that is durable (`durable_version`).
    version: u64,
    durable_version: u64,
    /// The log of changed entries. If this process is killed, another process replays the log.
    pub(crate) redo: RedoLog,
    pub(crate) freeze: FreezeState,
    /// The slices that change while the tables are being copied.
    pub(crate) watch: ChangeWatch,
}

/// The active tables as they are on disk.
pub(crate) struct ActiveTables {
    pub(crate) header: Header,
    pub(crate) l1: Vec<u64>,
    pub(crate) refcount_table: Vec<u64>,
    /// The length of the file in clusters.
    pub(crate) clusters: u64,
}

impl Tables {
    /// The tables of an image that is being opened, with a cache of this many slices.
    pub(crate) fn new(name: &str, active: ActiveTables, slices: usize) -> Self {
        let ActiveTables { header, l1, refcount_table, clusters } = active;
        Self {
            geometry: header.geometry,
            name: name.into(),
            headers: Headers::new(header),
            l1: TopTable::new(l1),
            refcount_table: TopTable::trimmed(refcount_table),
            cache: SliceCache::new(slices),
            new_tables: HashMap::new(),
            active: HashSet::new(),
            file: FileEnd::new(clusters),
            has_counted: false,
            version: 0,
            durable_version: 0,
            redo: RedoLog::default(),
            freeze: FreezeState::Active,
            watch: ChangeWatch::default(),
        }
    }

    /// Replaces the active tables by tables that are entirely on disk.
    pub(crate) fn replace(&mut self, active: ActiveTables) -> Result<(), Error> {
        self.file = self.file.with_clusters(active.clusters);
        self.switch(active.header, active.l1, active.refcount_table)
    }

    /// As [`replace`](Self::replace), but the current refcounts count the clusters of the new
    /// tables. So the end of the file remains the same.
    pub(crate) fn switch(
        &mut self,
        header: Header,
        l1: Vec<u64>,
        refcount_table: Vec<u64>,
    ) -> Result<(), Error> {
        self.watch.end();
        self.headers.replace(header);
        self.l1 = TopTable::new(l1);
        self.refcount_table = TopTable::trimmed(refcount_table);
        self.cache = self.cache.emptied();
        self.new_tables.clear();
        self.has_counted = true;
        self.active.clear();
        self.note_active()
    }

    pub(crate) fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The image's name, for errors.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The header that the next writeback must leave on disk.
    pub(crate) fn header(&self) -> &Header {
        self.headers.wanted()
    }

    /// The active L1 table.
    pub(crate) fn l1(&self) -> &[u64] {
        self.l1.words()
    }

    pub(crate) fn refcount_table(&self) -> &TopTable {
        &self.refcount_table
    }

    /// The number of the last change. A writeback that begins now makes this change durable.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Whether all changes up to this one are durable.
    pub(crate) fn is_durable(&self, version: u64) -> bool {
        self.durable_version >= version
    }

    /// Whether any refcount was changed since the image was opened.
    pub(crate) fn has_counted(&self) -> bool {
        self.has_counted
    }

    /// Returns `Blocked` if the limit of dirty slices is reached, so that a writeback runs first.
    pub(crate) fn check_dirty_limit(&self) -> Step<()> {
        if self.cache.is_over_dirty_limit() { Err(Blocked::DirtyLimit) } else { Ok(()) }
    }

    /// The error of a structure that contradicts the format.
    pub(crate) fn corrupt(&self, what: impl Into<String>, offset: u64) -> Error {
        Error::new(ErrorKind::Corrupt, what.into())
            .on(&self.name)
            .at(offset)
            .hint("check the image before using it")
    }

    /// Fails for a cluster past the largest offset.
    pub(crate) fn check_within_limits(&self, cluster: u64) -> Result<(), Error> {
        if cluster < crate::qcow2::layout::limits::MAX_OFFSET >> self.geometry.cluster_bits {
            return Ok(());
        }
        let what = "the image is as large as its format allows";
        Err(Error::new(ErrorKind::NoSpace, what).on(&self.name))
    }

    /// Records the clusters of the active tables.
    ///
    /// # Errors
    /// `Corrupt` if two tables are at one offset, or a table is past the end of the file.
    pub(crate) fn note_active(&mut self) -> Result<(), Error> {
        let geometry = self.geometry;
        let header = self.headers.wanted();
        let table = geometry.cluster_of(header.refcount_table_offset);
        let table_clusters = u64::from(header.refcount_table_clusters);
        let l1 = geometry.cluster_of(header.l1_offset);
        self.note_table("the header", 0..1)?;
        self.note_table("the refcount table", table..table + table_clusters)?;
        if self.l1.len() > 0 {
            let l1_clusters = geometry.clusters_for(self.l1.len() as u64 * 8);
            self.note_table("the L1 table", l1..l1 + l1_clusters)?;
        }
        for index in 0..self.refcount_table.len() as u64 {
            if let Some(block) = self.refcount_block(index)? {
                let cluster = geometry.cluster_of(block);
                self.note_table("a refcount block", cluster..cluster + 1)?;
            }
        }
        // Several L1 entries may refer to one table if none of them has the copied flag, because
        // such a table is not changed in place.
        let mut shared = HashSet::new();
        for index in 0..self.l1.len() {
            if let Some(table) = self.l2_table(index)? {
                let cluster = geometry.cluster_of(table.offset);
                if table.is_copied() || shared.insert(cluster) {
                    self.note_table("an L2 table", cluster..cluster + 1)?;
                }
            }
        }
        Ok(())
    }

    fn note_table(&mut self, what: &str, clusters: Range<u64>) -> Result<(), Error> {
        for cluster in clusters {
            let offset = self.geometry.offset_of(cluster);
            if !self.active.insert(cluster) {
                return Err(self.corrupt(format!("{what} shares its place"), offset));
            }
            if cluster >= self.file.bound() {
                let what = format!("{what} lies beyond the end of the file");
                return Err(self.corrupt(what, offset));
            }
        }
        Ok(())
    }
}
