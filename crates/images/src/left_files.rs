//! Removes the files of layers that are no longer part of a chain.
//!
//! Guarantees: a file is removed only after its chain durably no longer includes it, and only if no
//! other image is known to use it as a backing file. The images of this process, of other processes
//! (by their locks), and in the file's folder are checked. The file's record is removed after the
//! file, so a crash leaves no file that could be taken for a disk.

use std::fs::remove_file;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_disk::{FurtherBase, ImageDisk, Layer};
use blockhouse_engine::FileKind;
use blockhouse_storage::ImageStorage;

use crate::durable_rename::sync_folder;
use crate::images_over::check_only_over;
use crate::layer_commit::check_layers;
use crate::lock::lock_for_writing;
use crate::moved_record::forget_moved;
use crate::open_location::{Identity, canonical, identity_of};
use crate::rollback::{give_space_back, requests_ended};

/// Files of layers to be removed. See the module's documentation.
pub struct LeftFiles(Vec<(PathBuf, Identity)>);

impl LeftFiles {
    /// The files of the layers in `left_out`, which the chain of `disk` still includes.
    ///
    /// # Errors
    /// `InvalidInput` if a file is another image's backing file (the error names that image), or if
    /// another file has its name now. `Unsupported` for layers that are not regular files, have
    /// snapshots, or keep their data in other files.
    pub async fn of(disk: &ImageDisk, left_out: &FurtherBase) -> Result<Self> {
        let layers: Vec<_> = disk.image().layer().layers().skip(left_out.above()).collect();
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
    /// read them, and must have released its locks. If a file cannot be removed, it and the files
    /// below it stay, and the log has the reason.
    pub fn remove(self) {
        self.remove_with(true);
    }

    /// As [`remove`](Self::remove), but requests in flight on `disk` may still read the file. If
    /// they do not end in time, the space is freed only when the disk closes the file.
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
                Err(error) if path.symlink_metadata().is_ok() => {
                    return tracing::warn!("{error}; it stays, as do the layers below it");
                }
                Err(error) => {
                    let path = path.display();
                    return tracing::warn!("{error}; {path} is removed, and the layers below stay");
                }
            }
        }
    }
}

fn remove(path: &Path, identity: &Identity, gives_back: bool) -> Result<()> {
    let refuse = |what: &str| {
        Err(Error::new(ErrorKind::InvalidInput, what.to_owned()).on(&path.to_string_lossy()))
    };
    // The lock ensures that no other program and no other disk of this process reads the file.
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
    give_space_back(&file)
}
