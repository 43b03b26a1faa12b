//! `cargo xtask map [WORD]`: which file is about what, as the files themselves say.
//!
//! A line is the path of a Rust file with the first line of its module comment, or of a README.md
//! with its title. A word selects the lines that have it, in any case; several words select the
//! lines that have all of them.

use anyhow::{Result, bail};

use lab_tools::workspace::Workspace;

use crate::tidy::{SourceFile, source_files};

/// Prints the lines that have all words.
pub fn run(workspace: &Workspace, words: &[String]) -> Result<()> {
    let files = source_files(workspace.root())?;
    let lines: Vec<String> =
        files.iter().filter_map(line).filter(|line| has(line, words)).collect();
    if lines.is_empty() {
        bail!("no path and no first line has '{}'", words.join(" "));
    }
    lines.iter().for_each(|line| println!("{line}"));
    Ok(())
}

/// A file's line; `None` for other texts.
fn line(file: &SourceFile) -> Option<String> {
    let mark = match () {
        () if file.is_rust() => "//! ",
        () if file.path.ends_with("README.md") => "# ",
        () => return None,
    };
    let head = file.text.lines().find_map(|line| line.strip_prefix(mark)).unwrap_or_default();
    Some(format!("{}  {head}", file.path.display()))
}

/// Whether a line has all words, in any case.
fn has(line: &str, words: &[String]) -> bool {
    let line = line.to_lowercase();
    words.iter().all(|word| line.contains(&word.to_lowercase()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_the_path_with_the_first_line_of_the_head() {
        let file = |path: &str, text: &str| SourceFile { path: path.into(), text: text.into() };
        let rust = file("crates/a/src/limits.rs", "//! What may be in flight.\n//! More.\n");
        assert_eq!(line(&rust).as_deref(), Some("crates/a/src/limits.rs  What may be in flight."));
        let readme = file("crates/a/README.md", "# The title\n\ntext\n");
        assert_eq!(line(&readme).as_deref(), Some("crates/a/README.md  The title"));
        assert_eq!(line(&file("docs/a.md", "# A page\n")), None);
    }

    #[test]
    fn all_words_select_in_path_or_head_in_any_case() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert!(has("a/limits.rs  The rates of a Disk.", &words("disk LIMITS")));
        assert!(!has("a/limits.rs  The rates of a Disk.", &words("limits image")));
    }
}
