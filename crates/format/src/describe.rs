//! The answers about an image for the layers above, so that none of them looks at which format it
//! is.

use blockhouse_core::{ByteRange, Result, Storage, ToolProgress};

use crate::qcow2;
use crate::{CacheCounts, CheckReport, Flat, Format, Qcow2, SideFile};

impl<S: Storage> Format<S> {
    /// The name of the format of its [`storage`](Self::storage), as on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Flat(flat) => flat.name(),
            Self::Qcow2(_) => "qcow2",
        }
    }

    /// Whether the disk is the storage of its [data](Self::data), byte for byte: each extent is
    /// mapped at its own offset, also a last sector that the storage has only in part, and
    /// holes of the host's file are holes of the disk.
    pub fn is_identity(&self) -> bool {
        matches!(self, Self::Flat(Flat::Raw(_) | Flat::WithSideFile(_)))
    }

    /// The side file of a raw image, which has its bitmaps.
    pub fn side_file(&self) -> Option<&SideFile<S>> {
        match self {
            Self::Flat(flat) => flat.side_file(),
            Self::Qcow2(_) => None,
        }
    }

    /// Whether the image is a raw one without a side file.
    pub fn is_raw(&self) -> bool {
        matches!(self, Self::Flat(Flat::Raw(_)))
    }

    /// Whether what [`map`](Self::map) points to is encrypted: the guest's data, never the
    /// metadata.
    pub fn is_encrypted(&self) -> bool {
        match self {
            Self::Flat(flat) => matches!(flat, Flat::Luks(_)),
            Self::Qcow2(qcow2) => qcow2.facts().encryption.is_some(),
        }
    }

    /// Whether mappings are stored in metadata of the image, which writes and discards change.
    pub fn has_metadata(&self) -> bool {
        matches!(self, Self::Qcow2(_))
    }

    /// Whether every part of the disk has its own host range from the beginning, so that what other
    /// programs write to the storage is read here.
    pub fn is_fully_allocated(&self) -> bool {
        match self {
            Self::Flat(flat) => !matches!(flat, Flat::Foreign(_)),
            Self::Qcow2(qcow2) => qcow2.facts().has_raw_disk(),
        }
    }

    /// Bytes of a cluster, a power of two; `None` where the format has none.
    pub fn cluster_size(&self) -> Option<u64> {
        match self {
            Self::Flat(Flat::Foreign(foreign)) => foreign.cluster_size(),
            Self::Flat(_) | Self::Qcow2(_) => self.qcow2().map(Qcow2::cluster_size),
        }
    }

    /// Bytes of the unit in which space is allocated, a power of two: a write of fewer takes as
    /// many.
    pub fn allocation_unit(&self) -> u64 {
        match self {
            Self::Flat(Flat::Luks(luks)) => u64::from(luks.header().sector_size),
            Self::Flat(Flat::Foreign(foreign)) => foreign.cluster_size().unwrap_or(512),
            Self::Flat(flat) => u64::from(flat.data().capabilities().alignment.offset),
            Self::Qcow2(qcow2) => qcow2.subcluster_size(),
        }
    }

    /// Says how long the backing file's disk is, in bytes: past its end, unallocated clusters read
    /// as zeros. Before, none is taken to end.
    pub fn set_backing_size(&self, size: u64) {
        if let Self::Qcow2(qcow2) = self {
            qcow2.set_backing_size(size);
        }
    }

    /// How often parts of the metadata were found in memory, and had to be read; `None` where the
    /// format has none.
    pub fn cache_counts(&self) -> Option<CacheCounts> {
        match self {
            Self::Flat(Flat::Foreign(foreign)) => Some(foreign.cache_counts()),
            Self::Flat(_) | Self::Qcow2(_) => self.qcow2().map(Qcow2::cache_counts),
        }
    }

    /// The host offset that is allocated for the first bytes of `range` although they are not read
    /// from there, and for how many bytes that answer holds. `range` was just mapped as zeros,
    /// a hole or backing.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub async fn preallocated_offset(&self, range: ByteRange) -> Result<(Option<u64>, u64)> {
        match self {
            Self::Flat(_) => Ok((None, range.length())),
            Self::Qcow2(qcow2) => qcow2.preallocated_offset(range).await,
        }
    }

    /// Looks for errors in the image, whose changes are flushed and which must not change
    /// meanwhile; `None` where the format has nothing to check. `progress` counts tables that were
    /// read.
    ///
    /// # Errors
    /// Only what the storage answers: what is wrong with the image is in the report.
    pub async fn check(&self, progress: &ToolProgress) -> Result<Option<CheckReport>> {
        match (self, self.qcow2()) {
            (_, Some(qcow2)) => qcow2::check_with(qcow2, progress).await.map(Some),
            (Self::Flat(Flat::Foreign(foreign)), None) => foreign.check().await,
            (_, None) => Ok(None),
        }
    }
}
