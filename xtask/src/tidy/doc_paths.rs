//! Rule: the files and types that the documentation names exist, and so do the pages that it links
//! to.
//!
//! A code span of a Markdown file is checked when it looks like a path into the workspace: its
//! first part is a crate (`disk/path` is `crates/disk/src/path.rs` or a folder of that name) or a
//! folder at the top (`xtask/tidy` is `xtask/src/tidy`). A code span that is one name in CamelCase
//! must be a word of some Rust file. The changelog is exempt, because it names files that no longer
//! exist.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::source_file::SourceFile;

/// Violations in all Markdown files.
pub fn check(root: &Path, files: &[SourceFile]) -> Vec<String> {
    let words = rust_words(files);
    let is_checked = |file: &&SourceFile| {
        file.path.extension().is_some_and(|extension| extension == "md")
            && !file.path.ends_with("CHANGELOG.md")
    };
    let mut violations = Vec::new();
    for file in files.iter().filter(is_checked) {
        for (line, target) in links(&file.text) {
            let page = file.path.parent().map(|folder| root.join(folder).join(target));
            if !page.is_some_and(|page| page.exists()) {
                violations
                    .push(file.violation(line, format_args!("{target} is linked and missing")));
            }
        }
        for (line, span) in code_spans(&file.text) {
            if is_path(root, span) && !exists(root, span) {
                violations
                    .push(file.violation(line, format_args!("`{span}` names no file or folder")));
            } else if is_type_name(span) && !words.contains(span) {
                violations.push(file.violation(line, format_args!("`{span}` is in no Rust file")));
            }
        }
    }
    violations
}

/// The words of all Rust files.
fn rust_words(files: &[SourceFile]) -> HashSet<&str> {
    let texts = files.iter().filter(|file| file.is_rust()).map(|file| file.text.as_str());
    texts.flat_map(|text| text.split(|c: char| !c.is_alphanumeric() && c != '_')).collect()
}

/// The files that a Markdown text links to, relative to its folder, with line numbers from 1.
fn links(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = (1..).zip(text.lines());
    let targets = lines.flat_map(|(number, line)| {
        let ends = line.split("](").skip(1);
        ends.filter_map(move |rest| Some((number, rest.split_once(')')?.0)))
    });
    let files =
        targets.map(|(number, target)| (number, target.split('#').next().unwrap_or(target)));
    files.filter(|(_, file)| !file.is_empty() && !file.contains("://"))
}

/// The code spans of a Markdown text that end on their line, with line numbers from 1. Fenced and
/// indented blocks are skipped.
fn code_spans(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_fenced = false;
    let lines = (1..).zip(text.lines()).filter(move |(_, line)| {
        let is_fence = line.trim_start().starts_with("```");
        is_fenced ^= is_fence;
        !is_fenced && !is_fence && !line.starts_with("    ")
    });
    lines.flat_map(|(number, line)| {
        line.split('`').skip(1).step_by(2).map(move |span| (number, span))
    })
}

/// Whether a span looks like a path into the workspace.
fn is_path(root: &Path, span: &str) -> bool {
    let is_path_letter = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
    let Some((first, rest)) = span.split_once('/') else { return false };
    !first.is_empty()
        && !rest.is_empty()
        && span.chars().all(is_path_letter)
        && (root.join(first).is_dir() || root.join("crates").join(first).is_dir())
}

/// Whether a path is that of a file or folder, with or without `.rs`, `crates` and `src`.
fn exists(root: &Path, path: &str) -> bool {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    let with_src = |parents: usize| -> PathBuf {
        let (package, rest) = parts.split_at(parents.min(parts.len()));
        package.iter().chain(&["src"]).chain(rest).collect()
    };
    // A package is a folder at the top (`xtask`), of `crates` or of `lab`.
    let places = [PathBuf::from(path), with_src(1), with_src(2)];
    let bases = [root.to_owned(), root.join("crates")];
    let mut candidates =
        places.iter().flat_map(|place| bases.iter().map(move |base| base.join(place)));
    candidates.any(|candidate| candidate.exists() || candidate.with_extension("rs").exists())
}

/// Whether a span is one name with a capital inside, as types have: `IoVector`, but not `FUA`.
fn is_type_name(span: &str) -> bool {
    let mut letters = span.chars();
    letters.next().is_some_and(|first| first.is_ascii_uppercase())
        && span.chars().all(|c| c.is_ascii_alphanumeric())
        && span
            .as_bytes()
            .windows(2)
            .any(|two| two[0].is_ascii_lowercase() && two[1].is_ascii_uppercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_found_outside_of_blocks_only() {
        let text = "see `a/b`, `c`\n```sh\n`x/y`\n```\n    `in/block`\n| `d/e` |\n";
        let found: Vec<_> = code_spans(text).collect();
        assert_eq!(found, [(1, "a/b"), (1, "c"), (6, "d/e")]);
    }

    #[test]
    fn links_to_files_are_found_without_their_anchors() {
        let text = "[a](a.md) and [b](../b.md#part)\n[c](https://example.org/) [d](#here)\n";
        assert_eq!(links(text).collect::<Vec<_>>(), [(1, "a.md"), (1, "../b.md")]);
    }

    #[test]
    fn paths_into_the_workspace_are_told_from_others() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
        for path in ["core/extent", "xtask/tidy", "lab/vm/guest", "docs/jobs.md", "engine/tests"] {
            assert!(is_path(root, path) && exists(root, path), "{path}");
        }
        assert!(is_path(root, "core/no_such_file") && !exists(root, "core/no_such_file"));
        for other in ["/dev/shm", "cache=none/off", "raw", "host/guest", "nbd://host/name"] {
            assert!(!is_path(root, other), "{other}");
        }
    }

    #[test]
    fn type_names_are_told_from_other_words() {
        assert!(is_type_name("IoVector") && is_type_name("LoopThread"));
        for other in ["FUA", "Disk", "io_uring", "Durability::Data", "ByteRange,"] {
            assert!(!is_type_name(other), "{other}");
        }
    }
}
