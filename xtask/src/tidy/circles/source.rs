//! The modules of one crate, and what each of them names.
//!
//! They are read from tokens, and macros are not expanded: a path inside of a macro's arguments
//! counts like any other. Items under `#[cfg(test)]` are left out, and so are the files of modules
//! that are declared under it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

use crate::tidy::paths::{self, Tokens, UseItem};
use crate::tidy::source_file::SourceFile;

/// The names of a module's path, from the crate's root on.
pub(super) type ModulePath = Vec<String>;

/// A path that a module names.
pub(super) struct Mention {
    /// The module in whose scope the path is read; inside of a file it may be an inline module.
    pub scope: ModulePath,
    /// The path as it is written.
    pub path: Vec<String>,
    /// The line in the file, counted from 1.
    pub line: usize,
    /// Whether all names of the path are meant (`use path::*`).
    pub is_glob: bool,
}

/// A file of the crate.
pub(super) struct Module {
    /// Relative to the crate's folder.
    pub file: PathBuf,
    /// The mentions, outside of re-exports.
    pub mentions: Vec<Mention>,
}

/// The modules of a crate.
#[derive(Default)]
pub(super) struct Crate {
    /// Each file that is a module.
    pub modules: BTreeMap<ModulePath, Module>,
    /// The names that a scope has by `use`, public or not, and the path that each stands for.
    pub names: BTreeMap<(ModulePath, String), Vec<String>>,
    /// Inline modules, which have no files.
    pub inline: BTreeSet<ModulePath>,
}

impl Crate {
    /// Reads the crate whose root is the file `root`.
    pub fn parse(root: &Path, files: &[SourceFile]) -> Result<Self> {
        let folder = root.parent().unwrap_or(Path::new(""));
        let mut this = Self::default();
        let mut tests = Vec::new();
        for file in files.iter().filter(|file| file.is_rust()) {
            let Some(path) = module_path(folder, root, &file.path) else { continue };
            let tokens: TokenStream =
                file.text.parse().map_err(|error| anyhow!("{}: {error}", file.path.display()))?;
            let mut reader = Reader { mentions: Vec::new(), tests: Vec::new(), into: &mut this };
            reader.items(tokens, &path);
            let Reader { mentions, tests: more, .. } = reader;
            tests.extend(more);
            let file = file.path.strip_prefix(folder)?.to_owned();
            this.modules.insert(path, Module { file, mentions });
        }
        this.modules.retain(|path, _| !tests.iter().any(|test| path.starts_with(test)));
        Ok(this)
    }
}

/// The module that `file` is in the crate of `root`.
fn module_path(folder: &Path, root: &Path, file: &Path) -> Option<ModulePath> {
    let inside = file.strip_prefix(folder).ok()?.with_extension("");
    let mut path: ModulePath =
        inside.iter().map(|name| name.to_str().map(str::to_owned)).collect::<Option<_>>()?;
    if file == root {
        return Some(Vec::new());
    }
    match path.last().map(String::as_str) {
        Some("mod") => _ = path.pop(),
        // The root of another crate in the same folder.
        Some("lib" | "main") => return None,
        _ if path.first().is_some_and(|first| first == "bin") => return None,
        _ => {}
    }
    Some(path)
}

struct Reader<'a> {
    mentions: Vec<Mention>,
    /// Modules in separate files that are declared for tests only.
    tests: Vec<ModulePath>,
    into: &'a mut Crate,
}

impl Reader<'_> {
    /// Reads the items in `scope`.
    fn items(&mut self, stream: TokenStream, scope: &ModulePath) {
        let mut tokens = Tokens::new(stream);
        let (mut is_test, mut is_public) = (false, false);
        while let Some(token) = tokens.peek() {
            if let Some(attribute) = tokens.attribute() {
                is_test |= paths::is_for_tests(&attribute);
                continue;
            }
            match token {
                TokenTree::Ident(ident) if ident == "pub" => {
                    tokens.next();
                    tokens.skip_group(Delimiter::Parenthesis);
                    is_public = true;
                    continue;
                }
                TokenTree::Ident(ident) if ident == "use" && !tokens.is_capture() => {
                    let line = ident.span().start().line;
                    let items = tokens.use_items();
                    if !is_test {
                        items
                            .into_iter()
                            .for_each(|item| self.imported(scope, item, is_public, line));
                    }
                }
                TokenTree::Ident(ident) if ident == "mod" => {
                    self.module(&mut tokens, scope, is_test)
                }
                _ if is_test => tokens.skip_item(),
                _ => self.anything(&mut tokens, scope),
            }
            (is_test, is_public) = (false, false);
        }
    }

    fn imported(&mut self, scope: &ModulePath, item: UseItem, is_public: bool, line: usize) {
        if let Some(name) = item.name {
            self.into.names.insert((scope.clone(), name), item.path.clone());
        }
        if !is_public {
            let UseItem { path, is_glob, .. } = item;
            self.mentions.push(Mention { scope: scope.clone(), path, line, is_glob });
        }
    }

    fn module(&mut self, tokens: &mut Tokens, scope: &ModulePath, is_test: bool) {
        tokens.next();
        let Some(TokenTree::Ident(name)) = tokens.next() else { return };
        let path: ModulePath = scope.iter().cloned().chain([name.to_string()]).collect();
        match tokens.next() {
            Some(TokenTree::Group(body)) if !is_test => {
                self.into.inline.insert(path.clone());
                self.items(body.stream(), &path);
            }
            Some(TokenTree::Punct(_)) if is_test => self.tests.push(path),
            _ => {}
        }
    }

    /// One token, group or path of an item.
    fn anything(&mut self, tokens: &mut Tokens, scope: &ModulePath) {
        if let Some((path, line)) = tokens.path() {
            self.mentions.push(Mention { scope: scope.clone(), path, line, is_glob: false });
            return;
        }
        // A block's imports hold only in the block. Here they hold in the whole scope, which finds
        // too many arrows rather than too few.
        if let Some(TokenTree::Group(group)) = tokens.next() {
            self.items(group.stream(), scope);
        }
    }
}
