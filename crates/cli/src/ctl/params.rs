//! Parameters of methods.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use blockhouse_images::is_address;
use serde_json::Value;

/// Adds the parameters that were given.
pub(super) fn add_given<const N: usize>(params: &mut Value, optional: [(&str, Option<Value>); N]) {
    for (key, value) in optional {
        if let Some(value) = value {
            params[key] = value;
        }
    }
}

/// The absolute path, because the server may have another working directory.
///
/// # Errors
/// The path is not UTF-8, as requests are.
pub(super) fn absolute(path: &Path) -> Result<PathBuf> {
    let whole = std::path::absolute(path).with_context(|| format!("{}", path.display()))?;
    if whole.to_str().is_none() {
        bail!("{}: its path is not UTF-8: rename it, or make a link to it", path.display());
    }
    Ok(whole)
}

/// As [`absolute`], for the name of an image: the address of an image on another server is
/// unchanged.
pub(super) fn absolute_image(name: &Path) -> Result<PathBuf> {
    if is_address(name.as_os_str().as_bytes()) { Ok(name.to_owned()) } else { absolute(name) }
}
