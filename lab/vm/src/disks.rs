//! Files that are the disks of guests.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tempfile::TempDir;

use super::base::Base;

/// The disks of a scenario; removed when this is dropped.
pub struct Disks {
    folder: TempDir,
}

impl Disks {
    /// Makes a folder for the disks, in the cache.
    pub fn new(base: &Base) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("disks-").tempdir_in(base.cache());
        Ok(Self { folder: folder.context("cannot make a folder for disks")? })
    }

    /// The path of the disk `name`.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A new disk of `size` bytes, all zeros, without allocated space.
    pub fn empty(&self, name: &str, size: u64) -> Result<PathBuf> {
        let path = self.path(name);
        let make = |path: &Path| File::create(path)?.set_len(size);
        make(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(path)
    }
}
