//! `blockhouse vmstate`: copies a machine's state from a pipe to a snapshot in an image, or back.

mod progress;
mod stream_end;

use std::path::PathBuf;

use crate::open_args::OpenArgs;
use crate::pipe::{self, Reader};
use anyhow::{Context, Result, bail};
use blockhouse_disk::{Access, Compression, ImageFormat, VmStateReader, VmStateWriter};
use blockhouse_engine::{EngineChoice, EventLoop};
use blockhouse_images::{CacheMode, ImageOptions, open};
use clap::builder::ValueParser;

use progress::Progress;
use stream_end::StreamEnd;

/// Bytes of the state that are read at a time.
const PIECE: usize = 1 << 20;

/// Arguments of `vmstate`.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Store the VM state from standard input, in a new snapshot of the disk. The machine must be
    /// paused: migrate "exec:blockhouse vmstate save IMAGE NAME".
    Save {
        #[command(flatten)]
        image: Image,
        /// Compress the state: zlib or zstd, whichever the image uses.
        #[arg(long, value_name = "KIND", value_parser = ValueParser::new(parse_compression))]
        compress: Option<Compression>,
    },
    /// Write the VM state of a snapshot to standard output: -incoming "exec:blockhouse vmstate load
    /// IMAGE NAME".
    Load {
        #[command(flatten)]
        image: Image,
    },
}

/// The image and its snapshot.
#[derive(clap::Args)]
struct Image {
    /// The image's format; left out, the file's name decides (docs/formats.md; otherwise raw).
    #[arg(long, short, value_parser = ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// The host's cache: none, writeback, writethrough, directsync or unsafe.
    #[arg(long, default_value = "none", value_parser = ValueParser::new(str::parse::<CacheMode>))]
    cache: CacheMode,
    /// How file operations are done: auto, io_uring, linux-aio or threads.
    #[arg(long, default_value = "auto", value_parser = ValueParser::new(str::parse::<EngineChoice>))]
    engine: EngineChoice,
    #[command(flatten)]
    open: OpenArgs,
    /// The image, in qcow2. No other program may be writing to it.
    image: PathBuf,
    /// The snapshot's name.
    name: String,
}

impl Image {
    fn options(&self, access: Access) -> Result<ImageOptions> {
        let options = self.open.read_only(self.format)?;
        Ok(ImageOptions { access, cache: self.cache, ..options })
    }
}

fn parse_compression(name: &str) -> Result<Compression, String> {
    match name {
        "zlib" => Ok(Compression::Zlib),
        "zstd" => Ok(Compression::Zstd),
        _ => Err("use zlib or zstd".into()),
    }
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    match arguments.action {
        Action::Save { image, compress } => {
            EventLoop::new(image.engine)?.block_on(save(&image, compress))
        }
        Action::Load { image } => EventLoop::new(image.engine)?.block_on(load(&image)),
    }
}

async fn save(image: &Image, compression: Option<Compression>) -> Result<()> {
    let disk = open(&image.image, image.options(Access::ReadWrite)?).await?;
    let existing = disk.snapshots().list().await?;
    if existing.iter().any(|one| one.name == image.name) {
        bail!(
            "{}: has a snapshot '{}' already; choose another name, or delete that snapshot first",
            disk.name(),
            image.name
        );
    }
    let mut writer = VmStateWriter::new(&disk, compression)?;
    let mut chunks = pipe::read_standard_input(PIECE)?;
    let mut progress = Progress::new(None);
    let mut end = StreamEnd::default();
    let stored = async {
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.context("cannot read the state from standard input")?;
            writer.write(writer.size(), &chunk).await?;
            progress.add(chunk.len());
            end.look_at(&chunk);
            chunks.recycle(chunk);
        }
        end.check().map_err(|why| {
            anyhow::anyhow!("{}: no snapshot is taken: {why}", image.image.display())
        })?;
        anyhow::Ok(writer.finish(&image.name).await?)
    }
    .await;
    progress.end();
    if stored.is_err() {
        writer.abandon().await;
    } else {
        drop(writer);
    }
    // The close also stores the refcounts of freed clusters. The first error is reported.
    let closed = disk.close().await;
    stored?;
    Ok(closed?)
}

async fn load(image: &Image) -> Result<()> {
    let options = image.options(Access::ReadOnly)?;
    let disk = open(&image.image, options.at_snapshot(Some(&image.name))).await?;
    let mut reader = VmStateReader::new(&disk)?;
    let mut output = pipe::write_standard_output("the state")?;
    let mut progress = Progress::new(Some(reader.size()));
    while let Some(buffer) = reader.next().await? {
        progress.add(buffer.len());
        if output.write(buffer).await == Reader::Gone {
            break;
        }
        if let Some(written) = output.written() {
            reader.recycle(written);
        }
    }
    let ended = output.finish();
    progress.end();
    ended
}
