//! `blockhouse commit`: an image's data into its backing file.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use blockhouse_disk::{
    AfterCommit, ImageDisk, ImageFormat, ToolProgress, commit_overlay, open_for_commit,
};
use blockhouse_engine::{EngineChoice, EventLoop};

use crate::image_args::resolve_relative;
use crate::image_opts::{ImageOptsArgs, Named};
use crate::open_args::{OpenArgs, TargetCacheArgs};
use crate::progress::{Progress, ProgressArgs};

/// Arguments of `commit`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The image's format; left out, the file's name decides (.qcow2, otherwise raw).
    #[arg(long, short, value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// The backing file that gets the content: the image's own, named here only to be sure.
    #[arg(long, short, value_name = "FILE")]
    base: Option<PathBuf>,
    /// Leave in the image what it has, instead of emptying it.
    #[arg(long, short = 'd')]
    keep: bool,
    #[command(flatten)]
    target_cache: TargetCacheArgs,
    #[command(flatten)]
    progress: ProgressArgs,
    #[command(flatten)]
    image_opts: ImageOptsArgs,
    #[command(flatten)]
    open: OpenArgs,
    /// The image. What it has goes into its backing file, and it is empty afterwards.
    image: PathBuf,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    let Arguments { base, keep, target_cache, progress, open, .. } = &arguments;
    let (keep, target_cache, progress) = (*keep, *target_cache, *progress);
    let Named { path: image, format, .. } =
        arguments.image_opts.resolve_to_change(&arguments.image, arguments.format)?;
    let options = target_cache.apply(open.read_write(format)?);
    let after = if keep { AfterCommit::Keep } else { AfterCommit::Empty };
    let shown = Progress::start(progress)?;
    let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
    let (disk, behind) = event_loop.block_on(open_for_commit(&image, options))?;
    if let Some(base) = base {
        check_base(&image, &disk, base)?;
    }
    let progress = ToolProgress::default();
    let work = || Ok(event_loop.block_on(commit_overlay(&disk, &behind, after, &progress))?);
    shown.beside(|| progress.get(), work)?;
    event_loop.block_on(async {
        behind.close().await?;
        Ok(disk.close().await?)
    })
}

/// Refuses a base that is not the image's own backing file.
fn check_base(image: &Path, disk: &ImageDisk, base: &Path) -> Result<()> {
    let name = disk.backing_file().context("an image without a backing file")?;
    let own = resolve_relative(image, &name.name);
    // As qemu-img does: from here, or as the image names it.
    let is_own = [base.to_owned(), resolve_relative(image, base.as_os_str().as_encoded_bytes())]
        .iter()
        .any(|named| match (named.canonicalize(), own.canonicalize()) {
            (Ok(named), Ok(own)) => named == own,
            _ => *named == own,
        });
    if is_own {
        return Ok(());
    }
    bail!(
        "{}: its backing file is {}, and the content goes there only: commit it, and then {} in the same way",
        image.display(),
        own.display(),
        own.display()
    );
}
