//! Removes the files of layers that are no longer part of a chain.
//!
//! Guarantees: a file is removed only when its chain, durably, no longer includes it, and no other
//! image is known to use it as a backing file: one of this process, one of another process (by its
//! lock), or one in its folder. Its record is removed last, so a crash leaves no file that could be
//! taken for a disk.

use std::fs::remove_file;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use blockhouse_core::{Error, ErrorKind, Result, Storage};
use blockhouse_engine::FileKind;
use blockhouse_storage::ImageStorage;

use super::durable_rename::sync_folder;
use super::image_disk::ImageDisk;
use super::images_over::check_only_over;
use super::layer_commit::check_layers;
use super::lock::lock_for_writing;
use super::moved_record::forget_moved;
use super::open_location::{Identity, canonical, identity_of};
use super::rollback::requests_ended;
use crate::disk::FurtherBase;
use crate::layer::Layer;

/// Files of layers to be removed. See the module's page.
pub struct LeftFiles(Vec<(PathBuf, Identity)>);

impl LeftFiles {
    /// The files of the layers in `left_out`, which the chain of `disk` still has.
    ///
    /// # Errors
    /// `InvalidInput` if one of them is another image's backing file, whose name is in the error,
    /// or if another file has its name; `Unsupported` for layers that are not files, have
    /// snapshots, or keep their data in other files.
    pub async fn of(disk: &ImageDisk, left_out: &FurtherBase) -> Result<Self> {
        let layers: Vec<_> = disk.image().layers().skip(left_out.above()).collect();
        let layers = &layers[..left_out.steps()];
        check_layers(layers)?;
        Self::of_layers(&layers[1..]).await
    }

    /// The file of the image of `disk`, which is about to be replaced.
    ///
    /// # Errors
    /// As [`of`](Self::of).
    pub async fn of_image(disk: &ImageDisk) -> Result<Self> {
        let layer = &**disk.image().layer();
        if disk.image().file().is_some() {
            let path = Path::new(layer.image_name());
            check_only_over(path, path)?;
        }
        Self::of_layers(&[layer]).await
    }

    async fn of_layers(layers: &[&Layer<ImageStorage>]) -> Result<Self> {
        let mut files = Vec::new();
        for layer in layers {
            let name = layer.image_name();
            let refuse = |kind, what: &str| {
                let error = Error::new(kind, what.to_owned()).on(name);
                Err(error.hint("leave the files where they are"))
            };
            let file = layer.format().storage().storage().as_file();
            let Some(file) = file.filter(|file| file.kind() == FileKind::Regular) else {
                return refuse(ErrorKind::Unsupported, "is no file that could be removed");
            };
            if layer.format().header().data_file().is_some() {
                return refuse(ErrorKind::Unsupported, "keeps its data in another file");
            }
            if !layer.format().snapshots()?.list().await?.is_empty() {
                return refuse(ErrorKind::Unsupported, "has snapshots, which would go with it");
            }
            let path = canonical(name)?;
            let identity = identity_of(file)?;
            if path.metadata().is_ok_and(|found| (found.dev(), found.ino()) != identity) {
                let what = "is another file than the one that is in use, which had its path";
                return refuse(ErrorKind::InvalidInput, what);
            }
            files.push((path, identity));
        }
        Ok(Self(files))
    }

    /// Removes the files, the highest one first, and frees their space. The chain must no longer
    /// read them, and must have released its locks. If one cannot be removed, it and those below it
    /// stay: the log says why.
    pub fn remove(self) {
        self.remove_with(true);
    }

    /// The same of a file that requests in flight on `disk` may read still: it is removed, and its
    /// space given back when they have ended.
    pub async fn remove_beside(self, disk: &ImageDisk) {
        let are_ended = requests_ended(disk).await;
        if !are_ended {
            tracing::info!(
                "{}: the space of its former image is free when it is closed",
                disk.name()
            );
        }
        self.remove_with(are_ended);
    }

    fn remove_with(self, gives_back: bool) {
        for (path, identity) in self.0 {
            match remove(&path, &identity, gives_back) {
                Ok(()) => {
                    tracing::info!("{}: was left by its chain, and is removed", path.display())
                }
                Err(error) => {
                    return tracing::warn!("{error}; it stays, as do the layers below it");
                }
            }
        }
    }
}

fn remove(path: &Path, identity: &Identity, gives_back: bool) -> Result<()> {
    let refuse = |what: &str| {
        Err(Error::new(ErrorKind::InvalidInput, what.to_owned()).on(&path.to_string_lossy()))
    };
    // Neither another program nor another disk of this process reads it.
    let file = lock_for_writing(path)?;
    if identity_of(&file)? != *identity {
        return refuse("is another file than the one that was in use, which had its path");
    }
    check_only_over(path, path)?;
    let failed = |error| Error::host("cannot remove", error).on(&path.to_string_lossy());
    remove_file(path).map_err(failed)?;
    sync_folder(path)?;
    forget_moved(path)?;
    if !gives_back {
        return Ok(());
    }
    // The disk keeps it open.
    let given_back = rustix::fs::ftruncate(file.descriptor(), 0);
    given_back
        .map_err(|error| Error::host("cannot give its space back", error.into()).on(file.name()))
}
