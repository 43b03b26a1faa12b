//! Rule: no words that mark unfinished work. A missing feature has no code, and an error says so.

use super::source_file::SourceFile;

/// The words, in two halves, so that this file passes its own check.
const BANNED: &[(&str, &str)] = &[
    ("todo", "!"),
    ("unimplemented", "!"),
    ("FIX", "ME"),
    ("TO", "DO"),
    ("for ", "now"),
    ("simpli", "fied"),
];

pub(super) fn check(file: &SourceFile) -> Vec<String> {
    let banned: Vec<String> = BANNED.iter().map(|(head, tail)| format!("{head}{tail}")).collect();
    let mut violations = Vec::new();
    for (index, line) in file.text.lines().enumerate() {
        for word in &banned {
            if contains_word(line, word) {
                violations.push(file.violation(index + 1, format_args!("says \"{word}\"")));
            }
        }
    }
    violations
}

/// Whether `line` has `word` as a whole word.
fn contains_word(line: &str, word: &str) -> bool {
    let in_word = |character: char| character.is_alphanumeric() || character == '_';
    line.match_indices(word).any(|(start, found)| {
        let before = line[..start].chars().next_back();
        let after = line[start + found.len()..].chars().next();
        let open_ended = found.ends_with('!');
        !before.is_some_and(in_word) && (open_ended || !after.is_some_and(in_word))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_words_but_not_parts_of_words() {
        assert!(contains_word("// good enough for nobody, for one", "for one"));
        assert!(contains_word("    later!(\"x\")", "later!"));
        assert!(!contains_word("for once", "for on"));
        assert!(!contains_word("therefor one", "for one"));
    }

    #[test]
    fn names_file_and_line() {
        let text = format!("//! A file.\n// {}{}: more\n", "FIX", "ME");
        let file = SourceFile { path: "a.rs".into(), text };
        assert_eq!(check(&file).len(), 1);
        assert!(check(&file)[0].starts_with("a.rs:2: "));
    }
}
