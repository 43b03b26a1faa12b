//! `blockhouse resize`: longer images, and shorter ones where that is meant.

use std::path::PathBuf;

use anyhow::{Result, anyhow, bail};
use blockhouse_core::ErrorKind;
use blockhouse_disk::{ImageFormat, open};
use blockhouse_engine::{EngineChoice, EventLoop};

use crate::image_opts::{ImageOptsArgs, Named};
use crate::open_args::OpenArgs;
use blockhouse_daemon::size::{self, NewSize};

/// Arguments of `resize`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The image's format; left out, the file's name decides (.qcow2, otherwise raw).
    #[arg(long, short, value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// Make the disk shorter: what lies beyond the new size is lost.
    #[arg(long)]
    shrink: bool,
    #[command(flatten)]
    image_opts: ImageOptsArgs,
    #[command(flatten)]
    open: OpenArgs,
    /// The image.
    image: PathBuf,
    /// The new size of the disk: 512, 64K, 20G, 1T; or by how much it changes: +10G, -10G.
    #[arg(value_parser = size::parse_new, allow_hyphen_values = true)]
    size: NewSize,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    let Arguments { format, shrink, image_opts, open: open_args, image, size } = arguments;
    let Named { path: image, format, .. } = image_opts.resolve_to_change(&image, format)?;
    let options = open_args.read_write(format)?;
    EventLoop::new(EngineChoice::Auto)?.block_on(async {
        let disk = open(&image, options).await.map_err(|error| match error.kind() {
            ErrorKind::Locked => error.hint(
                "if that is 'blockhouse serve --control SOCKET', its guests are told of the new size by 'blockhouse ctl \
                 SOCKET resize NAME SIZE'; else stop that program first",
            ),
            _ => error,
        })?;
        let size = size.of(disk.size()).map_err(|why| anyhow!("{}: {why}", disk.name()))?;
        if size >= disk.size() {
            disk.resize(size).await?;
        } else if shrink {
            disk.shrink(size).await?;
        } else {
            bail!(
                "{}: has {} bytes and would become shorter: what lies beyond {size} would be lost; \
                 say --shrink if that is meant",
                disk.name(),
                disk.size()
            );
        }
        Ok(disk.close().await?)
    })
}
