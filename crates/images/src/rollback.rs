//! Rollback: returns a disk to the layer that a fork left, and removes its overlay. See *Rollback*
//! in README.md of the crate.
//!
//! Guarantees: the overlay is the disk until its file is removed; then the layer is the disk. The
//! record beside the layer, and the existence of the overlay's file, show which of the two is the
//! disk. Before the removal, the layer gets no write that would be visible through the overlay. A
//! layer is changed only if no other image is known to use it as its backing file.

use std::fs::remove_file;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use blockhouse_core::{Error, ErrorKind, Result, Storage, rare};
use blockhouse_disk::{Access, ImageDisk, Layer, Pause, ReplacedImage, StoredImage};
use blockhouse_engine::{HostFile, OpenMode, PageCache, sleep};
use blockhouse_storage::ImageStorage;
use futures_util::future::LocalBoxFuture;

use crate::durable_rename::sync_folder;
use crate::image_options::ImageOptions;
use crate::images_over::check_only_over;
use crate::moved_record::{
    check_not_committed, end_rollback, forget_moved, forked_to, record_committed, record_rollback,
};
use crate::open_image::open_layer_again;
use crate::open_location::{canonical, identity_of};
use crate::reader_locks::{ReaderLocksGuard, take_from_readers};

/// How long a rollback waits for the end of requests before it frees the removed overlay's space.
const MAX_WAIT: Duration = Duration::from_secs(2);

/// The interval of the checks during that wait.
const LOOK: Duration = Duration::from_millis(10);

/// The result of a rollback.
pub struct RolledBack {
    /// The image that is the disk again.
    pub layer: PathBuf,
    /// The image that was removed.
    pub overlay: PathBuf,
    /// For how long changes were held off.
    pub pause: Pause,
}

/// The outcome of a rollback that failed.
enum Failed {
    /// The disk continues in its overlay.
    Unchanged(Error),
    /// The overlay is removed, but may reappear after a power loss.
    Unknown(Error),
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Unchanged(error)
    }
}

/// Whether `image`, or one of its backing files, is the one at this depth of the chain of
/// `other`.
pub fn reads_layer_of(image: &StoredImage, other: &StoredImage, depth: usize) -> bool {
    let wanted = other.layer().layers().nth(depth).and_then(identity_of_layer);
    let Some(wanted) = wanted else { return false };
    image.layer().layers().filter_map(identity_of_layer).any(|one| one == wanted)
}

fn identity_of_layer(layer: &Layer<ImageStorage>) -> Option<crate::open_location::Identity> {
    identity_of(layer.data().storage().as_file()?).ok()
}

/// Returns a disk in use to its backing file, the layer of a fork, and removes the overlay of that
/// fork with all its data. `options` are those that the disk was opened with. Needs the event loop
/// of the current thread.
///
/// # Errors
/// The error names the disk or file: the disk's top image was not made by a fork, the layer has
/// other overlays or another size than the disk, or host errors. The disk then continues as before.
/// But it becomes read-only if the overlay's removal may or may not survive a power loss.
pub fn roll_back<'a>(
    disk: &'a ImageDisk,
    options: &'a ImageOptions,
) -> LocalBoxFuture<'a, Result<RolledBack>> {
    rare(async move {
        let (layer, overlay) = check_rollback(disk)?;
        let (lower, locks) = open_lower(disk, &layer, options).await?;
        match go_back(disk, &lower, &layer, &overlay).await {
            Ok(pause) => {
                locks.keep();
                Ok(RolledBack { layer, overlay, pause })
            }
            Err(Failed::Unchanged(error)) => {
                if let Err(error) = end_rollback(&layer) {
                    tracing::warn!("{error}");
                }
                if let Err(error) = lower.close().await {
                    tracing::warn!("{error}");
                }
                Err(error)
            }
            Err(Failed::Unknown(error)) => Err(error),
        }
    })
}

/// The canonical paths of the layer and of the overlay.
fn check_rollback(disk: &ImageDisk) -> Result<(PathBuf, PathBuf)> {
    let name = disk.image().image_name().to_owned();
    let refuse = |what: String, hint: &'static str| {
        Err(Error::new(ErrorKind::InvalidInput, what).on(&name).hint(hint))
    };
    disk.check_writable()?;
    disk.check_stays()?;
    if disk.jobs().base().is_some() {
        let what = "its backing file is open for writing since a commit that did not complete";
        return refuse(what.into(), "commit it again and complete that");
    }
    let (Some(file), Some(behind)) = (disk.image().file(), disk.image().layer().backing_layer())
    else {
        return refuse("stands on no layer".into(), "only a fork leaves one");
    };
    let (layer, overlay) = (canonical(behind.image_name())?, canonical(&name)?);
    let is_plain = overlay.to_str().is_some_and(|text| !text.contains(['\n', '\u{fffd}']));
    if forked_to(&layer)?.as_deref() != overlay.to_str() || !is_plain {
        let what =
            format!("no fork of {} has made it, as far as a record there says", layer.display());
        return refuse(what, "a commit brings it into the layer instead");
    }
    check_not_committed(&layer)?;
    if identity_of(&HostFile::open(&overlay, OpenMode::ReadOnly, PageCache::Used)?)?
        != identity_of(file)?
    {
        let what = "is another file than the one that is in use, which had its path";
        return refuse(what.into(), "give the image its name back");
    }
    check_only_over(&layer, &overlay)?;
    if disk.image().layer().opened().are_shared() {
        let what =
            format!("{} is the layer of other disks of this server as well", layer.display());
        return refuse(what, "remove these first, or make them independent (stream)");
    }
    Ok((layer, overlay))
}

/// Opens the layer of a disk for writing. The new opening gets the locks of the read-only opening.
async fn open_lower(
    disk: &ImageDisk,
    layer: &Path,
    options: &ImageOptions,
) -> Result<(Arc<StoredImage>, ReaderLocksGuard)> {
    let Some(behind) = disk.image().layer().backing_layer() else {
        return Err(Error::new(ErrorKind::InvalidInput, "stands on no layer").on(disk.name()));
    };
    let format = if behind.format().side_file().is_some() {
        Some(blockhouse_disk::ImageFormat::Raw)
    } else {
        behind.format().name().parse().ok()
    };
    let options =
        ImageOptions { format, access: Access::ReadWrite, copy_on_read: false, ..options.clone() };
    let guard = ReaderLocksGuard::new(behind, options.locking);
    let take_locks = |file: &_| take_from_readers(behind, file, &options);
    let lower = Arc::new(open_layer_again(layer, &options, take_locks).await?);
    let guard = guard.of_opened(&lower);
    Ok((lower, guard))
}

async fn go_back(
    disk: &ImageDisk,
    lower: &Arc<StoredImage>,
    layer: &Path,
    overlay: &Path,
) -> Result<Pause, Failed> {
    disk.check_replacement(lower)?;
    record_rollback(layer, overlay)?;
    let began = Instant::now();
    let quiesced = disk.quiesced().await?;
    // The disk may have become read-only or longer since the checks before.
    disk.check_writable()?;
    disk.check_replacement(lower)?;
    quiesced.note_own_parts_in(lower).await?;
    let failed = |error| Error::host("cannot remove", error).on(&overlay.to_string_lossy());
    remove_file(overlay).map_err(failed)?;
    if let Err(error) = sync_folder(overlay) {
        quiesced.retire(layer.display().to_string());
        return Err(Failed::Unknown(error));
    }
    let replaced = quiesced.go_back_to(Arc::clone(lower)).await?;
    let pause = Pause { length: began.elapsed() };
    let forgotten =
        forget_moved(layer).and(replaced.image().state().map_or(Ok(()), |state| state.remove()));
    let forgotten = forgotten.and(name_again(lower, layer, overlay));
    forgotten.unwrap_or_else(|error| tracing::warn!("{error}"));
    disk.jobs().unlock_former();
    give_back_space(disk, &replaced).await;
    Ok(pause)
}

/// In records further down the chain, replaces the name of the removed overlay by the layer's name.
/// A commit of layers leaves such a record, if it was about to remove the images between from the
/// chain.
fn name_again(lower: &StoredImage, layer: &Path, overlay: &Path) -> Result<()> {
    for below in lower.layer().layers().skip(1).filter(|below| identity_of_layer(below).is_some()) {
        let below = Path::new(below.image_name());
        if forked_to(below)?.as_deref() == overlay.to_str() {
            // The commit may have copied a part of the layer into this image.
            record_committed(below, layer)?;
        }
    }
    Ok(())
}

/// Frees the space of a removed overlay, whose file stays open as long as its disk. First waits
/// until the disk has no request in flight, because older requests may read the overlay. After a
/// time limit, the space is freed only when the disk is closed.
async fn give_back_space(disk: &ImageDisk, overlay: &ReplacedImage<'_, ImageStorage>) {
    if !requests_ended(disk).await {
        let name = overlay.image().layer().name();
        return tracing::info!("{name}: its space is free when the disk is closed");
    }
    for file in overlay.image().layer().format().storage().storage().files() {
        if let Err(error) = give_space_back(file) {
            tracing::warn!("{error}");
        }
    }
}

/// Frees the space of a removed file that is still open, unless the file has another name.
///
/// # Errors
/// The host's; the message names the file.
pub(crate) fn give_space_back(file: &HostFile) -> Result<()> {
    let is_removed = rustix::fs::fstat(file.descriptor()).map(|status| status.st_nlink == 0);
    let given_back = match is_removed {
        Ok(true) => rustix::fs::ftruncate(file.descriptor(), 0),
        other => other.map(drop),
    };
    given_back
        .map_err(|error| Error::host("cannot give its space back", error.into()).on(file.name()))
}

/// Waits until no request of a disk is in flight, up to a limit. Returns whether all have ended.
pub(crate) async fn requests_ended(disk: &ImageDisk) -> bool {
    let began = Instant::now();
    while disk.stats().counters().in_flight > 0 {
        if began.elapsed() > MAX_WAIT {
            return false;
        }
        sleep(LOOK).await;
    }
    true
}
