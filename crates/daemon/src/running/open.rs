//! Opening the images that are served.

use std::cell::Cell;
use std::path::Path;

use anyhow::{Result, bail};
use blockhouse_config::disk::DiskConfig;
use blockhouse_config::server::StateSetup;
use blockhouse_core::{ByteRange, Error, ErrorKind};
use blockhouse_disk::{Access, ImageDisk, StateDir};
use blockhouse_images::{
    AllowedPaths, ImageOptions, Locking, NOT_KEPT, Purpose, Secrets, StateUse, create, exists,
    format_for_new, make_missing_side_file, open,
};
use futures_util::stream::{self, StreamExt};

/// The maximum number of disks that are opened at the same time. Opening several saves time,
/// because each open waits for the host's storage more than once.
const MAX_OPENINGS: usize = 32;

/// The use of the state that outlives the server, which will run as `user`. A directory that the
/// operator requests must be usable. Without the default directory the server warns that no state
/// is kept.
///
/// # Errors
/// The directory cannot be used.
pub(crate) fn state_use(
    state: &StateSetup,
    disks: &[DiskConfig],
    user: Option<u32>,
) -> Result<StateUse> {
    match (state, user) {
        (StateSetup::Dir(path), Some(user)) => {
            return Ok(StateUse::Keep(StateDir::create_for(path, user)?));
        }
        (StateSetup::Usual, Some(user)) => {
            return try_keep(StateDir::create_for(&StateDir::default_path_for(user), user));
        }
        _ => {}
    }
    match state {
        StateSetup::Off => Ok(StateUse::Off),
        StateSetup::Dir(path) => Ok(StateUse::Keep(StateDir::create(path)?)),
        StateSetup::Usual if disks.iter().all(DiskConfig::is_read_only) => {
            Ok(StateDir::find_default().map_or(StateUse::Look(None), StateUse::TryKeep))
        }
        StateSetup::Usual => {
            try_keep(StateDir::default_path().and_then(|path| StateDir::create(&path)))
        }
    }
}

/// The default directory, or none if this host has no tmpfs for it.
///
/// # Errors
/// The directory belongs to another user, or is accessible to others. Reason: any user may take its
/// name in `/dev/shm`, and must not be able to make a killed server lose acknowledged changes.
fn try_keep(dir: blockhouse_core::Result<StateDir>) -> Result<StateUse> {
    match dir {
        Ok(dir) => Ok(StateUse::TryKeep(dir)),
        Err(error) if error.kind() == ErrorKind::InvalidInput => Err(error.into()),
        Err(error) => {
            tracing::warn!("{NOT_KEPT}: {error}");
            Ok(StateUse::Off)
        }
    }
}

/// The options for opening a disk, with the secrets for its encrypted images.
///
/// # Errors
/// An allowed path is missing.
pub(crate) fn image_options(
    disk: &DiskConfig,
    state: &StateUse,
    secrets: Secrets,
) -> Result<ImageOptions> {
    Ok(ImageOptions {
        purpose: Purpose::Disk,
        snapshot: None,
        format: disk.format,
        access: if disk.is_inactive { Access::ReadOnly } else { disk.access() },
        cache: disk.cache,
        discard: disk.discard,
        detect_zeroes: disk.detect_zeroes,
        compress: disk.compress,
        copy_on_read: disk.copy_on_read,
        block_sizes: disk.block_sizes().map_err(anyhow::Error::msg)?,
        on_full: disk.on_full().map_err(anyhow::Error::msg)?,
        locking: if disk.is_inactive { Locking::Inactive } else { Locking::Held },
        // Another program changes the image of an inactive disk, and has a state of its own.
        state: if disk.is_inactive { StateUse::Off } else { state.clone() },
        probes_exports: false,
        allowed_paths: if disk.no_references {
            AllowedPaths::only(&disk.allow_paths)?
        } else {
            AllowedPaths::new(&disk.allow_paths)?
        },
        remote_backing: disk.remote_backing(),
        secrets,
        part: disk.part,
        backing_use: disk.backing_use(),
        side_file: disk.side_file(),
        data_file: disk.data_file.clone(),
    }
    .in_part(disk.part))
}

/// Opens a disk as [`open_disk_with`] does, with the keys in the disk's key files. Blocks while a
/// key file is a pipe without data.
///
/// # Errors
/// The errors of [`open_disk_with`], or a key cannot be read.
pub(crate) async fn open_disk(setup: &DiskConfig, state: &StateUse) -> Result<ImageDisk> {
    open_disk_with(setup, state, setup.keys().read()?).await
}

/// Opens a disk, and makes its image first if that is requested and missing.
///
/// # Errors
/// The image cannot be opened, its size differs from the size to create it with, or it lacks a
/// bitmap that is to be offered.
pub(crate) async fn open_disk_with(
    setup: &DiskConfig,
    state: &StateUse,
    secrets: Secrets,
) -> Result<ImageDisk> {
    let (path, options) = (&*setup.path, image_options(setup, state, secrets)?);
    if let Some(size) = setup.create
        && !exists(path).await?
    {
        let refused = |why| Error::new(ErrorKind::InvalidInput, why);
        let by_name = || format_for_new(path).map_err(refused);
        let format = options.format.map_or_else(by_name, Ok)?;
        create(path, size, format).await?;
    }
    if options.side_file.is_some() && !setup.is_read_only() && !setup.is_inactive {
        match make_missing_side_file(path, &options).await {
            // The disk is served without bitmaps rather than not at all.
            Err(error) if matches!(error.kind(), ErrorKind::NoSpace | ErrorKind::Io) => {
                tracing::warn!(
                    "{}: there is no place for its bitmaps, so its changes are not recorded: {error}",
                    path.display()
                );
            }
            made => made?,
        }
    }
    let opened = open(path, options.at_snapshot(setup.snapshot.as_deref())).await;
    let disk = opened.map_err(|error| with_hint(error, path, setup.access()))?;
    for layer in (0..).map_while(|depth| disk.image().layer_at(depth)) {
        if let Some(truncation) = layer.features.and_then(|qcow2| qcow2.truncation) {
            tracing::warn!("{}: {truncation}: reads of what is lost fail", layer.name);
        }
    }
    let is_compressible = || {
        let image = disk.image();
        image.compression().is_some() && image.data_file().is_none()
    };
    if setup.compress && !is_compressible() {
        let format = disk.image().image_format_name();
        bail!("{}: Compression is not supported for underlying format: {format}", disk.name());
    }
    for bitmap in &setup.bitmaps {
        // Fails if the bitmap is missing or inconsistent.
        let nothing = ByteRange::between(0, 0);
        if setup.bitmaps_behind {
            disk.bitmaps().extents_in_chain(bitmap, nothing, 0).await?
        } else {
            disk.bitmaps().extents(bitmap, nothing, 0).await?
        };
    }
    if let Some(sector) = setup.logical_block_size
        && !disk.size().is_multiple_of(sector)
    {
        bail!(
            "{}: its {} bytes are no multiple of the sectors of {sector} bytes that it is to have; use \
             'blockhouse resize' to make it longer",
            disk.name(),
            disk.size()
        );
    }
    match setup.create {
        Some(size) if disk.size() != size => bail!(
            "{}: exists with {} bytes, not the {size} of --create; leave --create out, or use \
             'blockhouse resize' to make it longer",
            disk.name(),
            disk.size()
        ),
        _ => Ok(disk),
    }
}

/// Opens disks, several at a time. Returns the outcomes in the order of `disks`, except for disks
/// whose opening had not begun at the first failure.
pub(crate) async fn open_all(disks: &[DiskConfig], state: &StateUse) -> Vec<Result<ImageDisk>> {
    let has_failed = Cell::new(false);
    let has_failed = &has_failed;
    let open = |disk| async move {
        if has_failed.get() {
            return None;
        }
        let opened = open_disk(disk, state).await;
        has_failed.set(has_failed.get() || opened.is_err());
        Some(opened)
    };
    let outcomes = stream::iter(disks).map(open).buffered(MAX_OPENINGS);
    outcomes.filter_map(std::future::ready).collect().await
}

/// Adds a hint for an image that cannot be opened for serving.
fn with_hint(error: Error, image: &Path, access: Access) -> Error {
    match error.errno() {
        // EACCES, EROFS.
        13 | 30 if access == Access::ReadWrite => {
            error.hint("check its permissions, or serve it with --read-only")
        }
        // ENOENT, of the image itself if its folder exists.
        2 if image
            .parent()
            .is_some_and(|folder| folder.as_os_str().is_empty() || folder.exists()) =>
        {
            error.hint("check the path; 'blockhouse create' makes a new image")
        }
        _ => error,
    }
}
