//! Forks of disks that are in use, and of images that are not open: see *Forks* in README.md of the
//! crate.
//!
//! Guarantees: the layer (the disk's former image) holds the disk's content at the moment of the
//! fork. The disk's overlay and its children, which are further overlays, read the layer. A kill or
//! a loss of power at any step leaves the disk either in its old image or in its overlay, and the
//! record beside the layer says in which of the two. A fork that fails before the moment of the
//! fork leaves the disk unchanged, and no files.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use blockhouse_core::{Error, ErrorKind, Result, WriteCache, rare};
use blockhouse_disk::{
    Access, Disk, EarlierWrites, ImageDisk, Pause, ReplacedImage, StoredImage, check_overlay_size,
    set_backing_file,
};
use blockhouse_engine::{HostFile, NewFile, PageCache};
use blockhouse_format::qcow2::{CreateOptions, NewEncryption, Switch};
use blockhouse_format::{Backing, ImageFormat};
use blockhouse_storage::ImageStorage;
use futures_util::future::LocalBoxFuture;

use crate::allowed_paths::AllowedPaths;
use crate::chain::{MAX_FILES, end_opening};
use crate::create::{check_new_name, create_qcow2, part_of, remove_created};
use crate::disk_over::disk_over;
use crate::durable_rename::{IfExists, rename_durable};
use crate::fork_bitmaps::{ForkedBitmaps, copy_bitmaps, give_bitmaps};
use crate::further_base::name_from;
use crate::image_options::{BackingUse, CacheMode, ImageOptions, Purpose};
use crate::lock::become_reader;
use crate::moved_record::{forget_moved, record_forked};
use crate::open_image::open;
use crate::open_location::path_in_use;
use crate::unlock::{Secrets, WithoutKey, unlocked};
use crate::unwritten::{UnwrittenOverlay, check_unwritten};

/// Bytes of an overlay's cluster. A subcluster has 4 KiB: the first write to a subcluster after a
/// fork copies the rest of it, which is usually empty.
const OVERLAY_CLUSTER: u64 = 128 << 10;

type Replaced<'a> = ReplacedImage<'a, ImageStorage>;

/// An overlay to be made.
#[derive(Clone, Debug)]
pub struct NewChild {
    /// The path, where no file exists yet.
    pub path: PathBuf,
    /// The options for opening the overlay at once; `None` if the overlay is only created.
    pub opened: Option<ImageOptions>,
}

/// The part of a fork that concerns one disk.
#[derive(Clone)]
pub struct ForkOf<'a> {
    /// The disk, which is in use.
    pub disk: &'a ImageDisk,
    /// The options with which the disk was opened.
    pub options: ImageOptions,
    /// The path of the disk's new overlay; `None` for a disk that is open for reading only. A fork
    /// that shares the layer sets this to `None`.
    pub overlay: Option<PathBuf>,
    /// Whether the overlay exists already: a qcow2 image to which nothing was written.
    pub is_overlay_made: bool,
    /// Whether a disk whose image is an overlay without writes continues in this overlay. The
    /// children are then made over the overlay's layer, so the chain does not grow.
    pub may_share_layer: bool,
    /// The children.
    pub children: Vec<NewChild>,
}

/// A disk after its fork.
pub struct Forked<'a> {
    /// The canonical path of the layer.
    pub layer: PathBuf,
    /// The overlay that the disk goes on in; `None` if it is open for reading only.
    pub overlay: Option<PathBuf>,
    /// The children: the path of each, and its disk if it was to be opened.
    pub children: Vec<(PathBuf, Option<ImageDisk>)>,
    replaced: Option<Replaced<'a>>,
    disk: &'a ImageDisk,
    bitmaps: Option<ForkedBitmaps>,
}

impl Forked<'_> {
    /// Makes the layer durable, and then lets other programs read it. Guests continue, except while
    /// the disk's bitmaps are completed. An error of completing them is logged, and the bitmaps
    /// then mark the whole disk as changed.
    ///
    /// # Errors
    /// Errors of the storage. The layer then stays locked, and flushes of the images over it fail
    /// as well.
    pub fn settle(&self) -> LocalBoxFuture<'_, Result<()>> {
        rare(self.close_layer())
    }

    async fn close_layer(&self) -> Result<()> {
        let Some(replaced) = &self.replaced else { return Ok(()) };
        replaced.close_as_layer().await?;
        let format = replaced.image().format();
        for storage in [format.storage(), format.data()] {
            storage.storage().files().into_iter().for_each(become_reader);
        }
        if let Some(bitmaps) = &self.bitmaps
            && let Err(error) = bitmaps.complete(self.disk, replaced).await
        {
            tracing::warn!("{error}; the bitmaps of this disk say that all of it has changed");
        }
        Ok(())
    }
}

impl Drop for Forked<'_> {
    fn drop(&mut self) {
        if let Some(bitmaps) = &self.bitmaps {
            // The observer may have been detached already.
            self.disk.jobs().stop_observing(&bitmaps.observer());
        }
    }
}

/// The steps of one disk's fork that were taken so far.
struct Steps<'a> {
    fork: ForkOf<'a>,
    layer: PathBuf,
    /// The disk's overlay, if it shares its layer with the children.
    shared: Option<UnwrittenOverlay<'a>>,
    backing: Backing,
    overlay: Option<Arc<StoredImage>>,
    bitmaps: Option<ForkedBitmaps>,
    is_recorded: bool,
    children: Vec<(PathBuf, Option<ImageDisk>)>,
}

/// Forks disks at one moment. Returns the forked disks, and how long changes were held off. The
/// caller [settles](Forked::settle) the layers. Needs the event loop of the current thread.
///
/// # Errors
/// The error names the disk or file: the disk cannot be forked, its overlay has another size, or
/// the file exists; `Io` if changes in flight take too long; host errors. Then all disks continue
/// as before, and no file is left.
pub fn fork<'a>(forks: Vec<ForkOf<'a>>) -> LocalBoxFuture<'a, Result<(Vec<Forked<'a>>, Pause)>> {
    rare(async move {
        let mut forks = forks;
        loop {
            match fork_once(forks.clone()).await? {
                Attempt::Forked(forked, pause) => return Ok((forked, pause)),
                Attempt::Written(disks) => {
                    for (fork, is_written) in forks.iter_mut().zip(disks) {
                        fork.may_share_layer &= !is_written;
                    }
                }
            }
        }
    })
}

/// The outcome of an attempt to fork disks.
enum Attempt<'a> {
    Forked(Vec<Forked<'a>>, Pause),
    /// The attempt had no effect, because disks that were to share their layers were written to
    /// meanwhile. For each disk: whether it was written to.
    Written(Vec<bool>),
}

async fn fork_once<'a>(forks: Vec<ForkOf<'a>>) -> Result<Attempt<'a>> {
    let mut steps = Vec::with_capacity(forks.len());
    for fork in forks {
        steps.push(Steps::new(fork).await?);
    }
    let taken = take(&mut steps).await;
    if let Ok(Some((replaced, pause))) = taken {
        let forked = steps.into_iter().zip(replaced);
        let forked = forked.map(|(steps, replaced)| steps.forked(replaced)).collect();
        return Ok(Attempt::Forked(forked, pause));
    }
    let written = steps.iter().map(Steps::is_written).collect();
    for steps in steps {
        steps.undo().await;
    }
    taken.map(|_| Attempt::Written(written))
}

type Taken<'a> = (Vec<Option<Replaced<'a>>>, Pause);

/// Takes all steps; `None` if a disk that was to share its layer was written to.
async fn take<'a>(all: &mut [Steps<'a>]) -> Result<Option<Taken<'a>>> {
    for steps in &mut *all {
        steps.make_overlay().await?;
        steps.give_bitmaps().await?;
        steps.make_children().await?;
    }
    // The children get their names after the records exist. A failure after that undoes the fork,
    // so that no child remains whose layer continues to change.
    for steps in &mut *all {
        steps.record()?;
    }
    for steps in &mut *all {
        steps.name_children().await?;
    }
    let began = Instant::now();
    let mut quiesced = Vec::with_capacity(all.len());
    for steps in &*all {
        let disk = steps.fork.disk;
        if disk.image().access() == Access::ReadOnly {
            quiesced.push(None);
            continue;
        }
        quiesced.push(Some(disk.quiesced().await?));
        let Some(overlay) = &steps.overlay else { continue };
        // The disk may have become read-only or longer since the first checks.
        disk.check_writable()?;
        disk.check_replacement(overlay)?;
    }
    if all.iter().any(Steps::is_written) {
        return Ok(None);
    }
    // No switch can fail, because all were checked.
    let switched = quiesced.into_iter().zip(&*all).map(|(one, steps)| {
        let Some((quiesced, overlay)) = one.zip(steps.overlay.clone()) else { return Ok(None) };
        if let Some(bitmaps) = &steps.bitmaps {
            quiesced.observe(bitmaps.observer());
        }
        quiesced.switch_to(overlay).map(Some)
    });
    let switched = switched.collect::<Result<Vec<_>>>()?;
    Ok(Some((switched, Pause { length: began.elapsed() })))
}

impl<'a> Steps<'a> {
    async fn new(mut fork: ForkOf<'a>) -> Result<Self> {
        // The secret that opened the disk encrypts the overlays and opens them.
        fork.options.secrets = Secrets::of(fork.disk);
        if fork.overlay.is_some() {
            check_goes_on(fork.disk)?;
        }
        let image = check_forkable(fork.disk, fork.overlay.is_some())?;
        let shared = match fork.may_share_layer {
            true => UnwrittenOverlay::of(fork.disk, &image).await?,
            false => None,
        };
        let layer = shared.as_ref().map_or(image, |shared| shared.path().to_owned());
        if shared.is_some() {
            fork.overlay = None;
        }
        fork.overlay = fork.overlay.as_deref().map(whole_path).transpose()?;
        for child in &mut fork.children {
            if let Some(options) = &mut child.opened {
                options.secrets = fork.options.secrets.clone();
            }
            child.path = whole_path(&child.path)?;
        }
        let format = match &shared {
            Some(shared) => shared.format(),
            None => fork.disk.image().image_format_name(),
        };
        let backing = Backing { name: Vec::new(), format: Some(format.to_owned()) };
        let (overlay, bitmaps, children) = (None, None, Vec::new());
        Ok(Self { fork, layer, shared, backing, overlay, bitmaps, is_recorded: false, children })
    }

    /// Whether the disk was to share its layer, and was written to.
    fn is_written(&self) -> bool {
        self.shared.as_ref().is_some_and(UnwrittenOverlay::is_written)
    }

    /// The layer as the backing file of an image at this path.
    fn backing_of(&self, path: &Path) -> Backing {
        Backing { name: name_from(&self.layer, path), ..self.backing.clone() }
    }

    async fn make_overlay(&mut self) -> Result<()> {
        let Some(path) = self.fork.overlay.clone() else { return Ok(()) };
        if self.fork.is_overlay_made {
            self.give_backing(&path).await?;
        } else {
            let part = self.make(&path).await?;
            let named = rename_durable(&part, &path, IfExists::Fail);
            if named.is_err() {
                remove_created(&part).await;
            }
            named?;
        }
        let opened = self.open_over(&path, &self.fork.options).await;
        match opened {
            Ok(image) => self.overlay = Some(Arc::new(image)),
            Err(error) => {
                self.remove_overlay(&path).await;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Removes an overlay that the fork has made.
    async fn remove_overlay(&self, path: &Path) {
        if !self.fork.is_overlay_made {
            remove_created(path).await;
        }
    }

    /// Makes an existing image name the layer as its backing file, durably.
    async fn give_backing(&self, path: &Path) -> Result<()> {
        let options = overlay_options(&self.fork.options);
        let image = open(path, options.for_purpose(Purpose::Image)).await?;
        let given = async {
            check_unwritten(&image).await?;
            check_overlay_size(self.fork.disk, image.image())?;
            if self.fork.disk.image().has_encrypted_layer() && !image.image().is_encrypted() {
                let what = "is not encrypted, and the disk that would go on in it is";
                let error =
                    Error::new(ErrorKind::InvalidInput, what).on(image.image().image_name());
                return Err(error.hint("let the fork make the overlay"));
            }
            let backing = self.backing_of(path);
            if image.image().backing_file() == Some(&backing) {
                Ok(())
            } else {
                set_backing_file(&image, Some(backing)).await
            }
        };
        let given = given.await;
        let closed = image.close().await;
        given.and(closed)
    }

    /// Continues the disk's bitmaps in the overlay.
    async fn give_bitmaps(&mut self) -> Result<()> {
        if let Some(overlay) = &self.overlay {
            self.bitmaps = give_bitmaps(self.fork.disk, overlay).await?;
        }
        Ok(())
    }

    async fn make_children(&mut self) -> Result<()> {
        for index in 0..self.fork.children.len() {
            let path = self.fork.children[index].path.clone();
            let part = self.make(&path).await?;
            self.children.push((part, None));
        }
        Ok(())
    }

    /// Makes an overlay durably under a temporary name; returns the temporary path.
    async fn make(&self, path: &Path) -> Result<PathBuf> {
        check_new_name(path)?;
        if fs::symlink_metadata(path).is_ok() {
            let what = "exists already, and is left alone";
            let error = Error::new(ErrorKind::InvalidInput, what).on(&path.to_string_lossy());
            return Err(error.hint("choose another name"));
        }
        let part = part_of(path);
        let backing = Some(self.backing_of(path));
        let encryption = if self.fork.disk.image().has_encrypted_layer() {
            let (name, image) = (path.to_string_lossy(), self.fork.disk.image());
            let header = self.fork.options.secrets.create_overlay_header(&name, image).await?;
            Some(NewEncryption::Luks(header))
        } else {
            None
        };
        let options = CreateOptions {
            backing,
            encryption,
            cluster_size: OVERLAY_CLUSTER,
            extended_l2: Switch::On,
            ..CreateOptions::new(self.fork.disk.size())
        };
        create_qcow2(&part, &options, NewFile::default()).await?;
        Ok(part)
    }

    /// Opens an overlay that was made, over the disk's present image or over the shared layer.
    async fn open_over(&self, path: &Path, options: &ImageOptions) -> Result<StoredImage> {
        let mut options = overlay_options(options);
        if self.fork.disk.capabilities().write_cache == WriteCache::None {
            // The disk announces no volatile write cache, so the guest does not flush.
            options.cache = options.cache.write_through();
        }
        let (mode, cache) = (options.open_mode(), options.cache.page_cache());
        let file = match HostFile::open(path, mode, cache) {
            // A file system without direct I/O.
            Err(error)
                if options.cache == CacheMode::None
                    && matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::InvalidInput) =>
            {
                HostFile::open(path, mode, PageCache::Used)?
            }
            opened => opened?,
        };
        let opened = disk_over(file.into(), path, &options, EarlierWrites::Unknown, None).await;
        let (image, restore) = opened?;
        let image = unlocked(image, &options.secrets, WithoutKey::Refuse).await?;
        let header = image.format().header();
        let image = match &self.shared {
            Some(shared) => {
                header.check_backing(shared.layer().format())?;
                end_opening(&image, false);
                image.over_layer(shared.layer())
            }
            None => {
                header.check_backing(self.fork.disk.format())?;
                end_opening(&image, false);
                image.over(self.fork.disk.image())
            }
        };
        restore.finish(image).await
    }

    fn record(&mut self) -> Result<()> {
        let Some(overlay) = &self.fork.overlay else { return Ok(()) };
        // Set first: even if the write of the record fails, the record may exist.
        self.is_recorded = true;
        record_forked(&self.layer, overlay)
    }

    async fn name_children(&mut self) -> Result<()> {
        for index in 0..self.children.len() {
            let NewChild { path, opened } = self.fork.children[index].clone();
            rename_durable(&self.children[index].0, &path, IfExists::Fail)?;
            self.children[index].0.clone_from(&path);
            if let Some(options) = opened {
                let image = self.open_over(&path, &options).await?;
                self.children[index].1 = Some(Disk::new(image));
            }
        }
        Ok(())
    }

    /// Restores the state before the fork. Errors of closing images and of removing the record are
    /// logged.
    async fn undo(self) {
        for (path, disk) in self.children {
            close_unused(disk.as_ref().map(|disk| &**disk.image())).await;
            drop(disk);
            remove_created(&path).await;
        }
        if self.is_recorded
            && let Err(error) = forget_moved(&self.layer)
        {
            // The overlay stays, because the record beside the image leads programs to it.
            tracing::error!("{error}; its overlay stays");
            close_unused(self.overlay.as_deref()).await;
            return;
        }
        if let (Some(overlay), Some(path)) = (self.overlay, self.fork.overlay) {
            close_unused(Some(&overlay)).await;
            drop(overlay);
            if !self.fork.is_overlay_made {
                remove_created(&path).await;
            }
        }
    }

    fn forked(self, replaced: Option<Replaced<'a>>) -> Forked<'a> {
        let Self { fork, layer, shared, bitmaps, children, .. } = self;
        let ForkOf { disk, overlay, .. } = fork;
        let overlay = overlay.or_else(|| Some(shared?.overlay().to_owned()));
        Forked { layer, overlay, children, replaced, disk, bitmaps }
    }
}

/// As [`close`](StoredImage::close), for an image without writes. Its backing chain is not flushed.
async fn close_alone(image: &StoredImage) -> Result<()> {
    image.layer().stability().set_stable_behind();
    image.close().await
}

/// Closes an overlay without writes, so that it leaves no state file.
async fn close_unused(image: Option<&StoredImage>) {
    if let Some(image) = image
        && let Err(error) = close_alone(image).await
    {
        tracing::warn!("{error}");
    }
}

/// Forks an image that is not open. When the call returns, the disk durably continues in `overlay`.
///
/// # Errors
/// As [`fork`], and the errors of opening it for writing.
pub fn fork_image<'a>(
    image: &'a Path,
    options: ImageOptions,
    overlay: &'a Path,
) -> LocalBoxFuture<'a, Result<()>> {
    rare(async move {
        let disk = open(image, options.clone()).await?;
        let overlay = Some(overlay.to_owned());
        let fork = ForkOf {
            disk: &disk,
            options,
            overlay,
            is_overlay_made: false,
            may_share_layer: false,
            children: Vec::new(),
        };
        let mut steps = Steps::new(fork).await?;
        let made = async {
            steps.make_overlay().await?;
            if let Some(overlay) = &steps.overlay {
                copy_bitmaps(&disk, overlay).await?;
            }
            steps.record()
        };
        if let Err(error) = made.await {
            steps.undo().await;
            return Err(error);
        }
        if let Some(overlay) = steps.overlay.take() {
            close_alone(&overlay).await?;
        }
        disk.close().await
    })
}

/// The options for an overlay of a disk that was opened by `options`.
fn overlay_options(options: &ImageOptions) -> ImageOptions {
    ImageOptions {
        format: Some(ImageFormat::Qcow2),
        access: Access::ReadWrite,
        copy_on_read: false,
        allowed_paths: AllowedPaths::default(),
        snapshot: None,
        backing_use: BackingUse::default(),
        side_file: None,
        ..options.clone()
    }
}

/// Refuses a disk that cannot continue in an overlay.
fn check_goes_on(disk: &ImageDisk) -> Result<()> {
    let refuse = |what: &str, hint: &'static str| {
        let error = Error::new(ErrorKind::Unsupported, what.to_owned());
        Err(error.on(disk.image().image_name()).hint(hint))
    };
    disk.check_writable()?;
    disk.check_stays()?;
    if disk.image().data_file().is_some() && !disk.image().has_side_file() {
        let what = "keeps its data in another file, and is not forked";
        return refuse(what, "mirror the disk to an image that stands alone");
    }
    if disk.copies_on_read() {
        let what = "copies on read, which its overlay would not";
        return refuse(what, "stream it first ('blockhouse ctl SOCKET stream')");
    }
    if disk.jobs().base().is_some() {
        let what = "its backing file is open for writing since a commit that did not complete";
        return refuse(what, "commit it again and complete that");
    }
    Ok(())
}

/// Checks that a disk's image can get overlays, and returns its canonical path. `goes_on`: the disk
/// continues in one of them.
fn check_forkable(disk: &ImageDisk, goes_on: bool) -> Result<PathBuf> {
    let image = disk.image();
    let name = image.image_name().to_owned();
    let refuse = |kind, what: &str, hint: &'static str| {
        Err(Error::new(kind, what.to_owned()).on(&name).hint(hint))
    };
    if !goes_on && image.access() == Access::ReadWrite {
        let what = "is open for writing, and would change what others are over";
        return refuse(ErrorKind::InvalidInput, what, "have it go on in an overlay");
    }
    // For a raw image with a side file, this is the file with the data.
    let file = if image.has_side_file() {
        image.format().data().storage().as_file()
    } else {
        image.file()
    };
    let Some(file) = file else {
        let what = "is no file or device of this host, and is not forked";
        return refuse(ErrorKind::Unsupported, what, "mirror the disk to a file first");
    };
    if image.backing_file().is_some() && image.layer_at(1).is_none() {
        let what =
            "is open without the backing file that it names, which would be read behind an overlay";
        return refuse(ErrorKind::Unsupported, what, "rebase it to none first");
    }
    if image.layer().layers().count() >= MAX_FILES - 1 {
        let what = format!("its chain has {} files, and none may have more", MAX_FILES - 1);
        return refuse(ErrorKind::InvalidInput, &what, "shorten it (commit or stream)");
    }
    path_in_use(file, &name)
}

/// The path of a new file, with the canonical path of its folder. It is valid as long as no folder
/// is renamed.
fn whole_path(path: &Path) -> Result<PathBuf> {
    let failed = |error| Error::host("cannot find its folder", error).on(&path.to_string_lossy());
    let Some(name) = path.file_name() else {
        let what = "is no name of a file";
        return Err(Error::new(ErrorKind::InvalidInput, what).on(&path.to_string_lossy()));
    };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    Ok(folder.unwrap_or(Path::new(".")).canonicalize().map_err(failed)?.join(name))
}

#[cfg(test)]
mod tests {
    use blockhouse_core::{Buffer, Durability, Request};
    use blockhouse_disk::StateDir;
    use blockhouse_engine::{EngineChoice, EventLoop};

    use super::*;
    use crate::StateUse;
    use crate::create::create;

    const SIZE: u64 = 1 << 20;

    async fn write(disk: &ImageDisk, offset: u64, byte: u8) {
        let mut buffer = Buffer::new(4096);
        buffer.bytes_mut().fill(byte);
        let (from, durability) = (buffer.lend(), Durability::None);
        disk.submit(Request::Write { offset, from, durability }).await.unwrap();
    }

    async fn byte_at(disk: &ImageDisk, offset: u64) -> u8 {
        let mut buffer = Buffer::new(4096);
        disk.submit(Request::Read { offset, into: buffer.lend() }).await.unwrap();
        assert!(buffer.bytes().iter().all(|byte| *byte == buffer.bytes()[0]));
        buffer.bytes()[0]
    }

    /// A disk of a folder, with state, and how it was opened.
    async fn disk_in(folder: &Path, format: ImageFormat) -> (ImageDisk, ImageOptions, PathBuf) {
        let path = folder.join("disk");
        create(&path, SIZE, format).await.unwrap();
        let dir = StateDir::create(&folder.join("state")).unwrap();
        let (format, state) = (Some(format), StateUse::Keep(dir));
        let options = ImageOptions { format, state, ..ImageOptions::default() };
        (open(&path, options.clone()).await.unwrap(), options, path)
    }

    fn plan<'a>(disk: &'a ImageDisk, options: &ImageOptions, folder: &Path) -> ForkOf<'a> {
        let child = NewChild { path: folder.join("child"), opened: Some(options.clone()) };
        let overlay = Some(folder.join("over"));
        let (options, children) = (options.clone(), vec![child]);
        ForkOf { disk, options, overlay, is_overlay_made: false, may_share_layer: true, children }
    }

    fn of_qcow2(options: &ImageOptions) -> ImageOptions {
        ImageOptions { format: Some(ImageFormat::Qcow2), ..options.clone() }
    }

    #[test]
    fn a_death_before_the_layer_is_settled_loses_nothing() {
        EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
            for format in [ImageFormat::Raw, ImageFormat::Qcow2] {
                // The state is on tmpfs.
                let folder = tempfile::tempdir_in("/dev/shm").unwrap();
                let folder = folder.path();
                let (disk, options, path) = disk_in(folder, format).await;
                write(&disk, 0, 1).await;
                let (mut forked, _) = fork(vec![plan(&disk, &options, folder)]).await.unwrap();
                let child = forked[0].children.remove(0).1.unwrap();
                write(&disk, 65536, 2).await;
                write(&child, 65536, 3).await;
                assert!(disk.image().has_unstable_layer() && child.image().has_unstable_layer());
                // As after a kill, neither the layer nor the overlays are closed.
                drop(forked);
                drop((disk, child));
                let refused = open(&path, options.clone()).await.err().expect("it was forked");
                assert!(refused.to_string().contains("goes on in"), "{refused}");
                for (name, byte) in [("over", 2), ("child", 3)] {
                    let disk = open(&folder.join(name), of_qcow2(&options)).await.unwrap();
                    assert_eq!([byte_at(&disk, 0).await, byte_at(&disk, 65536).await], [1, byte]);
                    disk.close().await.unwrap();
                }
                assert_eq!(fs::read_dir(folder.join("state")).unwrap().count(), 0);
            }
        });
    }

    #[test]
    fn a_flush_covers_the_layer_until_it_is_settled() {
        EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
            for format in [ImageFormat::Raw, ImageFormat::Qcow2] {
                let folder = tempfile::tempdir_in("/dev/shm").unwrap();
                let folder = folder.path();
                let (disk, options, _) = disk_in(folder, format).await;
                disk.flush().await.unwrap();
                write(&disk, 0, 1).await;
                let (forked, _) = fork(vec![plan(&disk, &options, folder)]).await.unwrap();
                let child = forked[0].children[0].1.as_ref().unwrap();
                // Both disks count the requests to the layer that they share.
                write(&disk, 0, 2).await;
                let before = disk.stats().counters().flushes_issued;
                child.flush().await.unwrap();
                assert!(
                    disk.stats().counters().flushes_issued > before,
                    "a child's flush covers the layer"
                );
                forked[0].settle().await.unwrap();
                assert!(!disk.image().has_unstable_layer());
                let settled = child.stats().counters().flushes_issued;
                write(&disk, 4096, 2).await;
                disk.flush().await.unwrap();
                assert_eq!(child.stats().counters().flushes_issued, settled);
            }
        });
    }

    #[test]
    fn a_layer_is_shared_until_the_disk_is_written_to() {
        EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
            let folder = tempfile::tempdir_in("/dev/shm").unwrap();
            let folder = folder.path();
            let (disk, options, path) = disk_in(folder, ImageFormat::Raw).await;
            let image = folder.canonicalize().unwrap().join("over");
            write(&disk, 0, 1).await;
            assert!(
                UnwrittenOverlay::of(&disk, &image).await.unwrap().is_none(),
                "it is over no layer"
            );
            let (forked, _) = fork(vec![plan(&disk, &options, folder)]).await.unwrap();
            assert!(
                UnwrittenOverlay::of(&disk, &image).await.unwrap().is_none(),
                "the layer is not durable"
            );
            forked[0].settle().await.unwrap();
            let shared =
                UnwrittenOverlay::of(&disk, &image).await.unwrap().expect("nothing was written");
            assert_eq!(
                (shared.path(), shared.is_written()),
                (&*path.canonicalize().unwrap(), false)
            );
            // Changes of other disks over the layer do not count.
            write(forked[0].children[0].1.as_ref().unwrap(), 0, 3).await;
            assert!(!shared.is_written());
            write(&disk, 4096, 2).await;
            assert!(shared.is_written());
            drop(shared);
            assert!(
                UnwrittenOverlay::of(&disk, &image).await.unwrap().is_none(),
                "it was written to"
            );
        });
    }
}
