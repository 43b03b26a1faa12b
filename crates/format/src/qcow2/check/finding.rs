//! One thing that is wrong with an image, with its figures.

/// A thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Told in words only.
    Words(String),
    /// Bytes that are referred to and lie past the end of the file.
    PastEnd {
        /// Where they begin.
        offset: u64,
        /// How many there are.
        length: u64,
    },
    /// A cluster whose refcount is not the number of its references.
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
