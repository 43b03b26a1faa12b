//! The counts of explorations.

/// The counts of an exploration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Seeds that were explored, as [`for_seeds`](crate::for_seeds) counts them.
    pub seeds: u64,
    /// Requests that completed.
    pub requests: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Requests whose future was dropped.
    pub cancelled: u64,
    /// Crashes that were checked.
    pub crashes: u64,
    /// Processes that died and were followed by another one.
    pub deaths: u64,
}

impl Report {
    /// The sum of two reports.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            seeds: self.seeds + other.seeds,
            requests: self.requests + other.requests,
            failed: self.failed + other.failed,
            cancelled: self.cancelled + other.cancelled,
            crashes: self.crashes + other.crashes,
            deaths: self.deaths + other.deaths,
        }
    }
}
