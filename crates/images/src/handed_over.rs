//! Images that another process hands over: this process opens them by the file descriptors of the
//! other process, which have its locks.
//!
//! Guarantees: until [`HandedOverDisk::take_over`] this process changes neither the image nor its
//! state file, and the other process keeps the locks, even if this process dies. From
//! [`StoredImage::settle`] on the other process must execute no request, unless it resumes service
//! itself.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockhouse_core::{Error, ErrorKind, Result, Storage, rare};
use blockhouse_disk::{Disk, ImageDisk, Layer, StoredImage};
use blockhouse_engine::{HostFile, OpenFiles};
use blockhouse_storage::{ImageStorage, Location};
use futures_util::future::LocalBoxFuture;

use crate::allowed_paths::Folder;
use crate::image_options::{ImageOptions, StateUse};
use crate::qemu_name::plain_backing;
use crate::restore::{FutureState, LogSession};

/// A file of an image or its chain that another process has open.
#[derive(Debug)]
pub struct HandedFile {
    /// The path that [`HandedOverDisk::open`] finds in the images.
    pub path: String,
    /// The open files.
    pub files: OpenFiles<OwnedFd>,
}

/// The source of a chain's files.
pub(crate) enum Files {
    /// This process opens the files by their paths.
    Host,
    /// Another process has opened the files, in this order. The layer, if there is one, is open in
    /// this process already, and is the backing file of the last image.
    HandedOver(VecDeque<HandedFile>, Option<SharedLayer>),
}

/// An image that several disks of this process read from.
pub struct SharedLayer(Arc<Layer<ImageStorage>>);

impl Clone for SharedLayer {
    fn clone(&self) -> Self {
        self.0.stands().enter();
        Self(Arc::clone(&self.0))
    }
}

impl Drop for SharedLayer {
    fn drop(&mut self) {
        self.0.stands().leave();
    }
}

impl SharedLayer {
    /// Shares a layer in use, if further images may be put over it. The layer then stays locked.
    pub(crate) fn of(layer: Arc<Layer<ImageStorage>>) -> Option<Self> {
        layer.stands().enter();
        let shared = Self(layer);
        shared.0.stands().may_grow().then_some(shared)
    }

    /// Puts an image that was just opened over this layer.
    ///
    /// # Errors
    /// `InvalidInput` if this layer cannot be its backing file.
    pub(crate) fn put_behind(&self, image: StoredImage) -> Result<StoredImage> {
        image.format().header().check_backing(self.0.format())?;
        Ok(image.over_layer(&self.0))
    }
}

impl Files {
    /// Whether the file at this path is the next file that another process hands over.
    pub(crate) fn is_next(&self, path: &Path) -> bool {
        match self {
            Self::Host => false,
            Self::HandedOver(files, _) => {
                files.front().is_some_and(|file| Path::new(&file.path) == path)
            }
        }
    }

    /// Refuses a name that is not a file of this host, if another process hands its files over:
    /// names from that process must not make this process connect to a server.
    ///
    /// # Errors
    /// `Unsupported`.
    pub(crate) fn check_local(&self, location: &Location, name: &Path) -> Result<()> {
        match (self, location) {
            (Self::Host, _) | (Self::HandedOver(..), Location::File(_)) => Ok(()),
            (Self::HandedOver(..), _) => Err(not_handed_over(&name.to_string_lossy())),
        }
    }

    /// The next image, if it is open here already.
    pub(crate) fn take_shared(&mut self) -> Option<SharedLayer> {
        match self {
            Self::HandedOver(files, shared) if files.is_empty() => shared.take(),
            Self::Host | Self::HandedOver(..) => None,
        }
    }

    /// Refuses a chain that does not reach the image that is open here already. `name` is that of
    /// the chain's first image.
    ///
    /// # Errors
    /// `InvalidInput`.
    pub(crate) fn check_complete(&self, name: &str) -> Result<()> {
        match self {
            Self::HandedOver(_, Some(_)) => {
                let what =
                    "does not stand on the image that the process which hands over has behind it";
                Err(Error::new(ErrorKind::InvalidInput, what).on(name))
            }
            Self::Host | Self::HandedOver(..) => Ok(()),
        }
    }

    /// Opens the file at a path.
    pub(crate) fn open(&mut self, path: &Path, options: &ImageOptions) -> Result<HostFile> {
        let access = options.open_mode();
        let cache = options.cache.page_cache();
        let Self::HandedOver(files, _) = self else { return HostFile::open(path, access, cache) };
        let name = path.display().to_string();
        match files.pop_front() {
            Some(file) if file.path == name => HostFile::adopt(path, file.files, access, cache),
            other => {
                let what = match other {
                    Some(HandedFile { path, .. }) => {
                        format!("is wanted next, but the process that hands over has {path} open")
                    }
                    None => {
                        "is wanted, but the process that hands over does not have it open".into()
                    }
                };
                Err(Error::new(ErrorKind::InvalidInput, what).on(&name))
            }
        }
    }
}

/// The open files of the chain, in the order in which [`HandedOverDisk::open`] expects them,
/// each with the path that [`HandedOverDisk::open`] finds in the images. For each image of the
/// chain, from the top: the image and its data file, or the files that hold its data. This
/// process has usually opened the layer of a fork by another path.
///
/// # Errors
/// `Unsupported` if one of the images is on another server: connections cannot be handed over.
pub fn chain_files(image: &StoredImage) -> Result<Vec<(PathBuf, &HostFile)>> {
    first_files(image, usize::MAX)
}

/// As [`chain_files`], for the first `images` images only, including the
/// disk's own.
///
/// # Errors
/// As there.
pub fn first_files(image: &StoredImage, images: usize) -> Result<Vec<(PathBuf, &HostFile)>> {
    let mut all = Vec::new();
    let mut path = PathBuf::from(image.name());
    for (depth, layer) in image.layer().layers().take(images).enumerate() {
        let (image, data) = (layer.format().storage(), layer.format().data());
        // A raw image that is a backing file is read without the file that has its bitmaps.
        let image = if depth > 0 && layer.format().side_file().is_some() { data } else { image };
        let name = image.name();
        let is_as_opened = Path::new(name) == path;
        let folder = Folder::of_handed_over(&path);
        for file in files_of_storage(image.storage())? {
            let is_image = file.name() == name;
            all.push((if is_image { path.clone() } else { file.name().into() }, file));
        }
        if !std::ptr::eq(image, data) {
            let named = layer.format().header().data_file().filter(|_| !is_as_opened);
            for file in files_of_storage(data.storage())? {
                let name = named.map(|named| folder.join(&named.name));
                all.push((name.unwrap_or_else(|| file.name().into()), file));
            }
        }
        let behind = layer.backing_layer().map(|behind| PathBuf::from(behind.image_name()));
        let named = layer.backing_file().and_then(|named| plain_backing(named, name).ok());
        path = match (named, behind) {
            (Some((named, _)), Some(_)) if !Location::is_remote(&named.name) => {
                folder.join(&named.name)
            }
            (_, behind) => behind.unwrap_or_default(),
        };
    }
    Ok(all)
}

fn files_of_storage(storage: &ImageStorage) -> Result<Vec<&HostFile>> {
    let files = storage.files();
    if !files.is_empty() {
        return Ok(files);
    }
    Err(not_handed_over(storage.name()))
}

fn not_handed_over(name: &str) -> Error {
    let what = "an image on another server cannot be handed over";
    Error::new(ErrorKind::Unsupported, what).on(name)
}

/// Makes acknowledged changes of an open disk survive the process from now on, if `uses` requires
/// that; errors are logged. No request may be in flight on the disk, which must be
/// [settled](StoredImage::settle) and without a state file. `path` is the image's path.
pub fn keep_state<'a>(
    disk: &'a ImageDisk,
    path: &'a Path,
    uses: &'a StateUse,
) -> LocalBoxFuture<'a, ()> {
    rare(async move {
        let image = disk.image();
        if let Some(state) = FutureState::of(image, path, uses) {
            state.take(image, LogSession::New, image.flush_failures()).await;
        }
    })
}

/// An image that another process still owns.
pub struct HandedOverDisk {
    image: StoredImage,
    /// The state file to be made.
    state: Option<FutureState>,
}

impl HandedOverDisk {
    pub(crate) fn new(image: StoredImage, path: &Path, uses: &StateUse) -> Self {
        let state = FutureState::of(&image, path, uses);
        Self { image, state }
    }

    /// The image at `depth` in the disk's chain (0: its own), for other disks over it.
    pub fn layer_at(&self, depth: usize) -> Option<SharedLayer> {
        let own = self.image.layer();
        let mut layers = [own].into_iter().chain(own.opened().now());
        let layer = layers.nth(depth).cloned()?;
        layer.stands().enter();
        Some(SharedLayer(layer))
    }

    /// Takes ownership of the image: this process may change the image, and its drop of the image
    /// releases the locks. The next flush covers the other process's writes. `failures` are the
    /// flush failures that the other process remembers; this process remembers them, too. This
    /// process also owns the state file from now on. The takeover cannot be undone, so errors are
    /// only logged.
    pub async fn take_over(self, failures: [Option<i32>; 2]) -> ImageDisk {
        let Self { image, state } = self;
        chain_files(&image).into_iter().flatten().for_each(|(_, file)| file.own_locks());
        let format = image.format();
        for (storage, errno) in [format.storage(), format.data()].into_iter().zip(failures) {
            storage.note_earlier_writes();
            if let Some(errno) = errno {
                let error = std::io::Error::from_raw_os_error(errno);
                let error = Error::host("cannot flush", error).on(storage.name());
                storage.remember_failure(&error);
                tracing::error!(
                    "{error}; this was before the server was upgraded, and stays in force"
                );
            }
        }
        if let Some(state) = state {
            state.take(&image, LogSession::GoesOn, failures).await;
        }
        Disk::new(image)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, BorrowedFd};
    use std::sync::atomic::AtomicU64;

    use blockhouse_core::{Buffer, ByteRange, Durability, Request, StateMemory};
    use blockhouse_disk::{BlockStatus, BlockStatusCache, ImageFormat, StateDir};
    use blockhouse_engine::{EngineChoice, EventLoop, lock_byte_shared};

    use super::*;
    use crate::{create, open};

    fn files_of(disk: &ImageDisk) -> Vec<HandedFile> {
        let copy = |file: BorrowedFd<'_>| file.try_clone_to_owned().unwrap();
        let hand = |(path, file): (PathBuf, &HostFile)| {
            let OpenFiles { file: open, tail, flushed } = file.open_files();
            let files =
                OpenFiles { file: copy(open), tail: tail.map(copy), flushed: flushed.map(copy) };
            HandedFile { path: path.display().to_string(), files }
        };
        chain_files(disk.image()).unwrap().into_iter().map(hand).collect()
    }

    #[test]
    fn a_settled_image_is_another_process_s_to_flush_and_remembers_failures() {
        let folder = tempfile::tempdir().unwrap();
        EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
            for format in [ImageFormat::Raw, ImageFormat::Qcow2] {
                let path = folder.path().join(format.as_str());
                let options = ImageOptions { format: Some(format), ..ImageOptions::default() };
                create(&path, 1 << 20, format).await.unwrap();
                let disk = open(&path, options.clone()).await.unwrap();
                let mut buffer = Buffer::new(4096);
                buffer.bytes_mut().fill(7);
                let (offset, durability) = (8192, Durability::None);
                let write = Request::Write { offset, from: buffer.lend(), durability };
                disk.submit(write).await.unwrap();
                disk.image().settle().await.unwrap();
                // This disk never owned the locks, so dropping it is safe.
                let opened =
                    HandedOverDisk::open(&path, options.clone(), files_of(&disk), None).await;
                drop(opened.unwrap());
                let other =
                    HandedOverDisk::open(&path, options.clone(), files_of(&disk), None).await;
                let other = other.unwrap().take_over([None, None]).await;
                let before = other.stats().counters().flushes_issued;
                assert_eq!(before, 0, "what was settled is stable");
                other.flush().await.unwrap();
                assert_eq!(
                    other.stats().counters().flushes_issued,
                    before + 1,
                    "{}",
                    format.as_str()
                );
                buffer.bytes_mut().fill(0);
                other.submit(Request::Read { offset, into: buffer.lend() }).await.unwrap();
                assert_eq!(buffer.bytes(), [7; 4096]);
                let third =
                    HandedOverDisk::open(&path, options, files_of(&other), None).await.unwrap();
                let third = third.take_over([Some(5), None]).await;
                assert_eq!(third.image().flush_failures()[0], Some(5));
                assert_eq!(third.flush().await.unwrap_err().errno(), 5);
            }
        });
    }

    /// The first change after a hand-over writes and flushes no header, because guests wait for it.
    #[test]
    fn the_session_of_a_redo_log_goes_on_in_the_process_that_takes_over() {
        // The state is on tmpfs.
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = folder.path().join("disk.qcow2");
        let state = StateDir::create(&folder.path().join("state")).unwrap();
        EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
            create(&path, 1 << 20, ImageFormat::Qcow2).await.unwrap();
            let options = ImageOptions { state: StateUse::Keep(state), ..ImageOptions::default() };
            let write = async |disk: &ImageDisk, offset| {
                let from = Buffer::new(4096).lend();
                let durability = Durability::None;
                disk.submit(Request::Write { offset, from, durability }).await.unwrap();
            };
            let disk = open(&path, options.clone()).await.unwrap();
            write(&disk, 0).await;
            disk.image().settle().await.unwrap();
            let other = HandedOverDisk::open(&path, options.clone(), files_of(&disk), None).await;
            let other = other.unwrap().take_over([None, None]).await;
            write(&other, 1 << 19).await;
            assert_eq!(other.stats().counters().flushes_issued, 0, "no header is written");
            drop(other);
            // That process was killed: its log is the valid one.
            let disk = open(&path, options).await.unwrap();
            let range = ByteRange::between(1 << 19, (1 << 19) + 4096);
            let (status, _) =
                disk.block_status(range, &mut BlockStatusCache::default()).await.unwrap();
            assert_eq!(status, BlockStatus::Data, "the change was answered");
            disk.close().await.unwrap();
        });
    }

    /// After a hand-over that fails, the redo log is still valid, and no later opening of the image
    /// refuses it.
    #[test]
    fn a_process_that_goes_on_still_keeps_its_redo_log() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.qcow2");
        EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
            create(&path, 1 << 20, ImageFormat::Qcow2).await.unwrap();
            let options = ImageOptions::default();
            let disk = open(&path, options.clone()).await.unwrap();
            let has_session_bit = |image: &StoredImage| {
                image.format().redo().is_some_and(|redo| redo.has_session_bit())
            };
            let words = disk.image().redo_log_words();
            let log: Vec<AtomicU64> = (0..words).map(|_| AtomicU64::new(0)).collect();
            disk.image().attach_redo_log(Arc::new(log) as Arc<dyn StateMemory>);
            let write = async |offset| {
                let from = Buffer::new(4096).lend();
                let durability = Durability::None;
                disk.submit(Request::Write { offset, from, durability }).await.unwrap();
            };
            write(0).await;
            disk.image().settle().await.unwrap();
            let other = HandedOverDisk::open(&path, options, files_of(&disk), None).await.unwrap();
            assert!(has_session_bit(&other.image), "a replay would refuse what follows");
            drop(other);
            write(1 << 19).await;
            assert!(has_session_bit(disk.image()));
            disk.close().await.unwrap();
        });
    }

    /// Programs that try to open the image hold lock bytes for a moment, until they find the lock
    /// bytes of its server.
    #[test]
    fn who_tries_to_open_the_image_meanwhile_is_no_reason_to_refuse_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.raw");
        EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
            create(&path, 1 << 20, ImageFormat::Raw).await.unwrap();
            let disk = open(&path, ImageOptions::default()).await.unwrap();
            let other = std::fs::File::options().read(true).write(true).open(&path).unwrap();
            for byte in [100, 101, 103, 201, 203] {
                lock_byte_shared(other.as_fd(), byte).unwrap();
            }
            let options = ImageOptions::default();
            HandedOverDisk::open(&path, options, files_of(&disk), None).await.unwrap();
        });
    }

    /// A name that is handed over never makes the process connect to a server or load a library.
    #[test]
    fn a_location_is_a_name_and_nothing_to_open() {
        let folder = tempfile::tempdir().unwrap();
        let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        server.set_nonblocking(true).unwrap();
        let host = server.local_addr().unwrap();
        let image = folder.path().join("disk.raw");
        EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
            create(&image, 1 << 20, ImageFormat::Raw).await.unwrap();
            let disk = open(&image, ImageOptions::default()).await.unwrap();
            for name in [
                format!("nbd://{host}/x"),
                format!("nbds://{host}/x?tls-certificates=/etc"),
                format!("nbd+unix:///x?socket={}/socket", folder.path().display()),
                format!("rbd:pool/image?conf={}&id=admin", image.display()),
            ] {
                let mut files = files_of(&disk);
                files[0].path.clone_from(&name);
                let options =
                    ImageOptions { format: Some(ImageFormat::Raw), ..ImageOptions::default() };
                let opened = HandedOverDisk::open(Path::new(&name), options, files, None).await;
                let why = opened.err().expect("no file").to_string();
                assert!(why.contains("cannot be handed over"), "{why}");
            }
        });
        assert!(server.accept().is_err(), "a connection was made");
    }

    #[test]
    fn another_chain_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (folder.path().join("one"), folder.path().join("two"));
        EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
            for path in [&one, &two] {
                create(path, 1 << 20, ImageFormat::Raw).await.unwrap();
            }
            let disk = open(&one, ImageOptions::default()).await.unwrap();
            let refused = async |path: &Path, files| {
                let opened = HandedOverDisk::open(path, ImageOptions::default(), files, None).await;
                opened.err().expect("another file").to_string()
            };
            let other = refused(&two, files_of(&disk)).await;
            assert!(other.contains("two") && other.contains("one open"), "{other}");
            assert!(refused(&one, Vec::new()).await.contains("does not have it open"));
        });
    }
}
