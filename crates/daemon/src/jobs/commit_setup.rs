//! The images of a commit: which images of a chain are merged into which image.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use blockhouse_disk::ImageDisk;
use blockhouse_engine::is_same_file;

use crate::running::RunningDisk;

/// The request for a commit of one disk.
#[derive(Clone, Debug, Default)]
pub(crate) struct CommitSetup {
    /// The highest image that is merged; `None`: the disk's image.
    pub(crate) top: Option<PathBuf>,
    /// The image into which the others are merged; `None`: the disk's backing file, or the last
    /// image of the chain if `top` is a layer.
    pub(crate) base: Option<PathBuf>,
    /// The base's name in the header of the image above the layers; `None`: its path.
    pub(crate) backing_file: Option<String>,
    /// Whether an encrypted image's data may be stored unencrypted.
    pub(crate) decrypt: bool,
    /// Whether the files that are no longer in the chain are removed.
    pub(crate) delete: bool,
}

impl CommitSetup {
    /// The highest image that is merged, if it is not the disk's own image.
    pub(super) fn layer(&self, source: &RunningDisk) -> Option<&Path> {
        self.top.as_deref().filter(|top| !is_same_file(top, &source.path()))
    }

    /// Refuses options that only a commit of layers has.
    pub(super) fn check_for_image(&self, source: &RunningDisk) -> Result<()> {
        if self.backing_file.is_some() {
            bail!(
                "only a commit of layers gives the base a name: say top, or leave backing-file out"
            );
        }
        let is_behind = |base: &Path| {
            let behind = source.disk.image().layer_at(1);
            behind.is_some_and(|behind| is_same_file(Path::new(behind.name), base))
        };
        if let Some(base) = self.base.as_deref().filter(|base| !is_behind(base)) {
            bail!(
                "{} is not the backing file of the disk's image, into which that is committed: commit the layers between \
                 the two first ('blockhouse ctl SOCKET commit DISK --top FILE --base FILE')",
                base.display()
            );
        }
        Ok(())
    }
}

/// Refuses a disk whose backing file is open for writing since a commit that did not complete.
pub(super) fn check_base_is_read(disk: &ImageDisk, name: &str) -> Result<()> {
    if disk.jobs().base().is_some() {
        bail!(
            "the backing file of the disk {name:?} is open for writing since a commit that did not complete; commit it again \
             and complete that, or close the disk and open it again"
        );
    }
    Ok(())
}
