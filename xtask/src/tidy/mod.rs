//! `cargo xtask tidy`: the rules that no compiler checks.
//!
//! - No file has more than [`MAX_LINES`] lines, and every Rust file begins by saying what it is
//!   for.
//! - The words of unfinished work are absent ([`banned_words`]).
//! - Unsafe code lives where [`unsafety`] says, and every other crate forbids it.
//! - Comments are no wider than code ([`comment_width`]).
//! - A crate depends on lower layers only ([`layers`]).
//! - The modules of a crate depend on each other without circles, and so do its folders, as their
//!   imports are written ([`circles`]).
//! - No type has more methods than a reader can survey ([`type_sizes`]), and nothing public is
//!   without a use ([`unused`]).
//! - The files and types that the documentation names exist, and so do the pages that it links to
//!   ([`doc_paths`]).
//! - Each dependency has its reason ([`reasons`]).
//! - ARCHITECTURE.md is a page and docs/ a book for users: [`MAX_ARCHITECTURE`] and [`MAX_DOCS`].
//!
//! Every violation is printed with its file and line; one is enough to fail.

mod banned_words;
mod circles;
mod comment_width;
mod doc_paths;
mod layers;
mod paths;
mod reasons;
mod source_file;
mod type_sizes;
mod unsafety;
mod unused;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use lab_tools::process::stdout_of;
use lab_tools::workspace::{self, Workspace};

pub(crate) use self::source_file::SourceFile;

const MAX_LINES: usize = 800;
/// Maximum bytes of ARCHITECTURE.md, which should be readable in one sitting.
const MAX_ARCHITECTURE: u64 = 8192;
/// Maximum bytes of all files in docs/, as users get them.
const MAX_DOCS: u64 = 200_000;
const LENGTH_LIMITED: &[&str] = &["rs", "md", "py", "sh"];

/// Checks all rules.
pub fn run(workspace: &Workspace) -> Result<()> {
    let files = source_files(workspace.root())?;
    let fuzz = workspace.root().join("fuzz/Cargo.toml");
    let fuzz = if fuzz.exists() { Some(workspace::metadata(Some(&fuzz))?) } else { None };
    let packages: Vec<&Value> =
        workspace.packages().iter().chain(fuzz.iter().flat_map(workspace::packages)).collect();

    let mut violations = Vec::new();
    violations.extend(files.iter().filter_map(length));
    for file in files.iter().filter(|file| file.is_rust()) {
        violations.extend(header(file));
        violations.extend(banned_words::check(file));
        violations.extend(comment_width::check(file));
        violations.extend(unsafety::check_file(file)?);
    }
    violations.extend(unsafety::check_roots(workspace.root(), &packages, &files)?);
    violations.extend(layers::check(&packages));
    violations.extend(circles::check(workspace.root(), &packages, &files)?);
    violations.extend(type_sizes::check(&files)?);
    violations.extend(unused::check(&files)?);
    violations.extend(doc_paths::check(workspace.root(), &files));
    violations.extend(doc_sizes(workspace.root())?);
    let manifest = workspace.root().join("Cargo.toml");
    violations.extend(reasons::check(&std::fs::read_to_string(manifest)?));

    for violation in &violations {
        eprintln!("{violation}");
    }
    print_lengths(&files);
    if !violations.is_empty() {
        bail!("{} violations of the rules", violations.len());
    }
    Ok(())
}

/// All text files that git tracks or would add.
pub(crate) fn source_files(root: &Path) -> Result<Vec<SourceFile>> {
    let mut list = Command::new("git");
    list.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"]);
    list.current_dir(root);
    let mut files = Vec::new();
    for name in stdout_of(list)?.split_terminator('\0') {
        let path = PathBuf::from(name);
        let limited = path.extension().and_then(|extension| extension.to_str());
        // A file that is deleted but not yet committed is still listed.
        if !limited.is_some_and(|ext| LENGTH_LIMITED.contains(&ext)) || !root.join(&path).exists() {
            continue;
        }
        let text = std::fs::read_to_string(root.join(&path))
            .with_context(|| format!("cannot read {name}"))?;
        files.push(SourceFile { path, text });
    }
    Ok(files)
}

fn length(file: &SourceFile) -> Option<String> {
    let lines = file.lines();
    (lines > MAX_LINES).then(|| {
        file.violation(lines, format_args!("{lines} lines, more than {MAX_LINES}: split it"))
    })
}

/// Violations of the size limits of documentation.
fn doc_sizes(root: &Path) -> Result<Vec<String>> {
    let mut violations = Vec::new();
    for (name, limit) in [("ARCHITECTURE.md", MAX_ARCHITECTURE), ("docs", MAX_DOCS)] {
        let size = size_of(&root.join(name)).with_context(|| format!("cannot read {name}"))?;
        if size > limit {
            violations.push(format!("{name}: {size} bytes, more than {limit}"));
        }
    }
    Ok(violations)
}

/// Bytes of a file, or of all files in a folder.
fn size_of(path: &Path) -> std::io::Result<u64> {
    if !path.is_dir() {
        return Ok(path.metadata()?.len());
    }
    std::fs::read_dir(path)?.map(|entry| size_of(&entry?.path())).sum()
}

fn header(file: &SourceFile) -> Option<String> {
    (!file.text.starts_with("//!"))
        .then(|| file.violation(1, "does not begin with //! saying what the file is for"))
}

fn print_lengths(files: &[SourceFile]) {
    let mut rust: Vec<(usize, &Path)> = files
        .iter()
        .filter(|file| file.is_rust())
        .map(|file| (file.lines(), file.path.as_path()))
        .collect();
    rust.sort();
    if let (Some(median), Some(longest)) = (rust.get(rust.len() / 2), rust.last()) {
        println!(
            "tidy: {} Rust files, median {} lines, longest {} ({})",
            rust.len(),
            median.0,
            longest.0,
            longest.1.display(),
        );
    }
}
