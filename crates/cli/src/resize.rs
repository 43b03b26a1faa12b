//! `blockhouse resize`: grows images, and with `--shrink` makes them shorter.

use std::path::PathBuf;

use anyhow::{Result, anyhow, bail};
use blockhouse_core::{ByteRange, Durability, ErrorKind, Request, ToolProgress};
use blockhouse_disk::{ImageDisk, ImageFormat, open, take_space};
use blockhouse_engine::{EngineChoice, EventLoop};
use blockhouse_format::SpaceMode;

use crate::called_as;
use crate::create_options;
use crate::image_opts::{ImageOptsArgs, Named};
use crate::open_args::OpenArgs;
use crate::output;
use crate::progress::{Progress, ProgressArgs};
use blockhouse_config::size::{self, NewSize};

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
    let Named { path: image, format, .. } =
        image_opts.resolve_to_change(&arguments.image, *format)?;
    let options = arguments.open.read_write(&image, format)?;
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
    let size = arguments.size.of(old).map_err(|why| anyhow!("{}: {why}", disk.name()))?;
    // qemu-img takes any size for a raw disk; here a disk has whole sectors, so it is rounded up.
    let is_raw = disk.image().cluster_size().is_none();
    let size = if is_raw && called_as::is_qemu_img() { size.next_multiple_of(512) } else { size };
    if size < old && arguments.preallocation != Space::Later {
        if called_as::is_qemu_img() {
            bail!("Preallocation can only be used for growing images")
        } else {
            bail!(
                "{}: space is taken where a disk becomes longer; leave --preallocation out",
                disk.name()
            )
        }
    }
    if is_raw && arguments.preallocation == Space::Now(SpaceMode::Tables) {
        bail!(create_options::raw_has_no_tables());
    }
    event_loop.block_on(resize(&disk, size, arguments.shrink))?;
    if let Space::Now(mode) = arguments.preallocation
        && size > old
    {
        let taken = ToolProgress::default();
        let added = ByteRange::between(old, size);
        let work = || Ok(event_loop.block_on(take_space(&disk, added, mode, &taken))?);
        if let Err(error) = progress.beside(|| taken.get(), work) {
            return Err(event_loop.block_on(take_back(&disk, added, error)));
        }
    }
    event_loop.block_on(disk.close())?;
    if called_as::is_qemu_img() { output::print_unless_quiet("Image resized.") } else { Ok(()) }
}

/// Restores the size that the disk had before `added`, whose space could not be allocated. Returns
/// `why`, with a remark if the disk keeps its new size.
async fn take_back(disk: &ImageDisk, added: ByteRange, why: anyhow::Error) -> anyhow::Error {
    let durability = Durability::None;
    let undo = async {
        // The range is discarded first, because making the disk shorter may need space for
        // metadata.
        disk.submit(Request::Discard { range: added, durability }).await?;
        disk.flush().await?;
        disk.shrink(added.offset()).await
    };
    let undone = undo.await;
    match undone.and(disk.close().await) {
        Ok(()) => why,
        Err(error) => anyhow!("{why:#}; and the disk keeps its new size: {error}"),
    }
}

async fn resize(disk: &ImageDisk, size: u64, may_shrink: bool) -> Result<()> {
    // A raw disk on a device cannot be resized, not even to its own size.
    if size == disk.size() {
        return Ok(());
    }
    if size > disk.size() {
        return Ok(disk.resize(size).await?);
    }
    if may_shrink {
        return Ok(disk.shrink(size).await?);
    }
    bail!(
        "{}: has {} bytes and would become shorter: what lies beyond {size} would be lost; say --shrink if that is \
         meant",
        disk.name(),
        disk.size()
    );
}
