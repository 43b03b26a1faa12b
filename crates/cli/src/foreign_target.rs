//! Copies of disks that become images of other programs' formats.
//!
//! Guarantees: those of [`copy_target`](crate::copy_target), except that a failed copy leaves no
//! file, because a partial copy cannot be resumed.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail};
use blockhouse_core::ByteRange;
use blockhouse_disk::{CopyJob, ImageDisk};
use blockhouse_engine::{EventLoop, NewFile};
use blockhouse_format::{ForeignKind, NewForeignOptions};
use blockhouse_images::{is_device, remove_created};
use blockhouse_storage::Location;

use crate::copy_target::{
    Existing, Finish, How, IfThere, copy_to, existing, is_at_its_name_at_once, tell_of_sectors,
};
use crate::foreign_create::begin;
use crate::progress::Progress;
use crate::unfinished::unfinished;

/// A copy that becomes an image at `path`.
pub struct ForeignTarget<'a> {
    /// The image.
    pub path: &'a Path,
    /// The format.
    pub kind: ForeignKind,
    /// The properties.
    pub options: NewForeignOptions,
    /// The parent image.
    pub parent: Option<Arc<ImageDisk>>,
    /// The file's properties for the file system.
    pub file: NewFile,
    /// The treatment of an existing file of that name.
    pub if_there: IfThere,
    /// Whether the image is flushed at the end.
    pub is_flushed: bool,
}

/// Bytes of a sector of a copy of these disks. Only VHDX can have sectors of 4096 bytes; for other
/// formats a warning is printed.
pub fn sector_of_copy(kind: ForeignKind, sources: &[Arc<ImageDisk>]) -> u32 {
    let is_4k = sources.iter().any(|source| source.logical_block_size() == 4096);
    match kind {
        ForeignKind::Vhdx if is_4k => 4096,
        _ => {
            sources.iter().for_each(|source| tell_of_sectors(source));
            512
        }
    }
}

impl ForeignTarget<'_> {
    /// Copies parts of disks, one after the other.
    ///
    /// # Errors
    /// The error names a file; the files of the copy are removed.
    pub fn copy(
        self,
        event_loop: &mut EventLoop,
        progress: &Progress,
        parts: Vec<(Arc<ImageDisk>, ByteRange)>,
        how: How,
    ) -> Result<()> {
        let Self { path, kind, options, parent, file, if_there, is_flushed } = self;
        if !matches!(Location::of(path)?, Location::File(_)) || is_device(path) {
            bail!("{}: a {} image is made as a file", path.display(), kind.as_str());
        }
        let replaced = match existing(path, if_there)? {
            Existing::None => None,
            Existing::Replaced(file) => Some(file),
            Existing::InPlace => bail!(
                "{}: is mounted, or its folder takes no new file; a {} image is made as a new file",
                path.display(),
                kind.as_str()
            ),
        };
        let (part, finish) = if replaced.is_none() && is_at_its_name_at_once() {
            (path.to_owned(), Finish::in_place(path.to_owned()))
        } else {
            let part = event_loop.block_on(unfinished(path, "remove it"))?;
            let finish = Finish::of_part(path, &part, replaced, if_there);
            (part, finish)
        };
        let image = Arc::new(event_loop.block_on(begin(&part, path, kind, options, file))?);
        how.rate.apply(image.throttle());
        let is_stream = image.stream_unit().is_some();
        let job = |max_in_flight| CopyJob::to_new_image(parts, &image, parent, max_in_flight);
        let copied = copy_to(event_loop, progress, job, image.name(), is_stream, how);
        event_loop.block_on(async {
            let copied = match (copied, Arc::try_unwrap(image)) {
                (Ok(()), Ok(image)) => image.finish(is_flushed).await.map_err(Into::into),
                (Ok(()), Err(_)) => unreachable!("the copy has ended"),
                (Err(error), _) => Err(error),
            };
            if copied.is_err() {
                remove_created(&part).await;
                return copied;
            }
            finish.end(Ok(())).await
        })
    }
}
