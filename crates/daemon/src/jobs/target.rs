//! The target of a mirror: a new image, or an existing image that is overwritten.

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Result, bail};
use blockhouse_config::disk::DiskConfig;
use blockhouse_core::ErrorKind;
use blockhouse_disk::{ImageDisk, ImageFormat, mark_incomplete};
use blockhouse_images::{
    CacheMode, IfExists, ImageOptions, Purpose, StateUse, check_new_name, create, open,
    rename_durable,
};
use blockhouse_storage::Location;

/// The location and format of a mirror's target.
#[derive(Clone, Debug)]
pub(crate) struct TargetSetup {
    /// An absolute path, or the address of an image on another server.
    pub(crate) location: PathBuf,
    /// The target's format. `None`: for a file, its name decides; any other target is raw.
    pub(crate) format: Option<ImageFormat>,
    /// Whether an existing target is overwritten.
    pub(crate) overwrite: bool,
}

/// A target that is open.
pub(crate) struct Target {
    pub(crate) disk: Arc<ImageDisk>,
    /// Whether all of it reads as zeros.
    pub(crate) is_zero: bool,
    /// The file, if it was created for the mirror.
    pub(crate) created: Option<PathBuf>,
}

impl Target {
    /// Closes a target that no job uses, so that it leaves no state file, and removes a file that
    /// was created for it.
    pub(crate) async fn give_up(self) {
        // The caller reports why the target is not used, and it has no changes.
        let _ = self.disk.close().await;
        remove(self.created.as_deref());
    }
}

impl TargetSetup {
    /// Opens the target for a mirror of the disk with configuration `source` and `size` bytes.
    /// Creates the target first if it is a file that does not exist.
    ///
    /// # Errors
    /// The target exists and must not be overwritten, has another size, or cannot be opened.
    pub(crate) async fn open(
        &self,
        source: &DiskConfig,
        size: u64,
        state: StateUse,
    ) -> Result<Target> {
        let path = &*self.location;
        let is_remote = Location::is_remote(path.as_os_str().as_bytes());
        let format = match self.format {
            Some(format) => format,
            None if is_remote => ImageFormat::Raw,
            None => ImageFormat::for_new(path).map_err(|why| anyhow::anyhow!(why))?,
        };
        let created = self.create(source, is_remote, format, size).await?;
        let disk = match open_existing(path, format, source, state).await {
            Ok(disk) => Arc::new(disk),
            Err(error) => {
                remove(created.as_deref());
                return Err(error);
            }
        };
        let checked = check(&disk, size);
        let target = Target { disk, is_zero: created.is_some(), created };
        match checked {
            Ok(()) => Ok(target),
            Err(error) => {
                target.give_up().await;
                Err(error)
            }
        }
    }

    /// Creates the target's file if it does not exist, and returns its path. The file gets its name
    /// only after the mark of an incomplete mirror: so a crash leaves no empty disk that could be
    /// taken for the mirror.
    async fn create(
        &self,
        source: &DiskConfig,
        is_remote: bool,
        format: ImageFormat,
        size: u64,
    ) -> Result<Option<PathBuf>> {
        let path = &*self.location;
        let found = if is_remote { None } else { std::fs::metadata(path).ok() };
        if !is_remote && found.is_none() {
            check_new_name(path)?;
            let mut part = path.as_os_str().to_owned();
            part.push(".part");
            let part = PathBuf::from(part);
            create(&part, size, format).await?;
            let marked = async {
                let disk = open_existing(&part, format, source, StateUse::Off).await?;
                mark_incomplete(&disk, &source.path.to_string_lossy()).await?;
                disk.close().await?;
                Ok(rename_durable(&part, path, IfExists::Fail)?)
            };
            marked.await.inspect_err(|_: &anyhow::Error| remove(Some(&part)))?;
            return Ok(Some(path.to_owned()));
        }
        let what = match found {
            None => "an image on another server",
            Some(found) if found.file_type().is_block_device() => "a block device",
            Some(_) => "a file that exists",
        };
        if !self.overwrite {
            bail!(
                "{}: is {what}, and all that is in it would be lost; if that is meant, say overwrite",
                path.display()
            );
        }
        Ok(None)
    }
}

/// Removes a file that was created for a mirror that did not complete.
pub(super) fn remove(created: Option<&Path>) {
    if let Some(path) = created
        && let Err(error) = std::fs::remove_file(path)
    {
        tracing::warn!("{}: cannot remove what a job began: {error}", path.display());
    }
}

/// Opens the target with the options of its source, but through the page cache if the target does
/// not support direct I/O.
async fn open_existing(
    path: &Path,
    format: ImageFormat,
    source: &DiskConfig,
    state: StateUse,
) -> Result<ImageDisk> {
    let options = ImageOptions {
        // The format is given and not detected, because the present content is overwritten.
        format: Some(format),
        access: source.access(),
        cache: source.cache,
        discard: source.discard,
        detect_zeroes: source.detect_zeroes,
        block_sizes: source.block_sizes().map_err(anyhow::Error::msg)?,
        state,
        remote_backing: source.remote_backing(),
        secrets: source.keys().read()?,
        purpose: Purpose::Image,
        // Writes that get ENOSPC are not held here: the job handles ENOSPC itself.
        ..ImageOptions::default()
    };
    match open(path, options.clone()).await {
        Err(error)
            if source.cache == CacheMode::None
                && matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::InvalidInput) =>
        {
            let options = ImageOptions { cache: CacheMode::Writeback, ..options };
            Ok(open(path, options).await?)
        }
        opened => Ok(opened?),
    }
}

/// Refuses a target that cannot be a mirror of a disk of this size.
pub(super) fn check(disk: &ImageDisk, size: u64) -> Result<()> {
    if disk.size() != size {
        bail!(
            "{}: has {} bytes, and the disk has {size}; a mirror is as long as its disk: resize one of them",
            disk.name(),
            disk.size()
        );
    }
    if disk.image().backing_file().is_some() {
        bail!("{}: has a backing file, and a mirror stands alone; use another image", disk.name());
    }
    Ok(())
}
