//! The images of a commit: which of a chain are merged into which.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use blockhouse_disk::ImageDisk;
use blockhouse_engine::is_same_file;

use crate::running::RunningDisk;

/// The request for a commit of one disk.
#[derive(Clone, Debug, Default)]
pub(crate) struct CommitSetup {
    /// The highest image that is merged; `None`: that of the disk.
    pub(crate) top: Option<PathBuf>,
    /// The image that gets all of it; `None`: the one below, of layers the last one of the chain.
    pub(crate) base: Option<PathBuf>,
    /// The base's name in the header of the image above the layers; `None`: its path.
    pub(crate) backing_file: Option<String>,
    /// Whether what is encrypted may be stored in the clear.
    pub(crate) decrypt: bool,
    /// Whether the files that the chain has left are removed.
    pub(crate) delete: bool,
}

impl CommitSetup {
    /// The highest one, if it is not the image of the disk.
    pub(super) fn layer(&self, source: &RunningDisk) -> Option<&Path> {
        self.top.as_deref().filter(|top| !is_same_file(top, &source.path()))
    }

    /// Refuses what is possible for layers alone.
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
