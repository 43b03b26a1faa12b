//! The answers about an image for the layers above, so that none of them looks at which format it
//! is.

use blockhouse_core::{ByteRange, Result, Storage, ToolProgress};

use crate::qcow2;
use crate::{
    Backing, CacheCounts, CheckReport, Compression, DataFile, Encryption, Features, Format,
    VmdkFacts,
};

impl<S: Storage> Format<S> {
    /// The format's name, as on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Raw(_) => "raw",
            Self::Luks(_) => "luks",
            Self::Qcow2(_) => "qcow2",
            Self::Foreign(foreign) => foreign.kind().as_str(),
        }
    }

    /// Whether the disk is the storage of its [data](Self::data), byte for byte: each extent is
    /// mapped at its own offset, also a last sector that the storage has only in part, and
    /// holes of the host's file are holes of the disk.
    pub fn is_identity(&self) -> bool {
        self.is_raw() || self.is_sidecar()
    }

    /// Whether it is the sidecar of a raw disk, which is its data file: see
    /// [`Sidecar`](qcow2::Sidecar).
    pub fn is_sidecar(&self) -> bool {
        matches!(self, Self::Qcow2(qcow2) if qcow2.is_sidecar())
    }

    /// Whether the raw disk of a sidecar is longer than it should be, because a process died that
    /// changed its size.
    pub fn is_longer_than_its_disk(&self) -> bool {
        match self {
            Self::Qcow2(image) => image.is_sidecar() && image.data().size() > image.size(),
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => false,
        }
    }

    /// Cuts off what the raw disk of a sidecar has past its end, which was never a part of it or is
    /// none.
    ///
    /// # Errors
    /// What the storage answers.
    pub async fn cut_to_its_disk(&self) -> Result<()> {
        match self {
            Self::Qcow2(image) if image.is_sidecar() => image.data().resize(image.size()).await,
            _ => Ok(()),
        }
    }

    /// Whether the image is a raw one, opened as such and not through a sidecar.
    pub fn is_raw(&self) -> bool {
        matches!(self, Self::Raw(_))
    }

    /// The image's description of its data file, if it is the sidecar of a raw disk: see
    /// [`Sidecar`](qcow2::Sidecar).
    pub fn sidecar_mark(&self) -> Option<qcow2::DataFileMark> {
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => None,
            Self::Qcow2(qcow2) => qcow2.sidecar_mark(),
        }
    }

    /// Whether what [`map`](Self::map) points to is encrypted: the guest's data, never the
    /// metadata.
    pub fn is_encrypted(&self) -> bool {
        match self {
            Self::Raw(_) | Self::Foreign(_) => false,
            Self::Luks(_) => true,
            Self::Qcow2(qcow2) => qcow2.encryption().is_some(),
        }
    }

    /// How the guest's data is encrypted; `None` where it [is not](Self::is_encrypted).
    ///
    /// # Errors
    /// As [`LuksHeader::read`](crate::LuksHeader::read).
    pub async fn read_encryption(&self) -> Result<Option<Encryption>> {
        match self {
            Self::Luks(luks) => Ok(Some(luks.encryption())),
            Self::Qcow2(qcow2) => match qcow2.encryption() {
                Some(place) => Encryption::of_clusters(qcow2.storage(), place).await.map(Some),
                None => Ok(None),
            },
            Self::Raw(_) | Self::Foreign(_) => Ok(None),
        }
    }

    /// Whether mappings are stored in metadata of the image, which writes and discards change: not
    /// those of a sidecar.
    pub fn has_metadata(&self) -> bool {
        matches!(self, Self::Qcow2(_)) && !self.is_sidecar()
    }

    /// Whether every part of the disk has its own host range from the beginning, so that what other
    /// programs write to the storage is read here.
    pub fn is_fully_allocated(&self) -> bool {
        match self {
            Self::Raw(_) | Self::Luks(_) => true,
            Self::Qcow2(qcow2) => qcow2.is_raw_disk(),
            Self::Foreign(_) => false,
        }
    }

    /// Bytes of a cluster, a power of two; `None` where the format has none.
    pub fn cluster_size(&self) -> Option<u64> {
        match self {
            Self::Raw(_) | Self::Luks(_) => None,
            Self::Qcow2(qcow2) => Some(qcow2.cluster_size()),
            Self::Foreign(foreign) => foreign.cluster_size(),
        }
    }

    /// Bytes of the sectors that the image says its disk has, a power of two; 512 where it does not
    /// say.
    pub fn logical_block_size(&self) -> u64 {
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Qcow2(_) => 512,
            Self::Foreign(foreign) => foreign.sector_size(),
        }
    }

    /// Bytes of the unit in which space is allocated, a power of two: a write of fewer takes as
    /// many.
    pub fn allocation_unit(&self) -> u64 {
        match self {
            Self::Raw(raw) => u64::from(raw.storage().capabilities().alignment.offset),
            Self::Luks(luks) => u64::from(luks.header().sector_size),
            Self::Qcow2(qcow2) if qcow2.is_sidecar() => {
                u64::from(qcow2.data().capabilities().alignment.offset)
            }
            Self::Qcow2(qcow2) => qcow2.subcluster_size(),
            Self::Foreign(foreign) => foreign.cluster_size().unwrap_or(512),
        }
    }

    /// How clusters are compressed; `None` where the format has no compressed clusters.
    pub fn compression(&self) -> Option<Compression> {
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => None,
            Self::Qcow2(qcow2) => Some(qcow2.compression()),
        }
    }

    /// The backing file that the image names.
    pub fn backing_file(&self) -> Option<&Backing> {
        match self {
            Self::Raw(_) | Self::Luks(_) => None,
            Self::Qcow2(qcow2) => qcow2.backing(),
            Self::Foreign(foreign) => foreign.backing(),
        }
    }

    /// Refuses `backing` as the backing file of this image where the image says that it must be
    /// another one.
    ///
    /// # Errors
    /// `Corrupt` where it was changed since the image was made, `InvalidInput` where it is of
    /// another format.
    pub fn check_backing(&self, backing: &Self) -> Result<()> {
        match (self, backing) {
            (Self::Foreign(foreign), Self::Foreign(backing)) => {
                foreign.check_backing(Some(backing))
            }
            (Self::Foreign(foreign), _) => foreign.check_backing(None),
            _ => Ok(()),
        }
    }

    /// The descriptor of a VMDK image; `None` for other formats.
    pub fn vmdk_facts(&self) -> Option<VmdkFacts> {
        match self {
            Self::Foreign(foreign) => foreign.vmdk_facts(),
            Self::Raw(_) | Self::Luks(_) | Self::Qcow2(_) => None,
        }
    }

    /// Says how long the backing file's disk is, in bytes: past its end, unallocated clusters read
    /// as zeros. Before, none is taken to end.
    pub fn set_backing_size(&self, size: u64) {
        if let Self::Qcow2(qcow2) = self {
            qcow2.set_backing_size(size);
        }
    }

    /// The file that the image names as the one with the guest's data, if that is another one.
    pub fn data_file(&self) -> Option<&DataFile> {
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => None,
            Self::Qcow2(qcow2) => qcow2.data_file(),
        }
    }

    /// The names of the files that together hold the disk's data, as bytes of the host's file
    /// system, relative to the image's folder; empty where the image holds it itself, or in a
    /// [`data_file`](Self::data_file).
    pub fn extent_files(&self) -> &[Vec<u8>] {
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Qcow2(_) => &[],
            Self::Foreign(foreign) => foreign.extent_files(),
        }
    }

    /// The properties that the image's header states; `None` where the format has no header.
    pub fn features(&self) -> Option<Features> {
        match self {
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => None,
            Self::Qcow2(qcow2) => Some(qcow2.features()),
        }
    }

    /// How often parts of the metadata were found in memory, and had to be read; `None` where the
    /// format has none.
    pub fn cache_counts(&self) -> Option<CacheCounts> {
        match self {
            Self::Raw(_) | Self::Luks(_) => None,
            Self::Qcow2(qcow2) => Some(qcow2.cache_counts()),
            Self::Foreign(foreign) => Some(foreign.cache_counts()),
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
            Self::Raw(_) | Self::Luks(_) | Self::Foreign(_) => Ok((None, range.length())),
            Self::Qcow2(qcow2) => qcow2.preallocated_offset(range).await,
        }
    }

    /// Looks for errors in the image, whose changes are flushed and which must not change
    /// meanwhile; `None` where the format has nothing to check.
    ///
    /// # Errors
    /// Only what the storage answers: what is wrong with the image is in the report.
    pub async fn check(&self) -> Result<Option<CheckReport>> {
        self.check_with(&ToolProgress::default()).await
    }

    /// As [`check`](Self::check); `progress` tells of tables that were read.
    ///
    /// # Errors
    /// As there.
    pub async fn check_with(&self, progress: &ToolProgress) -> Result<Option<CheckReport>> {
        match self {
            Self::Raw(_) | Self::Luks(_) => Ok(None),
            Self::Qcow2(qcow2) => qcow2::check_with(qcow2, progress).await.map(Some),
            Self::Foreign(foreign) => foreign.check().await,
        }
    }
}
