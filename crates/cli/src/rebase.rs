//! `blockhouse rebase`: another backing file, with the same content or (`-u`) only in the header.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use blockhouse_core::ErrorKind;
use blockhouse_disk::{
    Access, Backing, ImageDisk, ImageFormat, ImageOptions, check_raw_backing, is_foreign_address,
    open, open_without_backing, prepare_rebase, set_backing_file,
};
use blockhouse_engine::{EngineChoice, EventLoop};

use crate::create::wrong_usage;
use crate::image_args::{resolve_relative, tell_if_not_free};
use crate::open_args::OpenArgs;

/// Arguments of `rebase`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The image's format; left out, the file's name decides (.qcow2, otherwise raw).
    #[arg(long, short, value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// Change only the name in the image: for a backing file that was moved. Any difference between the
    /// old and the new one shows.
    #[arg(short = 'u', long = "unsafe")]
    only_name: bool,
    /// The new backing file, from the image's folder. Left out or empty: none, what was read from the old
    /// one is copied and the image will stand alone.
    #[arg(short, long, value_name = "FILE", conflicts_with = "no_backing")]
    backing: Option<OsString>,
    /// The image will stand alone. With -u, which copies nothing, all that was read from the old backing
    /// file is lost, so this (or an empty -b) has to be said.
    #[arg(long)]
    no_backing: bool,
    /// Its format: raw or qcow2.
    #[arg(short = 'F', long, value_name = "FORMAT")]
    #[arg(value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    backing_format: Option<ImageFormat>,
    #[command(flatten)]
    open: OpenArgs,
    /// The image.
    image: PathBuf,
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    let Arguments {
        format,
        only_name,
        backing,
        no_backing,
        backing_format,
        open: open_args,
        image,
    } = arguments;
    if only_name && backing.is_none() && !no_backing {
        wrong_usage(
            "rebase -u stores another name and copies nothing: say -b FILE -F FORMAT, or --no-backing if \
             all that is read from the old backing file is to be lost",
        );
    }
    let backing = backing.filter(|name| !name.is_empty());
    let new = match (backing, backing_format) {
        (Some(name), Some(format)) => Some((name, format)),
        (Some(name), None) => bail!(
            "the format of the backing file '{}' is not guessed; say -F raw or -F qcow2",
            name.display()
        ),
        (None, Some(_)) => bail!("a format of the backing file (-F) without the file (-b)"),
        (None, None) => None,
    };
    if let Some((name, _)) = &new
        && is_foreign_address(name.as_encoded_bytes())
    {
        let name = name.display();
        bail!(
            "'{name}' is no file but an address of QEMU; write a server's export as a URI (nbd://HOST/NAME); if it \
             is a file, write './{name}'"
        );
    }
    let options = open_args.read_write(format)?;
    EventLoop::new(EngineChoice::Auto)?.block_on(async {
        let disk = if only_name {
            warn_of_new(&image, new.as_ref()).await;
            open_without_backing(&image, options).await?
        } else {
            let disk = open(&image, options.clone()).await?;
            let behind = open_new(&image, new.as_ref(), options).await?;
            prepare_rebase(&disk, behind.as_ref()).await?;
            disk
        };
        let named = new.map(|(name, format)| Backing {
            name: name.into_vec(),
            format: Some(format.as_str().to_owned()),
        });
        set_backing_file(&disk, named.clone()).await?;
        disk.close().await?;
        if let Some(backing) = named {
            tell_if_not_free(&image, &backing.name, "backing file");
        }
        Ok(())
    })
}

async fn open_new(
    image: &Path,
    new: Option<&(OsString, ImageFormat)>,
    options: ImageOptions,
) -> Result<Option<ImageDisk>> {
    let Some((name, format)) = new else { return Ok(None) };
    let path = resolve_relative(image, name.as_encoded_bytes());
    let failed = || format!("{}: no backing file", image.display());
    if *format == ImageFormat::Raw {
        check_raw_backing(&path).await.with_context(failed)?;
    }
    let options = ImageOptions { format: Some(*format), access: Access::ReadOnly, ..options };
    let opened = open(&path, options).await;
    opened.map(Some).with_context(failed)
}

/// Says what looks wrong about a name that is stored all the same. The file may not be there yet.
async fn warn_of_new(image: &Path, new: Option<&(OsString, ImageFormat)>) {
    let Some((name, ImageFormat::Raw)) = new else { return };
    let path = resolve_relative(image, name.as_encoded_bytes());
    if let Err(error) = check_raw_backing(&path).await
        && error.kind() == ErrorKind::InvalidInput
    {
        tracing::warn!("{error}");
    }
}
