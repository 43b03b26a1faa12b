//! Copies disks into VMDK images of several files.
//!
//! Guarantees: those of [`vmdk_files`](crate::vmdk_files). Each file has the guarantees of a copy
//! into a single image.

use std::sync::Arc;

use anyhow::Result;
use blockhouse_core::ByteRange;
use blockhouse_disk::{ImageDisk, ImageFormat};
use blockhouse_engine::EventLoop;
use blockhouse_format::ForeignKind;
use blockhouse_images::check_new_apart;

use crate::called_as;
use crate::copy_target::{How, IfThere, TargetSpec, copy, existing};
use crate::foreign_target::ForeignTarget;
use crate::open_args::OpenArgs;
use crate::progress::Progress;
use crate::vmdk_files::VmdkFiles;

/// A disk, and the range of the disk to copy.
type Part = (Arc<ImageDisk>, ByteRange);

impl VmdkFiles {
    /// Copies `parts`, in this order, to the image's files, and then writes the descriptor.
    ///
    /// # Errors
    /// The error names the file. Files that were completed before the error are not removed.
    pub fn copy(
        &self,
        event_loop: &mut EventLoop,
        progress: &Progress,
        parts: &[Part],
        (if_there, how, open): (IfThere, How, &OpenArgs),
    ) -> Result<()> {
        existing(&self.path, if_there)?;
        parts.iter().try_for_each(|(source, _)| check_new_apart(&self.path, source))?;
        self.remove_descriptor()?;
        for file in &self.files {
            let path = &self.path.with_file_name(&file.name);
            let (parts, size) = (cut(parts, file.range), file.range.length());
            if !self.is_flat() {
                let (kind, options) = (ForeignKind::Vmdk, self.options_of(size));
                let (file, parent) = (called_as::new_file(), None);
                let target =
                    ForeignTarget { path, kind, options, parent, file, if_there, is_flushed: true };
                target.copy(event_loop, progress, parts, how)?;
                continue;
            }
            let sources: Vec<_> = parts.iter().map(|(source, _)| Arc::clone(source)).collect();
            let disks = sources.iter().map(Arc::as_ref).collect();
            let spec = TargetSpec::new(path, ImageFormat::Raw, size, open, disks);
            let spec = TargetSpec { if_there, ..spec };
            let target = event_loop.block_on(spec.build())?;
            let copied = copy(event_loop, progress, parts, &target, how);
            event_loop.block_on(target.finish(copied))?;
        }
        event_loop.block_on(self.write_descriptor())
    }
}

/// The pieces of `parts` that are inside `range` of their concatenation.
fn cut(parts: &[Part], range: ByteRange) -> Vec<Part> {
    let mut start = 0;
    let mut inside = Vec::new();
    for (source, part) in parts {
        let from = range.offset().max(start);
        let to = range.end().min(start + part.length());
        if from < to {
            let first = part.offset() + (from - start);
            inside.push((Arc::clone(source), ByteRange::between(first, first + (to - from))));
        }
        start += part.length();
    }
    inside
}
