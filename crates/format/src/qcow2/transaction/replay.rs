//! Replays the redo log of a process that has died (`tables/redo`), so that the changes of requests
//! that this process had completed become durable.
//!
//! The caller has checked that the log belongs to this file and to this boot of the host. The
//! *session bits*, autoclear bits of the header, show that no other program has changed the image
//! since. Reasons: a program that does not know such bits clears them before its first change
//! (`docs/interop/qcow2.txt` of QEMU, "autoclear feature bits"), and each process with a log sets
//! different session bits. Images of version 2 have no such bits.
//!
//! Before any change the whole log is checked against the image. If the log cannot belong to this
//! file, the file is not changed.
//!
//! 1. For each guest cluster only the latest change is replayed (`LatestChanges`).
//! 2. Host clusters that these changes refer to and whose refcount is 0 get a refcount of 1, and no
//!    new table is placed in one of them (`recount`). Compressed data increments the refcounts of
//!    its clusters, which may be counted already; at most, the increment leaks a cluster. If the
//!    process died before a lower refcount of a cluster was written, this cluster leaks, too.
//! 3. Ordinary steps set the entries. The clusters that the entries referred to before are freed as
//!    usual.
//! 4. A writeback makes all of these changes durable.
//!
//! A crash during a replay is harmless: the log still exists, and a replay neither frees nor reuses
//! host clusters that the log refers to.

use std::ops::Range;
use std::sync::Arc;

use blockhouse_core::{Result, StateMemory, Storage};

use crate::Replay;
use crate::qcow2::Qcow2;
use crate::qcow2::allocator::{Allocator, Gaps};
use crate::qcow2::layout::cluster_ranges::ClusterRanges;
use crate::qcow2::layout::entry::Entry;
use crate::qcow2::layout::geometry::Geometry;
use crate::qcow2::layout::header::{SESSION, SESSION_BITS};
use crate::qcow2::tables::{
    LatestChanges, REDO_LOG_WORDS, RedoChange, RedoLog, RedoRecord, Tables,
};
use crate::qcow2::writeback::Metadata;

use super::recount::{change_refcount, whole_clusters};

/// The redo log of an image: memory that outlives the process.
pub struct ImageRedo<'a, S: Storage> {
    image: &'a Qcow2<S>,
}

impl<S: Storage> Qcow2<S> {
    /// The image's redo log.
    pub fn redo(&self) -> ImageRedo<'_, S> {
        ImageRedo { image: self }
    }
}

impl<S: Storage> ImageRedo<'_, S> {
    /// The number of words of [`StateMemory`] for the log. With less memory, the log holds fewer
    /// changes.
    pub fn words(&self) -> usize {
        REDO_LOG_WORDS
    }

    /// Replays the linked changes of a killed process that had the image open: `memory` is the log
    /// that the process had attached. The changes are durable when the method returns. The log is
    /// not modified, so that a crash during the replay loses nothing. The caller must call this
    /// method before any change, and before [`attach`](Self::attach), for an image that was [opened
    /// for a replay](Qcow2::open_before_replay).
    ///
    /// The caller guarantees that the log belongs to this file, and that the host has not been
    /// restarted since the process died. Later changes of the image by other programs are detected,
    /// except for images of version 2.
    ///
    /// # Errors
    /// Storage errors; `Corrupt` if the image contradicts itself. The log is then still valid.
    pub async fn replay(&self, memory: &dyn StateMemory) -> Result<Replay> {
        self.image.check_data_file()?;
        let metadata = &self.image.metadata;
        metadata.check_writable()?;
        let records = match RedoLog::read(memory, metadata.geometry()) {
            Ok(records) if records.is_empty() => return Ok(Replay::Nothing),
            Ok(records) => records,
            Err(why) => return Ok(Replay::Refused { why }),
        };
        if let Some(why) = refusal(metadata, RedoLog::session_in(memory)) {
            return Ok(Replay::Refused { why });
        }
        let latest: Vec<RedoRecord> = on_disk(metadata, &records).collect();
        if let Some(why) = missing_data(metadata, &latest) {
            return Ok(Replay::Refused { why });
        }
        if let Some(why) = misplaced_data(metadata, &latest).await? {
            return Ok(Replay::Refused { why });
        }
        let replayed = apply(metadata, &latest).await;
        let changes = metadata.marking(replayed).await?;
        metadata.write_everything().await?;
        Ok(Replay::Applied { changes })
    }

    /// Whether the session bits show that another program has opened the image for writing since
    /// the process with the log in `memory` died. A [`replay`](Self::replay) would refuse a change
    /// of that log.
    pub fn is_outdated(&self, memory: &dyn StateMemory) -> bool {
        // A process that changed nothing has left the bits of an earlier session as it found them.
        let is_unchanged =
            self.has_session_bit() && self.session_bits() == RedoLog::earlier_session_in(memory);
        !is_unchanged && refusal(&self.image.metadata, RedoLog::session_in(memory)).is_some()
    }

    /// Empties `log`, and from now on records in `log` changes that are linked and not yet on disk.
    /// If this process is killed, the next process can [`replay`](Self::replay) the log. The caller
    /// must call this method before any change.
    pub fn attach(&self, log: Arc<dyn StateMemory>) {
        self.attach_after(log, 0);
    }

    /// As [`attach`](Self::attach), to an image that has all changes of the session whose bits it
    /// has. If this process changes nothing, the log is [not outdated](Self::is_outdated).
    pub fn attach_to_complete(&self, log: Arc<dyn StateMemory>) {
        self.attach_after(log, self.session_bits());
    }

    fn attach_after(&self, log: Arc<dyn StateMemory>, earlier: u64) {
        let Qcow2 { metadata, .. } = self.image;
        let log = RedoLog::new(log, metadata.geometry(), earlier);
        metadata.autoclear().attach_redo_log(log);
    }

    /// As [`attach`](Self::attach), if this process replaces a process that has settled the image
    /// and no longer changes it. The session of the replaced process continues, so that the header
    /// need not be written before the first change. `log` replaces the log of the replaced process,
    /// which can no longer be found.
    pub fn take_over(&self, log: Arc<dyn StateMemory>) {
        let Qcow2 { metadata, .. } = self.image;
        let found = self.session_bits();
        match found & SESSION {
            0 => self.attach(log),
            _ => metadata.autoclear().attach_redo_log(RedoLog::of_session(
                log,
                metadata.geometry(),
                found,
            )),
        }
    }

    /// Whether a [`replay`](Self::replay) detects that other programs have changed the image. A
    /// replay does not detect changes of images of version 2; only the storage may detect these.
    pub fn detects_changes(&self) -> bool {
        self.image.metadata.geometry().version >= 3
    }

    /// Whether the header has the mark of a process that keeps a redo log. That process has the
    /// image open, or was killed.
    pub fn has_session_bit(&self) -> bool {
        self.session_bits() & SESSION != 0
    }

    /// The session bits of the header on disk.
    fn session_bits(&self) -> u64 {
        self.image.metadata.lock().tables.headers.disk().autoclear & SESSION_BITS
    }
}

/// The reason why the image is not in the state in which the process left it; `None` if the image
/// is in this state.
fn refusal<S: Storage>(metadata: &Metadata<S>, session: u64) -> Option<String> {
    let state = metadata.lock();
    let header = state.tables.headers.disk();
    let found = header.autoclear & SESSION_BITS;
    if header.geometry.version < 3 || found == session && found & SESSION != 0 {
        return None;
    }
    Some(match found & SESSION {
        0 => "another program has opened the image for writing since".into(),
        _ => "another server has changed the image since, with another state directory".into(),
    })
}

/// The latest changes inside the disk. Changes beyond the disk's end belong to a resize that had
/// not completed.
fn on_disk<S: Storage>(
    metadata: &Metadata<S>,
    records: &[RedoRecord],
) -> impl Iterator<Item = RedoRecord> {
    let geometry = metadata.geometry();
    let end = geometry.clusters_for(metadata.size());
    let latest: Vec<_> = LatestChanges::of(records, geometry).iter().collect();
    latest.into_iter().filter_map(move |record| {
        let Range { start, end: last } = record.clusters;
        let clusters = start..last.min(end);
        (!clusters.is_empty()).then_some(RedoRecord { clusters, ..record })
    })
}

/// The reason why changes cannot belong to this file, if their data would lie past the file's end.
fn missing_data<S: Storage>(metadata: &Metadata<S>, latest: &[RedoRecord]) -> Option<String> {
    let geometry = metadata.geometry();
    if geometry.has_data_file {
        return None;
    }
    let clusters = geometry.clusters_for(metadata.storage().size());
    let last = hosts_of(geometry, latest).end()?;
    (last > clusters).then(|| "the file is shorter than it was".into())
}

/// The host clusters to which the entries refer after a change, if the record names host clusters.
fn host_clusters(geometry: Geometry, record: &RedoRecord) -> Option<Range<u64>> {
    let count = record.clusters.end - record.clusters.start;
    match record.change {
        RedoChange::Set(Entry::Standard { host: Some(host), .. }) => {
            let start = geometry.cluster_of(host.offset);
            Some(start..start + count)
        }
        RedoChange::Set(Entry::Compressed(data)) => Some(data.host_clusters(geometry)),
        RedoChange::Set(Entry::Standard { host: None, .. }) | RedoChange::ZeroKeepingHost => None,
    }
}

/// The reason why changes cannot belong to this file, if their data would lie in the file's tables.
/// Reads all tables that the changes affect. Changes nothing, so even a corrupt image is not marked
/// as corrupt.
async fn misplaced_data<S: Storage>(
    metadata: &Metadata<S>,
    latest: &[RedoRecord],
) -> Result<Option<String>> {
    for record in latest {
        let mut rest = record.clusters.clone();
        while !rest.is_empty() {
            let (end, differing) = metadata
                .step(|state| state.mapper().differing_entries(record, rest.clone()))
                .await?;
            let state = metadata.lock();
            let misplaced = differing
                .iter()
                .find(|&&(cluster, entry)| state.tables.check_host(cluster, entry).is_err());
            if let Some(&(cluster, _)) = misplaced {
                let guest = metadata.geometry().offset_of(cluster);
                return Ok(Some(format!(
                    "the image has tables where the data of the guest's offset {guest} was"
                )));
            }
            rest.start = end;
        }
    }
    Ok(None)
}

/// Makes the changes in memory. Returns the number of entries that differed.
async fn apply<S: Storage>(metadata: &Metadata<S>, latest: &[RedoRecord]) -> Result<u64> {
    if !metadata.geometry().has_data_file {
        count_hosts(metadata, latest).await?;
    }
    let mut changes = 0;
    for record in latest {
        let mut rest = record.clusters.clone();
        while !rest.is_empty() {
            let (end, differing) = metadata
                .step(|state| state.mapper().differing_entries(record, rest.clone()))
                .await?;
            let dropped = metadata.step(|state| state.mapper().set_entries(&differing)).await?;
            metadata.free_clusters(dropped).await;
            changes += differing.len() as u64;
            rest.start = end;
        }
    }
    Ok(changes)
}

/// Makes the refcounts include each host cluster of the changes.
async fn count_hosts<S: Storage>(metadata: &Metadata<S>, latest: &[RedoRecord]) -> Result<()> {
    let geometry = metadata.geometry();
    let hosts = hosts_of(geometry, latest);
    let Some(end) = hosts.end() else { return Ok(()) };
    metadata.lock().tables.file.advance(end);
    let is_taken = |cluster| hosts.overlaps(&(cluster..cluster + 1));
    let mut gaps = Gaps::new(whole_clusters(metadata), &is_taken);
    for record in latest {
        let is_compressed = matches!(record.change, RedoChange::Set(Entry::Compressed(_)));
        for cluster in host_clusters(geometry, record).into_iter().flatten() {
            let count = |allocator: &mut Allocator, tables: &mut Tables| {
                allocator.count_reference(tables, cluster, is_compressed)
            };
            change_refcount(metadata, cluster, &mut gaps, count).await?;
        }
    }
    Ok(())
}

/// The host clusters that a log refers to, if it is the log of an image with this geometry.
pub(crate) fn logged_hosts(geometry: Geometry, log: Option<&dyn StateMemory>) -> ClusterRanges {
    let records = log.and_then(|log| RedoLog::read(log, geometry).ok()).unwrap_or_default();
    let latest: Vec<_> = LatestChanges::of(&records, geometry).iter().collect();
    hosts_of(geometry, &latest)
}

fn hosts_of(geometry: Geometry, records: &[RedoRecord]) -> ClusterRanges {
    let mut hosts = ClusterRanges::default();
    if !geometry.has_data_file {
        records
            .iter()
            .filter_map(|record| host_clusters(geometry, record))
            .for_each(|clusters| hosts.insert(clusters));
    }
    hosts
}
