//! The properties of a VMDK image, to be shown to users and other programs.

use super::descriptor::NO_PARENT;
use super::{Source, Vmdk};

/// The descriptor of a VMDK image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmdkFacts {
    /// The content ID, which changes with the content of the disk.
    pub cid: u32,
    /// The content ID of the parent; all ones without a parent.
    pub parent_cid: u32,
    /// How the image is stored, as VMware names it: `monolithicSparse`, `streamOptimized`.
    pub create_type: String,
    /// The parts of the disk in their order.
    pub extents: Vec<VmdkExtent>,
}

/// A part of the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmdkExtent {
    /// The name of its file, relative to the folder of the image; `None` if the data is in the
    /// image itself, or in no file.
    pub file: Option<Vec<u8>>,
    /// The keyword in the descriptor: `FLAT`, `SPARSE`; empty for the only extent of an image that
    /// is one file.
    pub kind: &'static str,
    /// Bytes of the disk.
    pub size: u64,
    /// Bytes of a grain; `None` without tables, or if the file is not open.
    pub grain_size: Option<u64>,
    /// Whether its grains are compressed.
    pub is_compressed: bool,
}

impl Vmdk {
    /// The properties to show to users.
    pub(in crate::foreign) fn facts(&self) -> VmdkFacts {
        let extents = self.extents.iter().map(|extent| {
            let header = match &extent.source {
                Source::Sparse(sparse) => Some(&sparse.header),
                _ => None,
            };
            VmdkExtent {
                file: extent.file.map(|number| self.files[number].clone()),
                kind: extent.kind,
                size: extent.range.length(),
                grain_size: header.map(|header| header.grain_size),
                is_compressed: header.is_some_and(|header| header.is_compressed),
            }
        });
        let parent_cid = if self.parent.is_some() { self.parent_cid } else { NO_PARENT };
        VmdkFacts {
            cid: self.cid,
            parent_cid,
            create_type: self.create_type.clone().unwrap_or_default(),
            extents: extents.collect(),
        }
    }
}
