//! The disks that the command line or the configuration asks for, to be compared with the
//! configuration at the next reload.

use std::path::{Path, PathBuf};

use blockhouse_config::disk::DiskConfig;
use parking_lot::Mutex;

/// The configuration of a server.
pub(crate) struct Configuration {
    path: Option<PathBuf>,
    disks: Mutex<Vec<DiskConfig>>,
}

impl Configuration {
    /// A configuration without disks. `path`: the file that reloads read.
    pub(super) fn new(path: Option<PathBuf>) -> Self {
        Self { path, disks: Mutex::default() }
    }

    /// The file that reloads read.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The requested disks.
    pub(crate) fn disks(&self) -> Vec<DiskConfig> {
        self.disks.lock().clone()
    }

    /// Sets the requested disks.
    pub(crate) fn set(&self, disks: Vec<DiskConfig>) {
        *self.disks.lock() = disks;
    }
}
