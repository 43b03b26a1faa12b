//! Replaying the redo log of a process that has died (`tables/redo`): what it answered comes to be on disk.
//!
//! Whether the log is that of this file, and of this boot of the host, the caller has found out. That no other
//! program has changed the image since is said by the *session bit*, an autoclear bit of the header: whoever does
//! not know such a bit clears it before the first change (`docs/interop/qcow2.txt` of QEMU, "autoclear feature
//! bits"). Images of version 2 have none.
//!
//! 1. Of each guest cluster the latest change counts (`LatestChanges`).
//! 2. Host clusters that these refer to and that are not counted yet get a refcount of one. The file's end is
//!    moved past all of them first, so that no new table takes one of them. Compressed data adds to the
//!    refcounts of its clusters, which may be counted already: a leak at most.
//! 3. Entries are set by ordinary steps. What they referred to before is freed as always.
//! 4. A writeback brings all of it to the disk.
//!
//! A death in the middle is harmless: the log is still there, and host clusters that it refers to are
//! neither freed nor reused by a replay.

use std::ops::Range;

use blockhouse_core::{Result, StateMemory, Storage};

use crate::Replay;
use crate::qcow2::layout::entry::Entry;
use crate::qcow2::layout::header::SESSION;
use crate::qcow2::tables::{LatestChanges, RedoChange, RedoLog, RedoRecord};

use super::{ImageMetadata, mapper};

/// Replays a log, before anything is changed.
///
/// # Errors
/// What the storage answers; `Corrupt` where the image contradicts itself. The log is still good then.
pub(crate) async fn replay<S: Storage>(
    metadata: &ImageMetadata<S>,
    memory: &dyn StateMemory,
) -> Result<Replay> {
    metadata.check_writable()?;
    let records = match RedoLog::read(memory, metadata.geometry()) {
        Ok(records) if records.is_empty() => return Ok(Replay::Nothing),
        Ok(records) => records,
        Err(why) => return Ok(Replay::Refused { why }),
    };
    if let Some(why) = refusal(metadata) {
        return Ok(Replay::Refused { why });
    }
    let latest: Vec<RedoRecord> = on_disk(metadata, &records).collect();
    if let Some(why) = missing_data(metadata, &latest) {
        return Ok(Replay::Refused { why });
    }
    let replayed = apply(metadata, &latest).await;
    let changes = metadata.marking(replayed).await?;
    metadata.write_everything().await?;
    Ok(Replay::Applied { changes })
}

/// Why the image is not as the process left it.
fn refusal<S: Storage>(metadata: &ImageMetadata<S>) -> Option<String> {
    let state = metadata.lock();
    let header = state.tables.headers().disk();
    (header.geometry.version >= 3 && header.autoclear & SESSION == 0)
        .then(|| "another program has opened the image for writing since".into())
}

/// The latest changes inside the disk. Those beyond its end are of a disk that was about to become longer,
/// or shorter: neither was answered.
fn on_disk<S: Storage>(
    metadata: &ImageMetadata<S>,
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

/// Why changes cannot be of this file: the data that they refer to would lie past its end.
fn missing_data<S: Storage>(metadata: &ImageMetadata<S>, latest: &[RedoRecord]) -> Option<String> {
    let geometry = metadata.geometry();
    if geometry.has_data_file {
        return None;
    }
    let clusters = geometry.clusters_for(metadata.storage().size());
    let last =
        latest.iter().filter_map(|record| Some(host_clusters(metadata, record)?.end)).max()?;
    (last > clusters).then(|| "the file is shorter than it was".into())
}

/// The host clusters that the entries refer to after a change, as far as the change says it.
fn host_clusters<S: Storage>(
    metadata: &ImageMetadata<S>,
    record: &RedoRecord,
) -> Option<Range<u64>> {
    let geometry = metadata.geometry();
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

/// Makes the changes in memory. Returns how many entries differed.
async fn apply<S: Storage>(metadata: &ImageMetadata<S>, latest: &[RedoRecord]) -> Result<u64> {
    if !metadata.geometry().has_data_file {
        count_hosts(metadata, latest).await?;
    }
    let mut changes = 0;
    for record in latest {
        let mut rest = record.clusters.clone();
        while !rest.is_empty() {
            let (end, differing) = metadata
                .step(|state| mapper(state).differing_entries(record, rest.clone()))
                .await?;
            let dropped = metadata.step(|state| mapper(state).set_entries(&differing)).await?;
            metadata.free_clusters(dropped).await;
            changes += differing.len() as u64;
            rest.start = end;
        }
    }
    Ok(changes)
}

/// Has each host cluster counted that the changes refer to.
async fn count_hosts<S: Storage>(metadata: &ImageMetadata<S>, latest: &[RedoRecord]) -> Result<()> {
    let hosts = latest.iter().filter_map(|record| {
        let is_compressed = matches!(record.change, RedoChange::Set(Entry::Compressed(_)));
        host_clusters(metadata, record).map(|clusters| (clusters, is_compressed))
    });
    let hosts: Vec<_> = hosts.collect();
    let Some(end) = hosts.iter().map(|(clusters, _)| clusters.end).max() else { return Ok(()) };
    metadata.lock().tables.file_mut().advance(end);
    for (clusters, is_compressed) in hosts {
        for cluster in clusters {
            let counted = metadata
                .step(|state| {
                    state.tables.check_dirty_limit()?;
                    state.allocator.count_reference(&mut state.tables, cluster, is_compressed)
                })
                .await;
            counted?;
        }
    }
    Ok(())
}
