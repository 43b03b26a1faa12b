//! One fault of an image, with its figures.

/// A fault of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// A fault that is described in words only.
    Words(String),
    /// Bytes past the end of the file to which something refers.
    PastEnd {
        /// The offset of the first byte in the file.
        offset: u64,
        /// The number of bytes.
        length: u64,
    },
    /// A cluster whose refcount differs from the number of its references.
    Refcount {
        /// The number of the cluster in the file.
        cluster: u64,
        /// The refcount of the cluster on disk.
        recorded: u64,
        /// The number of references to the cluster.
        counted: u64,
    },
    /// An entry whose COPIED flag contradicts the refcount.
    CopiedFlag {
        /// The index of an L1 entry; `None` for an L2 entry.
        l1_index: Option<u64>,
        /// The entry.
        entry: u64,
        /// The refcount that the flag contradicts; the one on disk if it contradicts both.
        refcount: u64,
        /// Which refcount the flag contradicts.
        contradicts: Refcounts,
    },
}

/// The refcounts of a cluster that the flag of an entry may contradict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refcounts {
    /// The one on disk, and the number of references.
    Both,
    /// The one on disk only: a repair of the refcount is enough.
    OnDisk,
    /// The number of references only: a repair changes the refcount and the flag.
    Counted,
}
