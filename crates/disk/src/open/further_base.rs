//! A backing file further down the chain of a disk, by the name that a person gives it.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_format::Backing;
use blockhouse_storage::ImageStorage;

use super::image_disk::ImageDisk;
use super::moved_record::{forked_to, record_forked};
use super::qemu_name::is_address;
use crate::disk::FurtherBase;
use crate::layer::Layer;

/// The backing file of `disk` that is the file, or has the name, `wanted`: at least two steps down.
///
/// # Errors
/// `InvalidInput`: no backing file is that, with the names of those that there are; or as
/// [`FurtherBase::new`].
pub fn find_further_base(disk: &ImageDisk, wanted: &Path) -> Result<FurtherBase> {
    let image = disk.image();
    let canonical_wanted = wanted.canonicalize().ok();
    let is_it = |name: &str| {
        Path::new(name) == wanted
            || canonical_wanted.is_some() && Path::new(name).canonicalize().ok() == canonical_wanted
    };
    let layers: Vec<_> = image.layers().collect();
    let found = layers.windows(2).position(|pair| is_it(pair[1].image_name()));
    let Some(above) = found else {
        let names: Vec<_> = layers.iter().skip(1).map(|layer| layer.image_name()).collect();
        let what = if names.is_empty() {
            "has no backing file".to_owned()
        } else {
            format!("{} is none of its backing files: {}", wanted.display(), names.join(", "))
        };
        return Err(Error::new(ErrorKind::InvalidInput, what).on(image.image_name()));
    };
    let name = name_below(disk, layers[above], layers[above + 1])?;
    FurtherBase::new(disk, above + 1, name)
}

/// The name of `base`, which is the backing file of `above`, in the image of `disk`.
fn name_below(
    disk: &ImageDisk,
    above: &Layer<ImageStorage>,
    base: &Layer<ImageStorage>,
) -> Result<Backing> {
    let canonical = |name: &str| {
        Path::new(name).canonicalize().map_err(|error| Error::host("cannot find", error).on(name))
    };
    let named = above.backing_file().cloned();
    let named = named.unwrap_or_else(|| Backing {
        name: base.image_name().into(),
        format: Some(base.format().name().to_owned()),
    });
    if base.format().storage().storage().as_file().is_none() {
        return Ok(named);
    }
    let image = canonical(disk.image().image_name())?;
    if !is_address(&named.name) {
        return Ok(Backing { name: name_from(&canonical(base.image_name())?, &image), ..named });
    }
    // More than a path, such as a part of a file, relative to the folder of the one above.
    let above = canonical(above.image_name())?;
    if above.parent() == image.parent() {
        return Ok(named);
    }
    let what = format!(
        "is in another folder than {}, whose name for its backing file is no plain path: {}",
        above.display(),
        String::from_utf8_lossy(&named.name)
    );
    Err(Error::new(ErrorKind::Unsupported, what).on(disk.name()))
}

/// Has the record of a fork say that its disk goes on in the image of `disk`, which stands on the
/// fork's layer now that what was between is left out.
///
/// # Errors
/// As [`record_forked`].
pub fn note_passed_over(disk: &ImageDisk) -> Result<()> {
    let image = disk.image();
    let (Some(layer), Some(_)) = (image.layer().backing_layer(), image.file()) else {
        return Ok(());
    };
    let layer = Path::new(layer.image_name());
    match forked_to(layer)? {
        Some(_) => record_forked(layer, Path::new(image.image_name())),
        None => Ok(()),
    }
}

/// The canonical path `layer`, as an image at the path `image` names it: without the folder that
/// both are in.
pub(super) fn name_from(layer: &Path, image: &Path) -> Vec<u8> {
    let is_beside = image.parent() == layer.parent();
    let name = layer.file_name().filter(|_| is_beside);
    let name = name.unwrap_or(layer.as_os_str()).as_bytes().to_vec();
    // A name with a colon would be taken for an address.
    if is_beside && is_address(&name) { [b"./", &name[..]].concat() } else { name }
}
