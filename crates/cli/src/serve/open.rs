//! Opening the images of `blockhouse serve`.

use std::path::Path;

use anyhow::{Result, bail};
use blockhouse_core::{Error, ErrorKind};
use blockhouse_disk::{Access, Disk, ImageFormat, ImageOptions, create, open, open_snapshot};
use blockhouse_engine::HostFile;

use super::arguments::Arguments;
use crate::create::whole_sectors;
use crate::workers::Workers;

/// Opens an image, and makes it first if that is wanted.
pub(super) fn open_image(
    workers: &Workers,
    image: &Path,
    arguments: &Arguments,
    options: ImageOptions,
) -> Result<Disk<HostFile>> {
    let path = image.to_owned();
    let wanted = arguments.create.map(|size| whole_sectors(image, size));
    let snapshot = arguments.snapshot.clone();
    let disk = workers.run(move || async move {
        if let Some(size) = wanted
            && !path.exists()
        {
            let refused = |why| Error::new(ErrorKind::InvalidInput, why);
            let by_name = || ImageFormat::for_new(&path).map_err(refused);
            let format = options.format.map_or_else(by_name, Ok)?;
            create(&path, size, format).await?;
        }
        let access = options.access;
        let opened = match snapshot {
            None => open(&path, options).await,
            Some(name) => open_snapshot(&path, options, &name).await,
        };
        opened.map_err(|error| with_hint(error, &path, access))
    })?;
    for layer in (0..).map_while(|depth| disk.layer_at(depth)) {
        if let Some(truncation) = layer.features.and_then(|qcow2| qcow2.truncation) {
            tracing::warn!("{}: {truncation}: reads of what is lost fail", layer.name);
        }
    }
    match wanted {
        Some(size) if disk.size() != size => bail!(
            "{}: exists with {} bytes, not the {size} of --create; leave --create out, or use \
             'blockhouse resize' to make it longer",
            disk.name(),
            disk.size()
        ),
        _ => Ok(disk),
    }
}

/// Adds a hint for an image that cannot be opened to be served.
fn with_hint(error: Error, image: &Path, access: Access) -> Error {
    match error.errno() {
        // EACCES, EROFS.
        13 | 30 if access == Access::ReadWrite => {
            error.hint("check its permissions, or serve it with --read-only")
        }
        // ENOENT: of the image itself, not of a backing file.
        2 if image
            .parent()
            .is_some_and(|folder| folder.as_os_str().is_empty() || folder.exists()) =>
        {
            error.hint("check the path; 'blockhouse create' makes a new image")
        }
        _ => error,
    }
}
