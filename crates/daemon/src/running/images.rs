//! New images.

use std::path::Path;

use anyhow::{Result, bail};
use blockhouse_disk::{CreateOptions, ImageFormat, check_new_name, create_as, create_qcow2};
use blockhouse_engine::NewFile;

use super::Running;

/// Makes an image: a qcow2 one where there are options for it, and else a raw one. With
/// `overwrite` a file that is there becomes it.
///
/// # Errors
/// A file is there without `overwrite`, or is in use; the host refuses.
pub(crate) async fn create_image(
    running: &Running,
    path: &Path,
    size: u64,
    options: Option<&CreateOptions>,
    overwrite: bool,
) -> Result<()> {
    running.sandbox().check(path)?;
    check_new_name(path)?;
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
