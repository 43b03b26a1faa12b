//! Rule: a type has at most [`MAX_METHODS`] inherent methods, in all files of its crate. A larger
//! type should be split.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::paths::{Tokens, is_for_tests};
use super::source_file::SourceFile;

/// The maximum number of inherent methods of a type.
const MAX_METHODS: usize = 50;

/// A type: the file that declares it, and its name.
type Type<'a> = (&'a Path, String);

/// One line for each type that is too large, or is listed with another number.
pub(super) fn check(files: &[SourceFile]) -> Result<Vec<String>> {
    let mut crates: BTreeMap<PathBuf, Vec<(&SourceFile, Declared)>> = BTreeMap::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        let Some(folder) = crate_of(&file.path) else { continue };
        let tokens: TokenStream =
            file.text.parse().map_err(|error| anyhow!("{}: {error}", file.path.display()))?;
        let mut declared = Declared::default();
        declared.items(tokens);
        crates.entry(folder).or_default().push((file, declared));
    }
    let mut violations = Vec::new();
    for files in crates.values() {
        let counts = count(files);
        violations.extend(counts.into_iter().filter_map(|(of, methods)| judge(&of, methods)));
    }
    Ok(violations)
}

/// The folder of the crate that a file belongs to, if it is not a test.
fn crate_of(path: &Path) -> Option<PathBuf> {
    let parts: Vec<_> = path.iter().collect();
    let src = parts.iter().position(|part| *part == "src")?;
    Some(parts[..src].iter().collect())
}

fn judge((file, name): &Type<'_>, methods: usize) -> Option<String> {
    let file = file.display();
    (methods > MAX_METHODS).then(|| {
        format!(
            "{file}: {name} has {methods} inherent methods, more than {MAX_METHODS}: make it several types"
        )
    })
}

/// The methods of each type of a crate.
fn count<'a>(files: &'a [(&'a SourceFile, Declared)]) -> BTreeMap<Type<'a>, usize> {
    let mut counts = BTreeMap::new();
    for (file, declared) in files {
        for (name, methods) in &declared.methods {
            let declares = files.iter().filter(|(_, other)| other.types.contains(name));
            let own = file.path.parent().unwrap_or(Path::new(""));
            // If several types have the name, the one in the nearest file.
            let common = |(other, _): &&(&SourceFile, Declared)| {
                let is_own = other.path == file.path;
                (is_own, own.iter().zip(&other.path).take_while(|(one, two)| one == two).count())
            };
            let of = declares.max_by_key(common).map_or(&*file.path, |(file, _)| &file.path);
            *counts.entry((of, name.clone())).or_default() += methods;
        }
    }
    counts
}

/// The types that a file declares, and the numbers of inherent methods in it by type.
#[derive(Default)]
struct Declared {
    types: BTreeSet<String>,
    methods: BTreeMap<String, usize>,
}

impl Declared {
    fn items(&mut self, stream: TokenStream) {
        let mut tokens = Tokens::new(stream);
        let mut is_test = false;
        while let Some(token) = tokens.peek() {
            if let Some(attribute) = tokens.attribute() {
                is_test |= is_for_tests(&attribute);
                continue;
            }
            match &token {
                TokenTree::Ident(word) if word == "pub" => {
                    tokens.next();
                    tokens.skip_group(Delimiter::Parenthesis);
                    continue;
                }
                TokenTree::Ident(word) if is_test && word == "mod" => skip_module(&mut tokens),
                _ if is_test => tokens.skip_item(),
                TokenTree::Ident(word) if word == "impl" => self.implementation(&mut tokens),
                TokenTree::Ident(word) if ["struct", "enum", "union"].iter().any(|w| word == w) => {
                    tokens.next();
                    if let Some(TokenTree::Ident(name)) = tokens.next() {
                        self.types.insert(name.to_string());
                    }
                }
                _ => {
                    if let Some(TokenTree::Group(group)) = tokens.next()
                        && group.delimiter() == Delimiter::Brace
                    {
                        self.items(group.stream());
                    }
                }
            }
            is_test = false;
        }
    }

    /// Reads the `impl` that is next; its methods count unless it implements a trait.
    fn implementation(&mut self, tokens: &mut Tokens) {
        tokens.next();
        let (mut depth, mut name, mut is_of_trait) = (0usize, None, false);
        let mut is_bound = false;
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Punct(punct) if punct.as_char() == '<' => depth += 1,
                TokenTree::Punct(punct) if punct.as_char() == '>' => {
                    depth = depth.saturating_sub(1);
                }
                TokenTree::Ident(word) if depth == 0 && word == "for" => is_of_trait = true,
                TokenTree::Ident(word) if depth == 0 && word == "where" => is_bound = true,
                TokenTree::Ident(word) if depth == 0 && !is_bound => name = Some(word.to_string()),
                TokenTree::Group(body) if body.delimiter() == Delimiter::Brace => {
                    if let Some(name) = name.filter(|_| !is_of_trait) {
                        *self.methods.entry(name).or_default() += methods(body.stream());
                    }
                    return;
                }
                _ => {}
            }
        }
    }
}

fn skip_module(tokens: &mut Tokens) {
    while let Some(token) = tokens.next() {
        let is_body =
            matches!(&token, TokenTree::Group(group) if group.delimiter() == Delimiter::Brace);
        if is_body || matches!(&token, TokenTree::Punct(punct) if punct.as_char() == ';') {
            return;
        }
    }
}

/// The number of functions in an `impl` that are not only for tests.
fn methods(body: TokenStream) -> usize {
    let mut tokens = Tokens::new(body);
    let (mut count, mut is_test) = (0, false);
    while let Some(token) = tokens.peek() {
        if let Some(attribute) = tokens.attribute() {
            is_test |= is_for_tests(&attribute);
            continue;
        }
        match token {
            TokenTree::Ident(word) if word == "fn" => {
                count += usize::from(!is_test);
                is_test = false;
                tokens.skip_item();
            }
            _ => _ = tokens.next(),
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(files: &[(&str, &str)]) -> Vec<(String, String, usize)> {
        let read = |(path, text): &(&str, &str)| SourceFile {
            path: path.into(),
            text: (*text).to_owned(),
        };
        let files: Vec<_> = files.iter().map(read).collect();
        let declared = |file: &SourceFile| {
            let mut declared = Declared::default();
            declared.items(file.text.parse().expect("Rust"));
            declared
        };
        let all: Vec<_> = files.iter().map(|file| (file, declared(file))).collect();
        let shown = |((file, name), count): (&Type<'_>, &usize)| {
            (file.display().to_string(), name.clone(), *count)
        };
        count(&all).iter().map(shown).collect()
    }

    #[test]
    fn methods_of_all_files_count_and_those_of_traits_and_tests_do_not() {
        let files = [
            (
                "crates/x/src/a.rs",
                "pub struct A<S: B<C>>(S); impl<S: B<C>> A<S> where S: D { pub(crate) const fn f() {} \
                 async fn g(&self) -> [u8; 2] { fn inner() {} [0; 2] } #[cfg(test)] fn t() {} } \
                 impl<S> Drop for A<S> { fn drop(&mut self) {} } \
                 #[cfg(test)] mod tests { impl super::A<u8> { fn u() {} } }",
            ),
            ("crates/x/src/a/b.rs", "impl<S> crate::a::A<S> { fn h() {} }"),
        ];
        assert_eq!(counted(&files), [("crates/x/src/a.rs".into(), "A".into(), 3)]);
    }

    #[test]
    fn types_of_one_name_are_told_apart() {
        let files = [
            ("crates/x/src/a/mod.rs", "struct State; impl State { fn f() {} }"),
            ("crates/x/src/a/part.rs", "impl State { fn g() {} }"),
            ("crates/x/src/b.rs", "struct State; impl State { fn f() {} }"),
        ];
        let counted: Vec<_> = counted(&files).into_iter().map(|(.., count)| count).collect();
        assert_eq!(counted, [2, 1]);
    }

    #[test]
    fn a_type_that_is_too_large_is_named() {
        let of = (Path::new("crates/x/src/a.rs"), "A".to_owned());
        assert_eq!(judge(&of, MAX_METHODS), None);
        let told = judge(&of, MAX_METHODS + 1).expect("it is too large");
        assert!(told.starts_with("crates/x/src/a.rs: A has 51"), "{told}");
    }
}
