//! New images.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Result, bail};
use blockhouse_disk::{CreateOptions, ImageFormat};
use blockhouse_engine::{NewFile, is_same_file};
use blockhouse_images::{check_new_name, create_as, create_qcow2};

use super::Running;

/// Changes the name of the backing file in a disk's image: see `DiskJobs::name_backing`.
///
/// # Errors
/// There is no such disk, a job works on it, or as `DiskJobs::name_backing`.
pub(crate) async fn name_backing(running: &Running, disk: &str, name: &str) -> Result<()> {
    let claimed = running.claim_disk(disk).await?;
    running.check_free(disk)?;
    Ok(claimed.disk.disk.jobs().name_backing(name.as_bytes()).await?)
}

/// Makes an image: a qcow2 one if there are options for it, else a raw one. With `overwrite` it
/// replaces an existing file.
///
/// # Errors
/// The file exists and `overwrite` is not set, the file is in use, or the host fails to create it.
pub(crate) async fn create_image(
    running: &Running,
    path: &Path,
    size: u64,
    options: Option<&CreateOptions>,
    overwrite: bool,
) -> Result<()> {
    running.sandbox().check(path)?;
    check_new_name(path)?;
    if let Some(file) = options.and_then(|options| options.data_file.as_ref()) {
        let data = Path::new(OsStr::from_bytes(&file.name));
        running.sandbox().check(data)?;
        if is_same_file(path, data) {
            bail!("{}: an image and its data file are two files", path.display());
        }
    }
    let is_in_place = path.is_file();
    if is_in_place && !overwrite {
        bail!(
            "{}: is a file that exists, and all that is in it would be lost; if that is meant, say overwrite",
            path.display()
        );
    }
    let how = NewFile { is_in_place, ..NewFile::default() };
    match options {
        Some(options) => create_qcow2(path, options, how).await?,
        None => create_as(path, size, ImageFormat::Raw, how).await?,
    }
    Ok(())
}
