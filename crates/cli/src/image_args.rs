//! The arguments that all commands have in common that read one image, and how images are opened by tools.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use blockhouse_disk::{
    Access, CacheMode, DetectZeroes, Discard, ImageFormat, ImageOptions, Locking, StateUse,
};

use crate::state_args::StateArgs;

/// The image that is read, and how the result is printed.
#[derive(clap::Args)]
pub struct ImageArgs {
    /// The image's format; left out, the file's name decides (.qcow2, otherwise raw).
    #[arg(long, short, value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    pub format: Option<ImageFormat>,
    #[command(flatten)]
    output: OutputArgs,
    /// Do not lock the image: also look at it while another program writes to it. What is told may be
    /// neither what it was nor what it becomes.
    #[arg(long, short = 'U')]
    pub force_share: bool,
    #[command(flatten)]
    pub state: StateArgs,
    /// The image.
    pub image: PathBuf,
}

/// How a result is printed.
#[derive(clap::Args)]
pub struct OutputArgs {
    /// Print JSON with the keys that qemu-img has for the same.
    #[arg(long)]
    json: bool,
    /// The same as --json, as qemu-img spells it.
    #[arg(long, value_name = "FORMAT", hide = true)]
    output: Option<OutputFormat>,
}

/// The names of qemu-img.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum OutputFormat {
    Human,
    Json,
}

impl OutputArgs {
    /// Whether it is JSON.
    pub fn is_json(&self) -> bool {
        self.json || self.output == Some(OutputFormat::Json)
    }
}

impl ImageArgs {
    /// Whether the result is printed as JSON.
    pub fn is_json(&self) -> bool {
        self.output.is_json()
    }

    /// How it is opened: through the page cache, where clusters may be smaller than the host's
    /// blocks, and locked against writers until it has been looked at.
    ///
    /// # Errors
    /// As [`StateArgs::state_use`].
    pub fn options(&self) -> Result<ImageOptions> {
        let locking = if self.force_share { Locking::None } else { Locking::Held };
        Ok(ImageOptions { locking, ..read_only(self.format, self.state.state_use()?) })
    }
}

/// How an image is opened that a tool only reads: it warns where changes are missing that a server answered before it
/// died.
pub fn read_only(format: Option<ImageFormat>, state: StateUse) -> ImageOptions {
    ImageOptions {
        format,
        access: Access::ReadOnly,
        cache: CacheMode::Writeback,
        discard: Discard::Unmap,
        detect_zeroes: DetectZeroes::Off,
        locking: Locking::Held,
        state,
    }
}

/// How an image is opened that a tool changes: it begins with the changes that a server answered before it died.
pub fn read_write(format: Option<ImageFormat>, state: StateUse) -> ImageOptions {
    ImageOptions { access: Access::ReadWrite, ..read_only(format, state) }
}

/// The path of a file that an image names, relative to the image.
pub fn resolve_relative(image: &Path, name: &[u8]) -> PathBuf {
    image.parent().unwrap_or(Path::new("")).join(OsStr::from_bytes(name))
}
