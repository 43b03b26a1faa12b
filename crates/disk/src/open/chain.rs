//! Opening an image with its backing files.
//!
//! A backing file is opened only as the format that the image names, never as what it looks like: a
//! guest could make its raw disk look like an image whose backing file is any file of the host. It
//! is a file (a server's export only where the user allows that), found from the folder of the
//! image that names it, below that folder or an allowed path (`allowed_paths`), only read, and
//! locked against writers. Chains end: a file that comes twice and a chain that is too long are
//! refused. A data file goes through the same gate, as raw, and is opened and locked as its image
//! is.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockhouse_core::{Error, ErrorKind, Result, Storage};
use blockhouse_engine::{FileKind, HostFile};
use blockhouse_format::{Backing, DataFile, ImageFormat, probe};
use blockhouse_storage::{Concat, ImageStorage, Location};

use super::allowed_paths::{FindError, Folder, NameUse, Namer};
use super::disk_over::disk_over;
use super::handed_over::{Files, HandedFile, HandedOverDisk, SharedLayer};
use super::image_disk::ImageDisk;
use super::image_options::{BackingUse, ImageOptions, Locking, RemoteBacking, StateUse};
use super::left_layer::restore_layer;
use super::left_out::without_backing;
use super::lock::{lock, lock_in_place_of};
use super::moved_record::{check_not_moved, check_not_moved_but_to};
use super::open_location::{
    Identity, identity_of, is_foreign_address, open_file, open_location, part_of_file,
};
use super::probe_check::format_by_name;
use super::qemu_name::{is_address, plain_backing, whole_backing};
use super::reader_locks::{lock_readers, take_from_readers};
use super::restore::Restore;
use super::same_bytes::{check_apart_from, files_of_layer};
use super::sidecar::{RawImage, RawVolume, Route, is_file, place_of, route};
use super::unlock::{WithoutKey, unlocked};
use crate::disk::EarlierWrites;
use crate::options::Access;
use crate::tools::check_not_marked;

/// How many files a chain may have.
pub(super) const MAX_FILES: usize = 200;

/// How many names of a chain a message has room for at either end.
const NAMED: usize = 2;

/// The words for the file that an image names, in messages.
const BACKING_FILE: &str = "backing file";
const DATA_FILE: &str = "data file";
const EXTENT: &str = "extent";

/// `ENOENT` of Linux: a file is missing.
const ENOENT: i32 = 2;

/// Opens an image with all backing files and locks them. Needs the loop of the current thread.
///
/// # Errors
/// One that names the file: it is missing, no disk image, of a wrong size, locked, looks like
/// another format, is a mirror that was not completed, or the host refuses; for a backing file also
/// the chain that leads to it.
pub async fn open(path: &Path, options: ImageOptions) -> Result<ImageDisk> {
    open_chain(path, &options, None, Files::Host).await
}

/// As [`open`], to find out what is in the chain: of encrypted images without a key no data can be
/// read.
///
/// # Errors
/// As [`open`].
pub async fn open_to_look(path: &Path, options: ImageOptions) -> Result<ImageDisk> {
    let (storage, identity) = open_location(&mut Files::Host, path, &options).await?;
    let mut chain = Chain::from_image(path, identity, Files::Host)?;
    chain.without_key = WithoutKey::StayLocked;
    open_from(chain, storage, &Route::itself(path, &options), None).await
}

/// As [`open`], as the disk was when the snapshot of this name (or id) was taken; for reading only.
///
/// # Errors
/// As [`open`]; `InvalidInput` when there is no such snapshot, `Unsupported` for a raw image.
pub async fn open_snapshot(
    path: &Path,
    options: ImageOptions,
    snapshot: &str,
) -> Result<ImageDisk> {
    let options = ImageOptions { access: Access::ReadOnly, ..options };
    open_chain(path, &options, Some(snapshot), Files::Host).await
}

/// As [`open`] or [`open_snapshot`], by the files that another process has open
/// ([`Disk::chain_files`](crate::Disk::chain_files)). Changes nothing, and leaves the state file to
/// that process, before [`HandedOverDisk::take_over`]. `behind` is read behind the last of these
/// files.
///
/// # Errors
/// As [`open`]; `InvalidInput` where the chain consists of other files.
pub async fn open_handed_over(
    path: &Path,
    options: ImageOptions,
    snapshot: Option<&str>,
    files: Vec<HandedFile>,
    behind: Option<SharedLayer>,
) -> Result<HandedOverDisk> {
    let mut options = match snapshot {
        Some(_) => ImageOptions { access: Access::ReadOnly, ..options },
        None => options,
    };
    // The process that hands over still has the state file.
    let state = std::mem::take(&mut options.state);
    let disk =
        open_chain(path, &options, snapshot, Files::HandedOver(files.into(), behind)).await?;
    Ok(HandedOverDisk::new(disk, path, &state))
}

async fn open_chain(
    path: &Path,
    options: &ImageOptions,
    snapshot: Option<&str>,
    mut files: Files,
) -> Result<ImageDisk> {
    let (path, snapshot) = at_snapshot(path, options, snapshot)?;
    let route = route(&files, &path, options).await?;
    let options = &*route.options;
    let (storage, identity) = route.open(&mut files).await?;
    let is_anew = matches!(files, Files::Host);
    // A process that hands an image over has looked at it.
    if is_anew && identity.is_some() && options.access == Access::ReadWrite {
        check_not_moved(&path)?;
    }
    let chain = Chain::from_image(&route.path, identity, files)?;
    let disk = open_from(chain, storage, &route, snapshot).await?;
    if is_anew && snapshot.is_none() {
        check_not_marked(&disk).await?;
    }
    disk.end_opening(options.state.is_look());
    Ok(disk)
}

/// The location to open for a snapshot: a raw image in Ceph has snapshots of its own, which are
/// locations.
fn at_snapshot<'a>(
    path: &'a Path,
    options: &ImageOptions,
    snapshot: Option<&'a str>,
) -> Result<(Cow<'a, Path>, Option<&'a str>)> {
    let format = options.format.unwrap_or_else(|| format_by_name(path));
    Ok(match (Location::of(path)?, snapshot, format) {
        (Location::Rbd(location), Some(name), ImageFormat::Raw) => {
            (PathBuf::from(location.at_snapshot(name).to_string()).into(), None)
        }
        _ => (path.into(), snapshot),
    })
}

/// The disk of the last image of a chain, whose file is open, with all that is behind it.
async fn open_from(
    mut chain: Chain,
    storage: ImageStorage,
    route: &Route<'_>,
    snapshot: Option<&str>,
) -> Result<ImageDisk> {
    let options = &*route.options;
    let is_handed_over = matches!(chain.source, Files::HandedOver(..));
    let path = chain.last_path().to_owned();
    let earlier = match is_handed_over {
        true => EarlierWrites::Stable,
        false => EarlierWrites::Unknown,
    };
    let (disk, restore) = disk_over(storage, &path, options, earlier, snapshot).await?;
    chain.sidecars_image = route.raw_image(&disk)?;
    let disk = chain.with_data(disk, options).await?;
    let mut disk = unlocked(disk, &options.secrets, chain.without_key).await?;
    let mut above = Vec::new();
    if options.backing_use == BackingUse::LeftOut {
        disk = without_backing(disk).await?;
    }
    while let Some(backing) =
        disk.backing_file().filter(|_| options.backing_use == BackingUse::Followed)
    {
        if let Some(shared) = chain.source.take_shared() {
            disk = shared.put_behind(disk)?;
            break;
        }
        let next = chain.open_behind(backing, options).await?;
        disk.format().header().check_backing(next.format())?;
        above.push(std::mem::replace(&mut disk, next));
    }
    chain.source.check_complete(disk.name())?;
    let disk = above.into_iter().rfold(disk, |behind, disk| disk.with_backing(Arc::new(behind)));
    // Before anything tells later processes that the image is as it was.
    route.confirm(&disk).await?;
    if !is_handed_over {
        end_resize(&disk, &restore).await?;
    }
    if options.locking == Locking::Held {
        disk.begin_vouching(options.cache);
    }
    match is_handed_over {
        false => restore.finish(disk).await,
        // The process that hands over still owns it.
        true => Ok(disk),
    }
}

/// Opens an image with its data file, but without its backing files. What it leaves to a backing
/// file cannot be read. Needs the loop of the current thread.
///
/// # Errors
/// As [`open`].
pub async fn open_without_backing(path: &Path, options: ImageOptions) -> Result<ImageDisk> {
    let route = route(&Files::Host, path, &options).await?;
    let (path, options) = (&*route.path, &*route.options);
    let (storage, identity) = route.open(&mut Files::Host).await?;
    let mut chain = Chain::from_image(path, identity, Files::Host)?;
    let (disk, restore) = disk_over(storage, path, options, EarlierWrites::Unknown, None).await?;
    chain.sidecars_image = route.raw_image(&disk)?;
    let disk = chain.with_data(disk, options).await?;
    let disk = unlocked(disk, &options.secrets, WithoutKey::StayLocked).await?;
    disk.end_opening(options.state.is_look());
    route.confirm(&disk).await?;
    end_resize(&disk, &restore).await?;
    restore.finish(disk).await
}

/// Ends what a process that died has begun: a raw image with a sidecar is as long as its disk.
async fn end_resize(disk: &ImageDisk, restore: &Restore) -> Result<()> {
    // A device has its length from elsewhere.
    let is_file = disk.format().data().storage().as_file();
    let is_file = is_file.is_some_and(|file| file.kind() == FileKind::Regular);
    let side_file = disk.format().side_file().filter(|side_file| side_file.is_shorter_than_data());
    let Some(side_file) = side_file.filter(|_| is_file) else { return Ok(()) };
    if disk.opened_access() == Access::ReadOnly {
        return Ok(());
    }
    // No other program's change, if this process dies as well.
    restore.stamp_data_change();
    side_file.cut_data().await?;
    restore.stamp_data_change();
    Ok(())
}

/// Opens only the files that hold the image's metadata, to ask what it is, for reading only: no
/// guest data of an image with a data file can be read. Needs the loop of the current thread.
///
/// # Errors
/// As [`open`].
pub async fn open_metadata(path: &Path, options: ImageOptions) -> Result<ImageDisk> {
    let options = ImageOptions { access: Access::ReadOnly, ..options };
    let (storage, identity) = open_location(&mut Files::Host, path, &options).await?;
    let (disk, restore) = disk_over(storage, path, &options, EarlierWrites::Unknown, None).await?;
    // Names that are not followed can be told all the same.
    let disk = match disk.extent_files().is_empty() || options.allowed_paths.is_none() {
        true => disk,
        false => {
            let mut chain = Chain::from_image(path, identity, Files::Host)?;
            chain.with_extents(disk, &options).await?
        }
    };
    restore.finish(disk).await
}

/// An image that is open for a commit.
pub struct CommitChain {
    /// The image, open for writing.
    pub overlay: ImageDisk,
    /// The backing file that gets its content, open for writing.
    pub base: Arc<ImageDisk>,
    /// The images between the two, from the upper one down.
    pub between: Vec<String>,
}

/// Opens an image and one of its backing files, both for writing, with all other backing files: the
/// first whose path `is_base`. Needs the loop of the current thread.
///
/// # Errors
/// As [`open`]; `InvalidInput` when the image has no such backing file.
pub async fn open_for_commit(
    path: &Path,
    options: ImageOptions,
    is_base: impl Fn(&Path) -> bool,
) -> Result<CommitChain> {
    let options = ImageOptions { access: Access::ReadWrite, ..options };
    let (storage, identity) = open_location(&mut Files::Host, path, &options).await?;
    let mut chain = Chain::from_image(path, identity, Files::Host)?;
    let (disk, restore) = disk_over(storage, path, &options, EarlierWrites::Unknown, None).await?;
    let disk = chain.with_data(disk, &options).await?;
    let mut disk = unlocked(disk, &options.secrets, WithoutKey::Refuse).await?;
    disk.end_opening(options.state.is_look());
    let mut above = Vec::new();
    let backing = loop {
        let Some(backing) = disk.backing_file() else {
            let what = match above.is_empty() {
                true => "has no backing file".to_owned(),
                false => format!("no backing file of this name is behind it: {chain}"),
            };
            let error = Error::new(ErrorKind::InvalidInput, what).on(&path.display().to_string());
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
    let base = open_from(below, named.storage, &Route::itself(Path::new(""), &behind), None).await;
    let base = base.map_err(|error| chain.failed(error.into()))?;
    warn_of_disguise(&base).await?;
    base.end_opening(behind.state.is_look());
    let base = Arc::new(base);
    let mut overlay = disk.with_backing(Arc::clone(&base));
    let mut between = Vec::new();
    while let Some(upper) = above.pop() {
        between.insert(0, overlay.name().to_owned());
        overlay = upper.with_backing(Arc::new(overlay));
    }
    let overlay = restore.finish(overlay).await?;
    let above = overlay.layers().take(between.len() + 1);
    above
        .flat_map(files_of_layer)
        .try_for_each(|file| check_apart_from(&base, file.descriptor(), file.name()))?;
    Ok(CommitChain { overlay, base, between })
}

/// Opens the backing file of a disk for writing while the disk is used, with all further backing
/// files: for [`Disk::attach_base`](crate::Disk::attach_base). `path` is the image's, `options`
/// those that it was opened with. Other programs are kept from the backing file from now on, also
/// from reading it. Nothing that is answered outlives the process before
/// [`keep_state`](super::keep_state). Needs the loop of the current thread.
///
/// # Errors
/// As [`open`]; `InvalidInput` where there is no backing file, another file has its name now, or
/// its disk was moved; `Locked` where others use it; `Unsupported` for one with a data file.
pub async fn open_base(
    disk: &ImageDisk,
    path: &Path,
    options: ImageOptions,
) -> Result<Arc<ImageDisk>> {
    let refuse = |kind, what: &str, name: &str| Err(Error::new(kind, what.to_owned()).on(name));
    let (Some(backing), Some(layer)) = (disk.backing_file(), disk.layer().backing_layer()) else {
        return refuse(ErrorKind::InvalidInput, "has no backing file", disk.name());
    };
    if layer.format().header().data_file().is_some() && layer.format().side_file().is_none() {
        return refuse(
            ErrorKind::Unsupported,
            "keeps its data in another file, and cannot be written to as a backing file that is used",
            layer.name(),
        );
    }
    if layer.stands() > 1 {
        let what = "is the layer of other disks of this server as well, which it would spoil";
        return refuse(ErrorKind::Unsupported, what, layer.name());
    }
    let identity = disk.file().map(identity_of).transpose()?;
    let mut chain = Chain::from_image(path, identity, Files::Host)?;
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
        check_not_moved_but_to(&path, chain.last_path())?;
        if format == Some(ImageFormat::Raw) && is_file(&place_of(&path, &behind)) {
            return open_with_sidecar(disk, &path, &behind).await;
        }
        if behind.locking == Locking::Held {
            lock_in_place_of(file, reader)?;
        }
    }
    let below = Chain::from_named(path, identity, folder);
    let opened = open_from(below, storage, &Route::itself(Path::new(""), &behind), None).await;
    if opened.is_err()
        && let Some(reader) = reader.filter(|_| behind.locking == Locking::Held)
    {
        lock(reader, Access::ReadOnly)?;
    }
    let opened = opened?;
    opened.end_opening(behind.state.is_look());
    Ok(Arc::new(opened))
}

/// As [`open_base`], of a raw backing file: by the file of its bitmaps, if that belongs to it.
async fn open_with_sidecar(
    disk: &ImageDisk,
    path: &Path,
    options: &ImageOptions,
) -> Result<Arc<ImageDisk>> {
    let opened = open_layer_again(path, options, |file| take_from_readers(disk, file, options));
    let opened = opened.await;
    if opened.is_err() {
        lock_readers(disk, options)?;
    }
    opened.map(Arc::new)
}

/// Opens an image for writing that this process has open for reading already, as the layer of a
/// disk, and which a record refuses to open so: the disk is to go back to it. `take_locks` gets its
/// file, before it is locked. Needs the loop of the current thread.
///
/// # Errors
/// As [`open`], and those of `take_locks`.
pub(super) async fn open_layer_again(
    path: &Path,
    options: &ImageOptions,
    take_locks: impl FnOnce(&HostFile) -> Result<()>,
) -> Result<ImageDisk> {
    let route = route(&Files::Host, path, options).await?;
    let (storage, identity) = route.open(&mut Files::Host).await?;
    storage.as_file().map_or(Ok(()), take_locks)?;
    let chain = Chain::from_image(&route.path, identity, Files::Host)?;
    let disk = open_from(chain, storage, &route, None).await?;
    disk.end_opening(route.options.state.is_look());
    Ok(disk)
}

/// Opens the file of an image for work on the file itself, whatever is in it, and locks it if that
/// is asked for. Needs the loop of the current thread.
///
/// # Errors
/// One that names the file: it is missing or locked, or the host refuses.
pub fn open_storage(path: &Path, options: ImageOptions) -> Result<HostFile> {
    let (file, _) = open_file(&mut Files::Host, path, &options)?;
    if options.locking == Locking::Held {
        lock(&file, options.access)?;
    }
    Ok(file)
}

/// As [`open_storage`], wherever the image is: for a repair, which needs no file. Needs the loop of
/// the current thread.
///
/// # Errors
/// One that names the image: it is missing or locked, or the host, server or cluster refuses.
pub async fn open_for_repair(path: &Path, options: ImageOptions) -> Result<ImageStorage> {
    match Location::of(path)? {
        Location::File(_) => Ok(open_storage(path, options)?.into()),
        Location::Nbd { .. } | Location::Rbd(_) => {
            Ok(open_location(&mut Files::Host, path, &options).await?.0)
        }
    }
}

/// Tells of a raw backing file that looks like another format: the image that names its format may
/// be wrong.
async fn warn_of_disguise(backing: &ImageDisk) -> Result<()> {
    if backing.format().is_raw()
        && let Some(name) = probe::probe(backing.format().storage()).await?
    {
        tracing::warn!(
            "{} is opened as a raw backing file, as the image above says, but looks like {name}; if that \
             is what it is, the guest sees its tables instead of a disk",
            backing.name()
        );
    }
    Ok(())
}

/// The files that are open so far, from the image down.
struct Chain {
    files: Vec<(PathBuf, Option<Identity>)>,
    /// The files that hold the images' data.
    data_files: Vec<Identity>,
    /// The raw image that the user named, if the first image is its sidecar: the one data file
    /// that no name leads to.
    sidecars_image: Option<RawImage>,
    /// The folder of the last image, from which its names are looked up.
    folder: Folder,
    /// Where they come from.
    source: Files,
    without_key: WithoutKey,
}

/// A file that an image names, open.
struct Named {
    path: PathBuf,
    storage: ImageStorage,
    /// Of a file.
    identity: Option<Identity>,
    folder: Folder,
}

impl Chain {
    fn from_image(path: &Path, identity: Option<Identity>, source: Files) -> Result<Self> {
        let folder = match (&source, identity) {
            (Files::Host, Some(_)) => Folder::of_image(path)?,
            (Files::Host, None) => Folder::of_remote(),
            (Files::HandedOver(..), _) => Folder::of_handed_over(path),
        };
        Ok(Self { source, ..Self::from_named(path.to_owned(), identity, folder) })
    }

    /// A chain that begins with a file that another image named.
    fn from_named(path: PathBuf, identity: Option<Identity>, folder: Folder) -> Self {
        let files = vec![(path, identity)];
        let (data_files, sidecars_image) = (Vec::new(), None);
        let (source, without_key) = (Files::Host, WithoutKey::Refuse);
        Self { files, data_files, sidecars_image, folder, source, without_key }
    }

    /// The options that the next file is opened by.
    fn next(&self, backing: &Backing, options: &ImageOptions) -> Result<ImageFormat> {
        let name = String::from_utf8_lossy(&backing.name);
        let last = self.last();
        if self.files.len() == MAX_FILES {
            let what = format!("the chain {self} has more than {MAX_FILES} files");
            return Err(
                Error::new(ErrorKind::InvalidInput, what).hint("shorten it (commit or rebase)")
            );
        }
        if is_foreign_address(&backing.name) {
            let what = format!("its backing file '{name}' is no file but an address of QEMU");
            return Err(Error::new(ErrorKind::Unsupported, what)
                .on(last)
                .hint("write a server's export as a URI: nbd://HOST/NAME; if it is a file, rebase to './NAME'"));
        }
        if is_address(&backing.name) && options.remote_backing == RemoteBacking::Refused {
            let what = format!("names '{name}' on another server as its backing file");
            return Err(Error::new(ErrorKind::InvalidInput, what)
                .on(last)
                .hint("if you trust the maker of the image, allow it: --allow-remote"));
        }
        let Some(format) = &backing.format else {
            let what = format!("does not say which format its backing file '{name}' has");
            return Err(Error::new(ErrorKind::InvalidInput, what).on(last).hint(format!(
                "it is not guessed; store it: rebase -u -F FORMAT -b '{name}' '{last}'"
            )));
        };
        format.parse().map_err(|why: String| {
            let what = format!("cannot open its backing file '{name}': {why}");
            Error::new(ErrorKind::Unsupported, what).on(last)
        })
    }

    /// Opens the backing file that the last image names, for reading, without what is behind it.
    async fn open_behind(
        &mut self,
        backing: &Backing,
        options: &ImageOptions,
    ) -> Result<ImageDisk> {
        let (backing, part) = plain_backing(backing, self.last())?;
        let format = self.next(&backing, options)?;
        let (format, access) = (Some(format), Access::ReadOnly);
        let behind = ImageOptions { format, access, ..options.clone() }.in_part(part);
        let named = self.open_named(&backing.name, BACKING_FILE, &behind, NameUse::Asked).await;
        let Named { path, storage, identity, folder } =
            named.map_err(|error| self.failed(error))?;
        // Before it is locked: in a loop the lock would be held by ourselves.
        self.enter(path.clone(), identity, folder)?;
        if matches!(self.source, Files::Host) && options.access == Access::ReadWrite {
            Box::pin(restore_layer(&storage, &path, &behind)).await?;
        }
        let next = disk_over(storage, &path, &behind, EarlierWrites::Unknown, None).await;
        let (next, left) = next.map_err(|error| self.failed(error.into()))?;
        let next = self.with_data(next, &behind).await?;
        let next = unlocked(next, &options.secrets, self.without_key).await?;
        left.finish_backing(&next, options.access).map_err(|error| self.failed(error.into()))?;
        warn_of_disguise(&next).await?;
        next.end_opening(options.state.is_look());
        Ok(next)
    }

    /// Opens a file that the last image names.
    async fn open_named(
        &mut self,
        name: &[u8],
        role: &str,
        options: &ImageOptions,
        used: NameUse<'_>,
    ) -> Result<Named, FindError> {
        if Location::is_remote(name) {
            let path = PathBuf::from(OsStr::from_bytes(name));
            if matches!(self.source, Files::Host) {
                options.allowed_paths.check_remote(&path, role, self.last())?;
            }
            let (storage, identity) = open_location(&mut self.source, &path, options).await?;
            return Ok(Named { path, storage, identity, folder: Folder::of_remote() });
        }
        let path = self.folder.join(name);
        if let files @ Files::HandedOver(..) = &mut self.source {
            let (file, _) = open_file(files, &path, options)?;
            let folder = Folder::of_handed_over(&path);
            let (storage, identity) = part_of_file(file, options)?;
            return Ok(Named { path, storage, identity, folder });
        }
        let (descriptor, folder) = match self.sidecars_image.take() {
            Some(RawImage::Named(image)) => (image, Folder::of_handed_over(&path)),
            Some(RawImage::Volume(..)) | None => {
                let last = self.last();
                let found = options.allowed_paths.find(&self.folder, name, role, last, used)?;
                (found.descriptor, found.folder)
            }
        };
        let (mode, cache) = (options.open_mode(), options.cache.page_cache());
        let file = HostFile::open_found(descriptor.as_fd(), &path, mode, cache)?;
        let (storage, identity) = part_of_file(file, options)?;
        Ok(Named { path, storage, identity, folder })
    }

    /// The last image with the files that hold its data, if those are others: opened and locked as
    /// the image is.
    async fn with_data(&mut self, disk: ImageDisk, options: &ImageOptions) -> Result<ImageDisk> {
        if !disk.extent_files().is_empty() {
            return self.with_extents(disk, options).await;
        }
        match self.sidecars_image.take() {
            Some(RawImage::Volume(path, volume)) => {
                return self.with_volume(disk, &path, volume, options);
            }
            image => self.sidecars_image = image,
        }
        let Some(DataFile { name, .. }) = disk.data_file() else { return Ok(disk) };
        let file = disk.format().storage().storage().as_file();
        let file = file.map(HostFile::descriptor);
        let (storage, identity) = self.open_data(name, DATA_FILE, options, file).await?;
        // Known to those that follow, without being one of the images.
        self.data_files.extend(identity);
        disk.with_data(storage)
    }

    /// A sidecar with the volume that it belongs to, which is locked as the sidecar is.
    fn with_volume(
        &mut self,
        disk: ImageDisk,
        path: &Path,
        volume: RawVolume,
        options: &ImageOptions,
    ) -> Result<ImageDisk> {
        let (mode, cache) = (options.open_mode(), options.cache.page_cache());
        let storage = match volume {
            RawVolume::Found(found) => {
                HostFile::open_found(found.as_fd(), path, mode, cache)?.into()
            }
            RawVolume::Open(storage) => *storage,
            RawVolume::HandedOver => open_file(&mut self.source, path, options)?.0.into(),
        };
        let identity = storage.as_file().map(identity_of).transpose()?;
        if self.contains(identity) {
            let what = "is the file of its own bitmaps";
            return Err(Error::new(ErrorKind::InvalidInput, what).on(storage.name()));
        }
        self.data_files.extend(identity);
        if let Some(file) = storage.as_file().filter(|_| options.locking == Locking::Held) {
            lock(file, options.access)?;
        }
        disk.with_data(storage)
    }

    /// An image that is in many files, with all of them.
    async fn with_extents(&mut self, disk: ImageDisk, options: &ImageOptions) -> Result<ImageDisk> {
        let mut files = Vec::with_capacity(disk.extent_files().len());
        for name in disk.extent_files() {
            match self.open_data(name, EXTENT, options, None).await?.0 {
                ImageStorage::File(file) => files.push(file),
                other => {
                    let what = "an extent of an image is a file";
                    return Err(Error::new(ErrorKind::Unsupported, what).on(other.locate(0).0));
                }
            }
        }
        let data = Concat::new(disk.name().to_owned(), files)?;
        let ranges = data.ranges();
        disk.with_extents(ImageStorage::Concat(Box::new(data)), &ranges).await
    }

    /// A file with data of the last image, whose own file is `image`, and which names it as its
    /// `role`: opened and locked.
    async fn open_data(
        &mut self,
        name: &[u8],
        role: &'static str,
        options: &ImageOptions,
        image: Option<BorrowedFd<'_>>,
    ) -> Result<(ImageStorage, Option<Identity>)> {
        let last = self.last();
        if is_address(name) {
            let name = String::from_utf8_lossy(name);
            let what = format!("its {role} '{name}' is no file but a server's address");
            return Err(Error::new(ErrorKind::Unsupported, what)
                .on(last)
                .hint("only files can hold an image's data"));
        }
        let path = self.last_path().to_owned();
        let used = match options.access {
            Access::ReadOnly => NameUse::Read(Namer { path: &path, file: image }),
            Access::ReadWrite => NameUse::Written(Namer { path: &path, file: image }),
        };
        let opened = self.open_named(name, role, options, used).await;
        let last = self.last();
        let failed = |error: Error| {
            let what = format!("cannot open the {role} of {last}: {error}");
            let failed = Error::new(error.kind(), what);
            match error.errno() {
                ENOENT => failed.hint("put the file back: the guest's data is in it"),
                _ => failed,
            }
        };
        let Named { path, storage, identity, .. } = opened.map_err(|error| match error {
            FindError::Refused(error) => error,
            FindError::Host(error) => failed(error),
        })?;
        // Before it is locked: the lock of an image that is its own data file would be ours.
        if self.contains(identity) {
            let what = format!("its {role} {} is already in its chain", path.display());
            return Err(Error::new(ErrorKind::Corrupt, what)
                .on(last)
                .hint("restore the image: tables and data are different files"));
        }
        if let Some(file) = storage.as_file().filter(|_| options.locking == Locking::Held) {
            lock(file, options.access).map_err(failed)?;
        }
        Ok((storage, identity))
    }

    /// Whether a file is one of the chain already.
    fn contains(&self, identity: Option<Identity>) -> bool {
        let is_it = |identity: Identity| {
            self.files.iter().any(|(_, one)| *one == Some(identity))
                || self.data_files.contains(&identity)
        };
        identity.is_some_and(is_it)
    }

    /// Adds a file that was just opened.
    fn enter(&mut self, path: PathBuf, identity: Option<Identity>, folder: Folder) -> Result<()> {
        let is_there = self.contains(identity);
        self.files.push((path, identity));
        self.folder = folder;
        if !is_there {
            return Ok(());
        }
        let what = format!("the backing files form a loop: {self}");
        Err(Error::new(ErrorKind::Corrupt, what)
            .hint("restore the image, or give it the right file: 'blockhouse rebase -u'"))
    }

    /// The error for a file behind the first one.
    fn failed(&self, error: FindError) -> Error {
        let error = match error {
            // It names the image.
            FindError::Refused(error) => return error,
            FindError::Host(error) => error,
        };
        let failed =
            Error::new(error.kind(), format!("cannot open what is behind {self}: {error}"));
        match error.errno() {
            ENOENT => failed.hint(format!(
                "put the file back; if it has another name now, store that: 'blockhouse rebase -u -b NAME -F \
                 FORMAT {}' (a new file in its place would change the disk)",
                self.last()
            )),
            _ => failed,
        }
    }

    fn last_path(&self) -> &Path {
        self.files.last().map_or(Path::new(""), |(path, _)| path)
    }

    fn last(&self) -> &str {
        self.last_path().to_str().unwrap_or("the image")
    }
}

impl std::fmt::Display for Chain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let count = self.files.len();
        for (index, (path, _)) in self.files.iter().enumerate() {
            if index > 0 && (index < NAMED || index + NAMED >= count) {
                f.write_str(" -> ")?;
            }
            if index < NAMED || index + NAMED >= count {
                write!(f, "{}", path.display())?;
            } else if index == NAMED {
                write!(f, " -> ({} more)", count - 2 * NAMED)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
