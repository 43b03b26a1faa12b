//! For processors on which the system call filter is not supported.

use anyhow::{Result, bail};

use super::needs::Needs;

/// The number of allowed system calls: 0, because there is no list for this processor.
pub(crate) fn allowed_count(_: Needs) -> usize {
    0
}

/// Fails, because there is no filter for this processor.
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
