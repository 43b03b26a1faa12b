//! `blockhouse convert`: a copy of an image in another format.
//!
//! Guarantees: those of [`copy_target`](crate::copy_target). A copy that fails is kept in
//! `TARGET.part`, and `--resume` continues it: the partial copy is compared with the source, and
//! differences are copied. A copy from a pipe cannot be resumed, and a failed copy to a foreign
//! format is removed.
//!
//! Pipes: `-` as the source is a raw disk on standard input (`from_input`), and `-` as the target
//! is a raw disk on standard output (`to_output`). Under the name qemu-img it is a file's name.

mod arguments;
mod from_input;
mod to_foreign;
mod to_output;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use blockhouse_disk::{Bitmap, BitmapAction, ImageDisk, ImageFormat, NewBitmap};
use blockhouse_engine::{EngineChoice, EventLoop};

pub use arguments::Arguments;
use arguments::{open_sources, settings};

use crate::called_as;
use crate::copy_target::{copy, whole};
use crate::create::wrong_usage;
use crate::create_options::{self, Settings};
use crate::output;
use crate::progress::Progress;

/// The path that stands for standard input or output.
const PIPE: &str = "-";

/// Runs the command.
pub fn run(mut arguments: Arguments) -> Result<()> {
    if Settings::join(arguments.options.clone()).is_none() {
        let has_target = arguments.sources.len() > 1;
        return output::print(&create_options::help(arguments.formats.format, has_target));
    }
    arguments.target = arguments.sources.pop().unwrap_or_default();
    if arguments.sources.is_empty() {
        wrong_usage("both a source and a target are needed");
    }
    arguments.resolve_target()?;
    // To qemu-img '-' is the name of a file.
    let is_pipe = |path: &PathBuf| path == Path::new(PIPE) && !called_as::is_qemu_img();
    match (arguments.sources.iter().any(is_pipe), is_pipe(&arguments.target)) {
        (false, false) => run_between_images(&arguments),
        (true, false) => from_input::run(&arguments),
        (false, true) => to_output::run(&arguments),
        (true, true) => {
            wrong_usage("source and target are both '-': one of the two must be an image")
        }
    }
}

fn run_between_images(arguments: &Arguments) -> Result<()> {
    let format = arguments.formats.of_target(&arguments.target);
    let settings = settings(arguments, format);
    if let ImageFormat::Foreign(kind) = format {
        return to_foreign::run(arguments, kind, &settings);
    }
    let progress = Progress::start(arguments.progress)?;
    let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
    let sources = event_loop.block_on(open_sources(arguments))?;
    let bitmaps = match (arguments.bitmaps, sources.first()) {
        (true, Some(source)) => {
            event_loop.block_on(bitmaps_to_copy(source, arguments.skip_broken_bitmaps))?
        }
        _ => Vec::new(),
    };
    let size = sources.iter().try_fold(0_u64, |sum, source| sum.checked_add(source.size()));
    let Some(size) = size else { bail!("the sources are longer than a disk can be") };
    let spec = arguments.target_spec(format, settings, size, &sources);
    let target = event_loop.block_on(spec.build())?;
    let parts = whole(&sources);
    let copied = copy(&mut event_loop, &progress, parts, &target, arguments.how());
    event_loop.block_on(async {
        let copied = match (copied, sources.first()) {
            (Ok(()), Some(source)) => copy_bitmaps(source, &target.disk, &bitmaps).await,
            (outcome, _) => outcome,
        };
        target.finish(copied).await
    })
}

/// The bitmaps of the source that are to be copied.
///
/// # Errors
/// A bitmap lacks changes.
async fn bitmaps_to_copy(source: &ImageDisk, skip_broken: bool) -> Result<Vec<Bitmap>> {
    let mut good = Vec::new();
    // The latest bitmap is the first, which is QEMU's order in messages.
    for bitmap in source.bitmaps().list().await?.into_iter().rev() {
        let (image, name) = (source.name(), bitmap.name.escape_debug());
        match (bitmap.is_inconsistent, skip_broken) {
            (false, _) => good.push(bitmap),
            (true, true) if called_as::is_qemu_img() => {
                output::tell(&format!("qemu-img: warning: Skipping inconsistent bitmap '{name}'"));
            }
            (true, true) => output::tell(&format!(
                "blockhouse: {image}: bitmap '{name}' lacks changes and is left out"
            )),
            (true, false) => bail!(
                "{image}: bitmap '{name}' was not saved by its last writer, and lacks changes; leave such bitmaps out \
                 with --skip-broken-bitmaps"
            ),
        }
    }
    good.reverse();
    Ok(good)
}

/// Copies these bitmaps of the source to the target.
async fn copy_bitmaps(source: &ImageDisk, target: &ImageDisk, bitmaps: &[Bitmap]) -> Result<()> {
    for Bitmap { name, granularity, is_enabled, .. } in bitmaps {
        let (name, granularity) = (name.clone(), Some(*granularity));
        let new = NewBitmap { name, granularity, is_enabled: false };
        target.bitmaps().add(&new).await?;
        target.bitmaps().merge(&new.name, source, &new.name).await?;
        if *is_enabled {
            target.bitmaps().change(&new.name, BitmapAction::Enable).await?;
        }
    }
    Ok(())
}
