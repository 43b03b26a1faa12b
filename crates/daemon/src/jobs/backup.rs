//! Backups to disks of this server: the content of a disk at one moment is copied, all of it or the
//! parts that a bitmap marks, while its guest continues.
//!
//! Guarantees: when the job is complete, the target has the disk's content at the moment of its
//! start; until then the target of a full copy has the mark of an incomplete mirror. Another bitmap
//! records the changes since that moment. When the job completes, these changes replace the content
//! of a synced bitmap; if the job fails or is cancelled, the synced bitmap stays as it is.

use std::num::NonZeroU64;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::Result;
use blockhouse_core::ErrorKind;
use blockhouse_disk::{
    Access, BitmapAction, BitmapChange, DirtyMap, Disk, ImageDisk, Options, change_bitmaps,
};
use blockhouse_engine::LoopClock;
use blockhouse_jobs::{Completion, FrozenDisk, JobControl, JobEnd, JobStage, Mirror};
use blockhouse_storage::{ImageStorage, ViewStorage};
use futures_util::future::{Either, select};

use super::{NewJobName, RunningJob, run_job};
use crate::running::{Running, RunningDisk};

/// The source of a backup.
pub(crate) struct FrozenSource {
    /// The disk, which the guest continues to use.
    pub(crate) disk: Arc<RunningDisk>,
    /// The disk's content at the moment of the backup.
    pub(crate) view: Arc<FrozenDisk<ImageStorage>>,
    /// The only parts that are copied, if not all are. An error fails the job.
    pub(crate) only: Result<Option<DirtyMap>>,
    /// The bitmap that is synced, if any.
    pub(crate) synced: Option<CopiedBitmap>,
}

/// A synced bitmap: when the backup is complete, it has the changes since the moment of the backup.
#[derive(Clone, Debug)]
pub(crate) struct CopiedBitmap {
    /// The name.
    pub(crate) name: String,
    /// The name of the bitmap that records the changes since the moment of the backup.
    pub(crate) since: String,
}

impl CopiedBitmap {
    /// The changes of both bitmaps at the end of a job.
    fn changes_at(self, end: &JobEnd) -> Vec<BitmapChange> {
        let change = |name: &str, action| BitmapChange::Change { name: name.to_owned(), action };
        let removed = change(&self.since, BitmapAction::Remove);
        match end {
            JobEnd::Completed { .. } => vec![
                change(&self.name, BitmapAction::Clear),
                BitmapChange::Merge { name: self.name, source: self.since },
                removed,
            ],
            JobEnd::Cancelled | JobEnd::Failed(_) => vec![removed],
        }
    }
}

/// Starts a job that copies a frozen disk to `target`. The caller has claimed both disks, and
/// checked `target`.
///
/// # Errors
/// The server ends.
pub(crate) fn start_backup(
    running: &Running,
    name: &NewJobName<'_>,
    speed: Option<NonZeroU64>,
    source: FrozenSource,
    target: &RunningDisk,
) -> Result<Arc<RunningJob>> {
    let names = (target.path().display().to_string(), Some(target.name().to_owned()));
    let of = (source.disk.name(), &source.disk.disk);
    let (job, handle) = running.jobs().register_as(name, "backup", of, names)?;
    job.control.set_speed(speed);
    let target = Arc::clone(&target.disk);
    run_job(&handle, &job, running.events(), async move |job: &RunningJob| {
        let FrozenSource { disk, view, only, synced } = source;
        let copied = pin!(async {
            let copied = async { copy(job, &view, target, only?).await };
            copied.await.unwrap_or_else(|error| JobEnd::Failed(error.to_string()))
        });
        // The copy may wait for its target after the end is decided. The disk is thawed before.
        let (end, rest) = match select(copied, pin!(job.control.decided())).await {
            Either::Left((end, _)) => (end, None),
            Either::Right((end, copied)) => (end, Some(copied)),
        };
        view.thaw();
        let end = match synced {
            Some(bitmap) => sync(&disk.disk, bitmap, end).await,
            None => end,
        };
        job.source_is_kept.store(true, Ordering::SeqCst);
        let Some(copied) = rest else { return end };
        // A failure that was decided may have been repaired since: the copy has the last word on
        // the target's state.
        match (&end, copied.await) {
            (JobEnd::Failed(_), last @ JobEnd::Failed(_)) => last,
            _ => end,
        }
    });
    Ok(job)
}

async fn copy(
    job: &RunningJob,
    view: &Arc<FrozenDisk<ImageStorage>>,
    target: Arc<ImageDisk>,
    only: Option<DirtyMap>,
) -> Result<JobEnd> {
    let storage = ImageStorage::View(Box::new(ViewStorage::new(Arc::clone(view))));
    let options = Options { access: Access::ReadOnly, ..Options::default() };
    let source = Arc::new(Disk::raw(storage, options)?);
    let (control, clock) = (Arc::clone(&job.control), Rc::new(LoopClock::new()));
    let mirror = Mirror::backup(source, target, only, control, clock)?;
    let completing = Box::pin(complete_when_ready(&job.control));
    match select(Box::pin(mirror.run()), completing).await {
        Either::Left((end, _)) => Ok(end),
        Either::Right((never, _)) => match never {},
    }
}

/// Asks a job to complete each time it is ready.
async fn complete_when_ready(control: &JobControl) -> std::convert::Infallible {
    let mut stage = JobStage::Running;
    loop {
        if stage == JobStage::Ready {
            control.complete(Completion::Copy);
        }
        stage = control.next_stage(&stage).await;
    }
}

/// Updates the bitmaps after the end of a job. Returns the end, or a failure if the update fails
/// after a complete copy.
async fn sync(disk: &ImageDisk, bitmap: CopiedBitmap, end: JobEnd) -> JobEnd {
    let name = bitmap.name.clone();
    let changes = bitmap.changes_at(&end);
    let changed = async {
        disk.bitmaps().prepare(&changes).await?;
        let quiesced = disk.quiesced().await?;
        change_bitmaps(&[(&quiesced, &changes[..])]).await
    };
    match changed.await {
        Err(error) if matches!(end, JobEnd::Completed { .. }) => JobEnd::Failed(format!(
            "the copy is complete, but the bitmap {name:?} says what it said before: {error}"
        )),
        Err(error) if error.kind() != ErrorKind::InvalidInput => {
            tracing::error!("{}: {error}", disk.name());
            end
        }
        _ => end,
    }
}
