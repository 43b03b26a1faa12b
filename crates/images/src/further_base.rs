//! Finds a backing file further down a disk's chain by the name that a user gives.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_disk::{FurtherBase, ImageDisk, Layer};
use blockhouse_engine::is_same_file;
use blockhouse_format::Backing;
use blockhouse_storage::ImageStorage;

use crate::moved_record::{forked_to, record_forked};
use crate::open_location::canonical;
use crate::qemu_name::is_address;

/// The backing file of `disk` whose file or name is `wanted`: at least two steps below the disk's
/// image.
///
/// # Errors
/// `InvalidInput` if there is no such backing file; the error names those that exist. Or as
/// [`FurtherBase::new`].
pub fn find_further_base(disk: &ImageDisk, wanted: &Path) -> Result<FurtherBase> {
    let depth = depth_of(disk, wanted)?;
    let layers: Vec<_> = disk.image().layer().layers().collect();
    let name = name_below(disk.name(), layers[0], [layers[depth - 1], layers[depth]])?;
    FurtherBase::new(disk, 0, depth, name)
}

/// The layers of the chain of `disk` from the backing file `top` down to `base`, which is kept.
/// Both are given by their files or names; if `base` is `None`, it is the last image of the chain.
/// `name` replaces the usual name of the base in the header of the image above.
///
/// # Errors
/// As [`find_further_base`]; `InvalidInput` for a base that is not below `top`.
pub fn find_layers(
    disk: &ImageDisk,
    top: &Path,
    base: Option<&Path>,
    name: Option<&[u8]>,
) -> Result<FurtherBase> {
    let above = depth_of(disk, top)? - 1;
    let layers: Vec<_> = disk.image().layer().layers().collect();
    let depth = base.map_or(Ok(layers.len() - 1), |base| depth_of(disk, base))?;
    if depth <= above + 1 {
        let (top, base) = (layers[above + 1].image_name(), layers[depth].image_name());
        let what =
            format!("{base} is not below {top}, into which nothing of that can be committed");
        return Err(Error::new(ErrorKind::InvalidInput, what).on(disk.name()));
    }
    let usual = name_below(disk.name(), layers[above], [layers[depth - 1], layers[depth]])?;
    let name = match name {
        Some(name) => Backing { name: name.to_vec(), ..usual },
        None => usual,
    };
    FurtherBase::new(disk, above, depth - above, name)
}

/// The depth, in the chain of `disk`, of the backing file whose file or name is `wanted`.
fn depth_of(disk: &ImageDisk, wanted: &Path) -> Result<usize> {
    let image = disk.image();
    let is_it = |name: &str| is_same_file(Path::new(name), wanted);
    let layers: Vec<_> = image.layer().layers().collect();
    let is_layer = |layer: &&Layer<ImageStorage>| is_it(layer.image_name()) || is_it(layer.name());
    if let Some(found) = layers[1..].iter().position(is_layer) {
        return Ok(found + 1);
    }
    let names: Vec<_> = layers.iter().skip(1).map(|layer| layer.image_name()).collect();
    let what = if names.is_empty() {
        "has no backing file".to_owned()
    } else {
        format!("{} is none of its backing files: {}", wanted.display(), names.join(", "))
    };
    Err(Error::new(ErrorKind::InvalidInput, what).on(image.image_name()))
}

/// The name that `image`, an image of the chain of `disk`, has to store for `base`, the backing
/// file of `above`.
fn name_below(
    disk: &str,
    image: &Layer<ImageStorage>,
    [above, base]: [&Layer<ImageStorage>; 2],
) -> Result<Backing> {
    let named = above.backing_file().cloned();
    let named = named.unwrap_or_else(|| Backing {
        name: base.image_name().into(),
        format: Some(base.format().name().to_owned()),
    });
    if base.format().storage().storage().as_file().is_none() {
        return Ok(named);
    }
    let image = canonical(image.image_name())?;
    if !is_address(&named.name) {
        return Ok(Backing { name: name_from(&canonical(base.image_name())?, &image), ..named });
    }
    // A name that is more than a path, such as a part of a file, is relative to the folder of the
    // image above.
    let above = canonical(above.image_name())?;
    if above.parent() == image.parent() {
        return Ok(named);
    }
    let what = format!(
        "is in another folder than {}, whose name for its backing file is no plain path: {}",
        above.display(),
        String::from_utf8_lossy(&named.name)
    );
    Err(Error::new(ErrorKind::Unsupported, what).on(disk))
}

/// Updates the record of a fork after the images between were left out: the disk continues in the
/// image of `disk`, which is directly over the fork's layer now.
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

/// The name that an image at `image` stores for the file at the canonical path `layer`: without the
/// folder, if both are in the same folder.
pub(crate) fn name_from(layer: &Path, image: &Path) -> Vec<u8> {
    let is_beside = image.parent() == layer.parent();
    let name = layer.file_name().filter(|_| is_beside);
    let name = name.unwrap_or(layer.as_os_str()).as_bytes().to_vec();
    // Without the prefix, a name with a colon would be taken for an address.
    if is_beside && is_address(&name) { [b"./", &name[..]].concat() } else { name }
}
