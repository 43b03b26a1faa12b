//! `blockhouse create`: new images.
//!
//! Guarantees: an image that exists is left alone, a new image is durable when the command ends, and a
//! command that fails leaves none. Options that do not exist or contradict each other on the
//! command line are wrong usage; nothing is touched then.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use blockhouse_core::{ByteRange, Storage, SyncMode, ToolProgress};
use blockhouse_disk::{
    AllowedPaths, Backing, ImageDisk, ImageFormat, ImageOptions, Locking, StateUse,
    check_raw_backing, create as create_file, format_for_new, open_created, open_without_backing,
    remove_created,
};
use blockhouse_engine::{EngineChoice, EventLoop};
use blockhouse_format::{SpaceMode, preallocate, qcow2};

use crate::create_options::{self, Setting, Settings};
use crate::image_args::{resolve_relative, tell_if_not_free};
use crate::open_args::{AllowPathArgs, KeyArgs, read_only};
use blockhouse_daemon::size;

use crate::output;
use crate::progress::{Progress, ProgressArgs};

/// Arguments of `create`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The image's format; left out, the file's name decides (.qcow2, otherwise raw).
    #[arg(long, short, value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// Options as NAME=VALUE,...; a comma in a value is written twice. 'help' explains them. Of raw: preallocation. Of
    /// luks: key-secret, iter-time. Of
    /// qcow2: cluster_size, compat, refcount_bits, lazy_refcounts, extended_l2, compression_type,
    /// preallocation, backing_file, backing_fmt, data_file, data_file_raw, encrypt.format, encrypt.iter-time.
    #[arg(short, long = "options", value_name = "OPTION=VALUE,...")]
    #[arg(value_parser = create_options::parse)]
    options: Vec<create_options::Settings>,
    /// The image's backing file (qcow2), found from the image's folder: the same as -o backing_file=FILE.
    #[arg(long, short, value_name = "FILE", value_parser = create_options::parse_backing_file)]
    backing: Option<Setting>,
    /// The format of the backing file, which is never guessed: the same as -o backing_fmt=FORMAT.
    #[arg(long, short = 'F', value_name = "FORMAT", value_parser = create_options::parse_backing_format)]
    backing_format: Option<Setting>,
    /// Make the overlay without a look at its backing file, which need not be there yet. The size has to be given.
    #[arg(short = 'u', long = "unsafe", requires = "size")]
    only_name: bool,
    #[command(flatten)]
    progress: ProgressArgs,
    #[command(flatten)]
    allow: AllowPathArgs,
    #[command(flatten)]
    keys: KeyArgs,
    /// The new image: a path, or rbd:POOL/IMAGE. One that exists is left alone.
    image: Option<PathBuf>,
    /// The size of the disk: 512, 64K, 1.5G, 1T. Rounded up to a multiple of 512. Left out, that of the
    /// backing file.
    #[arg(value_parser = size::parse)]
    size: Option<u64>,
}

/// Runs the command.
pub fn run(mut arguments: Arguments) -> Result<()> {
    let Some(mut settings) = Settings::join(std::mem::take(&mut arguments.options)) else {
        return output::print(create_options::HELP);
    };
    settings.extend(arguments.backing.take());
    settings.extend(arguments.backing_format.take());
    let Some(image) = arguments.image.take() else { wrong_usage("which image to make is missing") };
    let size = arguments.size.map(|size| whole_sectors(&image, size));
    let (shown, made) = (Progress::start(arguments.progress)?, ToolProgress::default());
    let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
    match arguments.format.unwrap_or_else(|| format_of_new(&image)) {
        ImageFormat::Raw => {
            let mode = create_options::raw(settings).unwrap_or_else(|why| wrong_usage(&why));
            let Some(size) = size else { wrong_usage(SIZE_IS_MISSING) };
            let work = || event_loop.block_on(create_raw(&image, size, mode, &made));
            shown.beside(|| made.get(), work)
        }
        ImageFormat::Qcow2 => {
            let options = arguments.qcow2_options(size, settings)?;
            let work = || event_loop.block_on(arguments.create_qcow2(&image, options, &made));
            shown.beside(|| made.get(), work)
        }
        ImageFormat::Luks => {
            let Some(size) = size else { wrong_usage(SIZE_IS_MISSING) };
            let header = luks_header(&arguments.keys, &settings)?;
            event_loop.block_on(create_luks(&image, size, &header))
        }
        format @ ImageFormat::Foreign(_) => wrong_usage(&format.not_made()),
    }
}

/// What is said of a disk without a size.
const SIZE_IS_MISSING: &str = "the size is missing: 512, 64K, 20G";

impl Arguments {
    /// What a qcow2 image is to be like; a size of 0 is that of the backing file.
    fn qcow2_options(
        &self,
        size: Option<u64>,
        settings: Vec<Setting>,
    ) -> Result<qcow2::CreateOptions> {
        let key_time = key_time(&settings);
        let secret = create_options::key_secret(&settings).map(str::to_owned);
        let options = create_options::qcow2(size.unwrap_or(0), settings);
        let mut options = options.unwrap_or_else(|why| wrong_usage(&why));
        if let Some(time) = key_time {
            options.encryption = Some(self.keys.create_header(secret.as_deref(), time)?);
        }
        if size.is_none() && options.backing.is_none() {
            wrong_usage(&format!("{SIZE_IS_MISSING}, or a backing file that has one"));
        }
        Ok(options)
    }

    async fn create_qcow2(
        &self,
        image: &Path,
        mut options: qcow2::CreateOptions,
        progress: &ToolProgress,
    ) -> Result<()> {
        if self.only_name {
            return make_qcow2(image, &options, progress).await;
        }
        let allowed = AllowedPaths::new(&self.allow.allow_path)?;
        if self.size.is_none()
            && let Some(backing) = &options.backing
        {
            options.size = open_backing(image, backing, allowed.clone()).await?.size();
        }
        create_qcow2(image, &options, allowed, progress).await
    }
}

/// Disks consist of whole sectors: a size with a part of one is rounded up, and that is said.
pub fn whole_sectors(image: &Path, size: u64) -> u64 {
    let rounded = size.next_multiple_of(512);
    if rounded != size {
        let image = image.display();
        output::tell(&format!("blockhouse: {image}: rounded up to whole sectors: {rounded} bytes"));
    }
    rounded
}

/// The format that the name of a new file stands for; wrong usage if it is none that can be made.
pub fn format_of_new(image: &Path) -> ImageFormat {
    format_for_new(image).unwrap_or_else(|why| wrong_usage(&why))
}

/// How long it is to take to derive the key of an image that is to be encrypted. Wrong usage ends the program.
pub fn key_time(settings: &[Setting]) -> Option<Duration> {
    create_options::key_time(settings).unwrap_or_else(|why| wrong_usage(&why))
}

/// Ends the program as for any other wrong usage.
pub fn wrong_usage(why: &str) -> ! {
    const WRONG_USAGE: i32 = 2;
    output::tell(&format!("error: {why}\n\nFor more information, try '--help'."));
    std::process::exit(WRONG_USAGE)
}

/// The header of a new LUKS container. Wrong usage ends the program.
///
/// # Errors
/// As [`KeyArgs::create_header`].
pub fn luks_header(keys: &KeyArgs, settings: &[Setting]) -> Result<Vec<u8>> {
    let time = create_options::luks(settings).unwrap_or_else(|why| wrong_usage(&why));
    keys.create_header(create_options::key_secret(settings), time)
}

/// Makes a new LUKS container with a disk of `size` bytes, which reads as anything.
///
/// # Errors
/// One that names the file; no file is left then.
pub async fn create_luks(image: &Path, size: u64, header: &[u8]) -> Result<()> {
    create_file(image, size.saturating_add(header.len() as u64), ImageFormat::Raw).await?;
    let finish = async {
        let storage = open_created(image).await?;
        blockhouse_format::create_luks(&storage, header).await?;
        storage.close().await
    };
    let finished = finish.await;
    if finished.is_err() {
        remove_created(image).await;
    }
    Ok(finished?)
}

async fn create_raw(
    image: &Path,
    size: u64,
    mode: Option<SpaceMode>,
    progress: &ToolProgress,
) -> Result<()> {
    create_file(image, size, ImageFormat::Raw).await?;
    let Some(mode) = mode else { return Ok(()) };
    let finish = async {
        let storage = open_created(image).await?;
        progress.begin(size);
        preallocate(&storage, ByteRange::between(0, size), mode, progress).await?;
        storage.flush(SyncMode::Full).await?;
        storage.close().await
    };
    let finished = finish.await;
    if finished.is_err() {
        remove_created(image).await;
    }
    Ok(finished?)
}

/// Makes a new qcow2 image, and says so if it names what commands open only when they are told to. `progress` tells of
/// tables and of space that is taken.
///
/// # Errors
/// One that names the file; no file is left then.
pub async fn create_qcow2(
    image: &Path,
    options: &qcow2::CreateOptions,
    allowed: AllowedPaths,
    progress: &ToolProgress,
) -> Result<()> {
    if let Some(backing) = &options.backing {
        open_backing(image, backing, allowed).await?;
    }
    make_qcow2(image, options, progress).await
}

/// As [`create_qcow2`], without a look at the backing file.
async fn make_qcow2(
    image: &Path,
    options: &qcow2::CreateOptions,
    progress: &ToolProgress,
) -> Result<()> {
    // The name is durable from here on. Until its header is written, the file is empty or starts
    // with zeros, which no program takes for an image.
    create_file(image, 0, ImageFormat::Raw).await?;
    let data_path = options.data_file.as_ref().map(|file| resolve_relative(image, &file.name));
    let outcome = fill_qcow2(image, data_path.as_deref(), options, progress).await;
    if outcome.is_err() {
        remove_created(image).await;
    }
    outcome?;
    if let Some(backing) = &options.backing {
        tell_if_not_free(image, &backing.name, "backing file");
    }
    if let Some(data_file) = &options.data_file {
        tell_if_not_free(image, &data_file.name, "data file");
    }
    Ok(())
}

/// Makes the empty `image` a qcow2 image with a new data file. A data file that could not be
/// finished is removed.
async fn fill_qcow2(
    image: &Path,
    data: Option<&Path>,
    options: &qcow2::CreateOptions,
    progress: &ToolProgress,
) -> blockhouse_core::Result<()> {
    let storage = open_created(image).await?;
    let Some(path) = data else {
        qcow2::create_with(&storage, None, options, progress).await?;
        return storage.close().await;
    };
    create_file(path, 0, ImageFormat::Raw).await?;
    let finish = async {
        let data = open_created(path).await?;
        qcow2::create_with(&storage, Some(&data), options, progress).await?;
        storage.close().await
    };
    let finished = finish.await;
    if finished.is_err() {
        remove_created(path).await;
    }
    finished
}

/// Opens the backing file of a new image: one that cannot be opened as what it is said to be would be of no use.
async fn open_backing(
    image: &Path,
    backing: &Backing,
    allowed_paths: AllowedPaths,
) -> Result<ImageDisk> {
    let path = resolve_relative(image, &backing.name);
    let format = backing.format.as_deref().map(str::parse).transpose();
    let format = format.map_err(anyhow::Error::msg)?;
    // What is missing there is told when the new image is used.
    let options =
        ImageOptions { locking: Locking::None, allowed_paths, ..read_only(format, StateUse::Off) };
    let failed = || format!("{}: no backing file", image.display());
    if options.format == Some(ImageFormat::Raw) {
        check_raw_backing(&path).await.with_context(failed)?;
    }
    open_without_backing(&path, options).await.with_context(failed)
}
