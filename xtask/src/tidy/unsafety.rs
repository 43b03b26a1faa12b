//! Rule: unsafe code may only be in the engine, which calls the kernel, in core's buffers, and in
//! the calls of librbd.
//!
//! Every other crate says `#![forbid(unsafe_code)]` in each of its roots (library, binaries, tests,
//! benchmarks, build script), so the compiler enforces the rule there. As a root is easily
//! forgotten, this check also searches all code for the word itself. The library with the calls of
//! librbd cannot forbid unsafe code, and denies it everywhere else.

use std::path::Path;

use anyhow::{Result, anyhow};
use proc_macro2::{TokenStream, TokenTree};
use serde_json::Value;

use super::source_file::SourceFile;

/// Crates whose files may hold unsafe code.
const CRATES: &[&str] = &["crates/core", "crates/engine"];

/// The modules of core that own raw memory: no other file of core may have unsafe code.
const CORE_MODULES: &[&str] = &["buf", "iovector", "shared_copy"];

/// The library with the calls of librbd, and the folder where they are.
const LIBRBD_ROOT: &str = "crates/storage/src/lib.rs";
const LIBRBD_CALLS: &str = "crates/storage/src/rbd/ffi";

fn allowed(path: &Path) -> bool {
    if path.starts_with(LIBRBD_CALLS) {
        return true;
    }
    let Ok(in_core) = path.strip_prefix("crates/core/src") else {
        return CRATES.iter().any(|folder| path.starts_with(folder));
    };
    let module = in_core.iter().next().map(|first| Path::new(first).with_extension(""));
    module.is_some_and(|module| CORE_MODULES.iter().any(|known| module == Path::new(known)))
}

/// Whether the crate of a root may hold unsafe code somewhere.
fn allowed_in_crate(root: &Path) -> bool {
    root == Path::new(LIBRBD_ROOT) || CRATES.iter().any(|folder| root.starts_with(folder))
}

/// Unsafe code in `file`, if the file may have none.
pub(super) fn check_file(file: &SourceFile) -> Result<Vec<String>> {
    if allowed(&file.path) {
        return Ok(Vec::new());
    }
    let mut lines = Vec::new();
    unsafe_lines(tokens(file)?, &mut lines);
    Ok(lines
        .into_iter()
        .map(|line| {
            file.violation(
                line,
                "unsafe code outside of the engine, core's buffers and the calls of librbd",
            )
        })
        .collect())
}

/// Roots of crates that do not forbid unsafe code, though they must.
pub(super) fn check_roots(
    workspace: &Path,
    packages: &[&Value],
    files: &[SourceFile],
) -> Result<Vec<String>> {
    let targets = packages.iter().filter_map(|package| package["targets"].as_array()).flatten();
    let mut violations = Vec::new();
    for root in targets.filter_map(|target| target["src_path"].as_str()) {
        let file = Path::new(root).strip_prefix(workspace).ok();
        let file = file.and_then(|path| files.iter().find(|file| file.path == path));
        let file =
            file.ok_or_else(|| anyhow!("{root} is a crate's root, but git does not know it"))?;
        if !allowed_in_crate(&file.path) && !forbids_unsafe(tokens(file)?) {
            violations.push(file.violation(1, "crate root without #![forbid(unsafe_code)]"));
        }
    }
    Ok(violations)
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
        let violations = check_file(&file("crates/nbd/src/lib.rs", text)).unwrap();
        assert_eq!(violations.len(), 2);
        assert!(violations[0].starts_with("crates/nbd/src/lib.rs:2:"));
        assert!(violations[1].starts_with("crates/nbd/src/lib.rs:4:"));
        let count = |path| check_file(&file(path, text)).unwrap().len();
        assert_eq!(count("crates/engine/src/ring.rs"), 0);
        assert_eq!(count("crates/core/src/buf.rs"), 0);
        assert_eq!(count("crates/core/src/buf/pool.rs"), 0);
        assert_eq!(count("crates/core/benches/shared_copy.rs"), 0);
        assert_eq!(count("crates/core/src/buffers.rs"), 2);
        assert_eq!(count("crates/storage/src/rbd/ffi/image.rs"), 0);
        assert_eq!(count("crates/storage/src/rbd/mod.rs"), 2);
        assert!(allowed_in_crate(Path::new("crates/storage/src/lib.rs")));
        assert!(!allowed_in_crate(Path::new("crates/storage/tests/it/main.rs")));
    }

    #[test]
    fn a_root_must_forbid() {
        assert!(forbids_unsafe("//! A.\n#![forbid(unsafe_code)]\nfn f() {}".parse().unwrap()));
        assert!(!forbids_unsafe("//! #![forbid(unsafe_code)]\nfn f() {}".parse().unwrap()));
        assert!(!forbids_unsafe("#![deny(unsafe_code)]".parse().unwrap()));
    }
}
