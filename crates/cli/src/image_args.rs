//! The arguments that are common to all commands that read one image.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use anyhow::Result;
use blockhouse_disk::ImageFormat;
use blockhouse_images::{AllowedPaths, CacheMode, ImageOptions, QemuName, is_address};
use blockhouse_storage::Location;

use crate::called_as;
use crate::image_opts::{ImageOptsArgs, Named};
use crate::open_args::{OpenArgs, of_metadata};
use crate::output;

/// The image that is read, and how the result is printed.
#[derive(clap::Args)]
pub struct ImageArgs {
    /// The image's format; left out, the file's name decides (docs/formats.md; otherwise raw).
    #[arg(long, short, value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    #[command(flatten)]
    output: OutputArgs,
    /// Do not lock the image: read it even while another program writes to it. The output may be
    /// inconsistent.
    #[arg(long, short = 'U')]
    pub force_share: bool,
    #[command(flatten)]
    image_opts: ImageOptsArgs,
    #[command(flatten)]
    pub open: OpenArgs,
    /// The image.
    image: PathBuf,
}

/// How a result is printed.
#[derive(clap::Args, Default)]
pub struct OutputArgs {
    /// Print JSON with the keys of qemu-img.
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

/// The image as it was typed.
impl fmt::Display for ImageArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.image.display().fmt(f)
    }
}

impl ImageArgs {
    /// Whether the result is printed as JSON.
    pub fn is_json(&self) -> bool {
        self.output.is_json()
    }

    /// The image's path, and the options to open it: locked against writers, unless sharing is
    /// requested; through the page cache (clusters may be smaller than the host's blocks), unless
    /// direct I/O is requested.
    ///
    /// # Errors
    /// As [`OpenArgs::read_image`] and [`ImageOptsArgs::resolve`].
    pub fn read_only(&self) -> Result<(PathBuf, ImageOptions)> {
        let named = self.image_opts.resolve_to_read(&self.image, self.format)?;
        let is_direct = named.is_direct;
        let (path, options) = self.open.read_named(named, self.force_share)?;
        let cache = if is_direct { CacheMode::None } else { options.cache };
        Ok((path, ImageOptions { cache, ..options }))
    }

    /// The export and the metadata context to map, if the options name a context.
    ///
    /// # Errors
    /// As [`ImageOptsArgs::resolve_to_map`].
    pub fn context(&self) -> Result<Option<(PathBuf, String)>> {
        let Named { path, context, .. } =
            self.image_opts.resolve_to_map(&self.image, self.format)?;
        Ok(context.map(|context| (path, context)))
    }

    /// QEMU's `json:` name of an encrypted image that was named by options: a path cannot carry the
    /// key.
    pub fn json_name(&self) -> Option<String> {
        let text = self.image.to_str().filter(|_| self.image_opts.is_used())?;
        let of = |key: &str| {
            let parts = text.split(',').filter_map(|part| part.split_once('='));
            parts.filter(|(known, _)| *known == key).map(|(_, value)| value.to_owned()).next_back()
        };
        let (key, driver) = (of("encrypt.key-secret")?, of("driver")?);
        let file = serde_json::json!({ "driver": "file", "filename": of("file.filename")? });
        let name = serde_json::json!({ "encrypt.key-secret": key, "driver": driver, "file": file });
        Some(format!("json:{name}"))
    }

    /// QEMU's driver of the image, if the options name it without a format above it: `file`.
    ///
    /// # Errors
    /// As [`ImageOptsArgs::resolve`].
    pub fn driver(&self) -> Result<Option<String>> {
        Ok(self.image_opts.resolve_to_read(&self.image, self.format)?.driver)
    }

    /// As [`read_only`](Self::read_only), for a command that only examines the image.
    ///
    /// # Errors
    /// As [`read_only`](Self::read_only).
    pub fn look_only(&self) -> Result<(PathBuf, ImageOptions)> {
        let (path, options) = self.read_only()?;
        Ok((path, of_metadata(options)))
    }

    /// The image, for a command that changes it.
    ///
    /// # Errors
    /// As [`ImageOptsArgs::resolve_to_change`].
    pub fn to_change(&self) -> Result<Named> {
        self.image_opts.resolve_to_change(&self.image, self.format)
    }
}

/// Whether later commands need an option to open the file `name`, which a new image names. If so,
/// prints a message, except under the name of a QEMU tool.
pub fn tell_if_not_free(image: &Path, name: &[u8], role: &str) -> bool {
    let plain = match str::from_utf8(name).ok().and_then(QemuName::of) {
        Some(Ok(named)) => named.path.into_os_string().into_vec(),
        _ => name.to_vec(),
    };
    let name = &*plain;
    let named = String::from_utf8_lossy(name);
    let why = if Location::is_remote(name) {
        "is on another server: commands open it only with --allow-remote".to_owned()
    } else if AllowedPaths::is_free_to_name(image, name) {
        return false;
    } else {
        let file = resolve_relative(image, name);
        let folder = file.parent().unwrap_or(Path::new("/")).display();
        format!(
            "is no regular file below the image's own folder, or hidden: commands open it only with \
             --allow-path '{folder}'"
        )
    };
    // Programs that call QEMU's tools would treat a message on standard error as an error.
    if called_as::tool().is_none() {
        output::tell(&format!("blockhouse: {}: its {role} '{named}' {why}", image.display()));
    }
    true
}

/// The path of a file that an image names, resolved from the image's folder; an address is
/// unchanged.
pub fn resolve_relative(image: &Path, name: &[u8]) -> PathBuf {
    if is_address(name) {
        return PathBuf::from(OsStr::from_bytes(name));
    }
    image.parent().unwrap_or(Path::new("")).join(OsStr::from_bytes(name))
}
