//! Commits of layers behind served disks: the images from a given one down to a base are merged
//! into the base, which becomes the backing file of the image above them.
//!
//! After a kill: the header of the image above says whether the chain is the old one or the one
//! without the merged layers. If it is the old one, another commit continues the work.

use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use anyhow::{Result, bail};
use blockhouse_disk::FurtherBase;
use blockhouse_engine::LoopClock;
use blockhouse_images::{
    LeftFiles, Secrets, StateUse, begin_layer_commit, end_layer_commit, find_layers,
};
use blockhouse_jobs::{CopyMode, JobEnd, Stream};

use super::commit_setup::{CommitSetup, check_base_is_read};
use super::stream::release_detached;
use super::{JobSetup, RunningJob, run_job};
use crate::running::open::image_options;
use crate::running::recording::keep_vouching;
use crate::running::rollbacks::check_nobody_stands;
use crate::running::{Running, RunningDisk};

/// Starts a commit of the layers from `top` on. When this returns, the base is open for writing and
/// has the length of `top`, and the job is listed. The caller has claimed the disk, which has no
/// job.
///
/// # Errors
/// `top` is no backing file, or the base is not below it; one of the layers has other overlays or
/// users; a layer is shorter than the base; a layer is encrypted and the base is not, unless the
/// setup permits that.
pub(super) async fn start_layer_commit(
    running: &Running,
    source: Arc<RunningDisk>,
    setup: JobSetup,
    top: &Path,
    commit: CommitSetup,
) -> Result<Arc<RunningJob>> {
    if setup.mode != CopyMode::Auto {
        bail!("writes never wait for a commit of layers: leave mode out");
    }
    let disk = Arc::clone(&source.disk);
    check_base_is_read(&disk, &setup.disk)?;
    let name = commit.backing_file.as_ref().map(String::as_bytes);
    let left_out = find_layers(&disk, top, commit.base.as_deref(), name)?;
    let (above, base) = (left_out.above(), left_out.above() + left_out.steps());
    check_nobody_stands(running, &source, above.max(1)..=base)?;
    if !commit.decrypt {
        check_encryption(&source, &left_out)?;
    }
    let files = if commit.delete { Some(LeftFiles::of(&disk, &left_out).await?) } else { None };
    for depth in [above, base] {
        if let Some(layer) = disk.image().layer_at(depth).filter(|_| depth > 0) {
            running.sandbox().check_image(Path::new(layer.name))?;
        }
    }
    let options = image_options(&source.setup, &StateUse::Off, Secrets::of(&disk))?;
    let layers = begin_layer_commit(&disk, left_out, &source.path(), &options).await?;
    keep_vouching(running, layers.base());
    let target = layers.base().image().image_name().to_owned();
    let listed =
        running.jobs().register(setup.name, "commit", (&setup.disk, &disk), (target, None));
    let (job, handle) = match listed {
        Ok(listed) => listed,
        Err(error) => {
            end_layer_commit(&layers, &options).await;
            return Err(error);
        }
    };
    // `left_out` is set only once.
    let _ = job.left_out.set(above + 1..base);
    job.control.set_speed(setup.speed);
    run_job(&handle, &job, running.events(), async move |job: &RunningJob| {
        let layers = Rc::new(layers);
        let (control, clock) = (Arc::clone(&job.control), Rc::new(LoopClock::new()));
        let end = Stream::commit(Rc::clone(&layers), control, clock).run().await;
        end_layer_commit(&layers, &options).await;
        if matches!(end, JobEnd::Completed { .. }) {
            release_detached(disk, files).await;
        }
        end
    });
    Ok(job)
}

/// Refuses to store encrypted data in the clear.
fn check_encryption(source: &RunningDisk, left_out: &FurtherBase) -> Result<()> {
    let layer = |depth| source.disk.image().layer_at(left_out.above() + depth);
    let encrypted = (1..left_out.steps()).filter_map(layer).find(|layer| layer.is_encrypted);
    if let (Some(encrypted), Some(base)) = (encrypted, layer(left_out.steps()))
        && !base.is_encrypted
    {
        bail!(
            "{}: is encrypted, and {} is not: what is committed would be stored there in the clear; if that is meant, say \
             decrypt ('blockhouse ctl SOCKET commit DISK --decrypt')",
            encrypted.name,
            base.name
        );
    }
    Ok(())
}
