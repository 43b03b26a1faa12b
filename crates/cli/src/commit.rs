//! `blockhouse commit`: an image's data into its backing file.

use std::path::PathBuf;

use anyhow::Result;
use blockhouse_disk::{ImageFormat, commit_overlay, open_for_commit};
use blockhouse_engine::{EngineChoice, EventLoop};

use crate::image_args::read_write;
use crate::state_args::StateArgs;

/// Arguments of `commit`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The image's format; left out, the file's name decides (.qcow2, otherwise raw).
    #[arg(long, short, value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    #[command(flatten)]
    state: StateArgs,
    /// The image. What it has goes into its backing file, and it is empty afterwards.
    image: PathBuf,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    let Arguments { format, state, image } = arguments;
    let options = read_write(format, state.state_use()?);
    EventLoop::new(EngineChoice::Auto)?.block_on(async {
        let (disk, base) = open_for_commit(&image, options).await?;
        commit_overlay(&disk, &base).await?;
        base.close().await?;
        Ok(disk.close().await?)
    })
}
