//! Counts of errors by errno.

use std::sync::OnceLock;

use blockhouse_core::metrics::Counter;

use super::reading::ErrorCount;

/// The number of counted errnos, 0 included. Requests fail with no larger errno of Linux; larger
/// numbers are counted as 0.
const ERRNOS: usize = 134;

/// One thread's counts, which take no memory before the first error.
#[derive(Debug, Default)]
pub(super) struct Errors(OnceLock<Box<[Counter; ERRNOS]>>);

impl Errors {
    pub(super) fn count(&self, errno: i32) {
        let counts = self.0.get_or_init(|| Box::new([const { Counter::new() }; ERRNOS]));
        let index = usize::try_from(errno).ok().filter(|&errno| errno < ERRNOS);
        counts[index.unwrap_or(0)].add(1);
    }

    /// Adds the counts to a list.
    pub(super) fn add_to(&self, all: &mut Vec<ErrorCount>) {
        let counts = self.0.get().into_iter().flat_map(|counts| counts.iter().enumerate());
        for (errno, count) in counts.filter(|(_, count)| count.get() > 0) {
            ErrorCount { errno: errno as i32, count: count.get() }.add_to(all);
        }
    }
}
