//! The configuration of a server, which reloads read.

use std::path::{Path, PathBuf};

use blockhouse_config::disk::DiskConfig;
use blockhouse_disk::Access;
use parking_lot::Mutex;

use super::export::RunningExport;

/// The configuration of a server. Each [`RunningDisk`](super::RunningDisk) has its own part.
pub(crate) struct Configuration {
    path: Option<PathBuf>,
    /// The disks that could not be opened again, neither with other options nor with the old ones.
    pub(super) lost: Mutex<Vec<ClosedDisk>>,
}

impl Configuration {
    /// A configuration. `path`: the file that reloads read.
    pub(super) fn new(path: Option<PathBuf>) -> Self {
        Self { path, lost: Mutex::default() }
    }

    /// The file that reloads read.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }
}

/// A disk that a reload has closed, as it was until then.
pub(super) struct ClosedDisk {
    /// The options that the file had for it.
    pub(super) old: DiskConfig,
    /// The options that open it as it was, with its limits, and without exports.
    pub(super) setup: DiskConfig,
    /// The canonical path of its image.
    pub(super) path: PathBuf,
    /// The write threshold that a request has set, in bytes.
    pub(super) write_threshold: Option<u64>,
    /// Whether clients may change it.
    pub(super) access: Access,
    /// Its exports, with their options.
    pub(super) exports: Vec<RunningExport>,
}
