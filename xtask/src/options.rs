//! `cargo xtask options`: makes the option reference, the schema of the control socket, man pages
//! and completions.
//!
//! The binary makes them from the definitions with which it parses. They are in `target/generated`
//! and in packages (`cargo xtask dist`), not in the repository, so they cannot become outdated.

use std::process::Command;

use anyhow::{Context, Result};

use lab_tools::build::{Profile, build_binary};
use lab_tools::process;
use lab_tools::workspace::Workspace;

/// Builds the binary, makes the files and prints the folder that has them.
pub fn run(workspace: &Workspace) -> Result<()> {
    let folder = workspace.target().join("generated");
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("cannot make {}", folder.display()))?;
    let mut generate = Command::new(build_binary(workspace, Profile::Dev)?);
    generate.arg("__generate").arg(&folder);
    process::run(generate)?;
    println!(
        "xtask: options.md, control.schema.json, man and completions are in {}",
        folder.display()
    );
    Ok(())
}
