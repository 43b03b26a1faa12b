//! `blockhouse commit`: an image's data into its backing file.

use std::path::PathBuf;

use anyhow::Result;
use blockhouse_disk::{ImageFormat, commit_overlay, open_for_commit};
use blockhouse_engine::{EngineChoice, EventLoop};

use crate::open_args::OpenArgs;

/// Arguments of `commit`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The image's format; left out, the file's name decides (.qcow2, otherwise raw).
    #[arg(long, short, value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    #[command(flatten)]
    open: OpenArgs,
    /// The image. What it has goes into its backing file, and it is empty afterwards.
    image: PathBuf,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    let Arguments { format, open, image } = arguments;
    let options = open.read_write(format)?;
    EventLoop::new(EngineChoice::Auto)?.block_on(async {
        let (disk, base) = open_for_commit(&image, options).await?;
        commit_overlay(&disk, &base).await?;
        base.close().await?;
        Ok(disk.close().await?)
    })
}
