//! For processors on which the system call filter is not supported.

use anyhow::{Result, bail};

use super::needs::Needs;

/// How many system calls are allowed: there is no list.
pub(crate) fn allowed_count(_: Needs) -> usize {
    0
}

/// Puts the filter on all threads.
///
/// # Errors
/// Always.
pub(super) fn restrict(_: Needs) -> Result<()> {
    bail!("there is no list of them for this processor")
}

/// As [`restrict`].
///
/// # Errors
/// Always.
pub(super) fn restrict_further(needs: Needs) -> Result<()> {
    restrict(needs)
}
