//! A text file of the checkout, and violations in it.

use std::path::PathBuf;

/// A text file of the checkout.
pub(crate) struct SourceFile {
    /// Relative to the workspace's root.
    pub path: PathBuf,
    pub text: String,
}

impl SourceFile {
    pub fn is_rust(&self) -> bool {
        self.path.extension().is_some_and(|extension| extension == "rs")
    }

    pub fn lines(&self) -> usize {
        self.text.lines().count()
    }

    /// A violation of a rule at `line`, counted from 1.
    pub fn violation(&self, line: usize, what: impl std::fmt::Display) -> String {
        format!("{}:{line}: {what}", self.path.display())
    }
}
