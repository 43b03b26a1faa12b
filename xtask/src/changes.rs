//! The packages that a change affects: those whose code differs from the last commit that passed
//! every step, and those that depend on them. Comments and unit tests of a Rust file do not count,
//! because the test step is never left out, and no package depends on the tests of another.
//!
//! `.ci/proven` names that commit; a run that leaves no step out writes it. If git cannot compare
//! with it, or if a file outside of all packages differs that affects their build, everything
//! counts as changed: a step is left out only if its result is known to be the same.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};
use serde_json::Value;

use lab_tools::process::stdout_of;
use lab_tools::workspace::Workspace;

const PROVEN: &str = ".ci/proven";
/// The name for the files of `fuzz/`, whose package is not a member of the workspace.
const FUZZ: &str = "blockhouse-fuzz";
/// The name for the manifests of all packages, as a package of their own.
pub const MANIFESTS: &str = "Cargo.toml";
/// Files and folders that do not affect the behaviour of any package.
const WITHOUT_CODE: &[&str] =
    &["docs/", "contrib/", "README.md", "ARCHITECTURE.md", "CHANGELOG.md"];
const ALSO_WITHOUT_CODE: &[&str] =
    &["CONTRIBUTING.md", "LICENSE-", ".gitignore", PROVEN, "lab/results/"];

/// The difference to the last commit that passed every step.
pub enum Changes {
    /// No comparison is possible, or none is wanted. The text is the reason.
    Everything(String),
    /// The packages that differ from `commit`, with all that depend on them.
    Packages { commit: String, names: BTreeSet<String> },
}

impl Changes {
    /// Compares the work tree, untracked files included, with the commit in `.ci/proven`.
    pub fn since_proven(workspace: &Workspace) -> Self {
        match Self::compare(workspace) {
            Ok(changes) => changes,
            Err(error) => Self::Everything(format!("{error:#}")),
        }
    }

    fn compare(workspace: &Workspace) -> Result<Self> {
        let commit = std::fs::read_to_string(workspace.root().join(PROVEN))
            .with_context(|| format!("cannot read {PROVEN}"))?
            .trim()
            .to_owned();
        let mut paths = git(workspace, &["diff", "--name-only", &commit, "--"])?;
        paths.push_str(&git(workspace, &["ls-files", "--others", "--exclude-standard"])?);
        let mut names = BTreeSet::new();
        let differs =
            |path: &&str| !is_without_code(path) && !is_same_code(workspace, &commit, path);
        for path in paths.lines().filter(differs) {
            names.extend(path.ends_with(MANIFESTS).then(|| MANIFESTS.to_owned()));
            match package_of(path, workspace.root(), workspace.packages()) {
                Some(name) => _ = names.insert(name),
                None => return Ok(Self::Everything(format!("{path} has changed"))),
            }
        }
        add_dependents(&mut names, workspace.packages());
        Ok(Self::Packages { commit, names })
    }

    /// Returns whether a step that tests `packages` has to run.
    pub fn reach(&self, packages: &[&str]) -> bool {
        match self {
            Self::Everything(_) => true,
            Self::Packages { names, .. } => packages.iter().any(|name| names.contains(*name)),
        }
    }
}

/// Writes the current commit into `.ci/proven`, if the work tree is that commit.
pub fn note_proven(workspace: &Workspace) -> Result<()> {
    if !git(workspace, &["status", "--porcelain"])?.is_empty() {
        println!("ci: {PROVEN} stays as it is: the work tree differs from its commit");
        return Ok(());
    }
    let commit = git(workspace, &["rev-parse", "HEAD"])?;
    std::fs::write(workspace.root().join(PROVEN), commit)
        .with_context(|| format!("cannot write {PROVEN}"))
}

fn git(workspace: &Workspace, args: &[&str]) -> Result<String> {
    let mut git = Command::new("git");
    git.args(args).current_dir(workspace.root());
    stdout_of(git)
}

fn is_without_code(path: &str) -> bool {
    let mut all = WITHOUT_CODE.iter().chain(ALSO_WITHOUT_CODE);
    let is_test =
        path.starts_with("crates/") && (path.contains("/tests/") || path.ends_with("/tests.rs"));
    is_test || path.ends_with("/README.md") || all.any(|start| path.starts_with(start))
}

/// Whether a Rust file has the same code as at `commit`.
fn is_same_code(workspace: &Workspace, commit: &str, path: &str) -> bool {
    if !path.ends_with(".rs") {
        return false;
    }
    let mut show = Command::new("git");
    // A new file does not exist in `commit`, which is not an error.
    show.arg("show").arg(format!("{commit}:{path}")).current_dir(workspace.root());
    let before = show.output().ok().filter(|output| output.status.success());
    let before = before.and_then(|output| String::from_utf8(output.stdout).ok());
    let now = std::fs::read_to_string(workspace.root().join(path)).ok();
    before.zip(now).is_some_and(|(before, now)| {
        code_of(&before).zip(code_of(&now)).is_some_and(|(before, now)| before == now)
    })
}

/// The tokens of a Rust file without its comments and its unit tests; `None` if the text cannot be
/// parsed.
fn code_of(text: &str) -> Option<String> {
    Some(without_comments_and_tests(text.parse().ok()?).to_string())
}

/// Doc comments are attributes: `#[doc = "..."]`. Unit tests are modules behind `#[cfg(test)]`.
fn without_comments_and_tests(tokens: TokenStream) -> TokenStream {
    let mut kept: Vec<TokenTree> = Vec::new();
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        let TokenTree::Group(group) = token else {
            kept.push(token);
            continue;
        };
        let attribute = attribute(&kept, &group).unwrap_or_default();
        let is_module = |next: &TokenTree| matches!(next, TokenTree::Ident(word) if word == "mod");
        let is_test = attribute == "cfg (test)" && tokens.peek().is_some_and(is_module);
        if is_test || attribute.starts_with("doc =") {
            kept.pop_if(|last| is_mark(last, '!'));
            kept.pop();
        } else {
            let inside = without_comments_and_tests(group.stream());
            kept.push(Group::new(group.delimiter(), inside).into());
        }
        if is_test {
            tokens.by_ref().find(ends_module);
        }
    }
    kept.into_iter().collect()
}

/// The text of an attribute: a group in brackets behind `#` or `#!`.
fn attribute(before: &[TokenTree], group: &Group) -> Option<String> {
    let is_marked = match before {
        [.., hash, mark] if is_mark(mark, '!') => is_mark(hash, '#'),
        [.., hash] => is_mark(hash, '#'),
        [] => false,
    };
    (is_marked && group.delimiter() == Delimiter::Bracket).then(|| group.stream().to_string())
}

fn is_mark(token: &TokenTree, mark: char) -> bool {
    matches!(token, TokenTree::Punct(found) if found.as_char() == mark)
}

/// Whether this is the body of a module, or the semicolon of one in another file.
fn ends_module(token: &TokenTree) -> bool {
    match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        TokenTree::Punct(mark) => mark.as_char() == ';',
        _ => false,
    }
}

/// The package that has the file at `path`, a path from `root` on.
fn package_of(path: &str, root: &Path, packages: &[Value]) -> Option<String> {
    if path.starts_with("fuzz/") {
        return Some(FUZZ.to_owned());
    }
    let file = root.join(path);
    let of_file = packages.iter().filter_map(|package| {
        let folder = Path::new(package["manifest_path"].as_str()?).parent()?;
        let name = package["name"].as_str()?;
        file.starts_with(folder).then(|| (folder.as_os_str().len(), name.to_owned()))
    });
    of_file.max().map(|(_, name)| name)
}

/// Adds each package that uses one of `names` in other code than its own tests.
fn add_dependents(names: &mut BTreeSet<String>, packages: &[Value]) {
    loop {
        let before = names.len();
        for package in packages {
            let dependencies = package["dependencies"].as_array().map_or(&[][..], Vec::as_slice);
            let uses_one = dependencies.iter().any(|dependency| {
                let name = dependency["name"].as_str().unwrap_or_default();
                dependency["kind"] != "dev" && names.contains(name)
            });
            if uses_one {
                names.extend(package["name"].as_str().map(str::to_owned));
            }
        }
        if names.len() == before {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn packages() -> Vec<Value> {
        let uses = |name: &str, kind: Option<&str>| json!([{ "name": name, "kind": kind }]);
        vec![
            json!({ "name": "low", "manifest_path": "/w/crates/low/Cargo.toml", "dependencies": [] }),
            json!({ "name": "high", "manifest_path": "/w/crates/high/Cargo.toml",
                    "dependencies": uses("low", None) }),
            json!({ "name": "apart", "manifest_path": "/w/crates/apart/Cargo.toml",
                    "dependencies": uses("low", Some("dev")) }),
        ]
    }

    #[test]
    fn a_change_reaches_the_packages_that_depend_on_it_but_not_through_their_tests() {
        let mut names = BTreeSet::from(["low".to_owned()]);
        add_dependents(&mut names, &packages());
        assert_eq!(names, BTreeSet::from(["low".to_owned(), "high".to_owned()]));
    }

    #[test]
    fn a_file_belongs_to_the_package_of_its_folder() {
        let of = |path| package_of(path, Path::new("/w"), &packages());
        assert_eq!(of("crates/low/src/lib.rs").as_deref(), Some("low"));
        assert_eq!(of("crates/lower/src/lib.rs"), None);
        assert_eq!(of("fuzz/targets/a.rs").as_deref(), Some(FUZZ));
        assert_eq!(of("Cargo.lock"), None);
    }

    #[test]
    fn texts_reach_nothing() {
        assert!(is_without_code("docs/a.md"));
        assert!(is_without_code("crates/low/README.md"));
        assert!(is_without_code("crates/low/tests/it/main.rs"));
        assert!(!is_without_code("tests/src/lib.rs"));
        assert!(!is_without_code("Cargo.lock"));
    }

    #[test]
    fn comments_and_unit_tests_do_not_count() {
        let old = "//! A.\n/// B.\nfn f() {\n    // C.\n    g(\"// D\");\n}\n";
        let worded = "//! E.\n//! E.\n/// F.\nfn f() { g(\"// D\"); /* H */ }\n";
        assert_eq!(code_of(old), code_of(worded));
        assert_eq!(
            code_of(old),
            code_of(&format!("{old}#[cfg(test)]\nmod tests {{ fn t() {{}} }}"))
        );
        assert_eq!(code_of(old), code_of(&format!("#[cfg(test)]\nmod tests;\n{old}")));
        let fields = |b| format!("struct S {{ #[cfg(test)] a: u8, b: {b} }}");
        assert_ne!(code_of(&fields("u8")), code_of(&fields("u16")));
        let arguments = |b| format!("fn f() {{ g(doc, {b}); h![cfg(test)] }}");
        assert_ne!(code_of(&arguments("1")), code_of(&arguments("2")));
        assert_ne!(code_of(old), code_of("//! A.\n/// B.\nfn f() { g(\"// E\"); }\n"));
        assert_eq!(code_of("fn f( {"), None);
    }
}
