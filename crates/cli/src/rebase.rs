//! `blockhouse rebase`: a new backing file, with the same content or (`-u`) only in the header.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use blockhouse_core::{ErrorKind, ToolProgress};
use blockhouse_disk::{
    Access, Backing, Compress, ImageDisk, ImageFormat, prepare_rebase, set_backing_file,
};
use blockhouse_engine::{EngineChoice, EventLoop};
use blockhouse_images::{
    ImageOptions, Purpose, QemuName, check_raw_backing, is_foreign_address, open, plain_backing,
};

use crate::called_as;
use crate::create::wrong_usage;
use crate::format_names;
use crate::image_args::{resolve_relative, tell_if_not_free};
use crate::image_opts::{ImageOptsArgs, Named, refuse_data_file};
use crate::open_args::{OpenArgs, SourceCacheArgs, TargetCacheArgs};
use crate::progress::{Progress, ProgressArgs};

/// Arguments of `rebase`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The image's format; left out, the file's name decides (docs/formats.md; otherwise raw).
    #[arg(long, short, value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// Change only the name in the image: for a backing file that was moved. If the new file's
    /// content differs, so does the disk's.
    #[arg(short = 'u', long = "unsafe")]
    only_name: bool,
    /// The new backing file, found from the image's folder. Left out or empty: none; the data of
    /// the old one is copied into the image.
    #[arg(short, long, value_name = "FILE", conflicts_with = "no_backing")]
    backing: Option<OsString>,
    /// The image gets no backing file. With -u, which copies nothing, the data of the old backing
    /// file is lost from the disk, so this option (or an empty -b) is required.
    #[arg(long)]
    no_backing: bool,
    /// The backing file's format: raw or qcow2.
    #[arg(short = 'F', long, value_name = "FORMAT", value_parser = parse_backing_format)]
    backing_format: Option<String>,
    #[command(flatten)]
    target_cache: TargetCacheArgs,
    /// As qemu-img has it: an image that is changed is locked all the same.
    #[arg(short = 'U', hide = true)]
    force_share: bool,
    /// Compress whole copied clusters, if that saves space.
    #[arg(short, long)]
    compress: bool,
    #[command(flatten)]
    source_cache: SourceCacheArgs,
    #[command(flatten)]
    progress: ProgressArgs,
    #[command(flatten)]
    image_opts: ImageOptsArgs,
    #[command(flatten)]
    open: OpenArgs,
    /// The image.
    image: PathBuf,
}

/// Checks a format's name. The name is stored as typed, because QEMU has several names for raw.
fn parse_backing_format(name: &str) -> Result<String, String> {
    format_names::parse(name).map(|_| name.to_owned())
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    let new = arguments.new_backing()?;
    let named = arguments.image_opts.resolve_to_change(&arguments.image, arguments.format)?;
    refuse_data_file(&named, &arguments.image)?;
    let Named { path, format, .. } = named;
    let arguments = Arguments { image: path, format, ..arguments };
    let shown = Progress::start(arguments.progress)?;
    let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
    let disk = if arguments.only_name {
        let opened = async {
            warn_of_new(&arguments.image, new.as_ref()).await;
            let options = arguments.open.read_write(&arguments.image, arguments.format)?;
            anyhow::Ok(open(&arguments.image, options.for_purpose(Purpose::Image)).await?)
        };
        // Nothing is copied, but qemu-img prints the first and the last line here, too.
        shown.beside(|| (0, 0), || event_loop.block_on(opened))?
    } else {
        arguments.with_same_content(&mut event_loop, &shown, new.as_ref())?
    };
    let named = new.map(|(name, format)| Backing { name: name.into_vec(), format: Some(format) });
    event_loop.block_on(async {
        set_backing_file(&disk, named.clone()).await?;
        anyhow::Ok(disk.close().await?)
    })?;
    if let Some(backing) = named {
        tell_if_not_free(&arguments.image, &backing.name, "backing file");
    }
    Ok(())
}

/// The name and the format of a backing file.
type NewBacking = (OsString, String);

impl Arguments {
    /// Refuses contradictory arguments, and returns the new backing file.
    fn new_backing(&self) -> Result<Option<NewBacking>> {
        if called_as::is_qemu_img() && self.backing.is_none() {
            if !self.only_name && !self.no_backing {
                bail!(
                    "Must specify backing file (-b) or use unsafe mode (-u)\nTry 'qemu-img rebase --help' for more info"
                );
            }
        } else if self.only_name && self.backing.is_none() && !self.no_backing {
            wrong_usage(
                "rebase -u stores another name and copies nothing: say -b FILE -F FORMAT, or --no-backing if \
                 the image shall lose what it reads from the old one",
            );
        }
        let backing = self.backing.clone().filter(|name| !name.is_empty());
        let new = match (backing, self.backing_format.clone()) {
            (Some(name), Some(format)) => (name, format),
            (Some(name), None) if called_as::is_qemu_img() => bail!(
                "Could not change the backing file to '{}': backing format must be specified",
                name.display()
            ),
            (Some(name), None) => bail!(
                "the format of the backing file '{}' is not guessed; say -F raw or -F qcow2",
                name.display()
            ),
            (None, Some(_)) if self.backing.is_none() => {
                bail!("a format of the backing file (-F) without the file (-b)")
            }
            (None, _) => return Ok(None),
        };
        let is_understood = new.0.to_str().and_then(QemuName::of).is_some();
        if is_foreign_address(new.0.as_encoded_bytes()) && !is_understood {
            let name = new.0.display();
            bail!(
                "'{name}' is no file but an address of QEMU; write a server's export as a URI (nbd://HOST/NAME); if \
                 it is a file, write './{name}'"
            );
        }
        Ok(Some(new))
    }

    /// Opens the image, and copies into it the data that the new backing file would change.
    fn with_same_content(
        &self,
        event_loop: &mut EventLoop,
        shown: &Progress,
        new: Option<&NewBacking>,
    ) -> Result<ImageDisk> {
        let options = self.open.read_write(&self.image, self.format)?;
        let (disk, behind) = event_loop.block_on(async {
            let disk = open(&self.image, self.target_cache.apply(options.clone())).await?;
            if self.compress && disk.image().compression().is_none() {
                if called_as::is_qemu_img() {
                    bail!("Compression not supported for this file format")
                } else {
                    bail!(
                        "{}: {} images have no compressed clusters; leave --compress out",
                        disk.name(),
                        disk.image().format_name()
                    )
                }
            }
            let behind = open_new(&self.image, new, self.source_cache.apply(options)).await?;
            anyhow::Ok((disk, behind))
        })?;
        let progress = ToolProgress::default();
        let compress = if self.compress { Compress::Clusters } else { Compress::Nothing };
        let work = || {
            Ok(event_loop.block_on(prepare_rebase(&disk, behind.as_ref(), compress, &progress))?)
        };
        shown.beside(|| progress.get(), work)?;
        Ok(disk)
    }
}

async fn open_new(
    image: &Path,
    new: Option<&NewBacking>,
    options: ImageOptions,
) -> Result<Option<ImageDisk>> {
    let Some((name, format)) = new else { return Ok(None) };
    let backing = Backing { name: name.as_encoded_bytes().to_vec(), format: Some(format.clone()) };
    let format: ImageFormat = format.parse().map_err(anyhow::Error::msg)?;
    let (plain, part) = plain_backing(&backing, &image.display().to_string())?;
    let path = resolve_relative(image, &plain.name);
    let failed = || format!("{}: cannot open its backing file", image.display());
    if format == ImageFormat::Raw && part.is_none() {
        check_raw_backing(&path).await.with_context(failed)?;
    }
    let options = ImageOptions { format: Some(format), access: Access::ReadOnly, ..options };
    let options = options.in_part(part);
    let opened = open(&path, options).await;
    opened.map(Some).with_context(failed)
}

/// Warns if the new name looks wrong; it is stored anyway. The file may not exist yet.
async fn warn_of_new(image: &Path, new: Option<&NewBacking>) {
    let Some((name, format)) = new else { return };
    if format.parse() != Ok(ImageFormat::Raw) {
        return;
    }
    let path = resolve_relative(image, name.as_encoded_bytes());
    if let Err(error) = check_raw_backing(&path).await
        && error.kind() == ErrorKind::InvalidInput
    {
        tracing::warn!("{error}");
    }
}
