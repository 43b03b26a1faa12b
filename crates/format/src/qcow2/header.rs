//! The header of an image: facts that are fixed while the image is open, and properties that can
//! change.

use blockhouse_core::Storage;

use super::layout::header::{EncryptionKind, Incompatible, LAZY_REFCOUNTS};
use super::{
    Backing, Compression, DataFile, DataFileMark, Qcow2, Snapshot, Switch, Truncation, Version,
};

/// The facts of an image when it was opened.
pub struct ImageFacts {
    /// How the image's clusters are compressed.
    pub compression: Compression,
    /// The backing file, from which unallocated clusters are read; past the end of the backing
    /// file, such clusters read as zeros.
    pub backing: Option<Backing>,
    /// The file with the guest's clusters, if it is not the image itself.
    pub data_file: Option<DataFile>,
    /// How the guest's data is encrypted, if it is.
    pub encryption: Option<EncryptionKind>,
    /// The loss of a truncated file, which is open for reading only: reads of lost clusters fail.
    pub truncation: Option<Truncation>,
    /// The snapshot that the image was opened on.
    pub snapshot: Option<Snapshot>,
}

/// The properties of an image, as its header on disk states them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// The revision of the format.
    pub version: Version,
    /// How clusters are compressed.
    pub compression: Compression,
    /// Bits of a refcount, 1 to 64.
    pub refcount_bits: u32,
    /// Whether refcounts may be written late.
    pub lazy_refcounts: Switch,
    /// Whether there are subclusters.
    pub extended_l2: Switch,
    /// The size of the disk in bytes, as the image states it. The disk that the guest sees is this
    /// size rounded down to a multiple of 512.
    pub stated_size: u64,
    /// The loss of the file, if it was found to be truncated.
    pub truncation: Option<Truncation>,
    /// Whether the image was not closed, so that refcounts may be wrong.
    pub is_dirty: bool,
    /// Whether the image is marked as corrupt.
    pub is_corrupt: bool,
}

/// The header of an open image, as it is on disk.
pub struct Qcow2Header<'a, S: Storage> {
    pub(super) image: &'a Qcow2<S>,
}

impl ImageFacts {
    /// Whether the data file reads as the disk, so that every cluster is allocated.
    pub fn has_raw_disk(&self) -> bool {
        self.data_file.as_ref().is_some_and(DataFile::is_raw_disk)
    }
}

impl<S: Storage> Qcow2Header<'_, S> {
    /// The properties of the image.
    pub fn features(&self) -> Features {
        let Qcow2 { metadata, facts, .. } = self.image;
        let state = metadata.lock();
        let header = state.tables.headers.disk();
        Features {
            version: if header.geometry.version < 3 { Version::V2 } else { Version::V3 },
            compression: header.compression,
            refcount_bits: 1 << header.geometry.refcount_order,
            lazy_refcounts: (header.compatible & LAZY_REFCOUNTS != 0).into(),
            extended_l2: header.geometry.extended_l2.into(),
            truncation: facts.truncation,
            stated_size: header.size + header.excess,
            is_dirty: header.incompatible.contains(Incompatible::DIRTY),
            is_corrupt: header.incompatible.contains(Incompatible::CORRUPT),
        }
    }

    /// The mark of the data file; `None` for an image that is not a side file, see
    /// [`SideFileHeader`](super::SideFileHeader).
    pub fn data_file_mark(&self) -> Option<DataFileMark> {
        DataFileMark::of(self.image.metadata.lock().tables.headers.disk())
    }
}
