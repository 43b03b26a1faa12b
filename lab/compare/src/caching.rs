//! The host's page cache in a measurement.

/// How a server treats the host's page cache. Only servers that treat it alike are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// Reads come from the device.
    Direct,
    /// Bytes that were read or written before are in memory.
    Cached,
    /// There is no storage.
    Null,
}
