//! THIRD-PARTY.txt: the licences of everything that is linked into the binary.
//!
//! Guarantee: each crate that the binary depends on (not those that only build scripts, tests or
//! other platforms need) is listed with its version and licence, and with each text of a licence or
//! notice that its package contains. deny.toml lists the permitted licences.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use lab_tools::process::{cargo, stdout_of};
use lab_tools::workspace::Workspace;

use super::files;
use super::static_binary;

/// The maximum depth of licence texts in the folders of a package: zstd-sys has them with its C
/// sources.
const DEPTH: usize = 2;

/// Whether one of the packages contains OpenSSL.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum OpenSsl {
    Contained,
    OfTheSystem,
}

/// Writes the page.
pub(super) fn write(workspace: &Workspace, openssl: OpenSsl, path: &Path) -> Result<()> {
    let metadata = metadata(workspace, openssl)?;
    let mut list = String::new();
    let mut texts: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in linked(&metadata)? {
        let text = |key: &str| package[key].as_str().unwrap_or_default();
        let name = format!("{} {}", text("name"), text("version"));
        list.push_str(&format!("{name}: {}; {}\n", text("license"), text("repository")));
        let folder =
            Path::new(text("manifest_path")).parent().context("a manifest has a folder")?;
        for file in licence_files(folder, DEPTH)? {
            let words = String::from_utf8_lossy(&fs::read(&file)?).trim().replace('\r', "");
            // Software under a choice of GPL and another licence is used under the other one:
            // deny.toml does not permit GPL.
            if words.trim_start().starts_with("GNU GENERAL PUBLIC LICENSE") {
                continue;
            }
            texts.entry(words).or_default().insert(name.clone());
        }
    }
    let mut page = format!(
        "blockhouse contains the following software of others, each under its licence.\n\
         \n{list}\n\
         It contains parts of the Rust standard library (Apache-2.0 OR MIT; https://github.com/rust-lang/rust). The\n\
         static binary also contains OpenSSL, which the Debian package takes from the system, and parts of the GNU C\n\
         Library (LGPL-2.1-or-later; https://sourceware.org/glibc);\n\
         the sources of blockhouse are public, so it can be linked with another version of that library.\n"
    );
    for (text, crates) in texts {
        let crates = crates.into_iter().collect::<Vec<_>>().join(", ");
        page.push_str(&format!("\n{}\n{crates}\n\n{text}\n", "-".repeat(79)));
    }
    files::write(path, page)
}

/// The output of `cargo metadata` for this platform, with resolved dependencies.
fn metadata(workspace: &Workspace, openssl: OpenSsl) -> Result<Value> {
    let mut version = std::process::Command::new("rustc");
    version.arg("-vV");
    let version = stdout_of(version)?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    let host = host.context("rustc -vV names no host")?;
    let mut metadata =
        cargo(["metadata", "--format-version", "1", "--locked", "--filter-platform"]);
    metadata.arg(host).current_dir(workspace.root());
    if openssl == OpenSsl::Contained {
        metadata.args(["--features", &format!("blockhouse/{}", static_binary::FEATURE)]);
    }
    serde_json::from_str(&stdout_of(metadata)?).context("cannot read the output of cargo metadata")
}

/// The third-party packages that the binary depends on, by name.
fn linked(metadata: &Value) -> Result<Vec<&Value>> {
    let list = |value: &'static str| -> Result<&Vec<Value>> {
        let found = metadata.pointer(value).and_then(Value::as_array);
        found.with_context(|| format!("cargo metadata has no {value}"))
    };
    let (packages, nodes) = (list("/packages")?, list("/resolve/nodes")?);
    let by_id = |list: &'_ Vec<Value>, id: &str| list.iter().position(|one| one["id"] == id);
    let root = packages.iter().find(|package| package["name"] == "blockhouse");
    let root = root.and_then(|package| package["id"].as_str()).context("no package blockhouse")?;
    let mut seen = BTreeSet::from([root]);
    let mut rest = vec![root];
    while let Some(id) = rest.pop() {
        let node = &nodes[by_id(nodes, id).with_context(|| format!("{id} is not resolved"))?];
        for dependency in node["deps"].as_array().into_iter().flatten() {
            let mut kinds = dependency["dep_kinds"].as_array().into_iter().flatten();
            let Some(id) = dependency["pkg"].as_str() else { continue };
            let is_linked = kinds.any(|kind| kind["kind"].is_null());
            if is_openssl(id) {
                // The dependencies are only needed for the build.
                seen.insert(id);
            } else if is_linked && seen.insert(id) {
                rest.push(id);
            }
        }
    }
    let is_linked = |package: &&Value| {
        // Packages of this workspace have no source.
        !package["source"].is_null() && package["id"].as_str().is_some_and(|id| seen.contains(id))
    };
    let mut linked: Vec<_> = packages.iter().filter(is_linked).collect();
    linked.sort_by_key(|package| (package["name"].as_str(), package["version"].as_str()));
    Ok(linked)
}

/// Whether a package has the sources of OpenSSL. It is a build dependency, but the library that it
/// builds is linked.
fn is_openssl(id: &str) -> bool {
    id.contains("#openssl-src@")
}

/// The files of a package that are licences or notices, by their names.
fn licence_files(folder: &Path, depth: usize) -> Result<Vec<PathBuf>> {
    const NAMES: &[&str] = &["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "UNLICENSE"];
    const CODE: &[&str] = &["rs", "toml", "c", "h", "py", "sh", "json"];
    let mut found = Vec::new();
    let list = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    for entry in list {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
        if path.is_dir() {
            if depth > 0 {
                found.extend(licence_files(&path, depth - 1)?);
            }
        } else if NAMES.iter().any(|start| name.starts_with(start)) {
            let extension = path.extension().unwrap_or_default().to_string_lossy();
            found.extend((!CODE.contains(&&*extension)).then_some(path));
        }
    }
    found.sort();
    Ok(found)
}
