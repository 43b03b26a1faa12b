//! `blockhouse commit`: writes an image's data into its backing file, or into a file further down
//! the backing chain.
//!
//! Guarantees: the image reads the same at every moment. The image is emptied only if all its data
//! is in its immediate backing file. Data of an encrypted image is stored unencrypted only with
//! `--decrypt`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Result, bail};
use blockhouse_core::ToolProgress;
use blockhouse_disk::{
    AfterCommit, CopyJob, CopyOptions, ImageDisk, ImageFormat, TargetContent, commit_overlay,
};
use blockhouse_engine::{EngineChoice, EventLoop, is_same_file};
use blockhouse_images::CommitChain;

use crate::called_as;
use crate::image_args::resolve_relative;
use crate::image_opts::{ImageOptsArgs, Named};
use crate::open_args::{OpenArgs, TargetCacheArgs};
use crate::output;
use crate::progress::{Progress, ProgressArgs};
use crate::rate::RateArgs;

/// Chunks in flight.
const MAX_IN_FLIGHT: usize = 16;

/// Arguments of `commit`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The image's format; left out, the file's name decides (docs/formats.md; otherwise raw).
    #[arg(long, short, value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// The backing file to commit into; left out, the image's own. If it is further down the chain,
    /// the image keeps its data, and the files between the two are valid only as parts of this
    /// chain.
    #[arg(long, short, value_name = "FILE")]
    base: Option<PathBuf>,
    /// Do not empty the image.
    #[arg(long, short = 'd')]
    keep: bool,
    /// Allow the data of an encrypted image to be stored unencrypted in the backing file.
    #[arg(long)]
    decrypt: bool,
    #[command(flatten)]
    rate: RateArgs,
    #[command(flatten)]
    target_cache: TargetCacheArgs,
    #[command(flatten)]
    progress: ProgressArgs,
    #[command(flatten)]
    image_opts: ImageOptsArgs,
    #[command(flatten)]
    open: OpenArgs,
    /// The image. Its data is written to its backing file, and the image is empty afterwards.
    image: PathBuf,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    let named = arguments.image_opts.resolve_to_commit(&arguments.image, arguments.format)?;
    let options = arguments.target_cache.apply(arguments.open.change_named(&named)?);
    let Named { path: image, format, backing, .. } = named;
    if arguments.base.is_some() && backing.is_some() {
        bail!("{}: the base is given twice; leave -b or backing.* out", image.display());
    }
    // Without `-b` the image itself names the file that is written.
    if format.is_none() && options.format.is_some() && arguments.base.is_none() {
        bail!(
            "{}: its format was found in the file, which its guest may have written, and commit writes to the file that it \
             names; name its format (-f), if you know who made it",
            image.display()
        );
    }
    let shown = Progress::start(arguments.progress)?;
    let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
    let is_base = |behind: &Path| {
        let base = arguments.base.as_deref().or(backing.as_ref().map(|(path, _)| &**path));
        base.is_none_or(|base| is_named(&image, base, behind))
    };
    let CommitChain { overlay, base, between } =
        event_loop.block_on(CommitChain::open(&image, options, &is_base))?;
    let is_other_format = |format: ImageFormat| format.as_str() != base.image().image_format_name();
    let said = backing.and_then(|(_, format)| format).filter(|_| arguments.base.is_none());
    if arguments.base.is_none() && !between.is_empty() || said.is_some_and(is_other_format) {
        bail!("{}: its options name another backing file than it has", image.display());
    }
    let overlay = Arc::new(overlay);
    if !arguments.decrypt {
        check_encryption(&overlay, &base, between.len())?;
    }
    arguments.rate.apply(base.throttle());
    if between.is_empty() {
        // qemu-img does not empty the image if `-b` names the base.
        let is_kept = arguments.keep || arguments.base.is_some() && called_as::is_qemu_img();
        let after = if is_kept { AfterCommit::Keep } else { AfterCommit::Empty };
        let progress = ToolProgress::default();
        let work = || Ok(event_loop.block_on(commit_overlay(&overlay, &base, after, &progress))?);
        shown.beside(|| progress.get(), work)?;
    } else {
        commit_chain(&mut event_loop, &shown, &overlay, &base)?;
    }
    event_loop.block_on(async {
        base.close().await?;
        anyhow::Ok(overlay.close().await?)
    })?;
    // The warning is not printed under the name qemu-img, because programs that read its standard
    // error would treat the warning as an error.
    for image in between.iter().filter(|_| !called_as::is_qemu_img()) {
        output::tell(&format!(
            "blockhouse: {image}: its backing file has changed; it is a part of this chain only, not a disk by itself"
        ));
    }
    if called_as::is_qemu_img() { output::print_unless_quiet("Image committed.") } else { Ok(()) }
}

/// Makes `base` read as `overlay` does. The overlay keeps its data; ranges with the same data are
/// not written.
fn commit_chain(
    event_loop: &mut EventLoop,
    shown: &Progress,
    overlay: &Arc<ImageDisk>,
    base: &Arc<ImageDisk>,
) -> Result<()> {
    if base.size() < overlay.size() {
        event_loop.block_on(base.resize(overlay.size()))?;
    }
    let options = CopyOptions {
        target_content: TargetContent::Unknown,
        compress: false,
        max_in_flight: MAX_IN_FLIGHT,
    };
    let job = CopyJob::new(Arc::clone(overlay), Arc::clone(base), options)?;
    let position = || (job.progress().done, job.progress().total);
    shown.beside(position, || Ok(event_loop.block_on(job.work())?))?;
    Ok(event_loop.block_on(base.flush())?)
}

/// Whether the base that the user typed is the file at `path`. A relative name is resolved from the
/// working directory, or from the folder of `image`.
fn is_named(image: &Path, typed: &Path, path: &Path) -> bool {
    let from_image = resolve_relative(image, typed.as_os_str().as_encoded_bytes());
    is_same_file(typed, path) || is_same_file(&from_image, path)
}

/// Refuses to store data unencrypted in the base if an image above it is encrypted.
fn check_encryption(overlay: &ImageDisk, base: &ImageDisk, between: usize) -> Result<()> {
    let mut above = (0..=between).filter_map(|depth| overlay.image().layer_at(depth));
    match above.find(|layer| layer.is_encrypted && !base.image().is_encrypted()) {
        None => Ok(()),
        Some(layer) => bail!(
            "{}: is encrypted, and its backing file {} is not: what is committed would be stored there in the clear; if \
             that is meant, say --decrypt",
            layer.name,
            base.name()
        ),
    }
}
