//! The durability that a caller may ask of a write, and that a storage can give.
//!
//! Of the two guarantees, full sync includes datasync, and datasync does not replace full sync.
//! `open(2)` calls them `O_DSYNC` and `O_SYNC`, POSIX "synchronized I/O data integrity completion"
//! and "file integrity completion".

/// The data that must be on stable storage when a write (or zero write, or discard) completes. A
/// greater value includes all that a lesser one guarantees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Durability {
    /// Nothing: the data may sit in a volatile cache until the next flush.
    #[default]
    None,
    /// The data, and the metadata needed to read it back. Guests and NBD call this FUA.
    Data,
    /// As `Data`, and all other metadata of the file (timestamps and the like). FUA alone never
    /// gives this.
    Full,
}

impl Durability {
    /// The flush that an operation of this durability needs if the operation itself is not durable;
    /// `None` if it needs no flush.
    pub const fn sync(self) -> Option<SyncMode> {
        match self {
            Self::None => None,
            Self::Data => Some(SyncMode::Data),
            Self::Full => Some(SyncMode::Full),
        }
    }
}

/// The depth of a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SyncMode {
    /// `fdatasync(2)`: all completed writes, and the metadata needed to read them back.
    Data,
    /// `fsync(2)`: as `Data`, and all other metadata of the file.
    Full,
}

/// How a storage makes a single write durable. Detected at run time for each file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fua {
    /// The write itself carries the durability: one request.
    Native,
    /// A write cannot carry it: the caller sends a flush after the write.
    Emulated,
    /// Durability is ignored (`--cache unsafe`): the storage makes nothing durable.
    Ignored,
}

impl Fua {
    /// The name of this variant in listings and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Emulated => "emulated",
            Self::Ignored => "none",
        }
    }
}
