//! New images of other programs' formats, without data.

use std::path::Path;
use std::time::SystemTime;

use anyhow::{Context, Result, bail};
use blockhouse_disk::{ImageDisk, ImageFormat, NewImage};
use blockhouse_engine::NewFile;
use blockhouse_format::{Backing, ForeignKind, NewForeign, NewForeignOptions, NewParent};
use blockhouse_images::{create_as, open_created, remove_created};
use blockhouse_storage::ImageStorage;

/// Makes an empty image.
///
/// # Errors
/// The error names the file. If the new image cannot be written, its file is removed.
pub async fn create(
    path: &Path,
    kind: ForeignKind,
    options: NewForeignOptions,
    file: NewFile,
) -> Result<()> {
    let image = begin(path, path, kind, options, file).await?;
    let made = image.finish(true).await;
    if made.is_err() {
        remove_created(path).await;
    }
    Ok(made?)
}

/// The description of the parent, for a new image.
///
/// # Errors
/// The parent is no VMDK image.
pub fn parent(disk: &ImageDisk, named: &Backing) -> Result<NewParent> {
    let Some(facts) = disk.image().vmdk_facts() else {
        bail!("{}: is no VMDK image, and the parent of one has to be", disk.name());
    };
    let name = String::from_utf8_lossy(&named.name).into_owned();
    Ok(NewParent { cid: facts.cid, name })
}

/// The image without data, in a new file at `place`; `path` is its final path.
pub async fn begin(
    place: &Path,
    path: &Path,
    kind: ForeignKind,
    options: NewForeignOptions,
    file: NewFile,
) -> Result<NewImage<ImageStorage>> {
    let size = options.size;
    let options = with_identity(options, path)?;
    // The options are checked before the file is created.
    let image = NewForeign::new(kind, &options);
    let image = image.map_err(|error| error.on(&path.display().to_string()))?;
    create_as(place, 0, ImageFormat::Raw, file).await?;
    let storage = open_created(place).await?;
    Ok(NewImage::new(storage, image, size))
}

/// The options with the values that each image has of its own: file name, time, random bytes.
///
/// # Errors
/// The host has no random bytes.
pub fn with_identity(options: NewForeignOptions, path: &Path) -> Result<NewForeignOptions> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let file_name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(NewForeignOptions { now, file_name, seed: random_bytes()?, ..options })
}

/// Unpredictable bytes from the host's random number generator.
///
/// # Errors
/// The host has no random bytes.
pub fn random_bytes() -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    let random = std::fs::File::open("/dev/urandom")
        .and_then(|mut random| std::io::Read::read_exact(&mut random, &mut bytes));
    random.context("/dev/urandom")?;
    Ok(bytes)
}
