//! The file or device that a measurement writes to, and the removal of its files.
//!
//! The measurement writes to a new folder with a unique name, in the folder that the user gave or
//! next to the file; dropping the [`Target`] removes the new folder. An existing file or block
//! device is written to only if the user says that its data may be destroyed, and it is locked
//! meanwhile.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use blockhouse_core::{Buffer, Durability, Request, rare};
use blockhouse_disk::{Access, ImageDisk, ImageFormat, Options};
use blockhouse_engine::{EngineChoice, EventLoop};
use blockhouse_images::{CacheMode, ImageOptions, StateUse, create, open_storage};
use blockhouse_storage::ImageStorage;
use rustix::fs::{Mode, OFlags};
use tempfile::TempDir;

use super::stop::Stop;
use crate::open_args::read_only;
use blockhouse_config::size;

/// Bytes of one write while the file is filled.
const CHUNK_SIZE: usize = 1 << 20;

/// The treatment of existing data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExistingData {
    /// The data is kept.
    Kept,
    /// The data may be overwritten.
    Destroyed,
}

/// The place that the measurement writes to.
#[derive(Debug)]
pub struct Target {
    kind: TargetKind,
}

#[derive(Debug)]
enum TargetKind {
    Folder(TempDir),
    /// A file or a block device. The disk that is measured opens a device exclusively, so it is not
    /// mounted meanwhile.
    Existing(PathBuf),
}

impl Target {
    /// Checks the path. Creates only the folder, and only if `space` bytes are free.
    ///
    /// # Errors
    /// No space, no permission, or a path that must not be written to. The error says what to do.
    pub fn at(path: &Path, data: ExistingData, space: u64) -> Result<Self> {
        let kind = std::fs::metadata(path).map(|metadata| metadata.file_type());
        let (is_folder, is_device) = match &kind {
            Ok(kind) => (kind.is_dir(), kind.is_block_device()),
            Err(_) => (false, false),
        };
        if data == ExistingData::Destroyed {
            ensure!(!is_folder, "{}: is a folder; --destroy-data wants a file", path.display());
            kind.with_context(|| format!("{}: cannot be written over", path.display()))?;
            return Ok(Self { kind: TargetKind::Existing(path.to_owned()) });
        }
        if is_device {
            bail!(
                "{}: is a block device, whose data would be lost; if that is wanted, say \
                 --destroy-data",
                path.display()
            );
        }
        let parent = match path.parent() {
            Some(parent) if parent != Path::new("") => parent,
            _ => Path::new("."),
        };
        let folder = if is_folder { path } else { parent };
        let system = rustix::fs::statvfs(folder).map_err(|error| {
            let name = folder.display();
            anyhow::anyhow!("{name}: no place for a new file: {error}; name a folder with --file")
        })?;
        let free = system.f_bavail.saturating_mul(system.f_frsize);
        ensure!(
            free >= space,
            "{}: {} are needed and {} are free; give another place with --file",
            folder.display(),
            size::show(space),
            size::show(free)
        );
        let folder = tempfile::Builder::new()
            .prefix(".blockhouse-bench-")
            .tempdir_in(folder)
            .with_context(|| format!("{}: cannot make a folder in it", folder.display()))?;
        Ok(Self { kind: TargetKind::Folder(folder) })
    }

    /// The folder for new files; `None` if an existing file is overwritten.
    pub fn folder(&self) -> Option<&Path> {
        match &self.kind {
            TargetKind::Folder(folder) => Some(folder.path()),
            TargetKind::Existing(_) => None,
        }
    }

    /// The folder that the user named, or the file or device that is overwritten, for messages.
    pub fn place(&self) -> String {
        let path = match &self.kind {
            TargetKind::Folder(folder) => folder.path().parent().unwrap_or(folder.path()),
            TargetKind::Existing(path) => path,
        };
        std::path::absolute(path).as_deref().unwrap_or(path).display().to_string()
    }

    /// Whether files in the folder can be opened for direct I/O.
    pub fn takes_direct_io(&self) -> bool {
        let flags = OFlags::RDWR | OFlags::DIRECT | OFlags::CLOEXEC;
        match &self.kind {
            TargetKind::Folder(folder) => {
                let probe = folder.path().join("probe");
                let mode = Mode::RUSR | Mode::WUSR;
                let opened = rustix::fs::open(&probe, flags | OFlags::CREATE, mode);
                // If the removal fails, the file is removed later with the folder.
                let _ = std::fs::remove_file(&probe);
                opened.is_ok()
            }
            TargetKind::Existing(path) => rustix::fs::open(path, flags, Mode::empty()).is_ok(),
        }
    }

    /// The path for device statistics and messages.
    pub fn path(&self) -> &Path {
        match &self.kind {
            TargetKind::Folder(folder) => folder.path(),
            TargetKind::Existing(path) => path,
        }
    }

    /// A raw disk: a new one of `size` bytes, or the existing file or device. Its first `size`
    /// bytes are filled and flushed. The cache mode is `None` (direct I/O) if the file system
    /// supports it.
    ///
    /// # Errors
    /// Errors of the host; the existing file is too short; the user has asked to stop.
    pub fn new_disk(&self, size: u64, stop: &Stop) -> Result<(Arc<ImageDisk>, CacheMode)> {
        let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
        event_loop.block_on(async {
            let path = match &self.kind {
                TargetKind::Folder(folder) => {
                    let path = folder.path().join("disk.raw");
                    create(&path, size, ImageFormat::Raw).await?;
                    path
                }
                TargetKind::Existing(path) => path.clone(),
            };
            let (storage, cache) = open_direct(&path).await?;
            let disk = ImageDisk::raw(storage, Options::default())?;
            fill(&disk, size, stop).await?;
            Ok((Arc::new(disk), cache))
        })
    }
}

async fn open_direct(path: &Path) -> Result<(ImageStorage, CacheMode)> {
    let options = |cache| ImageOptions {
        access: Access::ReadWrite,
        cache,
        ..read_only(Some(ImageFormat::Raw), StateUse::Off)
    };
    let (direct, cached) = (CacheMode::None, CacheMode::Writeback);
    match open_storage(path, options(direct)).await {
        Ok(storage) => Ok((storage, direct)),
        Err(_) => Ok((open_storage(path, options(cached)).await?, cached)),
    }
}

/// Writes data everywhere. Otherwise reads of a hole would not reach the device, and measured
/// writes would have to allocate space.
async fn fill(disk: &ImageDisk, size: u64, stop: &Stop) -> Result<()> {
    ensure!(
        disk.size() >= size,
        "{}: has {}, and {} are needed",
        disk.name(),
        size::show(disk.size()),
        size::show(size)
    );
    let mut buffer = Buffer::new(CHUNK_SIZE);
    fastrand::Rng::with_seed(0).fill(buffer.bytes_mut());
    for offset in (0..size).step_by(CHUNK_SIZE) {
        stop.check()?;
        let from = buffer.lend();
        rare(disk.submit(Request::Write { offset, from, durability: Durability::None })).await?;
    }
    Ok(disk.flush().await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_existing_file_stays_and_the_folder_goes() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let precious = folder.path().join("precious");
        std::fs::write(&precious, "data")?;
        let target = Target::at(&precious, ExistingData::Kept, 1 << 20)?;
        let _disk = target.new_disk(1 << 20, &Stop::default())?;
        assert_eq!(std::fs::read(&precious)?, b"data");
        assert_eq!(std::fs::read_dir(folder.path())?.count(), 2);
        drop(target);
        assert_eq!(std::fs::read_dir(folder.path())?.count(), 1);
        Ok(())
    }

    #[test]
    fn too_little_room_is_told_before_anything_is_made() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let error = Target::at(folder.path(), ExistingData::Kept, u64::MAX).unwrap_err();
        assert!(error.to_string().contains("are needed"), "{error}");
        assert_eq!(std::fs::read_dir(folder.path())?.count(), 0);
        Ok(())
    }

    #[test]
    fn an_existing_file_is_written_over_when_asked_for() -> Result<()> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("file");
        std::fs::write(&file, vec![0; 1 << 20])?;
        let target = Target::at(&file, ExistingData::Destroyed, 0)?;
        let _disk = target.new_disk(1 << 20, &Stop::default())?;
        assert!(std::fs::read(&file)?.iter().any(|&byte| byte != 0));
        assert!(Target::at(folder.path(), ExistingData::Destroyed, 0).is_err());
        Ok(())
    }
}
