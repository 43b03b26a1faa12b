//! Paths, `use` trees and attributes among tokens.

use std::collections::VecDeque;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// The meaning of one name of a `use` tree.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct UseItem {
    /// The full path, without the `*`.
    pub path: Vec<String>,
    /// The name in the importing scope; `None` for `*` and `_`.
    pub name: Option<String>,
    /// Whether all names of the path are imported.
    pub is_glob: bool,
}

/// Tokens of one level, read from the front.
pub(super) struct Tokens {
    rest: VecDeque<TokenTree>,
}

impl Tokens {
    pub fn new(stream: TokenStream) -> Self {
        Self { rest: stream.into_iter().collect() }
    }

    pub fn peek(&self) -> Option<TokenTree> {
        self.rest.front().cloned()
    }

    pub fn next(&mut self) -> Option<TokenTree> {
        self.rest.pop_front()
    }

    fn is_punct(&self, index: usize, char: char) -> bool {
        matches!(self.rest.get(index), Some(TokenTree::Punct(punct)) if punct.as_char() == char)
    }

    fn is_path_separator(&self) -> bool {
        self.is_punct(0, ':') && self.is_punct(1, ':')
    }

    /// Skips a group with these delimiters, if it is next.
    pub fn skip_group(&mut self, delimiter: Delimiter) {
        if matches!(self.rest.front(), Some(TokenTree::Group(group)) if group.delimiter() == delimiter)
        {
            self.next();
        }
    }

    /// The content of `#[...]`, or nothing for `#![...]`, if one of them is next.
    pub fn attribute(&mut self) -> Option<TokenStream> {
        if !self.is_punct(0, '#') {
            return None;
        }
        let at = if self.is_punct(1, '!') { 2 } else { 1 };
        match self.rest.get(at) {
            Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Bracket => {
                let stream = if at == 1 { group.stream() } else { TokenStream::new() };
                self.rest.drain(..=at);
                Some(stream)
            }
            _ => None,
        }
    }

    /// Skips an item, a field or a statement: to its `;`, its `{}` or, unless it begins like an
    /// item with generic parameters, its `,`.
    pub fn skip_item(&mut self) {
        let is_item = matches!(self.rest.front(), Some(TokenTree::Ident(ident)) if [
            "fn", "impl", "struct", "enum", "trait", "const", "static", "type", "unsafe", "async", "extern",
        ].iter().any(|keyword| ident == keyword));
        while let Some(token) = self.next() {
            match token {
                TokenTree::Punct(punct) if punct.as_char() == ';' => return,
                TokenTree::Punct(punct) if punct.as_char() == ',' && !is_item => return,
                TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => return,
                _ => {}
            }
        }
    }

    /// A path of two or more names and its line, if one begins here. The path does not include
    /// names after a `.` and in generic arguments.
    pub fn path(&mut self) -> Option<(Vec<String>, usize)> {
        let Some(TokenTree::Ident(first)) = self.rest.front() else { return None };
        let line = first.span().start().line;
        if !(matches!(self.rest.get(1), Some(TokenTree::Punct(punct)) if punct.as_char() == ':')
            && self.is_punct(2, ':'))
        {
            return None;
        }
        let mut path = vec![first.to_string()];
        self.next();
        while self.is_path_separator() {
            let Some(TokenTree::Ident(name)) = self.rest.get(2) else { break };
            path.push(name.to_string());
            self.rest.drain(..3);
        }
        // The part after `::<` is a separate path.
        Some((path, line))
    }

    /// Whether the `use` that is next lists the lifetimes that a type captures (`use<...>`).
    pub fn is_capture(&self) -> bool {
        self.is_punct(1, '<')
    }

    /// The items of the `use` declaration that is next, with its `;`.
    pub fn use_items(&mut self) -> Vec<UseItem> {
        self.next();
        let mut tree = Vec::new();
        while let Some(token) = self.next() {
            if matches!(&token, TokenTree::Punct(punct) if punct.as_char() == ';') {
                break;
            }
            tree.push(token);
        }
        let mut items = Vec::new();
        use_tree(&tree, &[], &mut items);
        items
    }
}

/// Reads one tree: `a::b`, `a::b as c`, `a::*`, `a::{...}`.
fn use_tree(tree: &[TokenTree], before: &[String], items: &mut Vec<UseItem>) {
    let mut path = before.to_vec();
    let mut alias = None;
    let mut after_as = false;
    for token in tree {
        match token {
            TokenTree::Ident(ident) if after_as => alias = Some(ident.to_string()),
            TokenTree::Ident(ident) if ident == "as" => after_as = true,
            TokenTree::Ident(ident) => path.push(ident.to_string()),
            TokenTree::Punct(punct) if punct.as_char() == '*' => {
                items.push(UseItem { path, name: None, is_glob: true });
                return;
            }
            // `as _`
            TokenTree::Punct(punct) if punct.as_char() == '_' => {}
            TokenTree::Group(group) => {
                let parts: Vec<TokenTree> = group.stream().into_iter().collect();
                let is_comma =
                    |t: &TokenTree| matches!(t, TokenTree::Punct(punct) if punct.as_char() == ',');
                parts.split(is_comma).filter(|part| !part.is_empty()).for_each(|part| {
                    use_tree(part, &path, items);
                });
                return;
            }
            _ => {}
        }
    }
    if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
        path.pop();
    }
    let name = alias.or_else(|| path.last().cloned()).filter(|name| name != "_");
    items.push(UseItem { path, name, is_glob: false });
}

/// Whether the content of an attribute is a `cfg` that holds only in tests.
pub(super) fn is_for_tests(attribute: &TokenStream) -> bool {
    let mut tokens = attribute.clone().into_iter();
    let is_cfg = matches!(tokens.next(), Some(TokenTree::Ident(ident)) if ident == "cfg");
    match tokens.next() {
        Some(TokenTree::Group(condition)) if is_cfg => needs_test(condition.stream()),
        _ => false,
    }
}

/// Whether a condition holds only in tests: `test`, or `all(...)` with such a part.
fn needs_test(condition: TokenStream) -> bool {
    let tokens: Vec<TokenTree> = condition.into_iter().collect();
    tokens.iter().enumerate().any(|(index, token)| match (token, tokens.get(index + 1)) {
        (TokenTree::Ident(ident), Some(TokenTree::Group(parts))) if ident == "all" => {
            needs_test(parts.stream())
        }
        (TokenTree::Ident(ident), _) => ident == "test",
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn items(text: &str) -> Vec<(String, Option<String>)> {
        let found = Tokens::new(text.parse().unwrap()).use_items();
        found.into_iter().map(|item| (item.path.join("::"), item.name)).collect()
    }

    #[test]
    fn use_trees_are_taken_apart() {
        let name = |text: &str| Some(text.to_owned());
        assert_eq!(items("use a;"), [("a".into(), name("a"))]);
        assert_eq!(
            items("use crate::a::{self, b as c, d::{E, F}, g::*, H as _};"),
            [
                ("crate::a".into(), name("a")),
                ("crate::a::b".into(), name("c")),
                ("crate::a::d::E".into(), name("E")),
                ("crate::a::d::F".into(), name("F")),
                ("crate::a::g".into(), None),
                ("crate::a::H".into(), None),
            ]
        );
    }

    #[test]
    fn only_conditions_that_need_tests_are_for_tests() {
        let verdict = |text: &str| is_for_tests(&text.parse().unwrap());
        assert!(verdict("cfg(test)"));
        assert!(verdict("cfg(all(test, not(loom)))"));
        assert!(!verdict("cfg(not(test))"));
        assert!(!verdict("cfg(any(test, loom))"));
        assert!(!verdict("cfg_attr(test, allow(dead_code))"));
        assert!(!verdict("test"));
    }
}
