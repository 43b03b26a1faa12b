//! The functions that open images, each by a [`Chain`].
//!
//! [`open`] opens an image for the purpose in [`ImageOptions::purpose`]. [`HandedOverDisk::open`]
//! opens it by the descriptors of another process. [`CommitChain::open`] also opens a backing file
//! for writing, and [`open_base`] opens that backing file while the disk is in use.
//! [`open_storage`] opens only the storage.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockhouse_core::{Error, ErrorKind, Result, Storage, rare};
use blockhouse_disk::{
    Access, Disk, EarlierWrites, ImageDisk, Layer, StoredImage, check_not_marked,
};
use blockhouse_engine::{FileKind, HostFile};
use blockhouse_format::ImageFormat;
use blockhouse_storage::{ImageStorage, Location};
use futures_util::future::LocalBoxFuture;

use crate::allowed_paths::NameUse;
use crate::chain::{BACKING_FILE, Chain, Named, end_opening, warn_of_disguise};
use crate::disk_over::{disk_over, with_probed};
use crate::handed_over::{Files, HandedFile, HandedOverDisk, SharedLayer};
use crate::image_options::{BackingUse, ImageOptions, Locking, Purpose, StateUse};
use crate::left_out::without_backing;
use crate::lock::{lock, lock_in_place_of};
use crate::moved_record::{check_not_moved, check_not_moved_but_to};
use crate::open_layers;
use crate::open_location::{identity_of, open_location};
use crate::probe_check::format_by_name;
use crate::qemu_name::whole_backing;
use crate::reader_locks::{ReaderLocksGuard, take_from_readers};
use crate::restore::Restore;
use crate::same_bytes::{check_apart_from, files_of_layer};
use crate::side_file::{Route, is_file, place_of, route};
use crate::unlock::{WithoutKey, unlocked};
use crate::vouching::begin_vouching;

/// Opens an image, as far as its [purpose](ImageOptions::purpose) needs, and locks its files. Needs
/// the event loop of the current thread.
///
/// # Errors
/// The error names the file: it is missing, not a disk image, of a wrong size, locked, looks like
/// another format, is an incomplete mirror, or the host refuses; for a backing file also the chain
/// that leads to it. `InvalidInput` when there is no such snapshot, `Unsupported` for a format
/// without snapshots (raw has them only in Ceph).
pub fn open(path: &Path, options: ImageOptions) -> LocalBoxFuture<'_, Result<ImageDisk>> {
    rare(async move {
        let is_view = at_snapshot(path, &options)?.1.is_some();
        let disk = Disk::new(match options.purpose {
            Purpose::Metadata => open_metadata(path, options.clone()).await?,
            _ => rare(open_image(path, &options, Files::Host)).await?,
        });
        if options.purpose == Purpose::Disk && !is_view {
            check_not_marked(&disk).await?;
        }
        Ok(disk)
    })
}

impl HandedOverDisk {
    /// As [`open`], by the files that another process has open
    /// ([`chain_files`](crate::chain_files)). Until [`take_over`](Self::take_over) this process
    /// changes nothing, and the state file belongs to the other process. `behind`, if
    /// given, is the backing file of the last image in `files`.
    ///
    /// # Errors
    /// As [`open`]; `InvalidInput` if the chain consists of other files.
    pub async fn open(
        path: &Path,
        mut options: ImageOptions,
        files: Vec<HandedFile>,
        behind: Option<SharedLayer>,
    ) -> Result<Self> {
        // The process that hands the image over still owns the state file.
        let state = std::mem::take(&mut options.state);
        let image =
            rare(open_image(path, &options, Files::HandedOver(files.into(), behind))).await?;
        Ok(Self::new(image, path, &state))
    }
}

async fn open_image(path: &Path, options: &ImageOptions, mut files: Files) -> Result<StoredImage> {
    let (path, snapshot) = at_snapshot(path, options)?;
    let mut route = match options.purpose {
        Purpose::Chain => Route::itself(&path, options),
        _ => route(&files, &path, options).await?,
    };
    let (storage, identity) = route.open(&mut files).await?;
    route.options = with_probed(&storage, route.options).await?;
    let options = &*route.options;
    // The process that hands an image over has checked this already.
    let is_anew = matches!(files, Files::Host);
    let is_changed = options.purpose == Purpose::Disk && options.access == Access::ReadWrite;
    if is_anew && is_changed && identity.is_some() {
        check_not_moved(&path)?;
    }
    let mut chain = Chain::from_image(&route.path, identity, files)?;
    chain.data_file.clone_from(&options.data_file);
    if options.purpose != Purpose::Disk {
        chain.without_key = WithoutKey::StayLocked;
    }
    let image = rare(open_from(chain, storage, &route, snapshot)).await?;
    if options.purpose != Purpose::Chain {
        end_opening(&image, options.state.is_look());
    }
    Ok(image)
}

/// The location to open, and the snapshot's name if the format stores the snapshot. A snapshot of a
/// raw image in Ceph has its own location instead.
fn at_snapshot<'a>(
    path: &'a Path,
    options: &'a ImageOptions,
) -> Result<(Cow<'a, Path>, Option<&'a str>)> {
    let snapshot = options.snapshot.as_deref();
    let format = options.format.unwrap_or_else(|| format_by_name(path));
    Ok(match (Location::of(path)?, snapshot, format) {
        (Location::Rbd(location), Some(name), ImageFormat::Raw) => {
            (PathBuf::from(location.at_snapshot(name).to_string()).into(), None)
        }
        _ => (path.into(), snapshot),
    })
}

/// Opens the last image of a chain, whose file is open, with its backing chain.
async fn open_from(
    mut chain: Chain,
    storage: ImageStorage,
    route: &Route<'_>,
    snapshot: Option<&str>,
) -> Result<StoredImage> {
    let options = &*route.options;
    let is_handed_over = matches!(chain.source, Files::HandedOver(..));
    let path = chain.last_path().to_owned();
    let earlier = if is_handed_over { EarlierWrites::Stable } else { EarlierWrites::Unknown };
    let (image, restore) = disk_over(storage, &path, options, earlier, snapshot).await?;
    chain.side_files_image = route.raw_image(&image)?;
    let image = rare(chain.with_data(image, options)).await?;
    let mut image = unlocked(image, &options.secrets, chain.without_key).await?;
    if options.purpose != Purpose::Image {
        image = over_backing(image, &mut chain, options).await?;
    }
    // This check must precede any write that tells later processes that the image is unchanged.
    route.confirm(&image).await?;
    if !is_handed_over {
        end_resize(&image, &restore).await?;
    }
    begin_vouching(&image, options);
    if is_handed_over {
        // The process that hands over still owns its state.
        Ok(image)
    } else {
        restore.finish(image).await
    }
}

/// Puts the last image of a chain over its backing files, as the options require.
async fn over_backing(
    mut image: StoredImage,
    chain: &mut Chain,
    options: &ImageOptions,
) -> Result<StoredImage> {
    let is_anew = matches!(chain.source, Files::Host);
    let mut above = Vec::new();
    if options.backing_use == BackingUse::LeftOut {
        image = without_backing(image).await?;
    }
    while let Some(backing) =
        image.backing_file().filter(|_| options.backing_use == BackingUse::Followed)
    {
        if let Some(shared) = chain.source.take_shared() {
            image = shared.put_behind(image)?;
            break;
        }
        let (storage, behind) = chain.find_behind(backing, options).await?;
        if is_anew && let Some(shared) = open_layers::find(chain, behind.format, options) {
            image = shared.put_behind(image)?;
            break;
        }
        let next = chain.open_found(storage, &behind, options).await?;
        image.format().header().check_backing(next.format())?;
        above.push(std::mem::replace(&mut image, next));
    }
    chain.source.check_complete(image.name())?;
    let opened = above.len();
    let image = above.into_iter().rfold(image, |behind, image| image.with_backing(&behind));
    if is_anew {
        open_layers::note(&image, chain, opened, options);
    }
    Ok(image)
}

/// Completes a resize that a killed process began: cuts a raw image to the size in its side file.
async fn end_resize(image: &StoredImage, restore: &Restore) -> Result<()> {
    // A device's length cannot be set here.
    let is_file = image.format().data().storage().as_file();
    let is_file = is_file.is_some_and(|file| file.kind() == FileKind::Regular);
    let side_file = image.format().side_file().filter(|side_file| side_file.is_shorter_than_data());
    let Some(side_file) = side_file.filter(|_| is_file) else { return Ok(()) };
    if image.access() == Access::ReadOnly {
        return Ok(());
    }
    // If this process is killed as well, the cut must not count as another program's change.
    restore.stamp_data_change();
    side_file.cut_data().await?;
    restore.stamp_data_change();
    Ok(())
}

/// Opens only the files that hold the image's metadata.
async fn open_metadata(path: &Path, options: ImageOptions) -> Result<StoredImage> {
    let options = ImageOptions { access: Access::ReadOnly, ..options };
    let (storage, identity) = open_location(&mut Files::Host, path, &options).await?;
    let options = with_probed(&storage, Cow::Owned(options)).await?;
    let (image, restore) = disk_over(storage, path, &options, EarlierWrites::Unknown, None).await?;
    // If the image may name only allowed paths, its extents are not opened. So its metadata, with
    // the names in it, can be shown.
    let image = if image.extent_files().is_empty() || options.allowed_paths.are_only() {
        image
    } else {
        let mut chain = Chain::from_image(path, identity, Files::Host)?;
        chain.with_extents(image, &options).await?
    };
    restore.finish(image).await
}

/// An image that is open for a commit.
pub struct CommitChain {
    /// The image, open for writing.
    pub overlay: ImageDisk,
    /// The backing file that gets the image's content, open for writing.
    pub base: Arc<ImageDisk>,
    /// The images between the two, from the upper one down.
    pub between: Vec<String>,
}

impl CommitChain {
    /// Opens an image and one of its backing files for writing, and all other backing files. The
    /// backing file for writing is the first for whose path `is_base` returns true. Needs the event
    /// loop of the current thread.
    ///
    /// # Errors
    /// As [`open`]; `InvalidInput` if the image has no such backing file.
    pub fn open<'a>(
        path: &'a Path,
        options: ImageOptions,
        is_base: &'a dyn Fn(&Path) -> bool,
    ) -> LocalBoxFuture<'a, Result<Self>> {
        rare(Self::open_chain(path, options, is_base))
    }

    async fn open_chain(
        path: &Path,
        options: ImageOptions,
        is_base: &dyn Fn(&Path) -> bool,
    ) -> Result<Self> {
        let options = ImageOptions { access: Access::ReadWrite, ..options };
        let (storage, identity) = open_location(&mut Files::Host, path, &options).await?;
        let mut chain = Chain::from_image(path, identity, Files::Host)?;
        chain.data_file.clone_from(&options.data_file);
        let (disk, restore) =
            disk_over(storage, path, &options, EarlierWrites::Unknown, None).await?;
        let disk = rare(chain.with_data(disk, &options)).await?;
        let mut disk = unlocked(disk, &options.secrets, WithoutKey::Refuse).await?;
        end_opening(&disk, options.state.is_look());
        let mut above = Vec::new();
        let backing = loop {
            let Some(backing) = disk.backing_file() else {
                let what = if above.is_empty() {
                    "has no backing file".to_owned()
                } else {
                    format!("no backing file of this name is behind it: {chain}")
                };
                let error =
                    Error::new(ErrorKind::InvalidInput, what).on(&path.display().to_string());
                return Err(
                    error.hint("name an overlay: 'blockhouse info IMAGE' tells what is behind one")
                );
            };
            let plain = whole_backing(backing, chain.last())?;
            if is_base(&chain.folder.join(&plain.name)) {
                break plain.into_owned();
            }
            let next = chain.open_behind(backing, &options).await?;
            above.push(std::mem::replace(&mut disk, next));
        };
        let behind = ImageOptions { format: Some(chain.next(&backing, &options)?), ..options };
        let named = chain.open_named(&backing.name, BACKING_FILE, &behind, NameUse::Asked).await;
        let named = named.map_err(|error| chain.failed(error))?;
        let below = Chain::from_named(named.path, named.identity, named.folder);
        let base =
            open_from(below, named.storage, &Route::itself(Path::new(""), &behind), None).await;
        let base = base.map_err(|error| chain.failed(error.into()))?;
        warn_of_disguise(&base).await?;
        end_opening(&base, behind.state.is_look());
        let mut overlay = disk.with_backing(&base);
        let mut between = Vec::new();
        while let Some(upper) = above.pop() {
            between.insert(0, overlay.name().to_owned());
            overlay = upper.with_backing(&overlay);
        }
        let (base, overlay) = (Disk::new(base), restore.finish(overlay).await?);
        let above = overlay.layer().layers().take(between.len() + 1);
        above
            .flat_map(files_of_layer)
            .try_for_each(|file| check_apart_from(&base, file.descriptor(), file.name()))?;
        Ok(Self { overlay: Disk::new(overlay), base: Arc::new(base), between })
    }
}

/// Opens the backing file of a disk for writing while the disk is used, with all further backing
/// files, for [`attach_base`](blockhouse_disk::DiskJobs::attach_base). `path` is the path of the
/// disk's image, and `options` are those that it was opened with. From now on other programs can
/// neither read nor write the backing file. Until [`keep_state`](crate::keep_state) is called, a
/// kill of the process loses acknowledged but unflushed changes of the backing file. The caller
/// keeps the guard until the disk reads through the new opening, and then
/// [keeps](ReaderLocksGuard::keep) the locks. Needs the event loop of the current thread.
///
/// # Errors
/// As [`open`]; `InvalidInput` if there is no backing file, another file has its name now, or its
/// disk was moved; `Locked` if other programs use it; `Unsupported` for a backing file with a data
/// file.
pub fn open_base<'a>(
    disk: &'a ImageDisk,
    path: &'a Path,
    options: ImageOptions,
) -> LocalBoxFuture<'a, Result<(Arc<ImageDisk>, ReaderLocksGuard)>> {
    rare(async move {
        let above = [&**disk.image().layer()];
        let locking = options.locking;
        let base = Arc::new(Disk::new(open_behind(&above, path, options).await?));
        let Some(reader) = above[0].backing_layer() else {
            unreachable!("its backing file was opened")
        };
        let guard = ReaderLocksGuard::new(reader, locking).of_opened(base.image());
        Ok((base, guard))
    })
}

/// As [`open_base`], for the backing file of the last image in `above`. `above` is a disk's chain
/// from the top down to that image, and `path` is that image's path.
///
/// # Errors
/// As there.
pub(crate) async fn open_behind(
    above: &[&Layer<ImageStorage>],
    path: &Path,
    options: ImageOptions,
) -> Result<StoredImage> {
    let refuse = |kind, what: &str, name: &str| Err(Error::new(kind, what.to_owned()).on(name));
    let image = above[above.len() - 1];
    let (Some(backing), Some(layer)) = (image.backing_file(), image.backing_layer()) else {
        return refuse(ErrorKind::InvalidInput, "has no backing file", image.name());
    };
    if layer.format().header().data_file().is_some() && layer.format().side_file().is_none() {
        return refuse(
            ErrorKind::Unsupported,
            "keeps its data in another file, and cannot be written to as a backing file that is used",
            layer.name(),
        );
    }
    layer.stands().keep();
    if image.opened().are_shared() {
        let what = "is the layer of other disks of this server as well, which it would spoil";
        return refuse(ErrorKind::Unsupported, what, layer.name());
    }
    let file = image.format().storage().storage().as_file();
    let mut chain = Chain::from_image(path, file.map(identity_of).transpose()?, Files::Host)?;
    let backing = &*whole_backing(backing, chain.last())?;
    let format = Some(chain.next(backing, &options)?);
    let (access, state) = (Access::ReadWrite, StateUse::Off);
    let behind = ImageOptions { format, access, state, ..options };
    let named = chain.open_named(&backing.name, BACKING_FILE, &behind, NameUse::Asked).await;
    let Named { path, storage, identity, folder } = named.map_err(|error| chain.failed(error))?;
    let reader = layer.data().storage().as_file();
    if reader.map(identity_of).transpose()? != identity {
        let what = "is another file than the backing file that is in use, which had its name";
        return refuse(ErrorKind::InvalidInput, what, &path.to_string_lossy());
    }
    if let (Some(file), Some(reader)) = (storage.as_file(), reader) {
        let names = above.iter().map(|image| Path::new(image.image_name()));
        check_not_moved_but_to(&path, names.chain([chain.last_path()]))?;
        if format == Some(ImageFormat::Raw) && is_file(&place_of(&path, &behind)) {
            return open_with_side_file(layer, &path, &behind).await;
        }
        if behind.locking == Locking::Held {
            lock_in_place_of(file, reader)?;
        }
    }
    let guard = ReaderLocksGuard::new(layer, behind.locking);
    let below = Chain::from_named(path, identity, folder);
    let opened = open_from(below, storage, &Route::itself(Path::new(""), &behind), None).await?;
    end_opening(&opened, behind.state.is_look());
    guard.keep();
    Ok(opened)
}

/// As [`open_behind`], for a raw backing file: through its side file, if that belongs to the image.
async fn open_with_side_file(
    layer: &Arc<Layer<ImageStorage>>,
    path: &Path,
    options: &ImageOptions,
) -> Result<StoredImage> {
    let guard = ReaderLocksGuard::new(layer, options.locking);
    let take_locks = |file: &_| take_from_readers(layer, file, options);
    let opened = open_layer_again(path, options, take_locks).await?;
    guard.keep();
    Ok(opened)
}

/// Opens an image for writing that this process has open for reading already: a layer that a disk
/// is to return to, or the base of a commit. A record beside the image is not checked, because it
/// would forbid this. `take_locks` gets the image's file, before it is locked. Needs the event loop
/// of the current thread.
///
/// # Errors
/// As [`open`], and those of `take_locks`.
pub(crate) async fn open_layer_again(
    path: &Path,
    options: &ImageOptions,
    take_locks: impl FnOnce(&HostFile) -> Result<()>,
) -> Result<StoredImage> {
    let route = route(&Files::Host, path, options).await?;
    let (storage, identity) = route.open(&mut Files::Host).await?;
    storage.as_file().map_or(Ok(()), take_locks)?;
    let chain = Chain::from_image(&route.path, identity, Files::Host)?;
    let disk = rare(open_from(chain, storage, &route, None)).await?;
    end_opening(&disk, route.options.state.is_look());
    Ok(disk)
}

/// Opens the storage of an image of any kind, for work on it alone, and locks it if requested.
/// Needs the event loop of the current thread.
///
/// # Errors
/// The error names the image: it is missing or locked, or the host, server or cluster refuses.
pub fn open_storage(
    path: &Path,
    options: ImageOptions,
) -> LocalBoxFuture<'_, Result<ImageStorage>> {
    rare(async move {
        let storage = open_location(&mut Files::Host, path, &options).await?.0;
        if let Some(file) = storage.as_file().filter(|_| options.locking == Locking::Held) {
            lock(file, options.access)?;
        }
        Ok(storage)
    })
}
