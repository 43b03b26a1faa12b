//! The command line of `convert`: its options, contradictions among them, and the images to open.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use blockhouse_config::size;
use blockhouse_disk::{ImageDisk, ImageFormat};
use blockhouse_images::{CacheMode, behind_links};

use crate::called_as;
use crate::copy_target::{CopyFormats, How, IfThere, TargetSpec};
use crate::create::{chosen_encryption, wrong_usage};
use crate::create_options::{self, Settings};
use crate::create_setting::Setting;
use crate::formatting;
use crate::image_opts::ImageOptsArgs;
use crate::open_args::{OpenArgs, SourceCacheArgs, name_format_option};
use crate::progress::ProgressArgs;
use crate::rate::RateArgs;
use crate::snapshot_name::{SnapshotName, open_snapshot, parse_snapshot};

/// Arguments of `convert`.
#[derive(clap::Args)]
#[command(override_usage = "blockhouse convert [OPTIONS] <SOURCE>... <TARGET>")]
pub struct Arguments {
    #[command(flatten)]
    pub(super) formats: CopyFormats,
    /// Copy the disk of this snapshot (its name or id), without the VM state.
    #[arg(long, short = 'l', value_name = "SNAPSHOT", value_parser = parse_snapshot)]
    pub(super) snapshot: Option<SnapshotName>,
    /// Also copy the source's bitmaps (qcow2 only). A bitmap that lacks changes is an error.
    #[arg(long, conflicts_with_all = ["snapshot", "resume", "no_create"])]
    pub(super) bitmaps: bool,
    /// With --bitmaps, leave out those that lack changes.
    #[arg(long, requires = "bitmaps")]
    pub(super) skip_broken_bitmaps: bool,
    /// Write compressed clusters (qcow2 only).
    #[arg(long, short)]
    pub(super) compress: bool,
    /// Options of a qcow2 target, as those of 'create'. Without a backing file the target has none,
    /// even if the source has one.
    #[arg(short, long = "options", value_name = "OPTION=VALUE,...", conflicts_with = "resume")]
    #[arg(value_parser = create_options::parse)]
    pub(super) options: Vec<create_options::Settings>,
    /// Make the target an overlay of this file, found from the target's folder: it stores only data
    /// that differs from the file. With -n the target is an overlay already.
    #[arg(long, short = 'B', value_name = "FILE")]
    #[arg(value_parser = create_options::parse_backing_file, conflicts_with = "resume")]
    pub(super) backing: Option<Setting>,
    /// The format of the file of -B.
    #[arg(long, short = 'F', value_name = "FORMAT")]
    #[arg(value_parser = create_options::parse_backing_format, conflicts_with = "resume")]
    pub(super) backing_format: Option<Setting>,
    /// Replace a target that exists, once the copy is complete; or overwrite a block device.
    #[arg(long)]
    pub(super) force: bool,
    /// Continue a copy that failed: compare TARGET.part with the source and copy the differences.
    #[arg(long)]
    pub(super) resume: bool,
    /// Create no target: write into the existing one, which keeps its options and may be larger. A
    /// failed copy leaves the target incomplete.
    #[arg(long, short, conflicts_with_all = ["force", "resume", "options"])]
    pub(super) no_create: bool,
    /// The existing target reads as zeros, so zeros need not be written.
    #[arg(long, requires = "no_create")]
    pub(super) target_is_zero: bool,
    /// How the target is written: through the page cache (writeback) or around it (none), with a
    /// flush at the end; unsafe: through the page cache, without that flush.
    #[arg(long, short = 't', value_name = "MODE", value_parser = parse_cache)]
    pub(super) cache: Option<CacheMode>,
    /// Do not lock the source: copy it even while another program writes to it. The copy may mix
    /// several points in time.
    #[arg(long, short = 'U')]
    pub(super) force_share: bool,
    #[command(flatten)]
    pub(super) source_cache: SourceCacheArgs,
    /// Runs of zeros of at least this many bytes take no space. 0: write everything, also holes of
    /// the source.
    #[arg(short = 'S', long = "sparse-size", value_name = "SIZE", value_parser = size::parse)]
    pub(super) sparse: Option<u64>,
    /// Continue if a part of the source cannot be read: the part becomes zeros, and a warning says
    /// where.
    #[arg(long)]
    pub(super) salvage: bool,
    #[command(flatten)]
    habits: Habits,
    #[command(flatten)]
    pub(super) progress: ProgressArgs,
    #[command(flatten)]
    pub(super) image_opts: ImageOptsArgs,
    /// The target is given as QEMU's options, as sources are with --image-opts.
    #[arg(long, hide = true)]
    pub(super) target_image_opts: bool,
    #[command(flatten)]
    pub(super) open: OpenArgs,
    #[command(flatten)]
    pub(super) rate: RateArgs,
    /// SOURCE, the image to copy; several are copied one after the other into one disk. The sources
    /// and their backing files are only read. '-' is a raw disk on standard input. TARGET, the
    /// last, is the new image. An existing file is not changed. '-' writes a raw disk to standard
    /// output.
    #[arg(num_args = 1.., value_name = "IMAGE")]
    pub(super) sources: Vec<PathBuf>,
    #[arg(skip)]
    pub(super) target: PathBuf,
}

/// Options of qemu-img that change nothing here, except `-m 1`.
#[derive(clap::Args)]
struct Habits {
    /// 1: write the target in the order of the disk, so that equal sources give equal qcow2 files.
    /// Any other number changes nothing.
    #[arg(short = 'm', value_name = "NUMBER", value_parser = crate::habits::number)]
    coroutines: Option<u32>,
    /// Requests are written in any order.
    #[arg(short = 'W', hide = true)]
    out_of_order: bool,
    /// Copy offloading, which does not exist here.
    #[arg(short = 'C', hide = true, conflicts_with = "salvage")]
    copy_offloading: bool,
}

impl Habits {
    /// Refuses the same wrong usage as qemu-img, under its name.
    fn check(&self, sparse: Option<u64>) {
        const SECTOR: u64 = 512;
        const MAX_SPARSE: u64 = 16 << 20;
        if !called_as::is_qemu_img() {
            return;
        }
        if self.coroutines.is_some_and(|number| !(1..=16).contains(&number)) {
            wrong_usage("Invalid number of coroutines specified. Must be between 1 and 16.");
        }
        if sparse.is_some_and(|size| !size.is_multiple_of(SECTOR) || size > MAX_SPARSE) {
            wrong_usage(
                "Invalid buffer size for sparse output specified. Valid sizes are multiples of 512 up to 16777216. Select 0 \
                 to disable sparse detection (fully allocates output).",
            );
        }
        if self.copy_offloading && sparse.is_some() {
            wrong_usage("Cannot enable copy offloading when -S is used");
        }
    }
}

fn parse_cache(name: &str) -> Result<CacheMode, String> {
    Ok(match name.parse()? {
        mode @ (CacheMode::None | CacheMode::Writeback | CacheMode::Unsafe) => mode,
        // Flushes after each write are not needed: one flush at the end is enough.
        CacheMode::Directsync => CacheMode::None,
        CacheMode::Writethrough => CacheMode::Writeback,
    })
}

impl Arguments {
    /// The target to make, for a disk of `size` bytes with the content of `sources`.
    pub(super) fn target_spec<'a>(
        &'a self,
        format: ImageFormat,
        settings: Vec<Setting>,
        size: u64,
        sources: &'a [Arc<ImageDisk>],
    ) -> TargetSpec<'a> {
        TargetSpec {
            path: &self.target,
            format,
            settings,
            size,
            if_there: self.if_there(),
            // A copy with bitmaps cannot be resumed, because it would keep the bitmaps of the
            // partial copy, which may lack changes. A copy that is resumed does not replace a
            // target (--force). The other options exclude --resume.
            can_resume: !self.bitmaps
                && !self.force
                && self.options.is_empty()
                && self.backing.is_none(),
            compress: self.compress,
            cache: self.cache,
            open: &self.open,
            sources: sources.iter().map(Arc::as_ref).collect(),
        }
    }

    /// Sets the path and the format of the target from either form of its name.
    ///
    /// # Errors
    /// As [`ImageOptsArgs::resolve_to_change`].
    pub(super) fn resolve_target(&mut self) -> Result<()> {
        let names = ImageOptsArgs::if_used(self.target_image_opts);
        if self.target_image_opts && !self.no_create && called_as::is_qemu_img() {
            wrong_usage("--target-image-opts requires use of -n flag");
        }
        let named = names.resolve_target(&self.target, self.formats.format)?;
        self.compress |= named.is_compressed;
        self.formats.format = named.format;
        self.target = behind_links(&named.path);
        Ok(())
    }

    /// Ends the program, because the target cannot have one of its options. Under the name qemu-img
    /// the error about a value names the target, because qemu-img finds that error when it makes
    /// the target.
    pub(super) fn refuse_option(&self, format: &str, why: &str) -> ! {
        const EARLY: [&str; 3] =
            ["Invalid parameter", "Backing file not supported", "expects 'on' or 'off'"];
        if !called_as::is_qemu_img() || EARLY.iter().any(|early| why.contains(early)) {
            wrong_usage(why);
        }
        let target = self.target.display();
        wrong_usage(&format!("{target}: error while converting {format}: {why}"))
    }

    /// How the copy is made.
    pub(super) fn how(&self) -> How {
        How {
            compress: self.compress,
            writes_zeros: self.sparse == Some(0),
            salvages: self.salvage,
            in_order: self.habits.coroutines == Some(1),
            rate: self.rate,
        }
    }

    /// The treatment of a target that exists.
    pub(super) fn if_there(&self) -> IfThere {
        match () {
            () if self.target_is_zero => IfThere::OverwriteZeros,
            () if self.no_create => IfThere::Overwrite,
            () if self.resume => IfThere::Resume,
            () if self.force || called_as::is_qemu_img() => IfThere::Replace,
            () => IfThere::Fail,
        }
    }
}

/// The options of the target. Contradictions end the program.
pub(super) fn settings(arguments: &Arguments, format: ImageFormat) -> Vec<Setting> {
    let mut settings = Settings::join(arguments.options.clone()).unwrap_or_default();
    if !arguments.no_create {
        settings.extend(arguments.backing.clone());
        settings.extend(arguments.backing_format.clone());
    }
    let is_foreign = matches!(format, ImageFormat::Foreign(_));
    // Only some foreign formats have compression: `to_foreign` checks that.
    if format != ImageFormat::Qcow2 && !is_foreign && arguments.compress {
        wrong_usage("only qcow2 images have compressed clusters (-c); say --format qcow2");
    }
    if format != ImageFormat::Qcow2 && arguments.bitmaps {
        wrong_usage("only qcow2 images have bitmaps (--bitmaps); say --format qcow2");
    }
    arguments.habits.check(arguments.sparse);
    let is_compressed = arguments.compress && format == ImageFormat::Qcow2;
    if is_compressed && chosen_encryption(&settings).is_some() {
        wrong_usage("compressed clusters (-c) are not encrypted: leave one of the two out");
    }
    let is_preallocated =
        || formatting::preallocation_of(&settings).is_some_and(|mode| mode != "off");
    if is_compressed && called_as::is_qemu_img() && is_preallocated() {
        wrong_usage("Compression and preallocation not supported at the same time");
    }
    if let Some(refusal) = create_options::refusal_of(&settings) {
        arguments.refuse_option(format.as_str(), &refusal.words_of(format));
    }
    if format == ImageFormat::Raw {
        let mode = create_options::raw(&settings);
        mode.unwrap_or_else(|why| arguments.refuse_option(format.as_str(), &why));
    }
    if arguments.compress && settings.iter().any(|one| matches!(one, Setting::DataFile(_))) {
        wrong_usage("an image with a data file has no compressed clusters (-c)");
    }
    if arguments.sources.len() > 1 {
        if arguments.snapshot.is_some() || arguments.bitmaps {
            wrong_usage(
                "several sources make one disk: leave -l and --bitmaps out, which are of one image",
            );
        }
        if arguments.backing.is_some()
            || settings.iter().any(|one| matches!(one, Setting::BackingFile(_)))
        {
            wrong_usage("several sources make one disk, which is no overlay (-B) of another");
        }
    }
    settings
}

/// Opens all sources, in their order.
///
/// # Errors
/// The first source that cannot be opened.
pub(super) async fn open_sources(arguments: &Arguments) -> Result<Vec<Arc<ImageDisk>>> {
    let mut sources = Vec::with_capacity(arguments.sources.len());
    for source in &arguments.sources {
        sources.push(Arc::new(open_source(arguments, source).await?));
    }
    Ok(sources)
}

async fn open_source(arguments: &Arguments, source: &Path) -> Result<ImageDisk> {
    let Arguments { formats, .. } = arguments;
    let named = arguments.image_opts.resolve_to_read(source, formats.source_format)?;
    let (path, options) = arguments.open.read_named(named, arguments.force_share)?;
    let options = arguments.source_cache.apply(options);
    let opened = open_snapshot(&path, options, arguments.snapshot.as_ref()).await;
    // In `convert`, --format is the format of the target.
    opened.map_err(|error| name_format_option(error, "--source-format"))
}
