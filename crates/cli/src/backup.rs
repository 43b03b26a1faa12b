//! `blockhouse backup`: a disk as a qcow2 file, whole or what has changed since a bitmap was begun.
//!
//! Guarantees: the target gets its name when it is complete and durable, never before; until then it is in `TARGET.part`
//! beside it, which is removed where it cannot be completed. An increment has whole clusters and an ordinary link to its
//! base: what it does not have is read from there, by any program.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use blockhouse_core::ByteRange;
use blockhouse_core::sync::run_all;
use blockhouse_disk::{
    Access, AllowedPaths, Backing, CacheMode, CompareJob, CopyJob, CopyOptions, DirtyMap, IfExists,
    ImageDisk, ImageFormat, ImageOptions, RangeCopy, TargetContent, changed_since, check_new_name,
    exists, open, part_of, remove_created, rename_finished,
};
use blockhouse_engine::{EngineChoice, EventLoop};
use blockhouse_format::qcow2::CreateOptions;
use blockhouse_storage::Location;

use crate::create::{create_qcow2, format_of_new, wrong_usage};
use crate::open_args::OpenArgs;

/// Requests in flight in all.
const MAX_IN_FLIGHT: usize = 16;
/// Bytes of one request.
const CHUNK_SIZE: u64 = 1 << 20;
/// The largest cluster of a target, in bytes.
const MAX_CLUSTER: u64 = 64 << 10;
/// The smallest cluster of an increment, in bytes.
const MIN_CLUSTER: u64 = 4 << 10;

/// Arguments of `backup`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The source's format; left out, the file's name decides, and what is at another server is raw.
    #[arg(long, short = 'f', value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    source_format: Option<ImageFormat>,
    /// Copy only what has changed since this bitmap was begun: a bitmap of the image, or one that the server of SOURCE
    /// offers (qemu:dirty-bitmap:SINCE).
    #[arg(long, value_name = "SINCE", requires = "base")]
    incremental: Option<String>,
    /// The backup of the moment when the bitmap was begun, in the folder of TARGET, whose backing file it becomes.
    #[arg(long, short, value_name = "FILE", requires = "incremental")]
    base: Option<PathBuf>,
    /// The format of that backup; left out, its name decides (.qcow2, otherwise raw).
    #[arg(long, short = 'F', value_name = "FORMAT", requires = "base")]
    #[arg(value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    base_format: Option<ImageFormat>,
    /// Read all of it again in the end, and compare.
    #[arg(long)]
    verify: bool,
    #[command(flatten)]
    open: OpenArgs,
    /// The disk to copy: an image that no program changes, or an export of an NBD server, as 'ctl backup begin' makes them.
    source: PathBuf,
    /// The new qcow2 image. One that exists is left alone.
    target: PathBuf,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    if format_of_new(&arguments.target) != ImageFormat::Qcow2 {
        wrong_usage("a backup is a qcow2 image; give TARGET a name that ends in .qcow2");
    }
    EventLoop::new(EngineChoice::Auto)?.block_on(arguments.run())
}

impl Arguments {
    async fn run(&self) -> Result<()> {
        if !matches!(Location::of(&self.target)?, Location::File(_)) {
            bail!("{}: backups are files of this host", self.target.display());
        }
        if exists(&self.target).await? {
            bail!("{}: exists and is left alone; choose another name", self.target.display());
        }
        check_new_name(&self.target)?;
        let part = part_of(&self.target);
        if exists(&part).await? {
            bail!("{}: is what an earlier command left behind; remove it", part.display());
        }
        let source = open(&self.source, self.open.read_only(self.source_format)?).await?;
        let source = Arc::new(source);
        let filled = match &self.incremental {
            None => self.fill_whole(&source, &part).await,
            Some(since) => self.fill_increment(&source, &part, since).await,
        };
        let finished = match filled {
            Ok(()) => Ok(rename_finished(&part, &self.target, IfExists::Fail).await?),
            Err(error) => Err(error),
        };
        if finished.is_err() {
            remove_created(&part).await;
        }
        finished
    }

    async fn fill_whole(&self, source: &Arc<ImageDisk>, part: &Path) -> Result<()> {
        create_qcow2(part, &CreateOptions::new(source.size()), AllowedPaths::default()).await?;
        let target = Arc::new(self.open_target(part).await?);
        let options = CopyOptions {
            target_content: TargetContent::Zero,
            compress: false,
            max_in_flight: MAX_IN_FLIGHT,
        };
        CopyJob::new(Arc::clone(source), Arc::clone(&target), options)?.work().await?;
        self.finish(source, target).await
    }

    async fn fill_increment(
        &self,
        source: &Arc<ImageDisk>,
        part: &Path,
        since: &str,
    ) -> Result<()> {
        let changed = changed_since(&self.source, source, since).await?;
        let options = CreateOptions {
            cluster_size: cluster_size(&changed),
            backing: Some(self.backing()?),
            ..CreateOptions::new(source.size())
        };
        create_qcow2(part, &options, AllowedPaths::default()).await?;
        let target = Arc::new(self.open_target(part).await?);
        let copy = RangeCopy::new(
            Arc::clone(source),
            Arc::clone(&target),
            changed.granularity(),
            // The base may have had something else there.
            false,
        )?;
        let copies = chunks(&changed).map(|chunk| copy.copy(chunk));
        run_all(MAX_IN_FLIGHT, copies.map(|copy| async { copy.await.map(|_| ()) })).await?;
        self.finish(source, target).await
    }

    /// The link to the base.
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
        let options = ImageOptions {
            access: Access::ReadWrite,
            cache: CacheMode::Writeback,
            ..self.open.read_only(Some(ImageFormat::Qcow2))?
        };
        Ok(open(part, options).await?)
    }

    /// Makes the target durable, once it is found to be right.
    async fn finish(&self, source: &Arc<ImageDisk>, target: Arc<ImageDisk>) -> Result<()> {
        target.flush().await?;
        if self.verify {
            let compare = CompareJob::new(Arc::clone(source), Arc::clone(&target), MAX_IN_FLIGHT);
            if let Some(offset) = compare.work().await.map(|()| compare.difference())? {
                let what = match &self.incremental {
                    Some(since) => format!(
                        "does the base belong to the bitmap '{since}', and does nothing change the source?"
                    ),
                    None => "does nothing change the source?".to_owned(),
                };
                return Err(anyhow!(
                    "{}: differs from the source at offset {offset}; {what}",
                    self.target.display()
                ));
            }
        }
        Ok(target.close().await?)
    }
}

/// The largest clusters that have nothing but what has changed.
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

/// What has changed, in parts of the length of a request.
fn chunks(changed: &DirtyMap) -> impl Iterator<Item = ByteRange> + '_ {
    let mut offset = 0;
    std::iter::from_fn(move || {
        let run = changed.next(offset, CHUNK_SIZE)?;
        offset = run.end();
        Some(run)
    })
}
