//! What the host's page cache has to do with a measurement.

/// How a server treats the host's page cache; only like is compared with like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// What is read comes from the device.
    Direct,
    /// What was read or written before is in memory.
    Cached,
    /// There is no storage.
    Null,
}
