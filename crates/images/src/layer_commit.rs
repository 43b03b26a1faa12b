//! A commit of layers of a served disk, for files of the host: opens and locks the files, and
//! writes the record beside the base.
//!
//! Guarantees: nothing is written if another image is known to use one of the layers as its backing
//! file. If the base is the layer of a fork, a record is beside it. Until the base is complete, the
//! record says that the base no longer holds the content of the fork. Afterwards it says that the
//! image above was made over the base.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockhouse_core::{Result, rare};
use blockhouse_disk::{Disk, FurtherBase, ImageDisk, Layer, LayerCommit};
use blockhouse_engine::HostFile;
use blockhouse_storage::ImageStorage;
use futures_util::future::LocalBoxFuture;

use crate::image_options::{ImageOptions, Purpose};
use crate::images_over::check_only_over;
use crate::lock::become_reader;
use crate::moved_record::{has_commit_begun, is_forked, record_committed, record_forked};
use crate::open_image::open_behind;
use crate::reader_locks::{check_alone, lock_readers};

/// Opens for writing the images that a commit of layers of `disk` changes; the disk was opened with
/// `options`, and its image is at `path`. Other programs cannot open these images, not even for
/// reading. The caller must [end](end_layer_commit) the commit in every case. Needs the event loop
/// of the current thread.
///
/// # Errors
/// As [`open_base`](crate::open_base), of the base and of the image above the layers;
/// `InvalidInput` if one of them is the backing file of an image in their folders; `Io` if reads in
/// flight take too long; errors of making the base longer. The disk continues as before.
pub fn begin_layer_commit<'a>(
    disk: &'a Arc<ImageDisk>,
    left_out: FurtherBase,
    path: &'a Path,
    options: &'a ImageOptions,
) -> LocalBoxFuture<'a, Result<LayerCommit<ImageStorage>>> {
    rare(async move {
        let layers: Vec<_> = disk.image().layer().layers().collect();
        let (above, base) = (left_out.above(), left_out.above() + left_out.steps());
        check_layers(&layers[above..=base])?;
        // The layers between are checked, too, because other disks of this process might read them.
        layers[above.max(1)..=base].iter().try_for_each(|layer| check_alone(layer))?;
        let options = ImageOptions { copy_on_read: false, ..options.clone() };
        let opener = Opener { layers: &layers, path, options: &options };
        let upper = match above {
            0 => None,
            _ => Some(opener.open(above, Purpose::Image).await?),
        };
        let lower = match opener.open(base, Purpose::Disk).await {
            Ok(lower) => lower,
            Err(error) => {
                opener.give_back(upper.as_deref(), above).await;
                return Err(error);
            }
        };
        let (file, name) = (lower.image().file().is_some(), lower.image().image_name().to_owned());
        let made = LayerCommit::new(Arc::clone(disk), left_out, upper.clone(), Arc::clone(&lower));
        let commit = match made {
            Ok(commit) => commit,
            Err(error) => {
                opener.give_back(Some(&lower), base).await;
                opener.give_back(upper.as_deref(), above).await;
                return Err(error);
            }
        };
        let base = Some(PathBuf::from(name)).filter(|base| file && is_forked(base));
        let begin = commit.begin(|| match &base {
            Some(base) => record_committed(base, opener.path_of(left_below(&commit))),
            None => Ok(()),
        });
        if let Err(error) = begin.await {
            end_layer_commit(&commit, &options).await;
            return Err(error);
        }
        let [above, top] = [above, above + 1].map(|depth| opener.path_of(depth).to_owned());
        Ok(commit.before_naming(move || match &base {
            // If a commit into the highest layer has begun, the base gets its changes as well.
            Some(base) if has_commit_begun(&top)? => record_committed(base, &above),
            Some(base) => record_forked(base, &above),
            None => Ok(()),
        }))
    })
}

/// The depth of the image directly over the base until the commit is complete.
fn left_below(commit: &LayerCommit<ImageStorage>) -> usize {
    commit.left_out().above() + commit.left_out().steps() - 1
}

/// Refuses layers that are the backing file of an image other than the one above them.
pub(crate) fn check_layers(layers: &[&Layer<ImageStorage>]) -> Result<()> {
    let is_file = |layer: &Layer<ImageStorage>| layer.data().storage().as_file().is_some();
    let pairs = layers.windows(2).filter(|pair| is_file(pair[1]));
    pairs
        .map(|pair| [pair[0], pair[1]].map(|layer| Path::new(layer.image_name())))
        .try_for_each(|[above, layer]| check_only_over(layer, above))
}

/// Ends a commit of layers, complete or not. The commit must have no requests in flight. Afterwards
/// other programs may read the images that it has changed. Errors are logged.
pub async fn end_layer_commit(commit: &LayerCommit<ImageStorage>, options: &ImageOptions) {
    if let Err(error) = commit.end().await {
        tracing::warn!("{error}");
    }
    files_of(commit.base()).into_iter().for_each(become_reader);
    let layer = commit.disk().image().layer().layers().nth(commit.left_out().above());
    if let (Some(above), Some(layer)) = (commit.above(), layer) {
        read_again(above, layer, options);
    }
}

fn files_of(disk: &ImageDisk) -> Vec<&HostFile> {
    let (image, data) = (disk.image().format().storage(), disk.image().format().data());
    [image, data].into_iter().flat_map(|tracker| tracker.storage().files()).collect()
}

/// Replaces the lock of an image that was open for writing by a reader's lock of its layer.
fn read_again(opened: &ImageDisk, layer: &Layer<ImageStorage>, options: &ImageOptions) {
    files_of(opened).into_iter().for_each(become_reader);
    lock_readers(layer, options.locking);
}

/// Opens images of a chain again.
struct Opener<'a> {
    layers: &'a [&'a Layer<ImageStorage>],
    /// The path of the first image.
    path: &'a Path,
    options: &'a ImageOptions,
}

impl Opener<'_> {
    fn path_of(&self, depth: usize) -> &Path {
        if depth == 0 { self.path } else { Path::new(self.layers[depth].image_name()) }
    }

    async fn open(&self, depth: usize, purpose: Purpose) -> Result<Arc<ImageDisk>> {
        let options = self.options.clone().for_purpose(purpose);
        let image = open_behind(&self.layers[..depth], self.path_of(depth - 1), options).await?;
        Ok(Arc::new(Disk::new(image)))
    }

    /// Closes an image to which nothing was written.
    async fn give_back(&self, opened: Option<&ImageDisk>, depth: usize) {
        let Some(opened) = opened else { return };
        if let Err(error) = opened.close().await {
            tracing::warn!("{error}");
        }
        read_again(opened, self.layers[depth], self.options);
    }
}
