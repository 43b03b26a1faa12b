//! `blockhouse restore`: copies a backup, with its backing files, to a disk that can be used.
//!
//! Guarantees: those of [`copy_target`](crate::copy_target); also, the disk is read again and
//! compared with the backup before a new image gets its name. An existing file or device is written
//! to only with `--force`.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, anyhow};
use blockhouse_core::ByteRange;
use blockhouse_disk::{CompareJob, ImageDisk};
use blockhouse_engine::{EngineChoice, EventLoop};
use blockhouse_images::{ImageOptions, open};

use crate::copy_target::{CopyFormats, How, IfThere, Target, TargetSpec, copy};
use crate::create::wrong_usage;
use crate::open_args::{OpenArgs, name_format_option};
use crate::parallel::{default_threads, run_parallel};
use crate::progress::{Progress, ProgressArgs};

/// Chunks in flight in all.
const MAX_IN_FLIGHT: usize = 16;

/// Arguments of `restore`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    formats: CopyFormats,
    /// Replace an existing target, once the copy is complete and verified; or overwrite a block
    /// device.
    #[arg(long)]
    force: bool,
    /// Continue a copy that failed: compare TARGET.part with the backup and copy the differences.
    #[arg(long, conflicts_with = "force")]
    resume: bool,
    #[command(flatten)]
    progress: ProgressArgs,
    #[command(flatten)]
    open: OpenArgs,
    /// The backup to restore: an image that 'backup' made. It and its backing files are only read.
    source: PathBuf,
    /// The new image, or a block device. An existing file is not changed.
    target: PathBuf,
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    let format = arguments.formats.of_target(&arguments.target);
    if !format.is_writable() {
        wrong_usage(&format.not_made());
    }
    let progress = Progress::start(arguments.progress)?;
    let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
    let source = event_loop.block_on(open(&arguments.source, arguments.source()?));
    let source = source.map_err(|error| name_format_option(error, "--source-format"))?;
    let source = Arc::new(source);
    let if_there = match (arguments.force, arguments.resume) {
        (true, _) => IfThere::Replace,
        (false, true) => IfThere::Resume,
        (false, false) => IfThere::Fail,
    };
    let (path, size) = (&*arguments.target, source.size());
    let spec = TargetSpec::new(path, format, size, &arguments.open, vec![&source]);
    let spec = TargetSpec { if_there, can_resume: true, ..spec };
    let target = event_loop.block_on(spec.build())?;
    let range = ByteRange::between(0, source.size());
    let parts = vec![(Arc::clone(&source), range)];
    let copied = copy(&mut event_loop, &progress, parts, &target, How::default()).and_then(|()| {
        event_loop.block_on(target.disk.flush())?;
        compare(&mut event_loop, &progress, &source, &target)
    });
    event_loop.block_on(target.finish(copied))
}

impl Arguments {
    fn source(&self) -> Result<ImageOptions> {
        self.open.read_only(self.formats.source_format)
    }
}

/// Compares the target with the backup. If the target is a larger device, its bytes after the
/// disk's end are not compared.
fn compare(
    event_loop: &mut EventLoop,
    progress: &Progress,
    source: &Arc<ImageDisk>,
    target: &Target,
) -> Result<()> {
    let threads = default_threads();
    let max_in_flight = MAX_IN_FLIGHT.div_ceil(threads);
    let (one, other) = (Arc::clone(source), Arc::clone(&target.disk));
    let job = CompareJob::of_start(one, other, source.size(), max_in_flight);
    let work = || async { Ok(job.work().await?) };
    run_parallel(event_loop, progress, threads, work, || job.progress())?;
    match job.difference() {
        Some(offset) => Err(anyhow!(
            "{}: reads otherwise than the backup at offset {offset}, after it was written; check the storage below",
            target.disk.name()
        )),
        None => Ok(()),
    }
}
