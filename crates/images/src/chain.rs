//! The files of an image: its data file and its backing files.
//!
//! A backing file is opened only in the format that the image names; the format is never probed.
//! Reason: a guest could make its raw disk look like an image whose backing file is any file of the
//! host. A backing file is a local file, or a server's export if the user allows that. Its name is
//! relative to the folder of the image that names it. The file must be below that folder or an
//! allowed path (`allowed_paths`). It is opened read-only, and locked against writers. A chain is
//! refused if it has a file twice or is too long. A data file is raw and has the same checks; it is
//! opened and locked as its image is.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use blockhouse_core::{Error, ErrorKind, Result, Storage, rare};
use blockhouse_disk::{Access, EarlierWrites, StoredImage};
use blockhouse_engine::HostFile;
use blockhouse_format::{Backing, DataFile, ImageFormat, probe};
use blockhouse_storage::{Concat, ImageStorage, Location};

use crate::allowed_paths::{FindError, Folder, NameUse, Namer};
use crate::disk_over::disk_over;
use crate::handed_over::Files;
use crate::image_options::{ImageOptions, Locking, RemoteBacking};
use crate::left_layer::restore_layer;
use crate::lock::lock;
use crate::open_location::{
    Identity, identity_of, is_foreign_address, open_file, open_location, part_of_file,
};
use crate::qemu_name::{is_address, plain_backing};
use crate::side_file::{RawImage, RawVolume};
use crate::unlock::{WithoutKey, unlocked};

/// The maximum number of files of a chain.
pub(crate) const MAX_FILES: usize = 200;

/// The number of file names at each end of a chain that a message shows.
const NAMED: usize = 2;

/// The role of a file that an image names, in messages.
pub(crate) const BACKING_FILE: &str = "backing file";
const DATA_FILE: &str = "data file";
const EXTENT: &str = "extent";

/// `ENOENT` of Linux: a file is missing.
const ENOENT: i32 = 2;

/// Warns of a raw backing file that looks like another format: the format that the image names may
/// be wrong.
pub(crate) async fn warn_of_disguise(backing: &StoredImage) -> Result<()> {
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
pub(crate) struct Chain {
    files: Vec<(PathBuf, Option<Identity>)>,
    /// The files that hold the images' data.
    data_files: Vec<Identity>,
    /// The raw image that the user named, if the first image is its side file. It is the only data
    /// file that is not found by its name in an image.
    pub(crate) side_files_image: Option<RawImage>,
    /// The data file of the first image, if the user named it ([`ImageOptions::data_file`]).
    pub(crate) data_file: Option<PathBuf>,
    /// The folder of the last image, from which its names are looked up.
    pub(crate) folder: Folder,
    /// The source of the files.
    pub(crate) source: Files,
    pub(crate) without_key: WithoutKey,
}

/// A file that an image names, open.
pub(crate) struct Named {
    pub(crate) path: PathBuf,
    pub(crate) storage: ImageStorage,
    /// `None` if the storage is not a whole file of this host.
    pub(crate) identity: Option<Identity>,
    pub(crate) folder: Folder,
}

impl Chain {
    pub(crate) fn from_image(
        path: &Path,
        identity: Option<Identity>,
        source: Files,
    ) -> Result<Self> {
        let folder = match (&source, identity) {
            (Files::Host, Some(_)) => Folder::of_image(path)?,
            (Files::Host, None) => Folder::of_remote(),
            (Files::HandedOver(..), _) => Folder::of_handed_over(path),
        };
        Ok(Self { source, ..Self::from_named(path.to_owned(), identity, folder) })
    }

    /// A chain that begins with a file that another image named.
    pub(crate) fn from_named(path: PathBuf, identity: Option<Identity>, folder: Folder) -> Self {
        let files = vec![(path, identity)];
        let (data_files, side_files_image, data_file) = (Vec::new(), None, None);
        let (source, without_key) = (Files::Host, WithoutKey::Refuse);
        Self { files, data_files, side_files_image, data_file, folder, source, without_key }
    }

    /// The format of the next file. Refuses a chain that is too long, an address that is not
    /// allowed or not supported, and a missing or unknown format.
    pub(crate) fn next(&self, backing: &Backing, options: &ImageOptions) -> Result<ImageFormat> {
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
                .hint("if you trust the maker of the image, allow it: --allow-remote (callers of qemu-img: BLOCKHOUSE_ALLOW_REMOTE=1 in the environment, and -f)"));
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

    /// Opens the backing file that the last image names, for reading, without its own backing
    /// chain.
    pub(crate) async fn open_behind(
        &mut self,
        backing: &Backing,
        options: &ImageOptions,
    ) -> Result<StoredImage> {
        let (storage, behind) = self.find_behind(backing, options).await?;
        self.open_found(storage, &behind, options).await
    }

    /// Opens the file for [`open_behind`](Self::open_behind), and returns it with the options for
    /// its image. Only a file of which a part is read is locked here.
    pub(crate) async fn find_behind(
        &mut self,
        backing: &Backing,
        options: &ImageOptions,
    ) -> Result<(ImageStorage, ImageOptions)> {
        let (backing, part) = plain_backing(backing, self.last())?;
        let format = self.next(&backing, options)?;
        let (format, access) = (Some(format), Access::ReadOnly);
        let behind = ImageOptions { format, access, ..options.clone() }.in_part(part);
        let named = self.open_named(&backing.name, BACKING_FILE, &behind, NameUse::Asked).await;
        let Named { path, storage, identity, folder } =
            named.map_err(|error| self.failed(error))?;
        // Checks for a loop before locking: in a loop this process holds the lock already.
        self.enter(path, identity, folder)?;
        Ok((storage, behind))
    }

    /// Opens the image of a file that [`find_behind`](Self::find_behind) returned. `options` are
    /// those of the disk.
    pub(crate) async fn open_found(
        &mut self,
        storage: ImageStorage,
        behind: &ImageOptions,
        options: &ImageOptions,
    ) -> Result<StoredImage> {
        let path = self.last_path().to_owned();
        if matches!(self.source, Files::Host) && options.access == Access::ReadWrite {
            rare(restore_layer(&storage, &path, behind)).await?;
        }
        let next = disk_over(storage, &path, behind, EarlierWrites::Unknown, None).await;
        let (next, left) = next.map_err(|error| self.failed(error.into()))?;
        let next = rare(self.with_data(next, behind)).await?;
        let next = unlocked(next, &options.secrets, self.without_key).await?;
        left.finish_backing(&next, options.access).map_err(|error| self.failed(error.into()))?;
        warn_of_disguise(&next).await?;
        end_opening(&next, options.state.is_look());
        Ok(next)
    }

    /// Opens a file that the last image names.
    pub(crate) async fn open_named(
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
        let (descriptor, folder) = match self.side_files_image.take() {
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

    /// Adds the separate files that hold the last image's data, if there are any. They are opened
    /// and locked as the image is.
    pub(crate) async fn with_data(
        &mut self,
        disk: StoredImage,
        options: &ImageOptions,
    ) -> Result<StoredImage> {
        let has_own = disk.data_file().is_none() || self.side_files_image.is_some();
        if self.data_file.is_some() && has_own {
            let what = "has no external data file, so that none can be given";
            return Err(Error::new(ErrorKind::InvalidInput, what).on(disk.name()));
        }
        if !disk.extent_files().is_empty() {
            return self.with_extents(disk, options).await;
        }
        match self.side_files_image.take() {
            Some(RawImage::Volume(path, volume)) => {
                return self.with_volume(disk, &path, volume, options);
            }
            image => self.side_files_image = image,
        }
        let Some(DataFile { name, .. }) = disk.data_file() else { return Ok(disk) };
        let file = disk.format().storage().storage().as_file();
        let file = file.map(HostFile::descriptor);
        let (storage, identity) = self.open_data(name, DATA_FILE, options, file).await?;
        // Later files are compared with the data file, although it is not an image of the chain.
        self.data_files.extend(identity);
        disk.with_data(storage)
    }

    /// Adds the volume that a side file belongs to. The volume is locked as the side file is.
    fn with_volume(
        &mut self,
        disk: StoredImage,
        path: &Path,
        volume: RawVolume,
        options: &ImageOptions,
    ) -> Result<StoredImage> {
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

    /// Adds the extent files of an image that consists of several files.
    pub(crate) async fn with_extents(
        &mut self,
        disk: StoredImage,
        options: &ImageOptions,
    ) -> Result<StoredImage> {
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

    /// Opens and locks a file with data of the last image: the file that the user named, or the
    /// file that the image names as its `role`. `image` is the last image's own file.
    async fn open_data(
        &mut self,
        name: &[u8],
        role: &'static str,
        options: &ImageOptions,
        image: Option<BorrowedFd<'_>>,
    ) -> Result<(ImageStorage, Option<Identity>)> {
        let by_user = self.data_file.take();
        let last = self.last();
        if by_user.is_none() && is_address(name) {
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
        let opened = match by_user {
            Some(path) => open_location(&mut self.source, &path, &options.clone().in_part(None))
                .await
                .map(|(storage, identity)| Named {
                    path,
                    storage,
                    identity,
                    folder: Folder::of_remote(),
                })
                .map_err(FindError::Host),
            None => self.open_named(name, role, options, used).await,
        };
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
        // This check comes before locking: the data file may be an image of the chain, whose lock
        // this process holds already.
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

    /// Whether the chain has the file already.
    fn contains(&self, identity: Option<Identity>) -> bool {
        let is_it = |identity: Identity| {
            self.files.iter().any(|(_, one)| *one == Some(identity))
                || self.data_files.contains(&identity)
        };
        identity.is_some_and(is_it)
    }

    /// Adds a file that was just opened. An error means that the chain has it already.
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

    /// The number of files that the chain may still get.
    pub(crate) fn room(&self) -> usize {
        MAX_FILES - self.files.len()
    }

    /// The files with their identities, from the image down; `None` for a part of a file, and for
    /// an image on another server.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&Path, Option<Identity>)> {
        self.files.iter().map(|(path, identity)| (&**path, *identity))
    }

    /// The error for a file below the first one of the chain.
    pub(crate) fn failed(&self, error: FindError) -> Error {
        let error = match error {
            // The error names the image already.
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

    pub(crate) fn last_path(&self) -> &Path {
        self.files.last().map_or(Path::new(""), |(path, _)| path)
    }

    pub(crate) fn last(&self) -> &str {
        self.last_path().to_str().unwrap_or("the image")
    }
}

/// Ends the time limit of opening for the image's own server, not for its backing files. From
/// now on requests of guests and tools wait for its server without a limit. Commands that only
/// inspect the image (`is_look`) keep the limit.
pub(crate) fn end_opening(image: &StoredImage, is_look: bool) {
    if !is_look {
        image.format().storage().storage().set_answer_time(None);
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
