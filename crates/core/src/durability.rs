//! The durability that a caller may ask of a write, and that a storage can give.
//!
//! The two guarantees, datasync and full sync, are different and never stand in for one another:
//! `open(2)` calls them `O_DSYNC` and `O_SYNC`, POSIX "synchronized I/O data integrity completion"
//! and "file integrity completion".

/// The data that must be on stable storage when a write (or zero write, or discard) completes. A
/// greater value includes all that a lesser one guarantees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Durability {
    /// Nothing: the data may sit in a volatile cache until the next flush.
    #[default]
    None,
    /// The data and what is needed to read it back. Guests and NBD call this FUA.
    Data,
    /// As `Data`, and all other metadata of the file (timestamps and the like). FUA alone never
    /// suffices for it.
    Full,
}

impl Durability {
    /// The flush that makes an operation of this durability stable if the operation itself did not;
    /// `None` if none is needed.
    pub const fn sync(self) -> Option<SyncMode> {
        match self {
            Self::None => None,
            Self::Data => Some(SyncMode::Data),
            Self::Full => Some(SyncMode::Full),
        }
    }
}

/// How far a flush goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SyncMode {
    /// `fdatasync(2)`: all completed writes and what is needed to read them back.
    Data,
    /// `fsync(2)`: as `Data`, and all other metadata of the file.
    Full,
}

/// How a storage makes a single write durable. Found out per file, at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fua {
    /// The durability travels with the write: one request.
    Native,
    /// A single write cannot be: it takes a write and then a flush, which the caller makes.
    Emulated,
    /// The storage has no stable place at all (`--cache unsafe`): durability is not kept.
    Ignored,
}

impl Fua {
    /// The word for it in listings and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Emulated => "emulated",
            Self::Ignored => "none",
        }
    }
}
