//! One fault of an image, with its figures.

/// A fault of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// A fault that is described in words only.
    Words(String),
    /// Bytes past the end of the file to which something refers.
    PastEnd {
        /// Where they begin.
        offset: u64,
        /// How many there are.
        length: u64,
    },
    /// A cluster whose refcount differs from the number of its references.
    Refcount {
        /// Its number in the file.
        cluster: u64,
        /// Its refcount.
        recorded: u64,
        /// How many references it has.
        counted: u64,
    },
    /// An entry whose COPIED flag contradicts the refcount.
    CopiedFlag {
        /// The index of an L1 entry; `None` for an L2 entry.
        l1_index: Option<u64>,
        /// The entry.
        entry: u64,
        /// The refcount that it should agree with.
        refcount: u64,
        /// Whether it agrees with the refcount on disk, which is wrong itself.
        follows: bool,
    },
}
