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
use crate::reader_locks::{ReaderLocksGuard, check_alone, lock_readers};

/// Opens for writing the images that a commit of layers of `disk` changes; the disk was opened with
/// `options`, and its image is at `path`. Other programs cannot open these images, not even for
/// reading. The caller must [end](end_layer_commit) the commit in every case. If the future is
/// dropped, others may read the images again. Needs the event loop of the current thread.
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
        let (lower, lower_guard) = match opener.open(base, Purpose::Disk).await {
            Ok(lower) => lower,
            Err(error) => {
                give_back(upper).await;
                return Err(error);
            }
        };
        let (file, name) = (lower.image().file().is_some(), lower.image().image_name().to_owned());
        let (opened, upper_guard) = upper.unzip();
        let made = LayerCommit::new(Arc::clone(disk), left_out, opened.clone(), Arc::clone(&lower));
        let commit = match made {
            Ok(commit) => commit,
            Err(error) => {
                give_back(Some((lower, lower_guard))).await;
                give_back(opened.zip(upper_guard)).await;
                return Err(error);
            }
        };
        // From now on the disk reads the base through its new opening.
        lower_guard.keep();
        let lower_guard = guard_of(lower.image().layer(), &lower, &options);
        let base = Some(PathBuf::from(name)).filter(|base| file && is_forked(base));
        let begin = commit.begin(|| match &base {
            Some(base) => record_committed(base, opener.path_of(left_below(&commit))),
            None => Ok(()),
        });
        if let Err(error) = begin.await {
            end_layer_commit(&commit, &options).await;
            return Err(error);
        }
        lower_guard.keep();
        upper_guard.into_iter().for_each(ReaderLocksGuard::keep);
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

    async fn open(&self, depth: usize, purpose: Purpose) -> Result<Opened> {
        let options = self.options.clone().for_purpose(purpose);
        let image = open_behind(&self.layers[..depth], self.path_of(depth - 1), options).await?;
        let opened = Arc::new(Disk::new(image));
        let Some(layer) = self.layers[depth - 1].backing_layer() else {
            unreachable!("it was opened")
        };
        let guard = guard_of(layer, &opened, self.options);
        Ok((opened, guard))
    }
}

/// An image that is open for writing, and the guard of its layer's locks.
type Opened = (Arc<ImageDisk>, ReaderLocksGuard);

/// The guard of the locks of `layer` while `opened` has them.
fn guard_of(
    layer: &Arc<Layer<ImageStorage>>,
    opened: &ImageDisk,
    options: &ImageOptions,
) -> ReaderLocksGuard {
    ReaderLocksGuard::new(layer, options.locking).of_opened(opened.image())
}

/// Closes an image to which nothing was written, and locks its layer again.
async fn give_back(opened: Option<Opened>) {
    let Some((opened, _guard)) = opened else { return };
    if let Err(error) = opened.close().await {
        tracing::warn!("{error}");
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::task::Poll;
    use std::time::Duration;

    use blockhouse_disk::ImageFormat;
    use blockhouse_engine::{EngineChoice, EventLoop, is_byte_locked, sleep};
    use blockhouse_format::qcow2::{Backing, CreateOptions};
    use futures_util::poll;

    use super::*;
    use crate::create::{create, create_qcow2};
    use crate::further_base::find_layers;
    use crate::open_image::open;

    /// The byte that a writer locks.
    const WRITES: u64 = 101;
    /// The byte that keeps others from writing.
    const REFUSES_WRITES: u64 = 201;

    fn is_locked(path: &Path, byte: u64) -> bool {
        is_byte_locked(File::open(path).unwrap().as_fd(), byte).unwrap()
    }

    #[test]
    fn a_beginning_that_is_dropped_leaves_the_layers_locked() {
        let folder = tempfile::tempdir().unwrap();
        let [base, top, above, path] =
            ["base", "top", "above", "disk"].map(|name| folder.path().join(name));
        let changed = [&base, &above];
        EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
            create(&base, 1 << 20, ImageFormat::Qcow2).await.unwrap();
            for (name, image) in [("base", &top), ("top", &above), ("above", &path)] {
                let backing = Backing { name: name.into(), format: Some("qcow2".into()) };
                // The base becomes longer when the commit begins.
                let new = CreateOptions { backing: Some(backing), ..CreateOptions::new(2 << 20) };
                create_qcow2(image, &new, Default::default()).await.unwrap();
            }
            let format = Some(ImageFormat::Qcow2);
            let options = ImageOptions { format, ..ImageOptions::default() };
            let disk = Arc::new(open(&path, options.clone()).await.unwrap());
            for steps in (0..).map(|round| (2 + round % 2) << (round / 2)) {
                let left_out = find_layers(&disk, &top, None, None).unwrap();
                let mut begin = begin_layer_commit(&disk, left_out, &path, &options);
                let mut begun = Poll::Pending;
                for _ in 0..steps {
                    begun = poll!(&mut begin);
                    if begun.is_ready() {
                        break;
                    }
                    blockhouse_core::yield_now().await;
                }
                drop(begin);
                if let Poll::Ready(commit) = begun {
                    assert!(changed.iter().all(|path| is_locked(path, WRITES)));
                    end_layer_commit(&commit.unwrap(), &options).await;
                    break;
                }
                let are_kept = changed.iter().all(|path| is_locked(path, REFUSES_WRITES));
                assert!(are_kept, "dropped after {steps} steps");
                // The last operation of the opening ends.
                while changed.iter().any(|path| is_locked(path, WRITES)) {
                    sleep(Duration::from_millis(1)).await;
                }
                let are_kept = changed.iter().all(|path| is_locked(path, REFUSES_WRITES));
                assert!(are_kept, "some time after the drop after {steps} steps");
            }
            assert!(changed.iter().all(|path| is_locked(path, REFUSES_WRITES)));
            assert!(!changed.iter().any(|path| is_locked(path, WRITES)));
        });
    }
}
