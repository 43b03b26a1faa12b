//! Opens an image over its storage, and completes it.
//!
//! An image that names a data file or a backing file is complete when both have been added. An
//! incomplete image is not read or written.

use std::sync::{Arc, OnceLock};

use blockhouse_core::{ByteRange, Error, ErrorKind, Result, StateMemory, Storage, rare};
use blockhouse_crypt::{Secret, SectorCipher};
use blockhouse_format::{Encryption, Format, ImageFormat};

use super::Image;
use super::uses::ImageUses;
use crate::durability::FlushTracker;
use crate::layer::{DataCipher, Layer};
use crate::options::{Access, Options};
use crate::state::{StateFile, TrackedFile};
use crate::write::Writer;

/// The writes to an image before it is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EarlierWrites {
    /// A killed process may have left unstable writes.
    Unknown,
    /// All writes count as stable: another process has the image open, and has settled it
    /// (`StoredImage::settle`).
    Stable,
}

impl<S: Storage> Image<S> {
    /// A raw image.
    ///
    /// # Errors
    /// `InvalidInput` when the storage is too long for a file.
    pub fn raw(storage: S, options: Options) -> Result<Self> {
        let storage = FlushTracker::new(storage, options.flush, options.access);
        Ok(Self::new(Layer::new(Format::raw(storage)?), options))
    }

    /// Opens an image of the format. An image that names a [`backing_file`](Self::backing_file) is
    /// complete only after [`with_backing`](Self::with_backing), an image with a
    /// [`data_file`](Self::data_file) only after [`with_data`](Self::with_data).
    ///
    /// # Errors
    /// As [`Format::open`].
    pub async fn open(storage: S, format: ImageFormat, options: Options) -> Result<Self> {
        let storage = FlushTracker::new(storage, options.flush, options.access);
        rare(Self::open_tracked(storage, format, options, None)).await
    }

    /// As [`open`](Self::open), for an image whose `log` will be [replayed](Self::replay): writes
    /// of the opening itself do not overwrite data that the log refers to.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub async fn open_before_replay(
        storage: S,
        format: ImageFormat,
        options: Options,
        log: &dyn StateMemory,
    ) -> Result<Self> {
        let storage = FlushTracker::new(storage, options.flush, options.access);
        rare(Self::open_tracked(storage, format, options, Some(log))).await
    }

    /// As [`open`](Self::open), with known facts about earlier writes, and with the state file that
    /// was found. Changes that the opening itself makes are stamped in the page of the state file;
    /// the log of the state file will be replayed.
    pub async fn open_with_state(
        storage: S,
        format: ImageFormat,
        options: Options,
        earlier: EarlierWrites,
        found: Option<&StateFile>,
    ) -> Result<Self> {
        let storage = FlushTracker::new(storage, options.flush, options.access);
        let storage = match earlier {
            EarlierWrites::Unknown => storage,
            EarlierWrites::Stable => storage.after_flush(),
        };
        if let Some(found) = found {
            storage.keep_record(found.page(), TrackedFile::Image);
        }
        let log = found.map(StateFile::log);
        rare(Self::open_tracked(storage, format, options, log.as_deref())).await
    }

    async fn open_tracked(
        storage: FlushTracker<S>,
        format: ImageFormat,
        options: Options,
        log: Option<&dyn StateMemory>,
    ) -> Result<Self> {
        let image = Format::open_before_replay(storage, format, options.of_format(), log).await?;
        let excess = image.bitmaps().map_or(0, |bitmaps| bitmaps.excess());
        if excess > 0 {
            tracing::warn!(
                "{}: its last writer died: each enabled bitmap has all changes, and may say of up to {excess} bytes \
                 more that they changed",
                image.storage().name()
            );
        }
        Ok(Self::new(Layer::new(image), options))
    }

    /// As [`open`](Self::open), for reading only, with the content that the disk had when the
    /// snapshot of this name (or ID) was taken.
    ///
    /// # Errors
    /// As [`Format::open_snapshot`].
    pub async fn open_snapshot(
        storage: S,
        format: ImageFormat,
        options: Options,
        name: &str,
    ) -> Result<Self> {
        let options = Options { access: Access::ReadOnly, ..options };
        let storage = FlushTracker::new(storage, options.flush, options.access);
        let image = Format::open_snapshot(storage, format, options.of_format(), name).await?;
        Ok(Self::new(Layer::new(image), options))
    }

    fn new(layer: Layer<S>, options: Options) -> Self {
        let sector_size = layer.format().header().logical_block_size();
        let writer = Writer::new(Arc::new(layer));
        let uses = ImageUses::new(writer.layer());
        Self { writer, uses, options, sector_size, state: OnceLock::new() }
    }

    /// The same image with its data file, before anything is read or written.
    ///
    /// # Errors
    /// `InvalidInput` if the image needs no data file, or is the backing file of another image
    /// already; `Unsupported` if its clusters are smaller than the blocks of `data`.
    pub fn with_data(self, data: S) -> Result<Self> {
        let options = self.options;
        let data = FlushTracker::new(data, options.flush, options.access);
        Ok(Self::new(self.into_layer()?.with_data(data)?, options))
    }

    /// The same image with the [files](Self::extent_files) that hold its data, before anything is
    /// read: each is one of `ranges` of `data`, in their order.
    ///
    /// # Errors
    /// `InvalidInput` if the image names another number of files, or is the backing file of another
    /// image already, or if a file is invalid.
    pub async fn with_extents(self, data: S, ranges: &[ByteRange]) -> Result<Self> {
        let options = self.options;
        let data = FlushTracker::new(data, options.flush, options.access);
        Ok(Self::new(self.into_layer()?.with_extents(data, ranges).await?, options))
    }

    /// The same image with its encryption, the cipher of its data, and the secret that opened the
    /// image, if any, before anything is read.
    ///
    /// # Errors
    /// `InvalidInput` if the image is the backing file of another image already.
    pub fn with_cipher(
        self,
        encryption: Encryption,
        cipher: SectorCipher,
        secret: Option<Arc<Secret>>,
    ) -> Result<Self> {
        let options = self.options;
        let cipher = DataCipher::new(encryption, cipher, secret);
        Ok(Self::new(self.into_layer()?.with_cipher(cipher), options))
    }

    /// The same image over `backing`, its backing file: unallocated ranges are read from `backing`,
    /// and as zeros past the end of `backing`.
    #[must_use]
    pub fn with_backing(mut self, backing: &Self) -> Self {
        self.layer().opened().set(Arc::clone(backing.layer()), backing.access());
        self.sector_size = self.sector_size.max(backing.sector_size);
        // Nothing else uses the image yet.
        self.layer().claims().set_all(self.options.copy_on_read);
        self.uses = ImageUses::new(self.layer());
        self
    }

    /// The layer of an image that nothing else uses.
    fn into_layer(self) -> Result<Layer<S>> {
        let name = self.name().to_owned();
        Arc::into_inner(self.writer.into_layer()).ok_or_else(|| {
            let what = "no files can be given to an image that backs another one";
            Error::new(ErrorKind::InvalidInput, what).on(&name)
        })
    }
}
