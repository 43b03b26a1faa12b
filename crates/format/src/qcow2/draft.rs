//! A change of an image as a whole: which snapshots there are, and which tables are the active ones.
//!
//! A draft begins with an image whose tables are all on disk and stand still. New tables go to free
//! places beside those in force, refcounts too (see [`super::ledger`]). When all of them are durable, one
//! write of the header's first sector puts the new tables in force. So a crash finds the image as it was,
//! or as it shall be, and neither has a leak; an error before that write changes nothing.

use std::mem;
use std::ops::Range;

use blockhouse_core::{Durability, Error, ErrorKind, Result, Storage, SyncMode};
use futures_util::stream::{self, StreamExt};

use super::entry::{self, Entry, Ownership, Reference, l1_word};
use super::frozen::{Frozen, Thawed};
use super::geometry::Geometry;
use super::header::Header;
use super::ledger::{Ledger, Settled};
use super::round::Piece;
use super::snapshot_table::{self, SnapshotEntry, Table};
use super::state::{Blocked, State, Step};
use super::{Discard, Qcow2, table_io};

/// How many L2 tables are read, and pieces written, together.
const TOGETHER: usize = 16;

/// Whether references come or go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counting {
    Add,
    Remove,
}

/// Who refers to the active L2 tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sharers {
    /// The active L1 table alone speaks of them here.
    Active,
    /// So does a snapshot that is taken of it.
    ActiveAndSnapshot,
}

/// See the module's page.
pub(super) struct Draft<'a, S: Storage> {
    image: &'a Qcow2<S>,
    pub(super) geometry: Geometry,
    /// As it shall be; places of tables are filled in at the end.
    pub(super) header: Header,
    /// The active L1 table as it shall be.
    pub(super) l1: Vec<u64>,
    old_l1: Vec<u64>,
    pub(super) ledger: Ledger,
    pub(super) snapshots: Vec<SnapshotEntry>,
    old_snapshots_length: u64,
    waiting: Vec<Piece>,
}

/// Tables stand still while this is held.
struct Freeze<'a, S: Storage> {
    image: &'a Qcow2<S>,
    stage: Stage,
    rounds: Rounds,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Rounds {
    Running,
    Stopped,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The old tables are in force, on disk and in memory.
    Drafting,
    /// Which ones are in force is being decided.
    Switching,
}

impl<S: Storage> Drop for Freeze<'_, S> {
    fn drop(&mut self) {
        if self.stage == Stage::Switching {
            let what = "a change of the snapshots was given up at its last step";
            let error = Error::new(ErrorKind::Io, what).on(self.image.storage.name());
            // The first failure is the one that led here.
            let _ = self.image.failure.set(error);
        }
        let mut state = self.image.state.lock();
        // What was given up may still write to places that count as free.
        let draining = || Frozen::Draining(self.image.table_writes.clone());
        state.frozen = match self.image.failure.get() {
            // Nobody knows which tables are in force: nothing may be written over.
            Some(error) if self.stage == Stage::Switching => {
                Some(Frozen::Failed(error.duplicate().hint("open the image again")))
            }
            _ => self.image.table_writes.listen().map(|_| draining()),
        };
        if self.rounds == Rounds::Stopped {
            state.round_is_running = false;
        }
        drop(state);
        self.image.round_ended.notify(usize::MAX);
    }
}

impl State {
    /// Fails when nobody knows which tables are in force.
    pub(super) fn check_known_tables(&self) -> Result<()> {
        match &self.frozen {
            Some(Frozen::Failed(error)) => Err(error.duplicate()),
            _ => Ok(()),
        }
    }

    /// Waits while the tables stand still for a change of the whole image.
    pub(crate) fn check_thawed(&mut self) -> Step<()> {
        let waiting = match &self.frozen {
            None => None,
            Some(Frozen::Held(thawed)) => Some(thawed.listen()),
            Some(Frozen::Draining(writes)) => writes.listen(),
            Some(Frozen::Failed(error)) => return Err(Blocked::Failed(error.duplicate())),
        };
        match waiting {
            Some(event) => Err(Blocked::Wait(event)),
            None => {
                self.frozen = None;
                Ok(())
            }
        }
    }
}

impl<S: Storage> Qcow2<S> {
    /// Makes a change of the whole image, durably. No change of the guest's may be under way; those
    /// that begin meanwhile wait.
    pub(super) async fn redraft<T>(
        &self,
        change: impl AsyncFnOnce(&mut Draft<'_, S>) -> Result<T>,
    ) -> Result<T> {
        self.check_writable()?;
        self.check_sharing()?;
        self.check_intact()?;
        self.begin_changes().await?;
        let _alone = self.drafting.acquire().await;
        let mut freeze = self.freeze()?;
        let _no_frees = self.stop_rounds().await?;
        freeze.rounds = Rounds::Stopped;
        self.table_writes.wait().await;
        let mut draft = Draft::begin(self).await?;
        let outcome = change(&mut draft).await?;
        let freed = draft.finish(&mut freeze).await?;
        // Nobody gets a place that a read has looked up.
        self.reads.synchronize().await;
        self.give_to_host(&freed).await;
        Ok(outcome)
    }

    fn freeze(&self) -> Result<Freeze<'_, S>> {
        let mut state = self.state.lock();
        if !state.pending.is_idle() {
            let what = "snapshots cannot be changed while the guest's data is";
            return Err(Error::new(ErrorKind::InvalidInput, what).on(self.storage.name()));
        }
        state.frozen = Some(Frozen::Held(Thawed::default()));
        // The new tables may take what was got for others.
        state.give_up_room();
        let _ = state.room.take_at_end();
        Ok(Freeze { image: self, stage: Stage::Drafting, rounds: Rounds::Running })
    }

    async fn give_to_host(&self, freed: &[Range<u64>]) {
        if self.discard == Discard::Punch {
            for clusters in freed {
                self.punch(self.geometry.bytes_of(clusters.clone())).await;
            }
        }
    }
}

impl<'a, S: Storage> Draft<'a, S> {
    async fn begin(image: &'a Qcow2<S>) -> Result<Self> {
        let (header, l1, table, tables, haunted) = {
            let state = image.state.lock();
            let haunted = state.pending.haunted.clone();
            let (l1, table) = (state.l1.clone(), state.refcount_table.clone());
            (state.disk_header.clone(), l1, table, state.metadata.clone(), haunted)
        };
        let Table { entries, length } = snapshot_table::read(&image.storage, &header).await?;
        let ledger = Ledger::read(&image.storage, &header, &table, tables, haunted).await?;
        Ok(Self {
            image,
            geometry: header.geometry,
            header,
            old_l1: l1.clone(),
            l1,
            ledger,
            snapshots: entries,
            old_snapshots_length: length,
            waiting: Vec::new(),
        })
    }

    /// The L1 table of a snapshot.
    pub(super) async fn l1_of(&self, snapshot: &SnapshotEntry) -> Result<Vec<u64>> {
        let bytes = snapshot.l1_entries as usize * 8;
        let table = table_io::read(&self.image.storage, snapshot.l1_offset, bytes).await?;
        Ok(table_io::words_of(&table))
    }

    /// Counts every reference of the tree under an L1 table once more or once less.
    pub(super) async fn count_tree(&mut self, l1: &[u64], how: Counting) -> Result<()> {
        let tables: Vec<Reference> = references(self.image, l1)?.into_iter().flatten().collect();
        for some in tables.chunks(TOGETHER) {
            let contents = self.read_tables(some).await?;
            for (table, bytes) in some.iter().zip(contents) {
                self.count_one(self.geometry.cluster_of(table.offset), how)?;
                self.count_entries(&bytes, table.offset, how)?;
            }
        }
        Ok(())
    }

    /// Counts what the entries of an L2 table refer to. `offset` is for messages.
    pub(super) fn count_entries(&mut self, l2: &[u8], offset: u64, how: Counting) -> Result<()> {
        for index in 0..self.geometry.l2_entries() as usize {
            let clusters = match self.entry(l2, index, offset)? {
                Entry::Standard { place: None, .. } => continue,
                Entry::Standard { place: Some(place), .. } => {
                    let cluster = self.geometry.cluster_of(place.offset);
                    cluster..cluster + 1
                }
                Entry::Compressed(place) => place.host_clusters(self.geometry),
            };
            for cluster in clusters {
                self.count_one(cluster, how)?;
            }
        }
        Ok(())
    }

    fn count_one(&mut self, cluster: u64, how: Counting) -> Result<()> {
        match how {
            Counting::Add => self.ledger.add(cluster),
            Counting::Remove => self.ledger.remove(cluster),
        }
    }

    fn entry(&self, l2: &[u8], index: usize, offset: u64) -> Result<Entry> {
        Entry::read(l2, index, self.geometry).map_err(|violation| {
            let offset = offset + index as u64 * self.geometry.l2_entry_size();
            self.corrupt(format!("an L2 entry {violation}"), offset)
        })
    }

    fn corrupt(&self, what: String, offset: u64) -> Error {
        let error = Error::new(ErrorKind::Corrupt, what).on(self.image.storage.name()).at(offset);
        error.hint("check the image before using it")
    }

    async fn read_tables(&self, tables: &[Reference]) -> Result<Vec<Vec<u8>>> {
        let (storage, length) = (&self.image.storage, self.geometry.cluster_size());
        let read = async |table: &Reference| {
            if table.offset >= storage.size() {
                let what = "an L2 table lies beyond the end of the file".to_owned();
                return Err(self.corrupt(what, table.offset));
            }
            table_io::read(storage, table.offset, length as usize).await
        };
        let reads = stream::iter(tables.iter().map(read)).buffered(TOGETHER);
        reads.collect::<Vec<_>>().await.into_iter().collect()
    }

    /// Makes the active tables say "refcount is one" where the new refcounts do, and nowhere else. An
    /// L2 table that says otherwise gets a new place.
    pub(super) async fn mark_owners(&mut self, sharers: Sharers) -> Result<()> {
        let mut l1 = mem::take(&mut self.l1);
        let tables = references(self.image, &l1)?;
        let tables: Vec<(usize, Reference)> =
            (0..).zip(tables).filter_map(|(index, table)| Some((index, table?))).collect();
        for some in tables.chunks(TOGETHER) {
            let places: Vec<Reference> = some.iter().map(|&(_, table)| table).collect();
            let contents = self.read_tables(&places).await?;
            for (&(index, table), bytes) in some.iter().zip(contents) {
                let offset = self.mark_owners_of(table.offset, bytes, sharers).await?;
                l1[index] = l1_word(self.owned(offset));
            }
        }
        self.l1 = l1;
        Ok(())
    }

    /// Where the L2 table with the right marks is.
    async fn mark_owners_of(&mut self, old: u64, mut l2: Vec<u8>, sharers: Sharers) -> Result<u64> {
        let mut has_changed = false;
        for index in 0..self.geometry.l2_entries() as usize {
            if let Entry::Standard { place: Some(place), units } = self.entry(&l2, index, old)? {
                let marked = self.owned(place.offset);
                if marked != place {
                    has_changed = true;
                    Entry::Standard { place: Some(marked), units }.write(
                        &mut l2,
                        index,
                        self.geometry,
                    );
                }
            }
        }
        if !has_changed {
            return Ok(old);
        }
        let new = self.put(l2).await?;
        let cluster = self.geometry.cluster_of(old);
        self.ledger.remove(cluster)?;
        if sharers == Sharers::ActiveAndSnapshot {
            self.ledger.remove(cluster)?;
            self.ledger.add(self.geometry.cluster_of(new))?;
        }
        Ok(new)
    }

    /// The reference to a cluster, with the mark that its new refcount gives it.
    fn owned(&self, offset: u64) -> Reference {
        let ownership = match self.ledger.count(self.geometry.cluster_of(offset)) {
            1 => Ownership::Sole,
            _ => Ownership::Shared,
        };
        Reference { offset, ownership }
    }

    /// Stores bytes in free clusters; answers their offset.
    pub(super) async fn put(&mut self, bytes: Vec<u8>) -> Result<u64> {
        let first = self.ledger.take(self.geometry.clusters_for(bytes.len() as u64))?;
        let offset = self.geometry.offset_of(first);
        self.waiting.push(Piece { offset, bytes });
        if self.waiting.len() >= TOGETHER {
            let pieces = mem::take(&mut self.waiting);
            self.image.write_draft(&pieces).await?;
        }
        Ok(offset)
    }

    /// Bytes at `offset` are referred to no more.
    pub(super) fn release(&mut self, offset: u64, length: u64) -> Result<()> {
        let first = self.geometry.cluster_of(offset);
        self.ledger.remove_all(first..first + self.geometry.clusters_for(length))
    }

    /// Writes what is left, durably, and switches. Answers what is free now.
    async fn finish(mut self, freeze: &mut Freeze<'_, S>) -> Result<Vec<Range<u64>>> {
        self.put_l1().await?;
        self.put_snapshots().await?;
        let Self { image, mut header, l1, ledger, waiting, .. } = self;
        image.write_draft(&waiting).await?;
        let Settled { pieces, table, table_offset, table_clusters, freed } = ledger.settle()?;
        image.write_draft(&pieces).await?;
        drop(pieces);
        image.sync(SyncMode::Data).await?;
        header.refcount_table_offset = table_offset;
        header.refcount_table_clusters = table_clusters;
        freeze.stage = Stage::Switching;
        let wanted = header.clone();
        let switched = image.rewrite_header(|disk_header| *disk_header = wanted).await;
        if let Err(error) = switched {
            // Not even for want of room: nobody knows which header is on disk.
            let _ = image.failure.set(error.duplicate());
            return Err(error);
        }
        image.put_in_force(header, l1, table)?;
        freeze.stage = Stage::Drafting;
        Ok(freed)
    }

    async fn put_l1(&mut self) -> Result<()> {
        if self.l1 == self.old_l1 {
            return Ok(());
        }
        let old_length = self.old_l1.len() as u64 * 8;
        if old_length > 0 {
            self.release(self.header.l1_offset, old_length)?;
        }
        self.header.l1_entries = self.l1.len() as u32;
        self.header.l1_offset = match self.l1.is_empty() {
            true => 0,
            false => self.put(table_io::bytes_of(&self.l1)).await?,
        };
        Ok(())
    }

    async fn put_snapshots(&mut self) -> Result<()> {
        if self.header.snapshots > 0 {
            self.release(self.header.snapshots_offset, self.old_snapshots_length)?;
        }
        self.header.snapshots = self.snapshots.len() as u32;
        self.header.snapshots_offset = match self.snapshots.is_empty() {
            true => 0,
            false => self.put(snapshot_table::to_bytes(&self.snapshots)).await?,
        };
        Ok(())
    }
}

impl<S: Storage> Qcow2<S> {
    /// Writes tables that are not in force. Where they end up behind the file's end, new clusters are no
    /// longer blank: also when the draft is given up, and its writes are still under way.
    async fn write_draft(&self, pieces: &[Piece]) -> Result<()> {
        let end = |piece: &Piece| piece.offset + piece.bytes.len() as u64;
        if let Some(end) = pieces.iter().map(end).max() {
            self.state.lock().space.reach(self.geometry.clusters_for(end));
        }
        self.write_pieces(pieces, Durability::None).await
    }

    /// The tables in memory become those that the header on disk names now.
    fn put_in_force(&self, header: Header, l1: Vec<u64>, table: Vec<u64>) -> Result<()> {
        let size = header.size;
        let clusters = self.geometry.clusters_for(self.storage.size());
        let outcome = self.state.lock().replace_tables(header, l1, table, clusters);
        self.size.store(size, std::sync::atomic::Ordering::Release);
        outcome.inspect_err(|error| self.remember(error))
    }
}

/// The L2 tables that the entries of an L1 table refer to.
fn references<S: Storage>(image: &Qcow2<S>, l1: &[u64]) -> Result<Vec<Option<Reference>>> {
    let reference = |(index, &word): (usize, &u64)| {
        entry::l1_reference(word, image.geometry).map_err(|violation| {
            let what = format!("entry {index} of an L1 table {violation}");
            Error::new(ErrorKind::Corrupt, what).on(image.storage.name())
        })
    };
    l1.iter().enumerate().map(reference).collect()
}
