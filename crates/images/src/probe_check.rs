//! Refuses files whose content contradicts the format that they are opened as.

use std::ffi::OsStr;
use std::fs::FileType;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use blockhouse_core::{Error, ErrorKind, Result, Storage, rare};
use blockhouse_disk::Access;
use blockhouse_format::{ForeignKind, ImageFormat, probe};
use blockhouse_storage::Location;
use futures_util::future::LocalBoxFuture;

use crate::handed_over::Files;
use crate::image_options::{CacheMode, FilePart, ImageOptions, side_file_of};
use crate::open_location::open_location;

/// Refuses a file whose name says `format`, if its content lacks the signature of that format or
/// looks like another format.
pub(crate) async fn check_not_probed(
    file: &impl Storage,
    path: &Path,
    format: ImageFormat,
) -> Result<()> {
    let found = probe::probe_file(file, path).await?;
    let (what, hint) = match (format.has_signature(), found) {
        (true, Some(name)) if name == format.as_str() => return Ok(()),
        (false, None) => return Ok(()),
        (false, Some(name)) => (
            format!("would be opened as a {} image but looks like {name}", format.as_str()),
            advice_for(name, file.name()),
        ),
        (true, Some(name)) => (
            format!("is no {} image in spite of its name", format.as_str()),
            advice_for(name, file.name()),
        ),
        (true, None) => (
            format!("is no {} image in spite of its name", format.as_str()),
            format!(
                "if it was made as a raw image, say --format raw; if it was made as a {} image, its \
                 header is damaged: restore it from a copy",
                format.as_str()
            ),
        ),
    };
    Err(Error::new(ErrorKind::InvalidInput, what).on(file.name()).hint(hint))
}

/// The hint about an image that looks like the format `name`. A guest can write any bytes to its
/// raw disk, and an image of another format can name files of the host. So the advice is for users
/// who know how the image was made.
fn advice_for(name: &str, path: &str) -> String {
    let known = match name.parse::<ImageFormat>() {
        Ok(_) => format!("if it was made as a {name} image, say --format {name}"),
        Err(_) => format!(
            "the format {name} is not supported: if the image was made as one and is from a source \
             that you trust, QEMU's own 'qemu-img convert -f {name} -O qcow2 {path} NEW.qcow2' makes \
             a qcow2 image of it"
        ),
    };
    format!("{known}; if it is a raw disk whose guest wrote these bytes, say --format raw")
}

/// The format by the suffix of an image's name ([`ImageFormat::by_name`]), otherwise raw. For an
/// image in Ceph, the name ends before the snapshot and the parameters. A null device and an export
/// of another server are raw, whatever the name is. A format before the last suffix
/// (`disk.qcow2.bak`) counts if the file's content has that format.
pub fn format_by_name(name: &Path) -> ImageFormat {
    match Location::of(name) {
        Ok(Location::Rbd(location)) => ImageFormat::by_name(Path::new(location.image())),
        Ok(Location::Nbd { .. } | Location::Null(_)) => ImageFormat::Raw,
        Ok(Location::File(_)) | Err(_) => match ImageFormat::by_name(name) {
            ImageFormat::Raw => format_before_suffix(name).unwrap_or(ImageFormat::Raw),
            said => said,
        },
    }
}

/// Which images are probed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probing {
    /// Regular files whose names do not tell the format.
    Nameless,
    /// All files and block devices, except those whose name says raw.
    ByContent,
    /// As `ByContent`, for an image that is only read: content without any signature is raw,
    /// although the name says another format, as that of a flat extent of a VMDK
    /// (`disk-flat.vmdk`). A writable image is excluded, because its guest could write the
    /// signature that agrees with the name.
    ToRead,
}

/// Probes the format of an image whose name does not tell it. Such an image is a regular file
/// without a suffix or with a suffix of no format (`image.0.5.1`, `image.tmp`), or a part of a file
/// of any name. `how` adds other images, because distributions name their qcow2 images `.img`.
/// Returns `None` if the content has the format that the name says or no supported one, for other
/// names, for a raw image with bitmaps beside it, and for disks of servers. Needs no event loop.
///
/// # Errors
/// The host's.
pub fn probe_nameless(
    path: &Path,
    part: Option<FilePart>,
    how: Probing,
) -> Result<Option<ImageFormat>> {
    let by_content = how != Probing::Nameless;
    let says_nothing = by_content || path.extension().is_none_or(is_of_no_format);
    let is_known_raw = || has_raw_suffix(path) || is_file(&side_file_of(path));
    let can_be_probed = is_file(path) || by_content && is_device(path);
    if !can_be_probed || part.is_none() && (!says_nothing || is_known_raw()) {
        return Ok(None);
    }
    let said = if part.is_none() { format_by_name(path) } else { ImageFormat::Raw };
    if said == ImageFormat::Raw {
        return look_of(path, part.map_or(0, |part| part.offset));
    }
    let found = if by_content { look_despite(said, path)? } else { None };
    Ok(found.filter(|found| *found != ImageFormat::Raw || how == Probing::ToRead))
}

/// The format of a file's content, which is raw without any format's signature. `None` if the name
/// says the same format, and for an unsupported format.
fn look_despite(said: ImageFormat, path: &Path) -> Result<Option<ImageFormat>> {
    let mut found = probe::name_of(&bytes_at(path, SeekFrom::Start(0))?);
    // A fixed VHD has its signature at the end.
    if found.is_none() && said == ImageFormat::Foreign(ForeignKind::Vpc) {
        found = probe::name_of_end(&bytes_at(path, SeekFrom::End(0))?);
    }
    let found = found.map_or(Some(ImageFormat::Raw), |name| name.parse().ok());
    Ok(found.filter(|found| *found != said))
}

/// The format before other suffixes of a regular file's name (`disk.qcow2.1.bak`), if the content
/// has the same format. A suffix of raw disks means raw.
fn format_before_suffix(path: &Path) -> Option<ImageFormat> {
    const OF_RAW: [&str; 4] = ["raw", "img", "bin", "iso"];
    let mut name = Path::new(path.file_name()?);
    while let Some(suffix) = name.extension() {
        if OF_RAW.iter().any(|raw| suffix.eq_ignore_ascii_case(raw)) {
            return None;
        }
        name = Path::new(name.file_stem()?);
        let said = ImageFormat::by_name(name);
        if said != ImageFormat::Raw {
            return (is_file(path) && look_of(path, 0).ok()? == Some(said)).then_some(said);
        }
    }
    None
}

/// Whether one of the suffixes is `.raw` (`disk.raw.1`).
fn has_raw_suffix(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    name.split(|byte| *byte == b'.').skip(1).any(|suffix| suffix.eq_ignore_ascii_case(b"raw"))
}

fn is_file(path: &Path) -> bool {
    kind_of(path).is_some_and(|kind| kind.is_file())
}

fn is_device(path: &Path) -> bool {
    kind_of(path).is_some_and(|kind| kind.is_block_device())
}

fn kind_of(path: &Path) -> Option<FileType> {
    match Location::of(path) {
        Ok(Location::File(_)) => Some(std::fs::metadata(path).ok()?.file_type()),
        _ => None,
    }
}

/// Probes the format of an export.
///
/// # Errors
/// Errors of the server.
pub(crate) async fn probe_supported(storage: &impl Storage) -> Result<Option<ImageFormat>> {
    Ok(probe::probe(storage).await?.and_then(|name| name.parse().ok()))
}

/// Probes the format of the bytes of a file from `offset` on.
fn look_of(path: &Path, offset: u64) -> Result<Option<ImageFormat>> {
    let first = bytes_at(path, SeekFrom::Start(offset))?;
    Ok(probe::name_of(&first).and_then(|name| name.parse().ok()))
}

/// Up to [`probe::LENGTH`] bytes of a file after a position, or before a position from its end.
fn bytes_at(path: &Path, position: SeekFrom) -> Result<Vec<u8>> {
    const LENGTH: u64 = probe::LENGTH as u64;
    let mut bytes = Vec::new();
    let read = std::fs::File::open(path).and_then(|mut file| {
        let start = file.seek(position)?;
        if let SeekFrom::End(_) = position {
            file.seek(SeekFrom::Start(start.saturating_sub(LENGTH)))?;
        }
        file.take(LENGTH).read_to_end(&mut bytes)
    });
    let failed = |error| Error::host("cannot open", error).on(&path.display().to_string());
    read.map_err(failed)?;
    Ok(bytes)
}

/// Whether a suffix is part of a version, or marks a file as incomplete.
fn is_of_no_format(suffix: &OsStr) -> bool {
    const ON_ITS_WAY: [&str; 5] = ["download", "part", "partial", "tmp", "upload"];
    let is_of_version = suffix.as_encoded_bytes().iter().all(u8::is_ascii_digit);
    is_of_version || ON_ITS_WAY.iter().any(|known| suffix == *known)
}

/// Refuses a raw backing file whose content looks like another format: the guest would see the
/// metadata of that image instead of its disk.
///
/// # Errors
/// `InvalidInput` that names the file; errors of opening it. Needs the event loop of the current
/// thread.
pub fn check_raw_backing(path: &Path) -> LocalBoxFuture<'_, Result<()>> {
    rare(async move {
        let options = ImageOptions {
            access: Access::ReadOnly,
            cache: CacheMode::Writeback,
            ..ImageOptions::default()
        };
        let file = open_location(&mut Files::Host, path, &options).await?.0;
        let Some(name) = probe::probe(&file).await? else { return Ok(()) };
        let what = format!("is named as a raw backing file but looks like {name}");
        let hint = match name.parse::<ImageFormat>() {
            Ok(_) => format!(
                "the guest would see the tables of that image instead of its disk: name the format {name}; if \
             it is a raw disk whose guest wrote these bytes, 'rebase -u -F raw' stores that"
            ),
            Err(_) => format!(
                "the format {name} is not supported behind an image; if it is a raw disk whose guest wrote \
             these bytes, 'rebase -u -F raw' stores that"
            ),
        };
        Err(Error::new(ErrorKind::InvalidInput, what).on(file.name()).hint(hint))
    })
}
