//! `blockhouse resize`: longer images.

use std::path::PathBuf;

use anyhow::{Result, bail};
use blockhouse_disk::{
    Access, CacheMode, DetectZeroes, Discard, ImageFormat, ImageOptions, Locking, open,
};
use blockhouse_engine::{EngineChoice, EventLoop};

use crate::size;

/// Arguments of `resize`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The image's format; left out, the file's name decides (.qcow2, otherwise raw).
    #[arg(long, short, value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// The image.
    image: PathBuf,
    /// The new size of the disk: 512, 64K, 20G, 1T.
    #[arg(value_parser = size::parse)]
    size: u64,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    let Arguments { format, image, size } = arguments;
    let options = ImageOptions {
        format,
        access: Access::ReadWrite,
        cache: CacheMode::Writeback,
        discard: Discard::Unmap,
        detect_zeroes: DetectZeroes::Off,
        locking: Locking::Held,
    };
    EventLoop::new(EngineChoice::Auto)?.block_on(async {
        let disk = open(&image, options).await?;
        if size < disk.size() {
            bail!(
                "{}: has {} bytes and cannot be made shorter: the guest's data would be lost; \
                 copy what is needed into a new image",
                disk.name(),
                disk.size()
            );
        }
        Ok(disk.resize(size).await?)
    })
}
