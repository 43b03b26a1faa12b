//! Images to which nothing was written. A disk may continue in such an image that another program
//! has made. While the overlay of a fork is such an image, the disk reads as its layer.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhouse_core::{ByteRange, Error, ErrorKind, Extent, ExtentState, IoVector, Result};
use blockhouse_disk::{ChangeId, ChangeObserver, ChangeWait, ImageDisk, Layer};
use blockhouse_format::Intent;
use blockhouse_storage::ImageStorage;

use crate::moved_record::{forked_to, has_commit_begun};
use crate::open_location::path_in_use;

/// Refuses an image with data of its own: a disk that continues in it would read that data.
pub(crate) async fn check_unwritten(image: &ImageDisk) -> Result<()> {
    let Some(extent) = first_written(image).await? else { return Ok(()) };
    let what = "was written to, and a disk that goes on in it would read that";
    let error = Error::new(ErrorKind::InvalidInput, what).on(image.image().image_name());
    Err(error.at(extent.guest.offset()).hint("name an image without data"))
}

/// The first extent that the image does not leave to its backing file.
async fn first_written(disk: &ImageDisk) -> Result<Option<Extent>> {
    let mut rest = ByteRange::between(0, disk.size());
    while !rest.is_empty() {
        let extent = disk.format().map(rest, Intent::Read).await?;
        if !matches!(extent.state, ExtentState::Hole | ExtentState::Backing) {
            return Ok(Some(extent));
        }
        rest = rest.skip(extent.guest.length());
    }
    Ok(None)
}

/// A disk whose overlay has nothing of its own: further overlays of its layer have the content of
/// the disk.
pub(crate) struct UnwrittenOverlay<'a> {
    disk: &'a ImageDisk,
    overlay: PathBuf,
    layer: Arc<Layer<ImageStorage>>,
    path: PathBuf,
    format: String,
    watch: Arc<Watch>,
}

impl<'a> UnwrittenOverlay<'a> {
    /// The overlay of this disk, which is watched from now on; `overlay` is the canonical path of
    /// the disk's image. `None` if the image has something that the layer lacks, if the layer is
    /// not durable or no file of this host, or if no fork has made the image. Reason: a rollback
    /// removes the image, and needs the record of a fork.
    ///
    /// # Errors
    /// Errors of reading the metadata; `Io` if changes in flight take too long.
    pub(crate) async fn of(disk: &'a ImageDisk, overlay: &Path) -> Result<Option<Self>> {
        let image = disk.image();
        let format = image.backing_file().and_then(|backing| backing.format.clone());
        let layer = image.layer().opened().now().next();
        let (Some(format), Some(layer)) = (format, layer) else { return Ok(None) };
        let is_settled = !image.has_unstable_layer() && image.size() == layer.size();
        let file = layer.format().storage().storage().as_file().filter(|_| is_settled);
        let path = file.and_then(|file| path_in_use(file, layer.name()).ok());
        let Some(path) = path else { return Ok(None) };
        let is_recorded = forked_to(&path)?.is_some_and(|to| Path::new(&to) == overlay);
        if !is_recorded
            || has_commit_begun(&path)?
            || !disk.snapshots().list().await?.is_empty()
            || !disk.bitmaps().list().await?.is_empty()
        {
            return Ok(None);
        }
        // The disk is quiesced for the observer only if nothing was written to the overlay.
        if first_written(disk).await?.is_some() {
            return Ok(None);
        }
        let (layer, watch) = (Arc::clone(layer), Arc::new(Watch::default()));
        let observer: Arc<dyn ChangeObserver> = Arc::<Watch>::clone(&watch);
        disk.jobs().observe(observer).await?;
        let overlay = overlay.to_owned();
        let shared = Self { disk, overlay, layer, path, format, watch };
        Ok(first_written(disk).await?.is_none().then_some(shared))
    }

    /// The canonical path of the disk's image.
    pub(crate) fn overlay(&self) -> &Path {
        &self.overlay
    }

    /// The layer.
    pub(crate) fn layer(&self) -> &Arc<Layer<ImageStorage>> {
        &self.layer
    }

    /// The canonical path of the layer's file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The name of the layer's format.
    pub(crate) fn format(&self) -> &str {
        &self.format
    }

    /// Whether a change of the disk has begun.
    pub(crate) fn is_written(&self) -> bool {
        self.watch.0.load(Ordering::SeqCst)
    }
}

impl Drop for UnwrittenOverlay<'_> {
    fn drop(&mut self) {
        let observer: Arc<dyn ChangeObserver> = Arc::<Watch>::clone(&self.watch);
        self.disk.jobs().stop_observing(&observer);
    }
}

/// Remembers that a change has begun.
#[derive(Default)]
struct Watch(AtomicBool);

impl ChangeObserver for Watch {
    fn begins(&self, _range: ByteRange, _bytes: Option<&IoVector>) -> ChangeId {
        self.0.store(true, Ordering::SeqCst);
        0
    }

    fn completed(&self, _change: ChangeId, _range: ByteRange) -> Option<ChangeWait> {
        None
    }

    fn abandoned(&self, _change: ChangeId, _range: ByteRange) {}
}
