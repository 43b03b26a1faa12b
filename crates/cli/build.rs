//! Names the commit that the program is built from, for `--version`: `0.1.0 (COMMIT, DATE)`.
//!
//! A source tree that no git repository tracks has the version alone, so a package builds the same
//! without git.

#![forbid(unsafe_code)]

use std::path::Path;
use std::process::Command;

fn main() {
    let version = env!("CARGO_PKG_VERSION");
    println!("cargo:rerun-if-changed=build.rs");
    // Each commit and each checkout is noted there.
    for name in ["HEAD", "logs/HEAD"] {
        let path = git(&["rev-parse", "--path-format=absolute", "--git-path", name]);
        if let Some(path) = path.filter(|path| Path::new(path).exists()) {
            println!("cargo:rerun-if-changed={path}");
        }
    }
    // The repository may be another project's, which has a copy of this one's sources in an ignored
    // folder.
    let is_tracked = git(&["ls-files", "--error-unmatch", "build.rs"]).is_some();
    let commit = git(&["log", "-1", "--abbrev=12", "--format=%h, %cs"]).filter(|_| is_tracked);
    let version = commit.map_or(version.to_owned(), |commit| format!("{version} ({commit})"));
    println!("cargo:rustc-env=BLOCKHOUSE_VERSION={version}");
}

/// The first line of what git prints; `None` where it fails or is missing.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let line = text.lines().next()?.to_owned();
    output.status.success().then_some(line)
}
