//! `blockhouse convert`: a copy of an image in another format.
//!
//! Guarantees: the target gets its name when it is complete and durable, never before; until then the
//! copy is in `TARGET.part` beside it. A file that has the name already is left alone unless
//! `--force` says otherwise, and then it is replaced at one moment, at the very end. A copy that
//! fails stays in `TARGET.part`, and `--resume` goes on with it: what is there is compared with the
//! source, and what differs is copied.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use blockhouse_core::{ByteRange, Durability, ErrorKind, Fallback, Request, Unmap};
use blockhouse_disk::{
    Access, AllowedPaths, CacheMode, CopyJob, CopyOptions, DetectZeroes, Discard, IfExists,
    ImageDisk, ImageFormat, ImageOptions, Locking, RemoteBacking, StateUse, TargetContent,
    check_new_name, create as create_file, exists, open, open_locked, open_snapshot,
    open_without_backing, part_of, remove_created, rename_finished,
};
use blockhouse_engine::{EngineChoice, EventLoop, HostFile};
use blockhouse_storage::Location;

use crate::create::{create_qcow2, format_of_new, wrong_usage};
use crate::create_options::{self, Setting, Settings};
use crate::image_args::resolve_relative;
use crate::open_args::OpenArgs;
use crate::output;
use crate::parallel::{default_threads, run_parallel};

/// Chunks in flight in all.
const MAX_IN_FLIGHT: usize = 16;

/// Arguments of `convert`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The source's format; left out, the file's name decides (.qcow2, or one of docs/formats.md, which are
    /// only read; otherwise raw).
    #[arg(long, short = 'f', value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    source_format: Option<ImageFormat>,
    /// The target's format; left out, the file's name decides (.qcow2, otherwise raw).
    #[arg(long, short = 'O', value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// Copy the disk as it was when this snapshot was taken (its name or id), without a machine's state.
    #[arg(long, short = 'l', value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// Write compressed clusters (qcow2 only).
    #[arg(long, short)]
    compress: bool,
    /// Options of a qcow2 target, as those of 'create' but without a backing file: the target stands
    /// alone, whatever is behind the source.
    #[arg(short, long = "options", value_name = "OPTION=VALUE,...", conflicts_with = "resume")]
    #[arg(value_parser = create_options::parse)]
    options: Vec<create_options::Settings>,
    /// Replace a target that exists, once the copy is complete; or overwrite a block device.
    #[arg(long)]
    force: bool,
    /// Go on with a copy that failed: compare what is in TARGET.part with the source and copy what
    /// differs.
    #[arg(long)]
    resume: bool,
    /// How the target is written: through the page cache (writeback) or around it (none). Either
    /// way it is durable in the end.
    #[arg(long, value_name = "MODE", value_parser = parse_cache)]
    cache: Option<CacheMode>,
    #[command(flatten)]
    open: OpenArgs,
    /// The image to copy. It is only read, with all files behind it.
    source: PathBuf,
    /// The new image. One that exists is left alone.
    target: PathBuf,
}

fn parse_cache(name: &str) -> Result<CacheMode, String> {
    match name.parse()? {
        mode @ (CacheMode::None | CacheMode::Writeback) => Ok(mode),
        _ => Err("use none or writeback".to_owned()),
    }
}

/// The target of the copy.
struct Target {
    disk: ImageDisk,
    target_content: TargetContent,
    /// The file that becomes the target; `None` if the target is a device.
    part: Option<PathBuf>,
    /// The file that is going to be replaced, locked.
    replaced_file: Option<HostFile>,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    if Settings::join(arguments.options.clone()).is_none() {
        return output::print(create_options::HELP);
    }
    let format = arguments.format.unwrap_or_else(|| format_of_new(&arguments.target));
    let settings = settings(&arguments, format);
    let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
    let source = event_loop.block_on(open_source(&arguments))?;
    let builder = TargetBuilder { arguments: &arguments, format, settings, size: source.size() };
    let target = event_loop.block_on(builder.target())?;
    let Target { disk, target_content: before, part, replaced_file } = target;
    let (source, disk) = (Arc::new(source), Arc::new(disk));
    let threads = default_threads();
    let together = MAX_IN_FLIGHT.div_ceil(threads);
    let options = CopyOptions {
        target_content: before,
        compress: arguments.compress,
        max_in_flight: together,
    };
    let copying = CopyJob::new(source, Arc::clone(&disk), options)?;
    let copied = run_parallel(
        threads,
        || async { Ok(copying.work().await?) },
        || (copying.progress().done, copying.progress().total),
    );
    // After a failure too, so that what was copied can be found again.
    let closed = event_loop.block_on(disk.close());
    let finish = copied.and_then(|()| Ok(closed?)).and_then(|()| match &part {
        Some(part) => {
            let renaming = rename_finished(part, &arguments.target, existing(&arguments));
            Ok(event_loop.block_on(renaming)?)
        }
        None => Ok(()),
    });
    drop(replaced_file);
    finish.map_err(|error| with_advice(error, part.as_deref(), &arguments.target))
}

fn existing(arguments: &Arguments) -> IfExists {
    if arguments.force { IfExists::Replace } else { IfExists::Fail }
}

fn with_advice(error: anyhow::Error, part: Option<&Path>, target: &Path) -> anyhow::Error {
    let kept = part.unwrap_or(target).display();
    anyhow!(
        "{error:#}; what was copied is in {kept}: run the command again with --resume, or remove it"
    )
}

/// The options of the target, after everything that contradicts itself is refused.
fn settings(arguments: &Arguments, format: ImageFormat) -> Vec<Setting> {
    let settings = Settings::join(arguments.options.clone()).unwrap_or_default();
    if !format.is_writable() {
        wrong_usage(&format.not_made());
    }
    if format == ImageFormat::Raw && arguments.compress {
        wrong_usage("raw images have no compressed clusters (-c); say --format qcow2");
    }
    if format == ImageFormat::Raw && !settings.is_empty() {
        wrong_usage("raw images have no options (-o); say --format qcow2");
    }
    let is_backing =
        |one: &Setting| matches!(one, Setting::BackingFile(_) | Setting::BackingFormat(_));
    if settings.iter().any(is_backing) {
        wrong_usage("a converted image stands alone: it cannot have a backing file");
    }
    if arguments.compress && settings.iter().any(|one| matches!(one, Setting::DataFile(_))) {
        wrong_usage("an image with a data file has no compressed clusters (-c)");
    }
    settings
}

async fn open_source(arguments: &Arguments) -> Result<ImageDisk> {
    let Arguments { source, source_format: format, snapshot, .. } = arguments;
    let options = arguments.open.read_only(*format)?;
    let opened = match snapshot {
        None => open(source, options).await,
        Some(name) => open_snapshot(source, options, name).await,
    };
    opened.map_err(|error| match error.kind() {
        // A snapshot that is not there is no matter of formats.
        ErrorKind::InvalidInput if format.is_none() && snapshot.is_none() => {
            anyhow!("{error} (the source's format is --source-format)")
        }
        _ => error.into(),
    })
}

/// Builds the target.
struct TargetBuilder<'a> {
    arguments: &'a Arguments,
    format: ImageFormat,
    settings: Vec<Setting>,
    size: u64,
}

impl TargetBuilder<'_> {
    async fn target(self) -> Result<Target> {
        let path = &self.arguments.target;
        match Location::of(path)? {
            Location::File(_) => {}
            Location::Nbd { .. } => return self.overwrite("an export of another server").await,
            Location::Rbd(_) if exists(path).await? => {
                return self.overwrite("an image in Ceph").await;
            }
            Location::Rbd(_) => {
                let (disk, target_content, part) = self.fill_part(path).await?;
                let part = Some(part);
                return Ok(Target { disk, target_content, part, replaced_file: None });
            }
        }
        let found = std::fs::metadata(path).ok();
        if found.as_ref().is_some_and(|found| found.file_type().is_block_device()) {
            return self.overwrite("a block device").await;
        }
        if found.is_some() && !self.arguments.force {
            bail!(
                "{}: exists and is left alone; choose another name, or replace it with --force",
                path.display()
            );
        }
        check_new_name(path)?;
        // A program that uses it would go on with a file that has no name any more.
        let replaced_file = match found {
            Some(_) => Some(open_locked(path)?),
            None => None,
        };
        let (disk, target_content, part) = self.fill_part(path).await?;
        Ok(Target { disk, target_content, part: Some(part), replaced_file })
    }

    /// The image that becomes the target: a new one, or what an earlier conversion has left.
    async fn fill_part(&self, path: &Path) -> Result<(ImageDisk, TargetContent, PathBuf)> {
        let part = part_of(path);
        Ok(match self.arguments.resume {
            true => (self.open_partial(&part).await?, TargetContent::Unknown, part),
            false => (self.create_new(&part).await?, TargetContent::Zero, part),
        })
    }

    /// An empty image.
    async fn create_new(&self, part: &Path) -> Result<ImageDisk> {
        if exists(part).await? {
            bail!(
                "{}: is what an earlier conversion left behind; go on with it (--resume), or remove \
                 it",
                part.display()
            );
        }
        match self.format {
            ImageFormat::Raw => create_file(part, self.size, ImageFormat::Raw).await?,
            ImageFormat::Qcow2 => {
                let options = create_options::qcow2(self.size, self.settings.clone());
                let options = options.unwrap_or_else(|why| wrong_usage(&why));
                create_qcow2(part, &options, AllowedPaths::default()).await?;
            }
            ImageFormat::Foreign(_) => bail!("{}", self.format.not_made()),
        }
        let opened = self.open_target(part).await;
        if opened.is_err() {
            // Nothing is in it yet.
            remove_created(part).await;
        }
        opened
    }

    /// The partial copy of an earlier conversion.
    async fn open_partial(&self, part: &Path) -> Result<ImageDisk> {
        let advice = || format!("{}: cannot go on with it; remove it", part.display());
        let disk = self.open_target(part).await.with_context(advice)?;
        if disk.size() != self.size {
            bail!(
                "{}: is a disk of {} bytes, and the source has {}: it is no part of this copy; \
                 remove it",
                part.display(),
                disk.size(),
                self.size
            );
        }
        if disk.backing_file().is_some() {
            bail!("{}: has a backing file and is no part of this copy; remove it", part.display());
        }
        match disk.check().await.with_context(advice)? {
            Some(report) if report.corruptions > 0 => {
                bail!("{}: is damaged, {}; remove it", part.display(), report.problems.join("; "))
            }
            _ => Ok(disk),
        }
    }

    /// What has a size of its own, and is overwritten: `what` says what it is.
    async fn overwrite(&self, what: &str) -> Result<Target> {
        let path = &self.arguments.target;
        if !self.arguments.force && !self.arguments.resume {
            bail!(
                "{}: is {what}, and all that is on it would be lost; say --force to overwrite it",
                path.display()
            );
        }
        if self.format != ImageFormat::Raw {
            bail!("{}: is {what}: only raw images can be written to it", path.display());
        }
        let disk = self.open_target(path).await?;
        if disk.size() < self.size {
            bail!(
                "{}: has {} bytes, and the source {}; use a larger device",
                path.display(),
                disk.size(),
                self.size
            );
        }
        let before = if self.arguments.resume {
            TargetContent::Unknown
        } else {
            let range = ByteRange::between(0, self.size);
            let (unmap, fallback, durability) =
                (Unmap::Allowed, Fallback::Allowed, Durability::None);
            disk.submit(Request::WriteZeroes { range, unmap, fallback, durability }).await?;
            TargetContent::Zero
        };
        Ok(Target { disk, target_content: before, part: None, replaced_file: None })
    }

    async fn open_target(&self, path: &Path) -> Result<ImageDisk> {
        // Compressed clusters are packed byte for byte, which blocks of direct I/O would not allow.
        let usual = if self.arguments.compress { CacheMode::Writeback } else { CacheMode::None };
        let cache = self.arguments.cache.unwrap_or(usual);
        let is_free = self.arguments.cache.is_none();
        match open_without_backing(path, self.options(path, cache)?).await {
            // No direct I/O here, or clusters smaller than the host's blocks.
            Err(error)
                if is_free
                    && matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::InvalidInput) =>
            {
                Ok(open_without_backing(path, self.options(path, CacheMode::Writeback)?).await?)
            }
            opened => Ok(opened?),
        }
    }

    fn options(&self, path: &Path, cache: CacheMode) -> Result<ImageOptions> {
        // The user named the data file, too.
        let data_file = self.settings.iter().find_map(|setting| match setting {
            Setting::DataFile(name) => Some(resolve_relative(path, name.as_bytes())),
            _ => None,
        });
        Ok(ImageOptions {
            format: Some(self.format),
            access: Access::ReadWrite,
            cache,
            discard: Discard::Unmap,
            detect_zeroes: DetectZeroes::Off,
            locking: Locking::Held,
            // A new file, or a raw device.
            state: StateUse::Off,
            allowed_paths: self.arguments.open.allowed_paths(data_file)?,
            remote_backing: RemoteBacking::Refused,
        })
    }
}
