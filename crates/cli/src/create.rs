//! `blockhouse create`: new images.
//!
//! Guarantees:
//! - An existing file is not changed, unless an interrupted creation left it. Under the name
//!   qemu-img any file is overwritten.
//! - A new image is durable when the command ends. A command that fails leaves no file with the
//!   image's name.
//! - A qcow2 image overwrites a block device only after checks that nothing uses the device and
//!   that the metadata fits. The device's old bytes are not visible in the new disk. A raw disk on
//!   a block device is the device itself, and keeps its content.
//! - Unknown or contradictory options fail before anything is created.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use blockhouse_core::{ByteRange, Error, ErrorKind, Storage, SyncMode, ToolProgress};
use blockhouse_disk::{Backing, DataFile, ImageDisk, ImageFormat};
use blockhouse_engine::{EngineChoice, EventLoop, NewFile, is_same_file};
use blockhouse_format::qcow2::Preallocation;
use blockhouse_format::{SpaceMode, preallocate, probe, qcow2};
use blockhouse_images::{
    AllowedPaths, IfExists, ImageOptions, Locking, Purpose, QemuName, StateUse, behind_links,
    check_new_apart, check_raw_backing, create_as, exists, format_for_new, is_address, is_device,
    note_data_file, open, open_created, part_of, plain_backing, remove_created, rename_finished,
};
use blockhouse_storage::ImageStorage;

use crate::called_as;
use crate::create_options::{self, ChosenEncryption, Settings};
use crate::create_setting::{self, Setting};
use crate::foreign_create;
use crate::foreign_options;
use crate::formatting;
use crate::image_args::{resolve_relative, tell_if_not_free};
use crate::open_args::{AllowPathArgs, KeyArgs, read_only};
use blockhouse_config::size;

use crate::logging;
use crate::output;
use crate::progress::{Progress, ProgressArgs};
use crate::qemu_refusals;
use crate::vmdk_files::VmdkFiles;

/// Arguments of `create`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The image's format; left out, the file's name decides (.qcow2, .vmdk and so on, otherwise
    /// raw).
    #[arg(long, short, value_parser = clap::builder::ValueParser::new(str::parse::<ImageFormat>))]
    format: Option<ImageFormat>,
    /// Options as NAME=VALUE,...; a comma in a value is written twice. '-o help' lists them.
    #[arg(short, long = "options", value_name = "OPTION=VALUE,...")]
    #[arg(value_parser = create_options::parse)]
    options: Vec<create_options::Settings>,
    /// The image's backing file (qcow2), relative to the image's folder: as -o backing_file=FILE.
    #[arg(long, short, value_name = "FILE", value_parser = create_options::parse_backing_file)]
    backing: Option<Setting>,
    /// The format of the backing file, which is never guessed: the same as -o backing_fmt=FORMAT.
    #[arg(long, short = 'F', value_name = "FORMAT", value_parser = create_options::parse_backing_format)]
    backing_format: Option<Setting>,
    /// Do not open the backing file, which need not exist yet. The size must be given.
    #[arg(short = 'u', long = "unsafe")]
    only_name: bool,
    #[command(flatten)]
    progress: ProgressArgs,
    #[command(flatten)]
    allow: AllowPathArgs,
    #[command(flatten)]
    keys: KeyArgs,
    /// The new image: a path, or rbd:POOL/IMAGE. An existing file is not changed. On a block device
    /// a qcow2 image replaces all data, and a raw disk keeps it.
    image: Option<PathBuf>,
    /// The size of the disk: 512, 64K, 1.5G, 1T. It is rounded up to a multiple of 512. Left out:
    /// the backing file's size.
    #[arg(value_parser = size::parse)]
    size: Option<u64>,
}

/// Runs the command.
pub fn run(mut arguments: Arguments) -> Result<()> {
    let Some(mut settings) = Settings::join(std::mem::take(&mut arguments.options)) else {
        return output::print(&create_options::help(arguments.format, arguments.image.is_some()));
    };
    settings.extend(arguments.backing.take());
    settings.extend(arguments.backing_format.take());
    let Some(image) = arguments.image.take() else {
        wrong_usage("no image is named: blockhouse create IMAGE SIZE")
    };
    let size = match (arguments.size, create_options::size_of(&settings)) {
        (Some(_), Some(_)) => wrong_usage("the image size must be specified only once"),
        (said, option) => said.or(option),
    };
    if arguments.only_name && size.is_none() {
        size_is_missing(&image, "");
    }
    let said = size.unwrap_or(0);
    let size = size.map(|size| whole_sectors(&image, size));
    let named = image.clone();
    let image = match image.to_str().and_then(QemuName::of) {
        Some(named) => named.map_err(|why| anyhow!("{}: {why}", image.display()))?.path,
        None => image,
    };
    // Other files of the image are relative to the folder of the name as given, as when the image
    // is opened. The file itself is made where a link leads.
    let given = image;
    let image = behind_links(&given);
    arguments.size = size;
    refuse_own_name(&named, &settings)?;
    if let Some(words) = missing_backing(&named, &given, &settings)
        && !arguments.only_name
    {
        bail!("{words}");
    }
    if let Some(words) = missing_format(&named, &settings) {
        bail!("{words}");
    }
    if let Some(refusal) = create_options::refusal_of(&settings) {
        let format = arguments.format.unwrap_or(ImageFormat::Raw);
        if !refusal.is_first {
            formatting::print(&named, format, said, &settings)?;
        }
        bail!("{}: {}", named.display(), refusal.words_of(format));
    }
    let file = new_file(&image, &settings);
    let (shown, made) = (Progress::start(arguments.progress)?, ToolProgress::default());
    let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
    match arguments.format.unwrap_or_else(|| format_of_new(&image)) {
        format @ ImageFormat::Raw => {
            let mode = create_options::raw(&settings);
            let mode = mode.unwrap_or_else(|why| wrong_usage_of(&named, &why));
            let Some(size) = size else { size_is_missing(&named, "") };
            formatting::print(&named, format, said, &settings)?;
            if is_device(&image) {
                return check_device(&image, size, mode);
            }
            let work = || event_loop.block_on(create_whole_raw(&image, size, mode, file, &made));
            shown.beside(|| made.get(), work)
        }
        ImageFormat::Qcow2 => {
            let options = arguments.qcow2_options(&named, size, settings.clone())?;
            let work = || {
                let said = (&*named, &settings[..], said);
                let made = arguments.create_qcow2(&given, options, said, file, &made);
                event_loop.block_on(made)
            };
            shown.beside(|| made.get(), work)
        }
        ImageFormat::Luks => {
            let Some(size) = size else { size_is_missing(&named, "") };
            let header = luks_header(&arguments.keys, &settings)?;
            formatting::print(&named, ImageFormat::Luks, said, &settings)?;
            let space = create_options::space_of(&settings);
            event_loop.block_on(create_luks(&image, size, (&header, space), file))
        }
        format @ ImageFormat::Foreign(kind) => {
            let options = foreign_options::of(kind, size.unwrap_or(0), &settings);
            let mut options = options.unwrap_or_else(|why| wrong_usage_of(&named, &why));
            if let Some(backing) = foreign_options::parent_of(&settings) {
                let allowed = arguments.allow.allowed_paths()?;
                let parent = event_loop.block_on(open_backing(&given, &backing, allowed))?;
                options.size = size.unwrap_or_else(|| parent.size());
                options.parent = Some(foreign_create::parent(&parent, &backing)?);
            } else if size.is_none() {
                size_is_missing(&named, "");
            }
            let said = if size.is_none() { options.size } else { said };
            formatting::print(&named, format, said, &settings)?;
            match VmdkFiles::of(&image, kind, &options)? {
                Some(files) => event_loop.block_on(files.create(file.is_in_place)),
                None => event_loop.block_on(foreign_create::create(&image, kind, options, file)),
            }
        }
    }
}

/// As [`wrong_usage`]; under the name qemu-img the error names the image.
fn wrong_usage_of(image: &Path, why: &str) -> ! {
    if called_as::is_qemu_img() {
        wrong_usage(&format!("{}: {why}", image.display()))
    } else {
        wrong_usage(why)
    }
}

/// Refuses an image as its own backing file. Needed only under the name qemu-img, which overwrites
/// an existing image.
fn refuse_own_name(image: &Path, settings: &[Setting]) -> Result<()> {
    let is_own = |setting: &Setting| matches!(setting, Setting::BackingFile(name) if Path::new(name) == image);
    if called_as::is_qemu_img() && settings.iter().any(is_own) {
        bail!(
            "{}: Error: Trying to create an image with the same filename as the backing file",
            image.display()
        );
    }
    Ok(())
}

/// Ends the program with an error for a missing size. `other` names another way to give it.
fn size_is_missing(image: &Path, other: &str) -> ! {
    if called_as::is_qemu_img() {
        wrong_usage(&format!("{}: Image creation needs a size parameter", image.display()))
    } else {
        wrong_usage(&format!("the size is missing: add one (512, 64K, 20G){other}"))
    }
}

impl Arguments {
    /// The options of a qcow2 image. A size of 0 stands for the size of the backing file.
    fn qcow2_options(
        &self,
        named: &Path,
        size: Option<u64>,
        settings: Vec<Setting>,
    ) -> Result<qcow2::CreateOptions> {
        let encryption = chosen_encryption(&settings);
        let secret = create_options::key_secret(&settings).map(str::to_owned);
        let options = create_options::qcow2(size.unwrap_or(0), settings);
        let mut options = options.unwrap_or_else(|why| wrong_usage_of(named, &why));
        options.encryption = self.keys.new_encryption(encryption, secret.as_deref())?;
        if size.is_none() && options.backing.is_none() {
            size_is_missing(named, ", or a backing file that has one");
        }
        Ok(options)
    }

    async fn create_qcow2(
        &self,
        image: &Path,
        mut options: qcow2::CreateOptions,
        (named, settings, said): (&Path, &[Setting], u64),
        file: NewFile,
        progress: &ToolProgress,
    ) -> Result<()> {
        if self.only_name {
            formatting::print(named, ImageFormat::Qcow2, said, settings)?;
            return make_qcow2(image, &options, file, progress).await;
        }
        let allowed = self.allow.allowed_paths()?;
        if self.size.is_none()
            && let Some(backing) = &options.backing
        {
            options.size = open_backing(image, backing, allowed.clone()).await?.size();
        }
        let shown = if self.size.is_none() { options.size } else { said };
        formatting::print(named, ImageFormat::Qcow2, shown, settings)?;
        create_qcow2(image, &options, allowed, file, progress).await
    }
}

/// The error for a missing backing file, under the name qemu-img only; otherwise `None`.
fn missing_backing(named: &Path, image: &Path, settings: &[Setting]) -> Option<String> {
    let name = create_setting::backing_file(settings)?;
    if !called_as::is_qemu_img() || is_address(name.as_bytes()) || QemuName::of(name).is_some() {
        return None;
    }
    let path = resolve_relative(image, name.as_bytes());
    (!path.exists()).then(|| {
        let (image, path) = (named.display(), path.display());
        format!(
            "{image}: Could not open '{path}': No such file or directory\nCould not open backing image."
        )
    })
}

/// The error for a backing file without its format, under the name qemu-img only; otherwise `None`.
fn missing_format(image: &Path, settings: &[Setting]) -> Option<String> {
    let has_format = settings.iter().any(|one| matches!(one, Setting::BackingFormat(_)));
    let name = create_setting::backing_file(settings)?;
    if !called_as::is_qemu_img() || has_format || is_address(name.as_bytes()) {
        return None;
    }
    let path = resolve_relative(image, name.as_bytes());
    let mut first = Vec::new();
    let file = std::fs::File::open(path).ok()?;
    std::io::Read::read_to_end(&mut std::io::Read::take(file, probe::LENGTH as u64), &mut first)
        .ok()?;
    let found = probe::name_of(&first).unwrap_or("raw");
    Some(format!(
        "{}: Backing file specified without backing format\nDetected format of {found}.",
        image.display()
    ))
}

/// The options of a new image's file; under the name qemu-img a file that exists is overwritten.
fn new_file(image: &Path, settings: &[Setting]) -> NewFile {
    let is_in_place = called_as::is_qemu_img() && image.is_file();
    NewFile { is_in_place, ..create_options::new_file(settings) }
}

/// Checks that a device can be a raw disk of this size. Nothing is written to it.
fn check_device(image: &Path, size: u64, mode: Option<SpaceMode>) -> Result<()> {
    let name = image.display();
    let mut device = std::fs::File::open(image).with_context(|| format!("{name}: cannot open"))?;
    let has = std::io::Seek::seek(&mut device, std::io::SeekFrom::End(0));
    let has = has.with_context(|| format!("{name}: cannot find its size"))?;
    if called_as::is_qemu_img() && has < size {
        bail!("{name}: Cannot grow device files");
    }
    if mode.is_some() {
        bail!(
            "{name}: Unsupported preallocation mode: the space of a block device is allocated; leave preallocation out"
        );
    }
    if has < size {
        bail!("{name}: the device has {has} bytes, and the disk needs {size}; use a larger device");
    }
    if !called_as::is_qemu_img() {
        output::tell(&format!("blockhouse: {name}: is a device, and keeps what is on it"));
    }
    Ok(())
}

/// Rounds a size up to whole sectors, of which disks consist. Prints a message if that changes the
/// size, except under the name qemu-img.
pub fn whole_sectors(image: &Path, size: u64) -> u64 {
    let rounded = size.next_multiple_of(512);
    if rounded != size && !called_as::is_qemu_img() {
        let image = image.display();
        output::tell(&format!(
            "blockhouse: {image}: the size is rounded up to a multiple of 512: {rounded} bytes"
        ));
    }
    rounded
}

/// The format that the name of a new file implies; wrong usage if images of that format cannot be
/// created.
pub fn format_of_new(image: &Path) -> ImageFormat {
    if let made @ ImageFormat::Foreign(_) = ImageFormat::by_name(image) {
        return made;
    }
    format_for_new(image).unwrap_or_else(|why| wrong_usage(&why))
}

/// The encryption of the new image. Wrong usage ends the program.
pub fn chosen_encryption(settings: &[Setting]) -> Option<ChosenEncryption> {
    create_options::encryption(settings).unwrap_or_else(|why| wrong_usage(&why))
}

/// Reports wrong usage and ends the program.
pub fn wrong_usage(why: &str) -> ! {
    output::tell(&match qemu_refusals::of_usage(why) {
        Some(words) => format!("{}: {words}", called_as::own_name()),
        None => format!("error: {why}\n\nFor more information, try '--help'."),
    });
    // In a server, a separate thread writes the log lines, and the exit would drop the last ones.
    logging::flush();
    std::process::exit(called_as::wrong_usage_status(None))
}

/// The header of a new LUKS container. Wrong usage ends the program.
///
/// # Errors
/// As [`KeyArgs::create_header`].
pub fn luks_header(keys: &KeyArgs, settings: &[Setting]) -> Result<Vec<u8>> {
    let time = create_options::luks(settings).unwrap_or_else(|why| wrong_usage(&why));
    keys.create_header(create_options::key_secret(settings), time)
}

/// Removes a new file if the work on it has failed. Returns the outcome of the work.
async fn or_removed(file: &Path, made: blockhouse_core::Result<()>) -> blockhouse_core::Result<()> {
    if made.is_err() {
        remove_created(file).await;
    }
    made
}

/// Makes a new LUKS container with a disk of `size` bytes, whose content is undefined; `space` is
/// allocated at once.
///
/// # Errors
/// The error names the file. After an error no file is left.
pub async fn create_luks(
    image: &Path,
    size: u64,
    (header, space): (&[u8], Option<SpaceMode>),
    file: NewFile,
) -> Result<()> {
    let length = size.saturating_add(header.len() as u64);
    create_raw(image, length, space, file, &ToolProgress::default()).await?;
    let finish = async {
        let storage = open_created(image).await?;
        blockhouse_format::create_luks(&storage, header).await?;
        storage.close().await
    };
    Ok(or_removed(image, finish.await).await?)
}

/// As [`create_raw`], under a temporary name until the space is allocated. Reason: after a crash, a
/// file with the image's name is complete. If the rename fails, the temporary file remains.
async fn create_whole_raw(
    image: &Path,
    size: u64,
    mode: Option<SpaceMode>,
    file: NewFile,
    progress: &ToolProgress,
) -> Result<()> {
    if mode.is_none() || file.is_in_place || exists(image).await? {
        return create_raw(image, size, mode, file, progress).await;
    }
    let part = part_of(image);
    // A file that an earlier command left is overwritten.
    let file = NewFile { is_in_place: part.is_file(), ..file };
    create_raw(&part, size, mode, file, progress).await?;
    Ok(rename_finished(&part, image, IfExists::Fail).await?)
}

/// Refuses an allocation that exceeds the free space of the file system.
///
/// # Errors
/// `NoSpace`.
async fn check_room(storage: &ImageStorage, bytes: u64) -> blockhouse_core::Result<()> {
    match storage.free_space().await {
        // A file system without a size reports 0 free bytes.
        Ok(Some(free)) if 0 < free && free < bytes => {
            let (bytes, free) = (size::show(bytes), size::show(free));
            let what = format!("preallocation needs {bytes}, and the file system has {free} free");
            let error = Error::new(ErrorKind::NoSpace, what);
            Err(error.on(storage.name()).hint("free some space, or leave preallocation out"))
        }
        _ => Ok(()),
    }
}

/// Makes a new raw image. `progress` counts the space that `mode` allocates.
///
/// # Errors
/// The error names the file. An unfinished image is removed.
pub async fn create_raw(
    image: &Path,
    size: u64,
    mode: Option<SpaceMode>,
    file: NewFile,
    progress: &ToolProgress,
) -> Result<()> {
    create_as(image, size, ImageFormat::Raw, file).await?;
    let finish = async {
        let Some(mode) = mode else { return allocate_first_block(image, size) };
        let storage = open_created(image).await?;
        check_room(&storage, size).await?;
        progress.begin(size);
        preallocate(&storage, ByteRange::between(0, size), mode, progress).await?;
        storage.flush(SyncMode::Full).await?;
        storage.close().await
    };
    Ok(or_removed(image, finish.await).await?)
}

/// Truncates a new image to the end of its L1 table, as qemu-img does. An image with anything after
/// the cluster of the L1 table stays as it is.
fn cut_after_l1(image: &Path) -> std::io::Result<()> {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(image)?;
    let mut header = [0; 48];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut header, 0)?;
    let field = |at: usize| u64::from_be_bytes(header[at..at + 8].try_into().unwrap_or_default());
    let (cluster, entries) = (1_u64 << (field(16) & 31), field(36) >> 32);
    let end = field(40) + entries * 8;
    if file.metadata()?.len() == end.next_multiple_of(cluster) { file.set_len(end) } else { Ok(()) }
}

/// Under the name qemu-img: writes the first block of a new file, as qemu-img does. Programs probe
/// the alignment of O_DIRECT by reading that block.
pub fn allocate_first_block(image: &Path, size: u64) -> blockhouse_core::Result<()> {
    const BLOCK: usize = 4096;
    if !called_as::is_qemu_img() || !image.is_file() {
        return Ok(());
    }
    let zeros = vec![0; BLOCK.min(usize::try_from(size).unwrap_or(BLOCK))];
    let file = std::fs::OpenOptions::new().write(true).open(image);
    let written = file.and_then(|mut file| std::io::Write::write_all(&mut file, &zeros));
    let failed = |error| Error::host("cannot write its first block", error);
    written.map_err(|error| failed(error).on(&image.display().to_string()))
}

/// Creates a qcow2 image, after it has opened the backing file as a check. Prints a message for
/// each file of the image that commands open only with `--allow-path` or `--allow-remote`.
/// `progress` counts L2 tables and allocated space.
///
/// # Errors
/// The error names the file. An unfinished image is removed.
pub async fn create_qcow2(
    image: &Path,
    options: &qcow2::CreateOptions,
    allowed: AllowedPaths,
    file: NewFile,
    progress: &ToolProgress,
) -> Result<()> {
    if let Some(backing) = &options.backing {
        let backing = open_backing(image, backing, allowed).await?;
        // An existing data file is emptied.
        if let Some(data) = &options.data_file {
            check_new_apart(&resolve_relative(image, &data.name), &backing)?;
        }
    }
    make_qcow2(image, options, file, progress).await
}

/// Makes a new qcow2 image with the size of its backing file.
///
/// # Errors
/// As [`create_qcow2`].
pub fn make_overlay(
    overlay: &Path,
    base: &Path,
    format: ImageFormat,
    allowed: AllowedPaths,
) -> Result<()> {
    let name = base.as_os_str().as_encoded_bytes().to_vec();
    let backing = Backing { name, format: Some(format.as_str().to_owned()) };
    EventLoop::new(EngineChoice::Auto)?.block_on(async {
        let size = open_backing(overlay, &backing, allowed).await?.size();
        let mut options = qcow2::CreateOptions::new(size);
        options.backing = Some(backing);
        make_qcow2(overlay, &options, NewFile::default(), &ToolProgress::default()).await
    })
}

/// As [`create_qcow2`], but does not open the backing file.
async fn make_qcow2(
    image: &Path,
    options: &qcow2::CreateOptions,
    file: NewFile,
    progress: &ToolProgress,
) -> Result<()> {
    let place = &*behind_links(image);
    // The name is durable from here on. Until the header is written, the file is empty or starts
    // with zeros, so no program treats it as a qcow2 image.
    create_as(place, 0, ImageFormat::Raw, file).await?;
    if let Some(DataFile { name, .. }) = &options.data_file {
        note_data_file(image, name);
    }
    let data_path = options.data_file.as_ref().map(|file| resolve_relative(image, &file.name));
    if data_path.as_deref().is_some_and(|data| is_same_file(data, place)) {
        remove_created(place).await;
        bail!("{}: cannot be its own data file; name another file", image.display());
    }
    let data = data_path.as_deref().map(|path| {
        // qemu-img overwrites both files.
        let is_in_place = called_as::is_qemu_img() && path.is_file();
        (path, NewFile { is_in_place, ..file })
    });
    let filled = fill_qcow2(place, data, options, progress).await;
    or_removed(place, filled).await?;
    if called_as::is_qemu_img() && place.is_file() {
        cut_after_l1(place)
            .with_context(|| format!("{}: cannot set its length", image.display()))?;
    }
    if let Some(backing) = &options.backing {
        tell_if_not_free(image, &backing.name, "backing file");
    }
    if let Some(DataFile { name, .. }) = &options.data_file
        && !AllowedPaths::is_free_to_write(image, name)
        && !tell_if_not_free(image, name, "data file")
    {
        output::tell(&format!(
            "blockhouse: {}: commands write to its data file '{}' only with --allow-path; a name like the image's (disk.raw for disk.qcow2) needs none",
            image.display(),
            String::from_utf8_lossy(name)
        ));
    }
    Ok(())
}

/// Writes a qcow2 image to the empty file `image`, and creates the data file at `data`, if there is
/// one. After an error the data file is removed. A block device as the data file keeps its size; as
/// a raw data file it also keeps its content.
async fn fill_qcow2(
    image: &Path,
    data: Option<(&Path, NewFile)>,
    options: &qcow2::CreateOptions,
    progress: &ToolProgress,
) -> blockhouse_core::Result<()> {
    let storage = open_created(image).await?;
    let space = match options.preallocation {
        Preallocation::Falloc | Preallocation::Full => options.size,
        Preallocation::Off | Preallocation::Metadata => 0,
    };
    let Some((path, file)) = data else {
        check_room(&storage, space).await?;
        qcow2::create_with(&storage, None, options, progress).await?;
        return storage.close().await;
    };
    create_as(path, 0, ImageFormat::Raw, file).await?;
    let finish = async {
        let data = open_created(path).await?;
        check_room(&data, space).await?;
        qcow2::create_with(&storage, Some(&data), options, progress).await?;
        storage.close().await
    };
    or_removed(path, finish.await).await
}

/// Opens the backing file of a new image, in the stated format, because an image whose backing file
/// cannot be opened would be useless.
///
/// # Errors
/// The backing file cannot be opened; or the path of the new image leads to the backing file or to
/// a file below it, which creating the image would overwrite.
pub async fn open_backing(
    image: &Path,
    backing: &Backing,
    allowed_paths: AllowedPaths,
) -> Result<ImageDisk> {
    let (backing, part) = plain_backing(backing, &image.display().to_string())?;
    let path = resolve_relative(image, &backing.name);
    let format = backing.format.as_deref().map(str::parse).transpose();
    let format = format.map_err(anyhow::Error::msg)?;
    // A file missing further down the chain is reported only when the new image is used.
    let options =
        ImageOptions { locking: Locking::None, allowed_paths, ..read_only(format, StateUse::Off) };
    let options = options.in_part(part);
    let failed = || format!("{}: cannot open its backing file", image.display());
    if options.format == Some(ImageFormat::Raw) && part.is_none() {
        check_raw_backing(&path).await.with_context(failed)?;
    }
    let whole = options.clone().for_purpose(Purpose::Chain);
    let opened = open(&path, options.for_purpose(Purpose::Image)).await.with_context(failed)?;
    check_new_apart(image, &opened)?;
    // Files further down the chain that cannot be opened now are not compared with the new image.
    if image.exists()
        && let Ok(chain) = open(&path, whole).await
    {
        check_new_apart(image, &chain)?;
    }
    Ok(opened)
}
