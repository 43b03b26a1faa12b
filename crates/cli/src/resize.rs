//! `blockhouse resize`: grows images, and with `--shrink` makes them shorter.

use std::cmp::Ordering;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow, bail};
use blockhouse_core::{
    ByteRange, Durability, ErrorKind, Request, Storage, SyncMode, ToolProgress, rare,
};
use blockhouse_disk::{ImageDisk, ImageFormat, take_space};
use blockhouse_engine::{EngineChoice, EventLoop};
use blockhouse_format::SpaceMode;
use blockhouse_images::open;

use crate::called_as;
use crate::create::allocate_first_block;
use crate::create_options;
use crate::image_opts::ImageOptsArgs;
use crate::open_args::OpenArgs;
use crate::output;
use crate::progress::{Progress, ProgressArgs};
use blockhouse_config::size::{self, NewSize};

/// Bytes of a sector: a disk has whole sectors.
const SECTOR: u64 = 512;

/// Arguments of `resize`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The image's format; left out, the file's name decides (docs/formats.md; otherwise raw).
    #[arg(long, short, value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// Allow a smaller size: the data beyond the new size is lost.
    #[arg(long)]
    shrink: bool,
    /// Space for the part that is added: off allocates it when it is written, metadata the tables
    /// of a qcow2 image now, falloc all of it, full writes zeros to it. If the space is missing,
    /// the disk keeps its size.
    #[arg(long, value_name = "MODE", default_value = "off", value_parser = parse_space)]
    preallocation: Space,
    #[command(flatten)]
    progress: ProgressArgs,
    #[command(flatten)]
    image_opts: ImageOptsArgs,
    #[command(flatten)]
    open: OpenArgs,
    /// The image.
    image: PathBuf,
    /// The new size of the disk: 512, 64K, 20G, 1T; or the change of it: +10G, -10G.
    #[arg(value_parser = size::parse_new, allow_hyphen_values = true)]
    size: NewSize,
}

/// How the added space is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Space {
    /// The space is allocated when the guest writes to it.
    Later,
    Now(SpaceMode),
}

fn parse_space(text: &str) -> Result<Space, String> {
    match text {
        "off" => Ok(Space::Later),
        "metadata" => Ok(Space::Now(SpaceMode::Tables)),
        "falloc" => Ok(Space::Now(SpaceMode::Falloc)),
        "full" => Ok(Space::Now(SpaceMode::Full)),
        _ => Err("use off, metadata, falloc or full".into()),
    }
}

/// Runs the command.
pub fn run(arguments: &Arguments) -> Result<()> {
    let Arguments { format, image_opts, .. } = arguments;
    let named = image_opts.resolve_to_change(&arguments.image, *format)?;
    let options = arguments.open.change_named(&named)?;
    let image = named.path;
    let progress = Progress::start(arguments.progress)?;
    let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
    let opened = event_loop.block_on(open(&image, options));
    let disk = opened.map_err(|error| match error.kind() {
        ErrorKind::Locked => error.hint(
            "if that is 'blockhouse serve --control SOCKET', resize it, and its guests see the new size, by 'blockhouse ctl \
             SOCKET resize NAME SIZE'; else stop that program first",
        ),
        _ => error,
    })?;
    let old = disk.size();
    let length = arguments.size.of(old).map_err(|why| anyhow!("{}: {why}", disk.name()))?;
    arguments.check(&disk, length)?;
    // qemu-img takes any size for a raw disk; here a disk has whole sectors, so it is rounded up.
    let is_raw = disk.image().cluster_size().is_none();
    let is_exact = is_raw && called_as::is_qemu_img();
    let size = if is_exact { length.next_multiple_of(SECTOR) } else { length };
    if is_raw && arguments.preallocation == Space::Now(SpaceMode::Tables) {
        bail!(create_options::raw_has_no_tables());
    }
    event_loop.block_on(resize(&disk, size))?;
    if let Space::Now(mode) = arguments.preallocation
        && size > old
    {
        let taken = ToolProgress::default();
        let added = ByteRange::between(old, size);
        let work = || Ok(event_loop.block_on(rare(take_space(&disk, added, mode, &taken)))?);
        if let Err(error) = progress.beside(|| taken.get(), work) {
            return Err(event_loop.block_on(take_back(&disk, added, error)));
        }
    }
    if is_exact {
        event_loop.block_on(set_length(&disk, &image, old, length))?;
    }
    event_loop.block_on(disk.close())?;
    if called_as::is_qemu_img() { output::print_unless_quiet("Image resized.") } else { Ok(()) }
}

impl Arguments {
    /// Refuses a new size that the options do not allow. Under the name qemu-img also a size of 0,
    /// and preallocation of an unchanged size.
    fn check(&self, disk: &ImageDisk, size: u64) -> Result<()> {
        let (name, old, allocates) = (disk.name(), disk.size(), self.preallocation != Space::Later);
        if called_as::is_qemu_img() {
            if size == 0 {
                bail!("New image size must be positive");
            }
            if size <= old && allocates {
                bail!("Preallocation can only be used for growing images");
            }
        } else if size < old && allocates {
            bail!("{name}: space is taken where a disk becomes longer; leave --preallocation out");
        }
        if size < old && !self.shrink {
            bail!(
                "{name}: has {old} bytes and would become shorter: what lies beyond {size} would be lost; say --shrink if \
                 that is meant"
            );
        }
        Ok(())
    }
}

/// Under the name qemu-img: sets the length of a raw image's file, whose disk of `old` bytes has
/// been resized. The length may be inside the last sector. The first sector of a file that was
/// empty is written, as by qemu-img.
async fn set_length(disk: &ImageDisk, image: &Path, old: u64, length: u64) -> Result<()> {
    let file = disk.image().file().filter(|_| disk.image().format_name() == "raw");
    let Some(file) = file else { return Ok(()) };
    let length = if old == 0 { length.max(SECTOR) } else { length };
    if file.size() != length {
        file.resize(length).await?;
        file.flush(SyncMode::Full).await?;
    }
    if old == 0 {
        allocate_first_block(image, length)?;
    }
    Ok(())
}

/// Restores the size that the disk had before `added`, whose space could not be allocated. Returns
/// `why`, with a remark if the disk keeps its new size.
async fn take_back(disk: &ImageDisk, added: ByteRange, why: anyhow::Error) -> anyhow::Error {
    let durability = Durability::None;
    let undo = async {
        // The range is discarded first, because making the disk shorter may need space for
        // metadata.
        rare(disk.submit(Request::Discard { range: added, durability })).await?;
        disk.flush().await?;
        disk.shrink(added.offset()).await
    };
    let undone = undo.await;
    match undone.and(disk.close().await) {
        Ok(()) => why,
        Err(error) => anyhow!("{why:#}; and the disk keeps its new size: {error}"),
    }
}

async fn resize(disk: &ImageDisk, size: u64) -> Result<()> {
    // A raw disk on a device cannot be resized, not even to its own size.
    match size.cmp(&disk.size()) {
        Ordering::Equal => Ok(()),
        Ordering::Greater => Ok(disk.resize(size).await?),
        Ordering::Less => Ok(disk.shrink(size).await?),
    }
}
