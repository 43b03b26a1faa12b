//! `cargo xtask options`: writes docs/options.md and docs/control.schema.json, as the binary makes them from the
//! definition of its command line and of its control socket.

use std::process::Command;

use anyhow::{Context, Result};

use lab_tools::build::{Profile, build_binary};
use lab_tools::process;
use lab_tools::workspace::Workspace;

/// Builds the binary and replaces the pages.
pub fn run(workspace: &Workspace) -> Result<()> {
    let folder = workspace.target().join("generated");
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("cannot make {}", folder.display()))?;
    let mut generate = Command::new(build_binary(workspace, Profile::Dev)?);
    generate.arg("__generate").arg(&folder);
    process::run(generate)?;
    for name in ["options.md", "control.schema.json"] {
        let page = workspace.root().join("docs").join(name);
        std::fs::copy(folder.join(name), &page)
            .with_context(|| format!("cannot write {}", page.display()))?;
        println!("xtask: wrote {}", page.display());
    }
    Ok(())
}
