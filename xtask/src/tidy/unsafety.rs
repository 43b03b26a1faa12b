//! Where unsafe code may be: in the crates that talk to the kernel and own raw memory.
//!
//! Every other crate says `#![forbid(unsafe_code)]` in each of its roots (library, binaries, tests,
//! benchmarks, build script), so the compiler enforces the rule there; and as a root is easily
//! forgotten, the word itself is looked for in all code.

use std::path::Path;

use anyhow::{Result, anyhow};
use proc_macro2::{TokenStream, TokenTree};
use serde_json::Value;

use super::SourceFile;

/// Folders whose crates may hold unsafe code.
const ALLOWED: &[&str] = &["crates/core", "crates/engine"];

fn allowed(path: &Path) -> bool {
    ALLOWED.iter().any(|folder| path.starts_with(folder))
}

/// Unsafe code in `file`, where none may be.
pub(super) fn check_file(file: &SourceFile) -> Result<Vec<String>> {
    if allowed(&file.path) {
        return Ok(Vec::new());
    }
    let mut lines = Vec::new();
    unsafe_lines(tokens(file)?, &mut lines);
    Ok(lines
        .into_iter()
        .map(|line| file.breach(line, "unsafe code outside core and engine"))
        .collect())
}

/// Roots of crates that do not forbid unsafe code, though they must.
pub(super) fn check_roots(
    workspace: &Path,
    packages: &[&Value],
    files: &[SourceFile],
) -> Result<Vec<String>> {
    let targets = packages.iter().filter_map(|package| package["targets"].as_array()).flatten();
    let mut breaches = Vec::new();
    for root in targets.filter_map(|target| target["src_path"].as_str()) {
        let file = Path::new(root).strip_prefix(workspace).ok();
        let file = file.and_then(|path| files.iter().find(|file| file.path == path));
        let file =
            file.ok_or_else(|| anyhow!("{root} is a crate's root, but git does not know it"))?;
        if !allowed(&file.path) && !forbids_unsafe(tokens(file)?) {
            breaches.push(file.breach(1, "crate root without #![forbid(unsafe_code)]"));
        }
    }
    Ok(breaches)
}

fn tokens(file: &SourceFile) -> Result<TokenStream> {
    file.text.parse().map_err(|error| anyhow!("{}: {error}", file.path.display()))
}

fn unsafe_lines(stream: TokenStream, lines: &mut Vec<usize>) {
    for token in stream {
        match token {
            TokenTree::Ident(ident) if ident == "unsafe" => lines.push(ident.span().start().line),
            TokenTree::Group(group) => unsafe_lines(group.stream(), lines),
            _ => {}
        }
    }
}

fn forbids_unsafe(stream: TokenStream) -> bool {
    let mut before = [String::new(), String::new()];
    for token in stream {
        let text: String = token.to_string().split_whitespace().collect();
        if before == ["#", "!"] && text == "[forbid(unsafe_code)]" {
            return true;
        }
        before = [std::mem::take(&mut before[1]), text];
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> SourceFile {
        SourceFile { path: path.into(), text: text.into() }
    }

    #[test]
    fn finds_blocks_and_attributes_but_not_comments_and_strings() {
        let text = "//! unsafe\nfn f() { unsafe { g() } }\nconst S: &str = \"unsafe\";\n\
                    #[unsafe(no_mangle)]\nfn h() {}\n";
        let breaches = check_file(&file("crates/nbd/src/lib.rs", text)).unwrap();
        assert_eq!(breaches.len(), 2);
        assert!(breaches[0].starts_with("crates/nbd/src/lib.rs:2:"));
        assert!(breaches[1].starts_with("crates/nbd/src/lib.rs:4:"));
        assert!(check_file(&file("crates/engine/src/ring.rs", text)).unwrap().is_empty());
    }

    #[test]
    fn a_root_must_forbid() {
        assert!(forbids_unsafe("//! A.\n#![forbid(unsafe_code)]\nfn f() {}".parse().unwrap()));
        assert!(!forbids_unsafe("//! #![forbid(unsafe_code)]\nfn f() {}".parse().unwrap()));
        assert!(!forbids_unsafe("#![deny(unsafe_code)]".parse().unwrap()));
    }
}
