//! Rule: comments are no wider than code.

use super::source_file::SourceFile;

/// Columns, as `max_width` in rustfmt.toml; rustfmt does not wrap comments.
const MAX_WIDTH: usize = 100;

pub(super) fn check(file: &SourceFile) -> Vec<String> {
    let lines = file.text.lines().enumerate().filter(|(_, line)| is_too_wide(line));
    lines.map(|(index, _)| file.violation(index + 1, "a comment that is wider than code")).collect()
}

/// Whether a comment line is too wide. Rows of tables and examples of one line are exempt, because
/// they cannot be wrapped.
fn is_too_wide(line: &str) -> bool {
    let comment = line.trim_start();
    let Some(text) = comment.strip_prefix("//") else { return false };
    let text = text.trim_start_matches(['/', '!']).trim_start();
    line.chars().count() > MAX_WIDTH && !text.contains(" | ") && !text.starts_with(['{', '|'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_are_as_wide_as_code_and_tables_as_they_need() {
        let words = "word ".repeat(25);
        assert!(is_too_wide(&format!("    /// {words}")));
        assert!(!is_too_wide(&format!("//! | {words} | {words} |")));
        assert!(!is_too_wide(&format!("let text = \"{words}\";")));
        assert!(!is_too_wide("// short"));
    }
}
