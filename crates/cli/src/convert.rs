//! `blockhouse convert`: a copy of an image in another format.
//!
//! Guarantees: those of [`copy_target`](crate::copy_target). A copy that fails stays in `TARGET.part`, and `--resume` goes
//! on with it: what is there is compared with the source, and what differs is copied.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, anyhow, bail};
use blockhouse_core::{ByteRange, ErrorKind};
use blockhouse_disk::{
    Bitmap, BitmapAction, CacheMode, CopyJob, CopyOptions, ImageDisk, ImageFormat, ImageOptions,
    Locking, NewBitmap, open, open_snapshot,
};
use blockhouse_engine::{EngineChoice, EventLoop};

use crate::copy_target::{CopyFormats, IfThere, Target, TargetSpec};
use crate::create::wrong_usage;
use crate::create_options::{self, Setting, Settings};
use crate::image_opts::{ImageOptsArgs, Named};
use crate::open_args::{OpenArgs, SourceCacheArgs};
use crate::output;
use crate::parallel::{default_threads, run_parallel};
use crate::progress::{Progress, ProgressArgs};

/// Chunks in flight in all.
const MAX_IN_FLIGHT: usize = 16;

/// Arguments of `convert`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    formats: CopyFormats,
    /// Copy the disk as it was when this snapshot was taken (its name or id), without a machine's state.
    #[arg(long, short = 'l', value_name = "SNAPSHOT", value_parser = parse_snapshot)]
    snapshot: Option<String>,
    /// Copy the source's bitmaps of changes, too (qcow2 only). One that lacks changes is an error.
    #[arg(long, conflicts_with_all = ["snapshot", "resume", "no_create"])]
    bitmaps: bool,
    /// With --bitmaps, leave out those that lack changes.
    #[arg(long, requires = "bitmaps")]
    skip_broken_bitmaps: bool,
    /// Write compressed clusters (qcow2 only).
    #[arg(long, short)]
    compress: bool,
    /// Options of a qcow2 target, as those of 'create'. Without a backing file the target stands alone, whatever
    /// is behind the source.
    #[arg(short, long = "options", value_name = "OPTION=VALUE,...", conflicts_with = "resume")]
    #[arg(value_parser = create_options::parse)]
    options: Vec<create_options::Settings>,
    /// Make the target an overlay of this file, found from the target's folder: what differs from it is stored.
    #[arg(long, short = 'B', value_name = "FILE", requires = "backing_format")]
    #[arg(value_parser = create_options::parse_backing_file, conflicts_with_all = ["resume", "no_create"])]
    backing: Option<Setting>,
    /// The format of that file.
    #[arg(long, short = 'F', value_name = "FORMAT", requires = "backing")]
    #[arg(value_parser = create_options::parse_backing_format)]
    backing_format: Option<Setting>,
    /// Replace a target that exists, once the copy is complete; or overwrite a block device.
    #[arg(long)]
    force: bool,
    /// Go on with a copy that failed: compare what is in TARGET.part with the source and copy what
    /// differs.
    #[arg(long)]
    resume: bool,
    /// Make no target: write the copy into the one that is there, which keeps its options and may be larger. A copy
    /// that fails leaves a part of it.
    #[arg(long, short, conflicts_with_all = ["force", "resume", "options"])]
    no_create: bool,
    /// The target that is there reads as zeros, so that these need not be written.
    #[arg(long, requires = "no_create")]
    target_is_zero: bool,
    /// How the target is written: through the page cache (writeback) or around it (none). Either
    /// way it is durable in the end.
    #[arg(long, short = 't', value_name = "MODE", value_parser = parse_cache)]
    cache: Option<CacheMode>,
    /// Do not lock the source: also copy it while another program writes to it. The copy may be of no moment in
    /// time.
    #[arg(long, short = 'U')]
    force_share: bool,
    #[command(flatten)]
    source_cache: SourceCacheArgs,
    #[command(flatten)]
    habits: Habits,
    #[command(flatten)]
    progress: ProgressArgs,
    #[command(flatten)]
    image_opts: ImageOptsArgs,
    #[command(flatten)]
    open: OpenArgs,
    /// The image to copy. It is only read, with all files behind it.
    source: PathBuf,
    /// The new image. One that exists is left alone.
    target: PathBuf,
}

/// What qemu-img needs to be told, and is always so here.
#[derive(clap::Args)]
struct Habits {
    /// Several requests are in flight.
    #[arg(short = 'm', hide = true, value_name = "NUMBER")]
    coroutines: Option<u32>,
    /// They are written in any order.
    #[arg(short = 'W', hide = true)]
    out_of_order: bool,
    /// Zeros take no space.
    #[arg(short = 'S', hide = true, value_name = "SIZE", value_parser = parse_sparse)]
    sparse: Option<u64>,
}

fn parse_cache(name: &str) -> Result<CacheMode, String> {
    Ok(match name.parse()? {
        mode @ (CacheMode::None | CacheMode::Writeback) => mode,
        // What they say about flushes does not matter: there is one, at the end.
        CacheMode::Directsync => CacheMode::None,
        CacheMode::Writethrough | CacheMode::Unsafe => CacheMode::Writeback,
    })
}

/// A snapshot as qemu-img takes it: a name or id, or `snapshot.name=NAME`, `snapshot.id=ID`.
///
/// # Errors
/// Why it is neither.
pub fn parse_snapshot(text: &str) -> Result<String, String> {
    let named = ["snapshot.name=", "snapshot.id="];
    let name = named.iter().find_map(|prefix| text.strip_prefix(prefix)).unwrap_or(text);
    match name.contains(",snapshot.") {
        true => Err("say its name or its id, not both".into()),
        false => Ok(name.to_owned()),
    }
}

fn parse_sparse(text: &str) -> Result<u64, String> {
    match blockhouse_daemon::size::parse(text)? {
        0 => Err("zeros take no space here; for a target of qcow2 that has all of its space say \
                  -o preallocation=full"
            .into()),
        size => Ok(size),
    }
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    if Settings::join(arguments.options.clone()).is_none() {
        return output::print(create_options::HELP);
    }
    let format = arguments.formats.of_target(&arguments.target);
    let settings = settings(&arguments, format);
    let progress = Progress::start(arguments.progress)?;
    let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
    let source = event_loop.block_on(open_source(&arguments))?;
    let bitmaps = match arguments.bitmaps {
        true => event_loop.block_on(bitmaps_to_copy(&source, arguments.skip_broken_bitmaps))?,
        false => Vec::new(),
    };
    let spec = TargetSpec {
        path: &arguments.target,
        format,
        settings,
        size: source.size(),
        if_there: arguments.if_there(),
        // Going on would end with the bitmaps that are there, which may lack changes.
        can_resume: !arguments.bitmaps,
        compress: arguments.compress,
        cache: arguments.cache,
        open: &arguments.open,
    };
    let target = event_loop.block_on(spec.build())?;
    let range = ByteRange::between(0, source.size());
    let source = Arc::new(source);
    let copied = copy(&progress, &source, range, &target, arguments.compress);
    event_loop.block_on(async {
        let copied = match copied {
            Ok(()) => copy_bitmaps(&source, &target.disk, &bitmaps).await,
            Err(error) => Err(error),
        };
        target.finish(copied).await
    })
}

/// The bitmaps of the source that are to be copied.
///
/// # Errors
/// One of them lacks changes.
async fn bitmaps_to_copy(source: &ImageDisk, skip_broken: bool) -> Result<Vec<Bitmap>> {
    let mut good = Vec::new();
    for bitmap in source.bitmaps().list().await? {
        let (image, name) = (source.name(), bitmap.name.escape_debug());
        match (bitmap.is_inconsistent, skip_broken) {
            (false, _) => good.push(bitmap),
            (true, true) => output::tell(&format!(
                "blockhouse: {image}: bitmap '{name}' lacks changes and is left out"
            )),
            (true, false) => bail!(
                "{image}: bitmap '{name}' was not saved by its last writer, and lacks changes; leave such bitmaps out \
                 with --skip-broken-bitmaps"
            ),
        }
    }
    Ok(good)
}

/// Gives the target these bitmaps of the source.
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

/// Copies a part of a disk to the start of the target, which is to be [finished](Target::finish) with the outcome.
///
/// # Errors
/// What a storage answers.
pub fn copy(
    progress: &Progress,
    source: &Arc<ImageDisk>,
    range: ByteRange,
    target: &Target,
    compress: bool,
) -> Result<()> {
    let threads = default_threads();
    let options = CopyOptions {
        target_content: target.content,
        compress,
        max_in_flight: MAX_IN_FLIGHT.div_ceil(threads),
    };
    let copying = CopyJob::of_part(Arc::clone(source), range, Arc::clone(&target.disk), options)?;
    run_parallel(
        progress,
        threads,
        || async { Ok(copying.work().await?) },
        || (copying.progress().done, copying.progress().total),
    )
}

impl Arguments {
    fn if_there(&self) -> IfThere {
        match () {
            () if self.target_is_zero => IfThere::OverwriteZeros,
            () if self.no_create => IfThere::Overwrite,
            () if self.resume => IfThere::Resume,
            () if self.force => IfThere::Replace,
            () => IfThere::Fail,
        }
    }
}

/// The options of the target, after everything that contradicts itself is refused.
fn settings(arguments: &Arguments, format: ImageFormat) -> Vec<Setting> {
    let mut settings = Settings::join(arguments.options.clone()).unwrap_or_default();
    settings.extend(arguments.backing.clone());
    settings.extend(arguments.backing_format.clone());
    if !format.is_writable() {
        wrong_usage(&format.not_made());
    }
    if format == ImageFormat::Raw && arguments.compress {
        wrong_usage("raw images have no compressed clusters (-c); say --format qcow2");
    }
    if format == ImageFormat::Raw && arguments.bitmaps {
        wrong_usage("raw images have no bitmaps (--bitmaps); say --format qcow2");
    }
    if format == ImageFormat::Raw && !settings.is_empty() {
        wrong_usage("raw images have no options (-o, -B); say --format qcow2");
    }
    if arguments.compress && settings.contains(&Setting::EncryptLuks) {
        wrong_usage("compressed clusters (-c) are not encrypted: leave one of the two out");
    }
    if arguments.compress && settings.iter().any(|one| matches!(one, Setting::DataFile(_))) {
        wrong_usage("an image with a data file has no compressed clusters (-c)");
    }
    settings
}

async fn open_source(arguments: &Arguments) -> Result<ImageDisk> {
    let Arguments { source, formats, snapshot, .. } = arguments;
    let Named { path, format, is_shared, .. } =
        arguments.image_opts.resolve(source, formats.source_format)?;
    let locking = if arguments.force_share || is_shared { Locking::None } else { Locking::Held };
    let options = ImageOptions { locking, ..arguments.open.read_only(format)? };
    let options = arguments.source_cache.apply(options);
    let opened = match snapshot {
        None => open(&path, options).await,
        Some(name) => open_snapshot(&path, options, name).await,
    };
    opened.map_err(|error| match error.kind() {
        // A snapshot that is not there is no matter of formats.
        ErrorKind::InvalidInput if format.is_none() && snapshot.is_none() => {
            // --format is the target's here.
            anyhow!(error.to_string().replace("--format ", "--source-format "))
        }
        _ => error.into(),
    })
}
