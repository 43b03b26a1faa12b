//! What an image says of itself, for people who ask.

use blockhouse_core::Storage;

use super::header::{Incompatible, LAZY_REFCOUNTS};
use super::{Compression, Qcow2, Switch, Truncation, Version};

/// The properties of an image, as its header on disk says them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// The revision of the format.
    pub version: Version,
    /// How compressed clusters are packed.
    pub compression: Compression,
    /// Bits of a refcount, 1 to 64.
    pub refcount_bits: u32,
    /// Whether refcounts may be written late.
    pub lazy_refcounts: Switch,
    /// Whether there are subclusters.
    pub extended_l2: Switch,
    /// Bytes of the disk as the image states it. What is beyond a multiple of 512 is left out.
    pub stated_size: u64,
    /// What the file has lost, if it was found to be cut off.
    pub truncation: Option<Truncation>,
    /// Whether the image was not closed, so that refcounts may be wrong.
    pub is_dirty: bool,
    /// Whether the image was found to contradict itself.
    pub is_corrupt: bool,
}

impl<S: Storage> Qcow2<S> {
    /// What the image says of itself.
    pub fn features(&self) -> Features {
        let header = &self.state.lock().disk_header;
        let switch = |is_on| if is_on { Switch::On } else { Switch::Off };
        Features {
            version: if header.geometry.version < 3 { Version::V2 } else { Version::V3 },
            compression: header.compression,
            refcount_bits: 1 << header.geometry.refcount_order,
            lazy_refcounts: switch(header.compatible & LAZY_REFCOUNTS != 0),
            extended_l2: switch(header.geometry.extended_l2),
            truncation: self.truncation(),
            stated_size: header.size + header.excess,
            is_dirty: header.incompatible.contains(Incompatible::DIRTY),
            is_corrupt: header.incompatible.contains(Incompatible::CORRUPT),
        }
    }
}
