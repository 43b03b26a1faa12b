//! Rule: no circles between the modules of a crate.
//!
//! An arrow leads from a module to each module that defines what it names: by a path, or by a
//! `use`. Names are followed through re-exports and imports to the module that defines the item, so
//! a facade (`pub use`) does not hide an arrow and is not one itself. Code for tests is left out. A
//! module and one of its parts may name each other: `queue` and `queue::slot` are one unit in two
//! files.
//!
//! There may be no circles between the folders of a crate, either. Here paths count as they are
//! written, because a reader sees the path and not where a re-export leads. A file beside the root
//! counts as a folder. Circles from before the rule are listed in `KNOWN`, which may only get
//! shorter.

mod graph;
mod source;

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Result;
use serde_json::Value;

use self::graph::Graph;
use self::source::Crate;
use super::source_file::SourceFile;

/// Known circles of folders: the crate's root, and the folders.
const KNOWN: &[(&str, &str)] =
    &[("crates/daemon/src/lib.rs", "jobs running"), ("lab/vm/src/main.rs", "guest in_guest power")];

/// One line for each circle in each crate of the workspace.
pub(super) fn check(
    workspace: &Path,
    packages: &[&Value],
    files: &[SourceFile],
) -> Result<Vec<String>> {
    let mut roots = BTreeSet::new();
    for package in packages {
        for target in package["targets"].as_array().into_iter().flatten() {
            let root = target["src_path"].as_str().map(Path::new);
            roots.extend(root.and_then(|root| root.strip_prefix(workspace).ok()));
        }
    }
    let mut violations = Vec::new();
    for root in roots {
        // Only roots of folders; any other root is a program in one file.
        if !matches!(root.file_name().and_then(|name| name.to_str()), Some("lib.rs" | "main.rs")) {
            continue;
        }
        let source = Crate::parse(root, files)?;
        let circles = Graph::of(&source).circles();
        violations.extend(circles.iter().map(|circle| describe(root, circle)));
        let folders = Graph::of_folders(&source).circles();
        let known: Vec<_> = KNOWN.iter().filter(|(of, _)| root == Path::new(of)).collect();
        let is_known = |circle: &&graph::Circle| {
            known.iter().any(|(_, names)| *names == circle.modules.join(" "))
        };
        let new = folders.iter().filter(|circle| !is_known(circle));
        violations.extend(new.map(|circle| describe(root, circle)));
        let is_there = |names: &str| folders.iter().any(|circle| names == circle.modules.join(" "));
        let gone = known.into_iter().filter(|(_, names)| !is_there(names));
        violations.extend(gone.map(|(of, names)| {
            format!("{of}: the circle of {names} is no more: take it off the list in tidy/circles")
        }));
    }
    Ok(violations)
}

/// Describes the shortest circle, with the line in which each module names the next.
fn describe(root: &Path, circle: &graph::Circle) -> String {
    let folder = root.parent().unwrap_or(root);
    let steps = circle.steps.iter().map(|step| {
        let place = folder.join(&step.file);
        format!("\n    {} names {} ({}:{})", step.from, step.to, place.display(), step.line)
    });
    let steps: Vec<String> = steps.collect();
    format!(
        "{}: a circle of {} modules ({}):{}",
        root.display(),
        circle.modules.len(),
        circle.modules.join(" "),
        steps.concat(),
    )
}
