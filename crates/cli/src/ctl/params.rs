//! Parameters of methods.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

/// Adds the parameters that were given.
pub(super) fn add_given<const N: usize>(params: &mut Value, optional: [(&str, Option<Value>); N]) {
    for (key, value) in optional {
        if let Some(value) = value {
            params[key] = value;
        }
    }
}

/// The server may have another working directory.
pub(super) fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("{}", path.display()))
}
