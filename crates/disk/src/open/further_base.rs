//! A backing file further down the chain of a disk, by the name that a person gives it.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_format::Backing;

use super::image_disk::ImageDisk;
use super::moved_record::{forked_to, record_forked};
use super::qemu_name::is_address;
use crate::disk::FurtherBase;

/// The backing file of `disk` that is the file, or has the name, `wanted`: at least two steps down.
///
/// # Errors
/// `InvalidInput`: no backing file is that, with the names of those that there are; or as
/// [`FurtherBase::new`].
pub fn find_further_base(disk: &ImageDisk, wanted: &Path) -> Result<FurtherBase> {
    let image = disk.image();
    let canonical = wanted.canonicalize().ok();
    let is_it = |name: &str| {
        Path::new(name) == wanted
            || canonical.is_some() && Path::new(name).canonicalize().ok() == canonical
    };
    let names: Vec<&str> = image.layers().skip(1).map(|layer| layer.image_name()).collect();
    let Some(depth) = names.iter().position(|name| is_it(name)).map(|index| index + 1) else {
        let what = match names.is_empty() {
            true => "has no backing file".to_owned(),
            false => {
                format!("{} is none of its backing files: {}", wanted.display(), names.join(", "))
            }
        };
        return Err(Error::new(ErrorKind::InvalidInput, what).on(image.image_name()));
    };
    let [above, base] = [depth - 1, depth].map(|depth| image.layer().at_depth(depth));
    let (Some(above), Some(base)) = (above, base) else {
        return FurtherBase::new(disk, depth, Backing { name: Vec::new(), format: None });
    };
    let named = above.backing_file().cloned();
    let format = named.as_ref().and_then(|named| named.format.clone());
    let format = format.or_else(|| Some(base.format().name().to_owned()));
    let paths = [base.image_name(), image.image_name()].map(|name| Path::new(name).canonicalize());
    let name = match (paths, named) {
        // An image on the host may lie in another folder than the one that names it now.
        ([Ok(base), Ok(image)], _) => Backing { name: name_from(&base, &image), format },
        (_, Some(named)) => named,
        (_, None) => Backing { name: base.image_name().into(), format },
    };
    FurtherBase::new(disk, depth, name)
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
    match is_beside && is_address(&name) {
        true => [b"./", &name[..]].concat(),
        false => name,
    }
}
