//! New images of other programs' formats: empty ones, and copies of disks.
//!
//! Guarantees: those of [`copy_target`](crate::copy_target), but that a copy which fails leaves
//! nothing: a part of it could not be resumed.

use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::{Context, Result, bail};
use blockhouse_core::ByteRange;
use blockhouse_disk::{
    CopyJob, ImageDisk, ImageFormat, NewImage, create_as, exists, is_device, open_created, part_of,
    remove_created,
};
use blockhouse_engine::{EventLoop, NewFile};
use blockhouse_format::{Backing, ForeignKind, NewForeign, NewForeignOptions, NewParent};
use blockhouse_storage::{ImageStorage, Location};

use crate::copy_target::{Existing, Finish, How, IfThere, copy_to, existing};
use crate::progress::Progress;

/// Makes an empty image.
///
/// # Errors
/// One that names the file; none is left then.
pub async fn create(
    path: &Path,
    kind: ForeignKind,
    options: NewForeignOptions,
    file: NewFile,
) -> Result<()> {
    let image = begin(path, path, kind, options, file).await?;
    let made = image.finish(true).await;
    if made.is_err() {
        remove_created(path).await;
    }
    Ok(made?)
}

/// What a new image says of its parent.
///
/// # Errors
/// It is no VMDK image.
pub fn parent(disk: &ImageDisk, named: &Backing) -> Result<NewParent> {
    let Some(facts) = disk.image().vmdk_facts() else {
        bail!("{}: is no VMDK image, and the parent of one has to be", disk.name());
    };
    let name = String::from_utf8_lossy(&named.name).into_owned();
    Ok(NewParent { cid: facts.cid, name })
}

/// A copy that is to become an image at `path`.
pub struct ForeignTarget<'a> {
    /// The image.
    pub path: &'a Path,
    /// Its format.
    pub kind: ForeignKind,
    /// Its properties.
    pub options: NewForeignOptions,
    /// What the file system is to know of it.
    pub file: NewFile,
    /// The treatment of a file that has the name.
    pub if_there: IfThere,
    /// Whether it is made durable in the end.
    pub is_flushed: bool,
}

impl ForeignTarget<'_> {
    /// Copies all of `sources`, one after the other.
    ///
    /// # Errors
    /// One that names a file; what was made is removed.
    pub fn copy(
        self,
        event_loop: &mut EventLoop,
        progress: &Progress,
        sources: &[Arc<ImageDisk>],
        how: How,
    ) -> Result<()> {
        let Self { path, kind, options, file, if_there, is_flushed } = self;
        if !matches!(Location::of(path)?, Location::File(_)) || is_device(path) {
            bail!("{}: a {} image is made as a file", path.display(), kind.as_str());
        }
        let part = part_of(path);
        let replaced = match existing(path, if_there)? {
            Existing::None => None,
            Existing::Replaced(file) => Some(file),
            Existing::InPlace => bail!(
                "{}: is mounted, or its folder takes no new file; a {} image is made as a new file",
                path.display(),
                kind.as_str()
            ),
        };
        let finish = Finish::of_part(path, &part, replaced, if_there);
        if event_loop.block_on(exists(&part))? {
            bail!("{}: is left of an earlier copy; remove it", part.display());
        }
        let image = Arc::new(event_loop.block_on(begin(&part, path, kind, options, file))?);
        let whole =
            |source: &Arc<ImageDisk>| (Arc::clone(source), ByteRange::between(0, source.size()));
        let parts = sources.iter().map(whole).collect();
        let is_stream = image.stream_unit().is_some();
        let job = |max_in_flight| CopyJob::to_new_image(parts, &image, max_in_flight);
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

/// The image without data, in a new file at `place` that is going to be at `path`.
async fn begin(
    place: &Path,
    path: &Path,
    kind: ForeignKind,
    options: NewForeignOptions,
    file: NewFile,
) -> Result<NewImage<ImageStorage>> {
    let size = options.size;
    let options = with_identity(options, path)?;
    // Before anything is made.
    let image = NewForeign::new(kind, &options);
    let image = image.map_err(|error| error.on(&path.display().to_string()))?;
    create_as(place, 0, ImageFormat::Raw, file).await?;
    let storage = open_created(place).await?;
    Ok(NewImage::new(storage, image, size))
}

fn with_identity(options: NewForeignOptions, path: &Path) -> Result<NewForeignOptions> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let file_name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut seed = [0; 16];
    let random = std::fs::File::open("/dev/urandom")
        .and_then(|mut random| std::io::Read::read_exact(&mut random, &mut seed));
    random.context("/dev/urandom")?;
    Ok(NewForeignOptions { now, file_name, seed, ..options })
}
