//! `blockhouse backup`: copies a disk, or its changes since a bitmap was added, to a qcow2 file.
//!
//! Guarantees: the target gets its name only when it is complete and durable; until then the file
//! is `TARGET.part` in the same folder. An interrupted backup keeps the name `TARGET.part`, and
//! `--resume` continues it: the command compares the copy with the source and copies each range
//! that differs, so that no outdated data remains. An increment contains only whole clusters, and
//! its base is an ordinary backing file, so any program that reads qcow2 reads the other clusters
//! from the base.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use blockhouse_core::sync::run_all;
use blockhouse_core::{ByteRange, Storage, ToolProgress, rare};
use blockhouse_disk::{
    Access, Backing, CompareJob, CopyJob, CopyOptions, DirtyMap, ImageDisk, ImageFormat, RangeCopy,
    TargetContent,
};
use blockhouse_engine::{EngineChoice, EventLoop, NewFile};
use blockhouse_format::qcow2::CreateOptions;
use blockhouse_images::{
    AllowedPaths, IfExists, ImageOptions, changed_since, check_new_apart_from, check_new_name,
    exists, files_of_layer, open, open_copy_target, part_of, rename_finished,
};
use blockhouse_storage::{ImageStorage, Location};

use crate::copy_target::{check_left, tell_of_sectors, without_leaks};
use crate::create::{create_qcow2, format_of_new, wrong_usage};
use crate::open_args::{OpenArgs, name_format_option};
use crate::phases::Phases;
use crate::progress::{Progress, ProgressArgs};
use crate::side_file_args::SideFileArgs;

/// Requests in flight.
const MAX_IN_FLIGHT: usize = 16;
/// Bytes of one request.
const CHUNK_SIZE: u64 = 1 << 20;
/// Bytes of a block in the comparison of a resumed increment.
const BLOCK: u64 = 64 << 10;
/// The largest cluster of a target, in bytes.
const MAX_CLUSTER: u64 = 64 << 10;
/// The smallest cluster of an increment, in bytes.
const MIN_CLUSTER: u64 = 4 << 10;

/// Arguments of `backup`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The source's format; left out, the file's name decides, and an export of a server is raw.
    #[arg(long, short = 'f', value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    source_format: Option<ImageFormat>,
    /// Copy only the changes recorded in this bitmap: a bitmap of the image, or one that the server
    /// of SOURCE offers (qemu:dirty-bitmap:SINCE).
    #[arg(long, value_name = "SINCE", requires = "base")]
    incremental: Option<String>,
    /// The backup made when the bitmap was added or cleared. It becomes the backing file of TARGET,
    /// and must be in the same folder.
    #[arg(long, short, value_name = "FILE", requires = "incremental")]
    base: Option<PathBuf>,
    /// The format of that backup; left out, its name decides (docs/formats.md; otherwise raw).
    #[arg(long, short = 'F', value_name = "FORMAT", requires = "base")]
    #[arg(value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    base_format: Option<ImageFormat>,
    /// Compare the backup with the source at the end.
    #[arg(long)]
    verify: bool,
    /// Continue an interrupted backup: compare TARGET.part with the source, and copy the
    /// differences. Give the same --incremental and --base as before.
    #[arg(long)]
    resume: bool,
    #[command(flatten)]
    progress: ProgressArgs,
    #[command(flatten)]
    side_file: SideFileArgs,
    #[command(flatten)]
    open: OpenArgs,
    /// The disk to copy: an image that no program changes, or an export of an NBD server, such as
    /// one that 'ctl backup begin' makes.
    source: PathBuf,
    /// The new qcow2 image. An existing file is not changed.
    target: PathBuf,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    if format_of_new(&arguments.target) != ImageFormat::Qcow2 {
        wrong_usage("a backup is a qcow2 image; give TARGET a name that ends in .qcow2");
    }
    let shown = Progress::start(arguments.progress)?;
    let phases = Phases::of(if arguments.verify { 2 } else { 1 });
    let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
    let work = || event_loop.block_on(arguments.run(&phases));
    shown.beside(|| phases.position(), work)
}

impl Arguments {
    async fn run(&self, phases: &Phases) -> Result<()> {
        if !matches!(Location::of(&self.target)?, Location::File(_)) {
            bail!("{}: backups are files of this host", self.target.display());
        }
        if exists(&self.target).await? {
            bail!("{}: exists and is left alone; choose another name", self.target.display());
        }
        check_new_name(&self.target)?;
        let part = part_of(&self.target);
        if self.resume {
            check_left(&part, "backup").await?;
        } else if exists(&part).await? {
            bail!(
                "{}: is left of an earlier command; resume it with --resume, or remove it",
                part.display()
            );
        }
        let options = self.open.read_only(self.source_format)?;
        let options = ImageOptions { side_file: self.side_file.side_file(), ..options };
        let source = open(&self.source, options).await;
        let source = source.map_err(|error| name_format_option(error, "--source-format"))?;
        if let Some(base) = &self.base {
            check_not_source(base, &source)?;
        }
        tell_of_sectors(&source);
        let source = Arc::new(source);
        let target = match &self.incremental {
            None => self.fill_whole(&source, &part, phases).await,
            Some(since) => self.fill_increment(&source, &part, since, phases).await,
        };
        let finished = match target {
            Ok(target) => self.finish(&source, target, phases).await,
            Err(error) => Err(error),
        };
        match finished {
            Ok(()) => Ok(rename_finished(&part, &self.target, IfExists::Fail).await?),
            Err(error) if exists(&part).await.unwrap_or(false) => Err(anyhow!(
                "{error:#}; what was copied is in {}: run the command again with --resume, or remove it",
                part.display()
            )),
            Err(error) => Err(error),
        }
    }

    async fn fill_whole(
        &self,
        source: &Arc<ImageDisk>,
        part: &Path,
        phases: &Phases,
    ) -> Result<Arc<ImageDisk>> {
        let target_content = if self.resume { TargetContent::Unknown } else { TargetContent::Zero };
        let target = self.part(part, CreateOptions::new(source.size())).await?;
        let options = CopyOptions { target_content, compress: false, max_in_flight: MAX_IN_FLIGHT };
        let copied = match CopyJob::new(Arc::clone(source), Arc::clone(&target), options) {
            Ok(job) => {
                let job = Arc::new(job);
                let shown = Arc::clone(&job);
                phases.begin(move || (shown.progress().done, shown.progress().total));
                job.work().await
            }
            Err(error) => Err(error),
        };
        kept(target, copied).await
    }

    async fn fill_increment(
        &self,
        source: &Arc<ImageDisk>,
        part: &Path,
        since: &str,
        phases: &Phases,
    ) -> Result<Arc<ImageDisk>> {
        let changed = changed_since(&self.source, source, since).await?;
        let options = CreateOptions {
            cluster_size: cluster_size(&changed),
            backing: Some(self.backing()?),
            ..CreateOptions::new(source.size())
        };
        let target = self.part(part, options).await?;
        // Ranges that are not copied yet read from the base, so they need not be zero.
        let is_zero = false;
        let (from, to) = (Arc::clone(source), Arc::clone(&target));
        if self.resume {
            // The target may contain clusters with an earlier state of the source.
            let own = RangeCopy::new(Arc::clone(&to), Arc::clone(&from), BLOCK, is_zero)?;
            own.mark_own(&changed, || true).await?;
        }
        let copied = match RangeCopy::new(from, to, changed.granularity(), is_zero) {
            Ok(copy) => {
                let progress = Arc::new(ToolProgress::default());
                progress.begin(chunks(&changed).map(ByteRange::length).sum());
                let shown = Arc::clone(&progress);
                phases.begin(move || shown.get());
                let copies = chunks(&changed).map(|chunk| self.copy_chunk(&copy, chunk, &progress));
                run_all(MAX_IN_FLIGHT, copies).await
            }
            Err(error) => Err(error),
        };
        kept(target, copied).await
    }

    /// Copies a changed range, unless an earlier command has copied it.
    async fn copy_chunk(
        &self,
        copy: &RangeCopy<ImageStorage>,
        chunk: ByteRange,
        progress: &ToolProgress,
    ) -> blockhouse_core::Result<()> {
        if !(self.resume && rare(copy.is_copied(chunk)).await?) {
            rare(copy.copy(chunk)).await?;
        }
        progress.advance(chunk.length());
        Ok(())
    }

    /// The image that becomes the target: a new one, or the unfinished one of an earlier command,
    /// which must have the same size and backing file.
    async fn part(&self, part: &Path, options: CreateOptions) -> Result<Arc<ImageDisk>> {
        if !self.resume {
            let progress = ToolProgress::default();
            create_qcow2(part, &options, AllowedPaths::default(), NewFile::default(), &progress)
                .await?;
            return Ok(Arc::new(self.open_target(part).await?));
        }
        let advice = || format!("{}: cannot be resumed; remove it", part.display());
        let target = self.open_target(part).await.with_context(advice)?;
        let is_like_it = target.size() == options.size
            && target.image().backing_file() == options.backing.as_ref();
        if !is_like_it {
            bail!("{}: is no part of this backup; remove it", part.display());
        }
        let target = without_leaks(target, part, async || self.open_target(part).await).await?;
        Ok(Arc::new(target))
    }

    /// The base as the target's backing file.
    fn backing(&self) -> Result<Backing> {
        let base = self.base.as_deref().context("an increment has a base")?;
        let folder = |path: &Path| match path.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder.canonicalize(),
            _ => Path::new(".").canonicalize(),
        };
        let name = base.file_name().map(|name| name.to_string_lossy().into_owned());
        let (Some(name), Ok(of_base), Ok(of_target)) = (name, folder(base), folder(&self.target))
        else {
            bail!("{}: there is no such backup", base.display());
        };
        if of_base != of_target {
            bail!(
                "{}: a base is in the folder of its increment, so that both can be moved together; put TARGET there",
                base.display()
            );
        }
        let format = self.base_format.unwrap_or_else(|| format_of_new(base));
        Ok(Backing { name: name.into(), format: Some(format.as_str().to_owned()) })
    }

    async fn open_target(&self, part: &Path) -> Result<ImageDisk> {
        let read_only = self.open.read_only(Some(ImageFormat::Qcow2))?;
        let options = ImageOptions { access: Access::ReadWrite, ..read_only };
        Ok(open_copy_target(part, options).await?)
    }

    /// Makes the target durable, verifies the target if the user requested that, and closes it.
    async fn finish(
        &self,
        source: &Arc<ImageDisk>,
        target: Arc<ImageDisk>,
        phases: &Phases,
    ) -> Result<()> {
        target.flush().await?;
        let verified =
            if self.verify { self.compare(source, &target, phases).await } else { Ok(()) };
        let closed = target.close().await;
        verified.and_then(|()| Ok(closed?))
    }

    async fn compare(
        &self,
        source: &Arc<ImageDisk>,
        target: &Arc<ImageDisk>,
        phases: &Phases,
    ) -> Result<()> {
        let (one, other) = (Arc::clone(source), Arc::clone(target));
        let job = Arc::new(CompareJob::new(one, other, MAX_IN_FLIGHT));
        let shown = Arc::clone(&job);
        phases.begin(move || shown.progress());
        job.work().await?;
        let Some(offset) = job.difference() else { return Ok(()) };
        let what = match &self.incremental {
            Some(since) => format!(
                "check that the base belongs to the bitmap '{since}' and that nothing changes the source"
            ),
            None => "check that nothing changes the source".to_owned(),
        };
        Err(anyhow!(
            "{}: differs from the source at offset {offset}; {what}",
            self.target.display()
        ))
    }
}

/// Refuses a base that is the source under any name: it has the changes already, and the target
/// would read from a disk that goes on changing. A backing file of the source can be a base.
fn check_not_source(base: &Path, source: &ImageDisk) -> Result<()> {
    for file in files_of_layer(source.image().layer()) {
        if check_new_apart_from(base, file.descriptor(), file.name()).is_err() {
            bail!(
                "{}: is the source itself ({}), and no backup of it; name the backup made when the bitmap was added",
                base.display(),
                file.name()
            );
        }
    }
    Ok(())
}

/// Returns the target if the copy succeeded. Otherwise closes the target, so that `--resume` finds
/// the copied data.
async fn kept(
    target: Arc<ImageDisk>,
    copied: blockhouse_core::Result<()>,
) -> Result<Arc<ImageDisk>> {
    match copied {
        Ok(()) => Ok(target),
        Err(error) => {
            // The error of the copy is reported, so an error of the close is ignored.
            let _ = target.close().await;
            Err(error.into())
        }
    }
}

/// The largest cluster size at whose borders all changed ranges begin and end, within the limits.
fn cluster_size(changed: &DirtyMap) -> u64 {
    let mut borders = MAX_CLUSTER;
    let mut offset = 0;
    while let Some(run) = changed.next(offset, u64::MAX) {
        borders |= run.offset();
        // The last cluster may reach past the end of the disk.
        if changed.next_clean(run.end(), 1).is_some() {
            borders |= run.end();
        }
        offset = run.end();
    }
    (1 << borders.trailing_zeros()).clamp(MIN_CLUSTER, MAX_CLUSTER)
}

/// The changed ranges, split into requests.
fn chunks(changed: &DirtyMap) -> impl Iterator<Item = ByteRange> + '_ {
    let mut offset = 0;
    std::iter::from_fn(move || {
        let run = changed.next(offset, CHUNK_SIZE)?;
        offset = run.end();
        Some(run)
    })
}
