//! Transactions: changes of bitmaps and starts of backups, of one or several disks, at one moment.
//!
//! Guarantee: either all changes are made durably or none is made, unless a storage fails at the
//! last write of one of several images. A backup has the disk's content at that moment, and a
//! bitmap that begins then has exactly the changes since. Guests' changes are paused meanwhile.
//! Names of jobs and backups are reserved before the moment. Reason: a step after the moment cannot
//! be undone, so it must not fail. If the bitmap of a backup cannot be read then, its job fails.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use blockhouse_disk::{BitmapAction, BitmapChange, NewBitmap, QuiescedDisk, change_bitmaps};
use blockhouse_engine::timeout;
use blockhouse_images::check_apart;
use blockhouse_jobs::FrozenDisk;
use blockhouse_storage::ImageStorage;
use futures_util::future::try_join_all;

use super::backup_list::NewName;
use super::backups::{
    MAX_FREEZE_TIME, adopt_backup, check_frozen_name, complete_bitmap, copied, frozen_name, prepare,
};
use super::disk::RunningDisk;
use super::{Running, recording};
use crate::jobs::{self, CopiedBitmap, FrozenSource, JobSetup, NewJobName};
use crate::running::claims::Name;

/// A backup that begins in a transaction.
#[derive(Clone, Debug)]
pub(crate) struct BackupPart {
    /// The job, with the name of the disk. A backup without a job uses the job's name as its own.
    pub(crate) job: JobSetup,
    /// The kind of backup of the disk.
    pub(crate) kind: BackupKind,
}

/// The reader of the frozen content of a disk.
#[derive(Clone, Debug)]
pub(crate) enum BackupKind {
    /// A job, which writes it to another disk.
    Copied {
        /// The disk's name.
        target: String,
        /// The bitmap of the ranges to copy; `None`: all.
        bitmap: Option<String>,
        /// Whether, after the job, the bitmap has only the changes since the start of the backup.
        is_synced: bool,
    },
    /// Clients of the disk that was frozen.
    Served {
        /// The folder of the scratch file; `None`: the folder of the image.
        scratch: Option<PathBuf>,
    },
}

/// A change of a bitmap of a disk.
#[derive(Clone)]
pub(crate) enum PartChange {
    /// A change that reads no other disk.
    Own(BitmapChange),
    /// The bitmap is in memory, and gets the changes of another disk's bitmap.
    MergeFrom {
        /// The name.
        name: String,
        /// The other disk.
        disk: String,
        /// The name of the other bitmap.
        source: String,
    },
}

/// A disk, and the changes of its bitmaps, in this order.
type DiskChanges = (Arc<RunningDisk>, Vec<PartChange>);

impl PartChange {
    fn own(&self) -> Option<&BitmapChange> {
        match self {
            Self::Own(change) => Some(change),
            Self::MergeFrom { .. } => None,
        }
    }

    /// The other disk that it reads.
    fn reads(&self) -> Option<&str> {
        match self {
            Self::Own(_) => None,
            Self::MergeFrom { disk, .. } => Some(disk),
        }
    }
}

/// A backup that is about to begin.
struct ReadyBackup<'a> {
    part: BackupPart,
    source: Arc<RunningDisk>,
    frozen: (Arc<FrozenDisk<ImageStorage>>, u64),
    reader: Reader<'a>,
}

/// The reader of a frozen disk, with its reserved name.
enum Reader<'a> {
    Job { name: NewJobName<'a>, target: Arc<RunningDisk>, bitmap: Option<String> },
    Clients(NewName<'a>),
}

impl BackupPart {
    /// The names of the disk that is read, and of the one that is written.
    fn disks(&self) -> impl Iterator<Item = &str> {
        let target = match &self.kind {
            BackupKind::Copied { target, .. } => Some(&**target),
            BackupKind::Served { .. } => None,
        };
        std::iter::once(&*self.job.disk).chain(target)
    }

    /// The synced bitmap, and the one that records changes since the start.
    fn synced(&self, name: &str) -> Option<CopiedBitmap> {
        match &self.kind {
            BackupKind::Copied { bitmap: Some(bitmap), is_synced: true, .. } => {
                Some(CopiedBitmap { name: bitmap.clone(), since: format!("{bitmap} since {name}") })
            }
            _ => None,
        }
    }
}

/// Changes bitmaps of disks, and begins backups, all at one moment. Returns for how long guests'
/// changes were held off.
///
/// # Errors
/// There is no such disk or bitmap; a bitmap to add exists already; a bitmap to remove is offered
/// to clients; a disk has no bitmaps that can be changed, is used by a job or backup, or is too
/// busy; a target cannot be written to; a name of a job or backup is taken. Then nothing has
/// changed. If the server ends meanwhile, the changes may have been made, and the error says so.
pub(crate) async fn transact(
    running: &Running,
    mut changes: Vec<(String, PartChange)>,
    backups: Vec<BackupPart>,
) -> Result<Duration> {
    let of_changes = changes.iter().flat_map(|(disk, change)| {
        std::iter::once(disk.as_str()).chain(change.reads()).map(str::to_owned)
    });
    let of_backups = backups.iter().flat_map(|part| {
        let other = match &part.kind {
            BackupKind::Copied { target, .. } => target.clone(),
            BackupKind::Served { .. } => frozen_name(&part.job.disk, part.name()),
        };
        [part.job.disk.clone(), other]
    });
    let names = of_changes.chain(of_backups).map(Name::Disk);
    let _claim = running.claims.claim(names.collect::<Vec<_>>()).await;
    let mut ready: Vec<ReadyBackup<'_>> = Vec::new();
    for part in backups {
        let is_known = |disk: &&str| {
            ready.iter().flat_map(|other| other.part.disks()).any(|other| other == *disk)
        };
        if let Some(disk) = part.disks().find(is_known) {
            bail!("the disk {disk:?} is named twice");
        }
        let backup = make_ready(running, part, &changes).await?;
        if let Some(bitmap) = backup.part.synced(backup.part.name()) {
            let disk = &backup.part.job.disk;
            let is_transient = backup.source.disk.bitmaps().is_transient(&bitmap.name)
                || added(&changes, disk, &bitmap.name)
                    .is_some_and(|change| matches!(change, BitmapChange::AddTransient(_)));
            let new = NewBitmap { name: bitmap.since, granularity: None, is_enabled: true };
            let change =
                if is_transient { BitmapChange::AddTransient(new) } else { BitmapChange::Add(new) };
            changes.push((disk.clone(), PartChange::Own(change)));
        }
        ready.push(backup);
    }
    let parts = by_disk(running, changes)?;
    let mut recorded = Vec::new();
    let outcome = reach_moment(running, &parts, &ready, &mut recorded).await;
    match outcome {
        Err(error) => {
            for disk in recorded {
                recording::remove_empty_side_file(running, disk).await;
            }
            Err(error)
        }
        Ok(pause) => {
            for backup in ready {
                let name = backup.part.name().to_owned();
                begin(running, backup, pause).await.with_context(|| {
                    format!("the bitmaps have changed, but the backup {name:?} did not begin")
                })?;
            }
            Ok(pause)
        }
    }
}

/// The change that adds a bitmap to a disk, if there is one.
fn added<'a>(
    changes: &'a [(String, PartChange)],
    disk: &str,
    name: &str,
) -> Option<&'a BitmapChange> {
    let of_disk = changes.iter().filter(|(of, _)| of == disk);
    let adds = |change: &&BitmapChange| match change {
        BitmapChange::Add(new) | BitmapChange::AddTransient(new) => new.name == name,
        _ => false,
    };
    of_disk.filter_map(|(_, change)| change.own()).find(adds)
}

fn by_disk(running: &Running, changes: Vec<(String, PartChange)>) -> Result<Vec<DiskChanges>> {
    let mut parts: Vec<DiskChanges> = Vec::new();
    for (name, change) in changes {
        if let PartChange::Own(BitmapChange::Change {
            name: bitmap,
            action: BitmapAction::Remove,
        }) = &change
        {
            running.check_bitmap_unused(&*running.disks.get(&name)?, bitmap)?;
        }
        match parts.iter_mut().find(|(disk, _)| disk.name() == name) {
            Some((_, changes)) => changes.push(change),
            None => parts.push((running.disks.get(&name)?, vec![change])),
        }
    }
    Ok(parts)
}

/// Checks whether a backup can begin, and prepares it. Its disks are claimed.
async fn make_ready<'a>(
    running: &'a Running,
    part: BackupPart,
    changes: &[(String, PartChange)],
) -> Result<ReadyBackup<'a>> {
    let (name, disk) = (part.name().to_owned(), &part.job.disk);
    let source = running.disks.get(disk)?;
    running.check_free(disk)?;
    let job_name = running.jobs.new_name(Some(name.clone()), "backup")?;
    let (scratch, reader) = match &part.kind {
        BackupKind::Served { scratch } => {
            check_frozen_name(running, disk, &name)?;
            let name = running.backups.new_name(Some(name.clone()))?;
            (scratch.as_deref(), Reader::Clients(name))
        }
        BackupKind::Copied { target, bitmap, .. } => {
            let target = jobs::check_target_disk(running, target, disk)?;
            check_apart(&target.disk, &source.disk)?;
            if target.disk.size() != source.disk.size() {
                bail!(
                    "the disk {:?} has {} bytes, and {disk:?} has {}: resize one of them",
                    target.name(),
                    target.disk.size(),
                    source.disk.size()
                );
            }
            if let Some(bitmap) = bitmap {
                check_readable(&source, bitmap, changes).await?;
            }
            (None, Reader::Job { name: job_name, target, bitmap: bitmap.clone() })
        }
    };
    let frozen = prepare(running, (scratch, None), &name, &source).await?;
    Ok(ReadyBackup { part, source, frozen, reader })
}

/// Makes the changes and freezes the disks, at one moment. Returns for how long guests' changes
/// were held off. `recorded` gets the raw disks for which a side file was made.
async fn reach_moment<'a>(
    running: &Running,
    parts: &'a [DiskChanges],
    backups: &[ReadyBackup<'_>],
    recorded: &mut Vec<&'a RunningDisk>,
) -> Result<Duration> {
    let own: Vec<Vec<_>> = parts.iter().map(|(_, changes)| own_changes(changes)).collect();
    for ((disk, _), changes) in parts.iter().zip(&own) {
        let is_added = changes.iter().any(|change| matches!(change, BitmapChange::Add(_)));
        if is_added && recording::ensure_side_file(running, disk).await?.is_some() {
            recorded.push(disk);
        }
        disk.disk.bitmaps().prepare(changes).await?;
    }
    let mut disks: Vec<_> = parts.iter().map(|(disk, _)| Arc::clone(disk)).collect();
    let sources = backups.iter().map(|backup| Arc::clone(&backup.source));
    let reads = parts.iter().flat_map(|(_, changes)| changes).filter_map(PartChange::reads);
    let read: Vec<_> = reads.map(|disk| running.disks.get(disk)).collect::<Result<_>>()?;
    for disk in sources.chain(read) {
        if !disks.iter().any(|other| Arc::ptr_eq(other, &disk)) {
            disks.push(disk);
        }
    }
    let began = Instant::now();
    let quiescing = try_join_all(disks.iter().map(|disk| disk.disk.quiesced()));
    let quiesced = timeout(MAX_FREEZE_TIME, quiescing).await.with_context(|| {
        format!("the disks do not come to rest in {MAX_FREEZE_TIME:?}: try again")
    })??;
    let changes = with_merged(running, parts).await?;
    let changes = changes.iter().map(|changes| &changes[..]);
    let all: Vec<(&QuiescedDisk<'_, _>, _)> = quiesced.iter().zip(changes).collect();
    change_bitmaps(&all).await?;
    for backup in backups {
        let of = disks.iter().position(|disk| Arc::ptr_eq(disk, &backup.source));
        of.into_iter().for_each(|index| backup.frozen.0.freeze_at(&quiesced[index]));
    }
    drop(quiesced);
    let pause = began.elapsed();
    for disk in disks {
        tracing::info!("{}: changes were held off for {pause:?}", disk.name());
    }
    Ok(pause)
}

fn own_changes(changes: &[PartChange]) -> Vec<BitmapChange> {
    changes.iter().filter_map(PartChange::own).cloned().collect()
}

/// The changes of each disk, including merges from bitmaps of other disks. All disks are quiesced.
async fn with_merged(running: &Running, parts: &[DiskChanges]) -> Result<Vec<Vec<BitmapChange>>> {
    let mut all = Vec::new();
    for (target, changes) in parts {
        let mut merged = Vec::new();
        for change in changes {
            merged.push(match change {
                PartChange::Own(change) => change.clone(),
                PartChange::MergeFrom { name, disk, source } => {
                    let is_changed = |(of, changes): &DiskChanges| {
                        of.name() == disk
                            && own_changes(changes).iter().any(|change| change.name() == source)
                    };
                    if parts.iter().any(is_changed) {
                        bail!(
                            "the bitmap {source:?} of {disk:?} changes at the same moment, and cannot be merged into one of another disk"
                        );
                    }
                    let changes = Arc::new(copied(&*running.disks.get(disk)?, source).await?);
                    if changes.size() != target.disk.size() {
                        bail!("bitmaps of disks of different sizes cannot be merged");
                    }
                    BitmapChange::MergeChanges { name: name.clone(), changes }
                }
            });
        }
        all.push(merged);
    }
    Ok(all)
}

/// Begins a backup whose disk is frozen.
///
/// # Errors
/// The server ends, or the host has no memory.
async fn begin(running: &Running, backup: ReadyBackup<'_>, pause: Duration) -> Result<()> {
    let ReadyBackup { part, source, frozen, reader } = backup;
    let (name, target, bitmap) = match reader {
        Reader::Clients(name) => return adopt_backup(running, &name, source, frozen, pause).await,
        Reader::Job { name, target, bitmap } => (name, target, bitmap),
    };
    let only = match bitmap {
        Some(bitmap) => copied(&source, &bitmap).await.map(Some),
        None => Ok(None),
    };
    let synced = part.synced(name.name());
    let source = FrozenSource { disk: source, view: frozen.0, only, synced };
    jobs::start_backup(running, &name, part.job.speed, source, &target).map(drop)
}

impl BackupPart {
    fn name(&self) -> &str {
        self.job.name.as_deref().unwrap_or_default()
    }
}

/// Refuses a bitmap that cannot be read, unless the transaction adds it.
async fn check_readable(
    disk: &RunningDisk,
    name: &str,
    changes: &[(String, PartChange)],
) -> Result<()> {
    if added(changes, disk.name(), name).is_some() {
        return Ok(());
    }
    match complete_bitmap(disk, name).await? {
        Some(_) => Ok(()),
        None => bail!("the disk {:?} has no bitmap {name:?}", disk.name()),
    }
}
