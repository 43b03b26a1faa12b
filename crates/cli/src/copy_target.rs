//! The target of a copy: a new image, or one that is overwritten.
//!
//! Guarantees: a new image gets its name when it is complete and durable, never before; until then
//! the copy is in `TARGET.part` beside it. An existing target is not changed, unless the options
//! request that it be replaced (atomically, at the very end) or overwritten in place. Under the
//! name qemu-img a copy to a name that is free has that name from its start.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use blockhouse_core::{
    ByteRange, Durability, Fallback, Request, Storage, ToolProgress, Unmap, rare,
};
use blockhouse_disk::{CopyJob, CopyOptions, ImageDisk, ImageFormat, TargetContent};
use blockhouse_engine::{EventLoop, HostFile, NewFile};
use blockhouse_format::qcow2::{Preallocation, Repair, repair};
use blockhouse_images::{
    AllowedPaths, CacheMode, IfExists, ImageOptions, Purpose, StateUse, check_apart,
    check_new_apart, check_new_name, exists, is_device, keeps_its_place, lock_for_writing, open,
    open_copy_target, open_storage, part_of, remove_created, rename_finished,
};
use blockhouse_storage::{ImageStorage, Location};

use crate::called_as;
use crate::create::{
    chosen_encryption, create_luks, create_qcow2, create_raw, format_of_new, luks_header,
    wrong_usage,
};
use crate::create_options;
use crate::create_setting::{self, Setting};
use crate::formatting;
use crate::image_args::resolve_relative;
use crate::open_args::OpenArgs;
use crate::output;
use crate::parallel::{default_threads, run_displayed};
use crate::progress::Progress;
use crate::rate::RateArgs;
use crate::unfinished::unfinished;

/// The formats of a copy.
#[derive(clap::Args)]
pub struct CopyFormats {
    /// The source's format; left out, the file's name decides (docs/formats.md; otherwise raw).
    #[arg(long, short = 'f', value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    pub source_format: Option<ImageFormat>,
    /// The target's format; left out, the file's name decides, as for the source.
    #[arg(long, short = 'O', value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    pub format: Option<ImageFormat>,
}

impl CopyFormats {
    /// The format of the target, which will be at this path.
    pub fn of_target(&self, path: &Path) -> ImageFormat {
        self.format.unwrap_or_else(|| format_of_new(path))
    }
}

/// How a copy is made.
#[derive(Clone, Copy, Default)]
pub struct How {
    /// Whether clusters are compressed.
    pub compress: bool,
    /// Whether zeros are written as data.
    pub writes_zeros: bool,
    /// Whether unreadable parts become zeros.
    pub salvages: bool,
    /// Whether the target is written in the order of the disk, one chunk after the other. This is
    /// slower, and equal sources give equal qcow2 files.
    pub in_order: bool,
    /// The limit on writes to the target.
    pub rate: RateArgs,
}

/// The treatment of a target that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfThere {
    /// The copy fails, and the target is not changed.
    Fail,
    /// A file is replaced; a target of fixed size (a device, an export) is overwritten.
    Replace,
    /// The target must exist. It is filled with zeros and written.
    Overwrite,
    /// The target must exist and read as zeros. It is written without being zeroed before.
    OverwriteZeros,
    /// An earlier copy is continued.
    Resume,
}

/// Fails if no earlier command has left the file `part`; `what` names the work to resume, for the
/// error.
///
/// # Errors
/// There is no such file; as [`exists`].
pub async fn check_left(part: &Path, what: &str) -> Result<()> {
    if !exists(part).await? {
        bail!("{}: there is no {what} to resume; leave --resume out", part.display());
    }
    Ok(())
}

/// Returns the unfinished copy of an earlier command. If clusters leaked because that command was
/// killed, frees them, and opens the copy again by `open`.
///
/// # Errors
/// The copy's metadata is damaged; errors of the storage.
pub async fn without_leaks(
    disk: ImageDisk,
    part: &Path,
    open: impl AsyncFnOnce() -> Result<ImageDisk>,
) -> Result<ImageDisk> {
    let advice = || format!("{}: cannot be resumed; remove it", part.display());
    match disk.image().check().await.with_context(advice)? {
        Some(report) if report.corruptions > 0 => {
            bail!("{}: is damaged, {}; remove it", part.display(), report.problems.join("; "))
        }
        Some(report) if report.leaks > 0 => {
            disk.close().await?;
            // Dropping the disk releases its lock.
            drop(disk);
            let storage = open_storage(part, ImageOptions::default()).await?;
            repair(&storage, Repair::Leaks).await.with_context(advice)?;
            storage.close().await?;
            drop(storage);
            open().await
        }
        _ => Ok(disk),
    }
}

/// The description of the target.
pub struct TargetSpec<'a> {
    pub path: &'a Path,
    pub format: ImageFormat,
    /// Options of a new image.
    pub settings: Vec<Setting>,
    /// Bytes of the disk.
    pub size: u64,
    pub if_there: IfThere,
    /// Whether the command can resume a copy that failed.
    pub can_resume: bool,
    /// Whether clusters will be compressed.
    pub compress: bool,
    /// The cache mode; `None` is direct I/O if that is possible.
    pub cache: Option<CacheMode>,
    pub open: &'a OpenArgs,
    /// The disks that the copy reads.
    pub sources: Vec<&'a ImageDisk>,
}

/// The target of a copy.
pub struct Target {
    pub disk: Arc<ImageDisk>,
    pub content: TargetContent,
    /// Whether the target is a new image, and not on a block device: a stream of unknown length
    /// resizes it.
    pub is_new: bool,
    finish: Finish,
}

/// The work that is left when the copy is complete.
pub struct Finish {
    path: PathBuf,
    /// The file that becomes the target; `None` if the target is written in place.
    part: Option<PathBuf>,
    /// The file that will be replaced, locked.
    replaced_file: Option<HostFile>,
    if_exists: IfExists,
    can_resume: bool,
}

impl Finish {
    /// The end of a copy in place, after which nothing is left to do.
    pub fn in_place(path: PathBuf) -> Self {
        let (part, replaced_file, if_exists) = (None, None, IfExists::Fail);
        Self { path, part, replaced_file, if_exists, can_resume: false }
    }

    /// The end of a copy in `part`, which is renamed to `path`. With [`IfThere::Replace`] it
    /// replaces a file of that name.
    pub fn of_part(
        path: &Path,
        part: &Path,
        replaced_file: Option<HostFile>,
        if_there: IfThere,
    ) -> Self {
        let if_exists = match if_there {
            IfThere::Replace => IfExists::Replace,
            _ => IfExists::Fail,
        };
        let (path, part) = (path.to_owned(), Some(part.to_owned()));
        Self { path, part, replaced_file, if_exists, can_resume: false }
    }

    /// Renames the target to its final name if `copied` is no error. The caller has made the target
    /// durable and closed it.
    ///
    /// # Errors
    /// The error of the copy, or of its end; the error names the files that were not removed.
    pub async fn end(self, copied: Result<()>) -> Result<()> {
        let Self { path, part, replaced_file, if_exists, can_resume } = self;
        let finished = match (copied, &part) {
            (Ok(()), Some(part)) => {
                rename_finished(part, &path, if_exists).await.map_err(Into::into)
            }
            (outcome, _) => outcome,
        };
        drop(replaced_file);
        finished.map_err(|error| match part {
            Some(part) if !can_resume => {
                anyhow!("{error:#}; what was copied is in {}: remove it", part.display())
            }
            Some(part) => anyhow!(
                "{error:#}; what was copied is in {}: run the command again with --resume, or remove it",
                part.display()
            ),
            None => anyhow!("{error:#}; {} has a part of the copy", path.display()),
        })
    }
}

/// A file that has the name of a new target.
pub enum Existing {
    None,
    /// The file will be replaced. It is locked, because a program that has it open would continue
    /// with an unlinked file.
    Replaced(HostFile),
    /// The file keeps its inode, and is emptied.
    InPlace,
}

/// Finds out whether there is a file at `path`, and how it is replaced.
///
/// # Errors
/// The options do not allow to change the file, it is in use, or no file can have the name.
pub fn existing(path: &Path, if_there: IfThere) -> Result<Existing> {
    let is_there = std::fs::metadata(path).is_ok();
    if is_there && if_there != IfThere::Replace {
        let path = path.display();
        let instead = if if_there == IfThere::Resume { ", without --resume" } else { "" };
        bail!(
            "{path}: exists and is left alone; choose another name, or replace it with --force{instead}"
        );
    }
    check_new_name(path)?;
    Ok(match is_there {
        true if keeps_its_place(path) => Existing::InPlace,
        true => Existing::Replaced(lock_for_writing(path)?),
        false => Existing::None,
    })
}

/// Whether a copy to a free name has that name from its start. Reason: callers of qemu-img remove
/// only that file after a failure, and a security profile may allow qemu-img no other file.
pub fn is_at_its_name_at_once() -> bool {
    called_as::is_qemu_img()
}

impl Target {
    /// Ends the copy, whose outcome is `copied`. Closes the disk in any case, so that a later
    /// command can resume the copy. Gives the disk its name if there was no error.
    ///
    /// # Errors
    /// The error of the copy, or of its end; the error names the files that were not removed.
    pub async fn finish(self, copied: Result<()>) -> Result<()> {
        let Self { disk, finish, .. } = self;
        let closed = disk.close().await;
        finish.end(copied.and_then(|()| Ok(closed?))).await
    }
}

/// Maximum number of chunks in flight, of all threads together.
const MAX_IN_FLIGHT: usize = 16;

/// The whole range of each of these disks.
pub fn whole(sources: &[Arc<ImageDisk>]) -> Vec<(Arc<ImageDisk>, ByteRange)> {
    let all = |source: &Arc<ImageDisk>| ByteRange::between(0, source.size());
    sources.iter().map(|source| (Arc::clone(source), all(source))).collect()
}

/// Copies parts of disks, one after the other, to the start of the target, which the caller
/// [finishes](Target::finish) with the outcome.
///
/// # Errors
/// Errors of a storage.
pub fn copy(
    event_loop: &mut EventLoop,
    progress: &Progress,
    parts: Vec<(Arc<ImageDisk>, ByteRange)>,
    target: &Target,
    how: How,
) -> Result<()> {
    how.rate.apply(target.disk.throttle());
    let job = |max_in_flight| {
        let options =
            CopyOptions { target_content: target.content, compress: how.compress, max_in_flight };
        CopyJob::of_parts(parts, Arc::clone(&target.disk), options)
    };
    copy_to(event_loop, progress, job, target.disk.name(), false, how)
}

/// Carries out a copy; on one thread if the target is a stream. `job` makes the copy from the
/// maximum number of chunks in flight on each thread; `name` is the target's name, for messages.
///
/// # Errors
/// Errors of a storage.
pub fn copy_to(
    event_loop: &mut EventLoop,
    progress: &Progress,
    job: impl FnOnce(usize) -> blockhouse_core::Result<CopyJob<ImageStorage>>,
    name: &str,
    is_stream: bool,
    how: How,
) -> Result<()> {
    let threads = if is_stream { 1 } else { default_threads() };
    let mut copying = job(MAX_IN_FLIGHT.div_ceil(threads))?;
    if how.writes_zeros {
        copying = copying.writing_zeros();
    }
    if how.salvages {
        copying = copying.salvaging();
    }
    if how.in_order {
        copying = copying.in_order();
    }
    let total = copying.progress().total;
    let display = match progress.lines_by_chunk() {
        Some(tell) => {
            copying = event_loop.block_on(copying.observed(tell))?;
            progress.display_ends(total)
        }
        None => progress.display(total),
    };
    run_displayed(
        event_loop,
        &display,
        threads,
        || async { Ok(copying.work().await?) },
        || (copying.progress().done, copying.progress().total),
    )?;
    if copying.lost() > 0 {
        let lost = copying.lost();
        output::tell(&format!("blockhouse: {name}: {lost} bytes could not be read, and are zeros"));
    }
    Ok(())
}

/// Warns if a copy loses the source's sector size: no format that is written can store it.
pub fn tell_of_sectors(source: &ImageDisk) {
    let sector = source.logical_block_size();
    if sector != 512 {
        output::tell(&format!(
            "blockhouse: {}: its disk has sectors of {sector} bytes, which a copy cannot say: serve that with \
             --logical-block-size {sector}, or guests do not find its partitions",
            source.name()
        ));
    }
}

impl<'a> TargetSpec<'a> {
    /// A new image without options, whose copy cannot be resumed.
    pub fn new(
        path: &'a Path,
        format: ImageFormat,
        size: u64,
        open: &'a OpenArgs,
        sources: Vec<&'a ImageDisk>,
    ) -> Self {
        Self {
            path,
            format,
            settings: Vec::new(),
            size,
            if_there: IfThere::Fail,
            can_resume: false,
            compress: false,
            cache: None,
            open,
            sources,
        }
    }
}

impl TargetSpec<'_> {
    /// Makes or opens the target. Must run on the event loop of the current thread.
    ///
    /// # Errors
    /// The target exists, cannot be made, is too small, or is no part of this copy. The error names
    /// the target.
    pub async fn build(self) -> Result<Target> {
        if self.backing_name().is_none() {
            self.sources.iter().for_each(|source| tell_of_sectors(source));
        }
        if self.is_overwritten() {
            return self.overwrite().await;
        }
        let path = self.path;
        match Location::of(path)? {
            Location::File(_) => {}
            Location::Nbd { .. } => return self.replace("an export of another server").await,
            Location::Null(_) => return self.replace("a disk that keeps nothing").await,
            Location::Rbd(_) if exists(path).await? => {
                return self.replace("an image in Ceph").await;
            }
            Location::Rbd(_) => return self.fill_part(None).await,
        }
        if is_device(path) {
            return self.replace("a block device").await;
        }
        match existing(path, self.if_there)? {
            Existing::InPlace => self.fill_at_its_name(true).await,
            Existing::Replaced(file) => self.fill_part(Some(file)).await,
            Existing::None if is_at_its_name_at_once() => self.fill_at_its_name(false).await,
            Existing::None => self.fill_part(None).await,
        }
    }

    /// The image that becomes the target: a new image, or the partial copy of an earlier command.
    async fn fill_part(self, replaced_file: Option<HostFile>) -> Result<Target> {
        let (part, disk, content) = match self.if_there {
            IfThere::Resume => {
                let part = part_of(self.path);
                let disk = self.open_partial(&part).await?;
                (part, disk, TargetContent::Unknown)
            }
            _ => {
                let part = unfinished(self.path, "resume it with --resume, or remove it").await?;
                let disk = self.create_new(&part).await?;
                (part, disk, self.content_of_new())
            }
        };
        let finish = Finish::of_part(self.path, &part, replaced_file, self.if_there);
        let finish = Finish { can_resume: self.can_resume, ..finish };
        Ok(Target { disk: Arc::new(disk), content, is_new: true, finish })
    }

    /// An image that has its name from its start: the existing file, emptied, if `is_there`.
    async fn fill_at_its_name(self, is_there: bool) -> Result<Target> {
        let path = self.path.to_owned();
        self.check_new_apart(&path)?;
        let file = NewFile { is_in_place: is_there, ..create_options::new_file(&self.settings) };
        let disk = self.make(&path, file).await?;
        let (content, finish) = (self.content_of_new(), Finish::in_place(path));
        Ok(Target { disk: Arc::new(disk), content, is_new: true, finish })
    }

    /// The content of a new image. Unknown for an overlay, which reads as its backing file, and for
    /// an encrypted image, whose unwritten blocks decrypt to any data.
    fn content_of_new(&self) -> TargetContent {
        match self.backing_name() {
            Some(_) => TargetContent::Unknown,
            None if self.format == ImageFormat::Luks => TargetContent::Unknown,
            None => TargetContent::Zero,
        }
    }

    fn backing_name(&self) -> Option<&str> {
        create_setting::backing_file(&self.settings)
    }

    /// An empty image.
    async fn create_new(&self, part: &Path) -> Result<ImageDisk> {
        let opened = self.make(part, create_options::new_file(&self.settings)).await;
        if opened.is_err() {
            // The file has no data yet, so there is nothing to resume.
            remove_created(part).await;
        }
        opened
    }

    /// An empty image at this path.
    async fn make(&self, part: &Path, file: NewFile) -> Result<ImageDisk> {
        match self.format {
            ImageFormat::Raw => {
                let mode = create_options::raw(&self.settings);
                let mode = mode.unwrap_or_else(|why| wrong_usage(&why));
                create_raw(part, self.size, mode, file, &ToolProgress::default()).await?;
            }
            ImageFormat::Qcow2 => {
                let options = create_options::qcow2(self.size, self.settings.clone());
                let mut options = options.unwrap_or_else(|why| wrong_usage(&why));
                // An existing data file is emptied, so it must not belong to a source.
                if let Some(data) = &options.data_file {
                    self.check_new_apart(&resolve_relative(part, &data.name))?;
                }
                let encryption = chosen_encryption(&self.settings);
                let secret = create_options::key_secret(&self.settings);
                options.encryption = self.open.keys().new_encryption(encryption, secret)?;
                let progress = ToolProgress::default();
                create_qcow2(part, &options, self.allowed_paths()?, file, &progress).await?;
            }
            ImageFormat::Luks => {
                let header = luks_header(self.open.keys(), &self.settings)?;
                create_luks(
                    part,
                    self.size,
                    (&header, create_options::space_of(&self.settings)),
                    file,
                )
                .await?;
            }
            ImageFormat::Foreign(_) => bail!("{}", self.format.not_made()),
        }
        self.open_target(part).await
    }

    /// The partial copy of an earlier conversion.
    async fn open_partial(&self, part: &Path) -> Result<ImageDisk> {
        check_left(part, "copy").await?;
        let advice = || format!("{}: cannot be resumed; remove it", part.display());
        let disk = self.open_target(part).await.with_context(advice)?;
        self.check_apart(&disk)?;
        if disk.size() != self.size {
            bail!(
                "{}: is a disk of {} bytes, and the source has {}: it is no part of this copy; \
                 remove it",
                part.display(),
                disk.size(),
                self.size
            );
        }
        if disk.image().backing_file().is_some() {
            bail!("{}: has a backing file and is no part of this copy; remove it", part.display());
        }
        if self.format == ImageFormat::Qcow2 && !disk.bitmaps().list().await?.is_empty() {
            bail!("{}: has bitmaps, which may lack changes; remove it", part.display());
        }
        without_leaks(disk, part, async || self.open_target(part).await).await
    }

    /// Overwrites a target of fixed size, if the options ask for that; `what` names it in errors.
    async fn replace(self, what: &str) -> Result<Target> {
        let path = self.path;
        let takes_space = |one: &Setting| matches!(one, Setting::Preallocation(mode) if *mode != Preallocation::Off);
        if self.format == ImageFormat::Raw && self.settings.iter().any(takes_space) {
            if called_as::is_qemu_img() {
                let mode = formatting::preallocation_of(&self.settings).unwrap_or_default();
                bail!(
                    "{}: error while converting raw: Unsupported preallocation mode '{mode}'",
                    path.display()
                );
            }
            bail!(
                "{}: Unsupported preallocation mode: it is {what}, which has its space; leave preallocation out",
                path.display()
            );
        }
        if self.if_there == IfThere::Fail {
            bail!(
                "{}: is {what}, and all that is on it would be lost; say --force to overwrite it",
                path.display()
            );
        }
        match self.format {
            ImageFormat::Raw => self.overwrite().await,
            _ if is_device(path) => self.fill_device().await,
            _ => bail!("{}: is {what}: only raw images can be written to it", path.display()),
        }
    }

    /// A new image on a device, which loses its old content.
    async fn fill_device(self) -> Result<Target> {
        let path = self.path;
        // The device is checked before anything is written.
        let device = open(path, self.options(ImageFormat::Raw, StateUse::Off)?).await?;
        self.check_apart(&device)?;
        device.close().await?;
        drop(device);
        let (disk, content) = match self.if_there {
            IfThere::Resume => (self.open_partial(path).await?, TargetContent::Unknown),
            _ => (self.make(path, NewFile::default()).await?, self.content_of_new()),
        };
        let finish = Finish::in_place(path.to_owned());
        Ok(Target { disk: Arc::new(disk), content, is_new: false, finish })
    }

    /// The existing target, overwritten in place.
    async fn overwrite(self) -> Result<Target> {
        let path = self.path;
        let disk = self.open_target(path).await?;
        self.check_apart(&disk)?;
        if disk.size() < self.size && called_as::is_qemu_img() {
            bail!("output file is smaller than input file");
        }
        if disk.size() < self.size {
            bail!(
                "{}: has {} bytes, and the source {}; use a larger device or image",
                path.display(),
                disk.size(),
                self.size
            );
        }
        let content = match self.if_there {
            IfThere::Resume => TargetContent::Unknown,
            // Ranges that read from its backing file may already have the right data.
            _ if disk.image().backing_file().is_some() => TargetContent::Unknown,
            IfThere::OverwriteZeros => TargetContent::Zero,
            // The source is a stream of unknown length, so the target is not filled with zeros
            // before.
            _ if self.size == 0 => TargetContent::Unknown,
            _ => {
                let range = ByteRange::between(0, self.size);
                let (unmap, fallback, durability) =
                    (Unmap::Allowed, Fallback::Allowed, Durability::None);
                rare(disk.submit(Request::WriteZeroes { range, unmap, fallback, durability }))
                    .await?;
                TargetContent::Zero
            }
        };
        let finish = Finish::in_place(path.to_owned());
        Ok(Target { disk: Arc::new(disk), content, is_new: false, finish })
    }

    /// Refuses a target that shares a file with a source; called before anything is written.
    fn check_apart(&self, target: &ImageDisk) -> blockhouse_core::Result<()> {
        self.sources.iter().try_for_each(|source| check_apart(target, source))
    }

    /// As [`check_apart`](Self::check_apart), for a file that is to be made or emptied.
    fn check_new_apart(&self, file: &Path) -> blockhouse_core::Result<()> {
        self.sources.iter().try_for_each(|source| check_new_apart(file, source))
    }

    async fn open_target(&self, path: &Path) -> Result<ImageDisk> {
        let options = self.options(self.format, self.state()?)?;
        let opened = match self.cache {
            Some(cache) => open(path, ImageOptions { cache, ..options }).await,
            // Compressed clusters are not aligned to blocks, as direct I/O requires.
            None if self.compress => open(path, options).await,
            None => open_copy_target(path, options).await,
        };
        Ok(opened?)
    }

    /// The options that open the target through the page cache.
    fn options(
        &self,
        format: ImageFormat,
        state: StateUse,
    ) -> blockhouse_core::Result<ImageOptions> {
        Ok(ImageOptions {
            format: Some(format),
            cache: CacheMode::Writeback,
            state,
            allowed_paths: self.allowed_paths()?,
            remote_backing: self.open.remote_backing(Some(self.format)),
            secrets: self.open.secrets()?,
            purpose: if self.is_overlay() { Purpose::Disk } else { Purpose::Image },
            ..ImageOptions::default()
        })
    }

    /// Whether the target may have a backing file.
    fn is_overlay(&self) -> bool {
        self.backing_name().is_some() || (self.is_overwritten() && self.format != ImageFormat::Raw)
    }

    fn is_overwritten(&self) -> bool {
        matches!(self.if_there, IfThere::Overwrite | IfThere::OverwriteZeros)
    }

    /// Uses the image's state file if the image is overwritten in place, because the state file may
    /// have completed writes of a killed server. A new image needs none.
    fn state(&self) -> Result<StateUse> {
        if self.is_overwritten() { self.open.state_use() } else { Ok(StateUse::Off) }
    }

    /// The paths that the target may open: also the data file and the backing file in the settings,
    /// if they exist.
    fn allowed_paths(&self) -> blockhouse_core::Result<AllowedPaths> {
        let named = self.settings.iter().filter_map(|setting| match setting {
            Setting::DataFile(name) | Setting::BackingFile(name) => {
                Some(resolve_relative(self.path, name.as_bytes()))
            }
            _ => None,
        });
        self.open.allowed_paths(named.filter(|path| path.exists()))
    }
}
