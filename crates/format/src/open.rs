//! Opening and creating images of a given format.

use blockhouse_core::{ByteRange, Error, ErrorKind, Result, StateMemory, Storage, SyncMode, rare};

use crate::foreign::refuse_writing;
use crate::{
    Access, BitmapActivity, Discard, Flat, Foreign, Format, ImageFormat, Luks, Qcow2, Raw,
    SideFile, qcow2,
};

/// How an image is opened.
#[derive(Clone, Copy, Debug)]
pub struct OpenOptions {
    /// The access.
    pub access: Access,
    /// The treatment of the space that the guest discards.
    pub discard: Discard,
    /// How changes are recorded in bitmaps.
    pub bitmap_activity: BitmapActivity,
}

impl From<OpenOptions> for qcow2::OpenOptions {
    fn from(options: OpenOptions) -> Self {
        let OpenOptions { access, discard, bitmap_activity } = options;
        Self { access, discard, bitmap_activity, ..Self::default() }
    }
}

impl<S: Storage> Format<S> {
    /// Opens the image in `storage`. If the image names a backing file, the caller reads from that
    /// file. If the image names a data file, the caller attaches that file by
    /// [`with_data`](Self::with_data).
    ///
    /// # Errors
    /// As [`Raw::open`], [`Luks::open`], [`Qcow2::open`] or [`Foreign::open`]; `ReadOnly` for write
    /// access to an image of a format that is only read.
    pub async fn open(storage: S, format: ImageFormat, options: OpenOptions) -> Result<Self> {
        Self::open_before_replay(storage, format, options, None).await
    }

    /// As [`open`](Self::open), for an image whose `log` will be
    /// [replayed](qcow2::ImageRedo::replay): `open_before_replay` places no metadata in host
    /// clusters to which the log refers.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn open_before_replay(
        storage: S,
        format: ImageFormat,
        options: OpenOptions,
        log: Option<&dyn StateMemory>,
    ) -> Result<Self> {
        Ok(match format {
            ImageFormat::Raw => Self::raw(storage)?,
            ImageFormat::Luks => {
                Self::Flat(Flat::Luks(Box::new(rare(Luks::open(storage, options.access)).await?)))
            }
            ImageFormat::Qcow2 => {
                let image = rare(Qcow2::open_before_replay(storage, options.into(), log)).await?;
                Self::Qcow2(Box::new(image))
            }
            ImageFormat::Foreign(kind) if options.access == Access::ReadWrite => {
                return Err(refuse_writing(kind, storage.name()));
            }
            ImageFormat::Foreign(kind) => {
                Self::Flat(Flat::Foreign(Box::new(rare(Foreign::open(storage, kind)).await?)))
            }
        })
    }

    /// As [`open`](Self::open), but opens the state of the disk in the snapshot with this name (or
    /// id), for reading only.
    ///
    /// # Errors
    /// As [`open`](Self::open); `InvalidInput` if there is no such snapshot, `Unsupported` for a
    /// format without snapshots.
    pub async fn open_snapshot(
        storage: S,
        format: ImageFormat,
        options: OpenOptions,
        name: &str,
    ) -> Result<Self> {
        match format {
            ImageFormat::Raw | ImageFormat::Luks | ImageFormat::Foreign(_) => {
                let what = format!("a {} image has no snapshots", format.as_str());
                Err(Error::new(ErrorKind::Unsupported, what).on(storage.name()))
            }
            ImageFormat::Qcow2 => {
                let image = Qcow2::open_snapshot(storage, options.into(), name).await?;
                Ok(Self::Qcow2(Box::new(image)))
            }
        }
    }

    /// Opens a raw image, which needs no reads.
    ///
    /// # Errors
    /// As [`Raw::open`].
    pub fn raw(storage: S) -> Result<Self> {
        Ok(Self::Flat(Flat::Raw(Raw::open(storage)?)))
    }

    /// Attaches the image's data file. Must be called before anything is read or written.
    ///
    /// # Errors
    /// `InvalidInput` if the image names no data file; `Unsupported` if its clusters are smaller
    /// than the blocks of `data`.
    pub fn with_data(self, data: S) -> Result<Self> {
        match self {
            Self::Flat(_) => {
                let what = format!("{} images have no data file", self.name());
                Err(Error::new(ErrorKind::InvalidInput, what).on(self.storage().name()))
            }
            Self::Qcow2(image) => Ok(match SideFile::new(Box::new(image.with_data(data)?)) {
                Ok(side_file) => Self::Flat(Flat::WithSideFile(side_file)),
                Err(image) => Self::Qcow2(image),
            }),
        }
    }

    /// Attaches the image's [files](crate::ImageHeader::extent_files): `data` contains the files
    /// one after the other, each in its range of `ranges`, in the order of their names. Must be
    /// called before anything is read.
    ///
    /// # Errors
    /// `InvalidInput` if the image names no files, or another number of files; otherwise the error
    /// of the file that is invalid.
    pub async fn with_extents(self, data: S, ranges: &[ByteRange]) -> Result<Self> {
        match self {
            Self::Flat(Flat::Foreign(image)) => {
                let image = image.with_extents(data, ranges).await?;
                Ok(Self::Flat(Flat::Foreign(Box::new(image))))
            }
            Self::Flat(_) | Self::Qcow2(_) => {
                let what = format!("{} images name no files for their data", self.name());
                Err(Error::new(ErrorKind::InvalidInput, what).on(self.storage().name()))
            }
        }
    }
}

/// The size in bytes that a new file must have for [`create`] with a disk of `size` bytes.
pub fn initial_file_size(format: ImageFormat, size: u64) -> u64 {
    match format {
        ImageFormat::Raw => size,
        ImageFormat::Luks | ImageFormat::Qcow2 | ImageFormat::Foreign(_) => 0,
    }
}

/// Makes an image of `size` bytes, a multiple of 512, all holes, in a new file of
/// [`initial_file_size`] bytes. Durable when it returns.
///
/// # Errors
/// Errors of the format or the storage; `Unsupported` for LUKS, and for formats that are only read.
pub async fn create<S: Storage>(storage: &S, format: ImageFormat, size: u64) -> Result<()> {
    match format {
        ImageFormat::Raw => storage.resize(size).await?,
        ImageFormat::Qcow2 => {
            qcow2::create(storage, &qcow2::CreateOptions::new(size)).await?;
        }
        ImageFormat::Luks | ImageFormat::Foreign(_) => {
            let error = Error::new(ErrorKind::Unsupported, format.not_made()).on(storage.name());
            return Err(error.hint("make a qcow2 image"));
        }
    }
    storage.flush(SyncMode::Full).await
}
