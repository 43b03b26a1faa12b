//! Rule: every public item is used somewhere. The compiler finds unused private items; it cannot
//! know whether another crate uses a public one.
//!
//! A name counts as used if it is a word of any Rust file besides its declaration and its
//! re-exports: in code or in a string, not in comments. So an item that passes is used, or shares
//! its name with another.

use std::collections::HashMap;

use anyhow::{Result, anyhow};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::source_file::SourceFile;

/// Words that declare what follows them.
const DECLARING: [&str; 8] = ["fn", "struct", "enum", "union", "trait", "type", "const", "static"];

/// One line for each declaration that nothing uses.
pub(super) fn check(files: &[SourceFile]) -> Result<Vec<String>> {
    let mut uses: HashMap<String, usize> = HashMap::new();
    let mut declarations = Vec::new();
    for file in files.iter().filter(|file| file.is_rust()) {
        let tokens: TokenStream =
            file.text.parse().map_err(|error| anyhow!("{}: {error}", file.path.display()))?;
        let mut found = Vec::new();
        read(tokens, &mut uses, &mut found);
        declarations.extend(found.into_iter().map(|found| (file, found)));
    }
    let unused = declarations.into_iter().filter(|(_, (name, _))| uses[name] == 1);
    Ok(unused
        .map(|(file, (name, line))| file.violation(line, format_args!("nothing uses {name}")))
        .collect())
}

/// Counts words, and collects public declarations with their lines.
fn read(
    stream: TokenStream,
    uses: &mut HashMap<String, usize>,
    declarations: &mut Vec<(String, usize)>,
) {
    let tokens: Vec<TokenTree> = stream.into_iter().collect();
    let is_word = |index: usize, word: &str| matches!(tokens.get(index), Some(TokenTree::Ident(ident)) if ident == word);
    let (mut is_public, mut is_export) = (false, false);
    for (index, token) in tokens.iter().enumerate() {
        is_export |= is_public && is_word(index, "use");
        match token {
            TokenTree::Punct(punct) if punct.as_char() == ';' => {
                (is_public, is_export) = (false, false);
            }
            _ if is_export => {}
            TokenTree::Ident(ident) => {
                let name = ident.to_string();
                let declares = index > 0 && DECLARING.iter().any(|word| is_word(index - 1, word));
                // In `const fn`, `fn` is not the declared name.
                if declares && is_public && !DECLARING.contains(&name.as_str()) {
                    declarations.push((name.clone(), ident.span().start().line));
                    is_public = false;
                }
                is_public |= name == "pub";
                *uses.entry(name).or_default() += 1;
            }
            TokenTree::Literal(literal) => {
                let text = literal.to_string();
                let words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
                words.for_each(|word| *uses.entry(word.to_owned()).or_default() += 1);
            }
            TokenTree::Group(group) if is_comment(group.stream()) => {}
            TokenTree::Group(group) => {
                // Parentheses keep `pub` in effect: those of a tuple struct and of `pub(crate)`
                // declare nothing.
                is_public &= group.delimiter() == Delimiter::Parenthesis;
                read(group.stream(), uses, declarations);
            }
            TokenTree::Punct(_) => {}
        }
    }
}

/// Whether the content of an attribute is a doc comment.
fn is_comment(stream: TokenStream) -> bool {
    matches!(stream.into_iter().next(), Some(TokenTree::Ident(first)) if first == "doc")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nothing_names_is_found() {
        let file = |path: &str, text: &str| SourceFile { path: path.into(), text: text.into() };
        let files = [
            file(
                "a.rs",
                "/// Like [`lost`].\npub const fn lost() {}\npub(crate) struct Used;\n\
                 impl Used { pub async fn gone(&self) {} pub fn kept() {} fn private() {} }\n\
                 pub struct Fields { pub field: u8 }\npub const SHOWN: u8 = 1;\n#[test]\nfn a_test() {}\n",
            ),
            file(
                "b.rs",
                "pub use crate::a::lost;\nuse crate::a::{Fields, Used};\nfn f() { Used::kept(); g!(\"{SHOWN}\") }\n",
            ),
        ];
        let found = check(&files).expect("Rust");
        assert_eq!(found, ["a.rs:2: nothing uses lost", "a.rs:4: nothing uses gone"]);
    }
}
