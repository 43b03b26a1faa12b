//! Where the workspace and its build products are, from `cargo metadata`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::process::{cargo, stdout_of};

/// The paths of this checkout.
pub struct Workspace {
    root: PathBuf,
    target: PathBuf,
    metadata: Value,
}

impl Workspace {
    /// Asks cargo for the workspace that the current directory belongs to.
    pub fn find() -> Result<Self> {
        let metadata = metadata(None)?;
        let path = |key: &str| -> Result<PathBuf> {
            Ok(metadata[key]
                .as_str()
                .with_context(|| format!("cargo metadata has no {key}"))?
                .into())
        };
        Ok(Self { root: path("workspace_root")?, target: path("target_directory")?, metadata })
    }

    /// The folder of the workspace's `Cargo.toml`.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder for everything that is built.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// The workspace's packages, each as `cargo metadata` describes it.
    pub fn packages(&self) -> &[Value] {
        packages(&self.metadata)
    }
}

/// The output of `cargo metadata --no-deps` for the workspace of `manifest`, or of the current
/// folder.
pub fn metadata(manifest: Option<&Path>) -> Result<Value> {
    let mut command = cargo(["metadata", "--format-version", "1", "--no-deps"]);
    if let Some(manifest) = manifest {
        command.arg("--manifest-path").arg(manifest);
    }
    serde_json::from_str(&stdout_of(command)?).context("cannot read the output of cargo metadata")
}

/// The packages in the output of [`metadata`].
pub fn packages(metadata: &Value) -> &[Value] {
    metadata["packages"].as_array().map_or(&[], Vec::as_slice)
}
