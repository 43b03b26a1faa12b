//! Properties of an image for the layers above, so that these need not know which format it has.

use blockhouse_core::{ByteRange, Result, Storage, ToolProgress};

use crate::qcow2;
use crate::{CacheCounts, CheckReport, Flat, Format, Qcow2, SideFile};

impl<S: Storage> Format<S> {
    /// The name of the format of [`storage`](Self::storage), as on the command line: `qcow2` for a
    /// raw image with a side file.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Flat(flat) => flat.name(),
            Self::Qcow2(_) => "qcow2",
        }
    }

    /// Whether the disk is the storage of its [data](Self::data), byte for byte: each guest offset
    /// is mapped to the same host offset (even in a last sector of which the storage has only a
    /// part), and holes of the host's file are holes of the disk.
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

    /// Whether the guest's data, to which [`map`](Self::map) points, is encrypted. Metadata never
    /// is.
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

    /// Whether every part of the disk has its own host range from the beginning, so that reads
    /// return what other programs write to the storage.
    pub fn is_fully_allocated(&self) -> bool {
        match self {
            Self::Flat(flat) => !matches!(flat, Flat::Foreign(_)),
            Self::Qcow2(qcow2) => qcow2.facts().has_raw_disk(),
        }
    }

    /// Bytes of a cluster, a power of two; `None` if the format has no clusters.
    pub fn cluster_size(&self) -> Option<u64> {
        match self {
            Self::Flat(Flat::Foreign(foreign)) => foreign.cluster_size(),
            Self::Flat(_) | Self::Qcow2(_) => self.qcow2().map(Qcow2::cluster_size),
        }
    }

    /// Bytes of the unit in which space is allocated, a power of two: a shorter write allocates a
    /// whole unit.
    pub fn allocation_unit(&self) -> u64 {
        match self {
            Self::Flat(Flat::Luks(luks)) => u64::from(luks.header().sector_size),
            Self::Flat(Flat::Foreign(foreign)) => foreign.cluster_size().unwrap_or(512),
            Self::Flat(flat) => u64::from(flat.data().capabilities().alignment.offset),
            Self::Qcow2(qcow2) => qcow2.subcluster_size(),
        }
    }

    /// Sets the size of the backing file's disk, in bytes: past its end, unallocated clusters read
    /// as zeros. Until this call, the backing file's disk has no end.
    pub fn set_backing_size(&self, size: u64) {
        if let Self::Qcow2(qcow2) = self {
            qcow2.set_backing_size(size);
        }
    }

    /// How often parts of the metadata were found in memory, and how often they had to be read;
    /// `None` if the format has no metadata.
    pub fn cache_counts(&self) -> Option<CacheCounts> {
        match self {
            Self::Flat(Flat::Foreign(foreign)) => Some(foreign.cache_counts()),
            Self::Flat(_) | Self::Qcow2(_) => self.qcow2().map(Qcow2::cache_counts),
        }
    }

    /// The host offset that is allocated for the first bytes of `range`, although reads do not use
    /// it (`None` if none is allocated), and the number of bytes for which this holds. `range` was
    /// just mapped as zeros, a hole or backing.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    pub async fn preallocated_offset(&self, range: ByteRange) -> Result<(Option<u64>, u64)> {
        match self {
            Self::Flat(_) => Ok((None, range.length())),
            Self::Qcow2(qcow2) => qcow2.preallocated_offset(range).await,
        }
    }

    /// Checks the image for errors; `None` if the format has nothing to check. The image's changes
    /// were flushed, and it must not change during the check. `progress` counts tables that were
    /// read.
    ///
    /// # Errors
    /// Errors of the storage only: errors in the image are in the report.
    pub async fn check(&self, progress: &ToolProgress) -> Result<Option<CheckReport>> {
        match (self, self.qcow2()) {
            (_, Some(qcow2)) => qcow2::check_with(qcow2, progress).await.map(Some),
            (Self::Flat(Flat::Foreign(foreign)), None) => foreign.check().await,
            (_, None) => Ok(None),
        }
    }
}
