//! No circles between the modules of a crate.
//!
//! An arrow leads from a module to each module that defines what it names: by a path, or by a `use`.
//! Names are followed through re-exports and imports to the module that defines the item, so a facade
//! (`pub use`) does not hide an arrow and is none itself. Code for tests is left out. A module and one
//! part of it may name each other: `queue` and `queue::slot` are one thing in two files.

mod graph;
mod paths;
mod source;

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Result;
use serde_json::Value;

use self::graph::Graph;
use self::source::Crate;
use super::source_file::SourceFile;

/// Circles that are still to be removed: a crate's root, and modules among which a circle may be. An entry
/// without a circle is a violation, too.
const KNOWN: &[(&str, &str)] = &[(
    "crates/cli/src/main.rs",
    "bench bench::datasync bench::fixed_files bench::fua bench::html bench::load bench::plot \
     bench::random bench::report bench::rows bench::schedule bench::table bench::vmstate bench::wakeup",
)];

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
    let mut stale: Vec<_> = KNOWN.iter().collect();
    for root in roots {
        // The root of a folder; any other root is a program in one file.
        if !matches!(root.file_name().and_then(|name| name.to_str()), Some("lib.rs" | "main.rs")) {
            continue;
        }
        let source = Crate::parse(root, files)?;
        let graph = Graph::of(&source);
        for circle in graph.circles() {
            match KNOWN.iter().find(|known| is_known(root, &circle, known)) {
                Some(known) => stale.retain(|other| *other != known),
                None => violations.push(describe(root, &circle)),
            }
        }
    }
    violations.extend(stale.iter().map(|(root, modules)| {
        format!("{root}: no circle among {modules} any more: remove it from KNOWN in {}", file!())
    }));
    Ok(violations)
}

fn is_known(root: &Path, circle: &graph::Circle, (known, among): &(&str, &str)) -> bool {
    let among: BTreeSet<&str> = among.split_whitespace().collect();
    root == Path::new(known) && circle.modules.iter().all(|module| among.contains(module.as_str()))
}

/// The shortest way round, with the place where each module names the next.
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
