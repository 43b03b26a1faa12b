//! One image, as a disk uses it: how it was opened, the layer that reads it, the writer that
//! changes it, and the state that outlives its process.
//!
//! - [`Image`]: its parts and its properties.
//! - `open`: from a storage to a complete image, with its data file and its backing file.
//! - `fork`: an image over one that a disk is using.
//! - `redo_log`: the log that a killed process leaves to the next process.
//! - [`ImageUses`]: the requests in flight on it.
//!
//! A [`Disk`](crate::Disk) orders the requests to an image, and may replace it by another image.

mod fork;
mod open;
mod redo_log;
mod uses;

use std::sync::{Arc, OnceLock};

use blockhouse_core::{
    Alignment, ByteRange, Capabilities, Error, ErrorKind, Offload, Result, Storage, SyncMode,
    ToolProgress, WriteCache, rare,
};
use blockhouse_format::{
    Backing, CheckReport, Compression, DataFile, Encryption, Features, Format, ImageFormat,
    VmdkFacts,
};

use crate::durability::FlushTracker;
use crate::layer::{DataEncryption, Layer};
use crate::options::{Access, DetectZeroes, Discard, Options};
use crate::state::{StateFile, TrackedFile};
use crate::write::Writer;
pub(crate) use fork::{close_as_layer, image_of_layer};
pub use open::EarlierWrites;
use uses::ImageUses;
pub(crate) use uses::UseGuard;

/// One image: a format over a storage, with its data file and its backing files. See the module's
/// page.
pub struct Image<S: Storage> {
    writer: Writer<S>,
    /// The requests in flight on the image.
    pub(crate) uses: ImageUses,
    /// The options with which the image was opened.
    pub(crate) options: Options,
    /// The sector size of the disk in bytes: the largest sector size of the images in the chain,
    /// when they were opened.
    pub(crate) sector_size: u64,
    /// The state file, if there is one.
    state: OnceLock<StateFile>,
}

impl<S: Storage> Image<S> {
    /// The writer of the image.
    pub(crate) fn writer(&self) -> &Writer<S> {
        &self.writer
    }

    /// The image and its backing chain.
    pub fn layer(&self) -> &Arc<Layer<S>> {
        self.writer.layer()
    }

    /// The image in its format.
    pub fn format(&self) -> &Format<FlushTracker<S>> {
        self.layer().format()
    }

    /// The state file, if there is one.
    pub fn state(&self) -> Option<&StateFile> {
        self.state.get()
    }

    /// Keeps a state file, which gets the times of changes and the first flush failure from now on.
    /// Called at most once.
    pub fn keep_state(&self, state: StateFile) {
        let (image, data) = (self.format().storage(), self.format().data());
        image.keep_record(state.page(), TrackedFile::Image);
        if !std::ptr::eq(image, data) {
            data.keep_record(state.page(), TrackedFile::Data);
        }
        // Nothing was stored before: the state file is made when an image is opened, or taken over.
        let _ = self.state.set(state);
    }

    /// Whether the image was opened for writing.
    pub fn access(&self) -> Access {
        self.options.access
    }

    /// The encryption of the images of the chain, the highest first.
    pub fn encryptions(&self) -> impl Iterator<Item = &DataEncryption> {
        self.layer().layers().map(|layer| &layer.encryption)
    }

    /// Whether the guest's data is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.format().is_encrypted()
    }

    /// Whether the guest's data is encrypted in the image or one of its backing files.
    pub fn has_encrypted_layer(&self) -> bool {
        self.layer().layers().any(|layer| layer.format().is_encrypted())
    }

    /// How the guest's data is encrypted; `None` if it is not.
    ///
    /// # Errors
    /// As [`ImageHeader::read_encryption`](blockhouse_format::ImageHeader::read_encryption).
    pub async fn read_encryption(&self) -> Result<Option<Encryption>> {
        rare(self.format().header().read_encryption()).await
    }

    /// The descriptor of a VMDK image; `None` for other formats.
    pub fn vmdk_facts(&self) -> Option<VmdkFacts> {
        self.format().header().vmdk_facts()
    }

    /// The names of the files that together hold the disk's data, relative to the image's folder;
    /// empty if the data is in the image itself, or in a [`data_file`](Self::data_file).
    pub fn extent_files(&self) -> &[Vec<u8>] {
        self.format().header().extent_files()
    }

    /// The backing file that the image names.
    pub fn backing_file(&self) -> Option<&Backing> {
        self.layer().backing_file()
    }

    /// The external data file that the image names, if any.
    pub fn data_file(&self) -> Option<&DataFile> {
        self.format().header().data_file()
    }

    /// The name of the image's format, as on the command line.
    pub fn format_name(&self) -> &'static str {
        self.format().name()
    }

    /// As [`format_name`](Self::format_name), but raw for a raw image with a side file.
    pub fn image_format_name(&self) -> &'static str {
        if self.format().side_file().is_some() {
            ImageFormat::Raw.as_str()
        } else {
            self.format_name()
        }
    }

    /// Bytes of a cluster; `None` if the format has none.
    pub fn cluster_size(&self) -> Option<u64> {
        self.format().cluster_size()
    }

    /// The features in the image's header; `None` if the format has no header.
    pub fn features(&self) -> Option<Features> {
        self.format().header().features()
    }

    /// How clusters are compressed; `None` if the format has no compressed clusters.
    pub fn compression(&self) -> Option<Compression> {
        self.format().header().compression()
    }

    /// Bytes of the unit in which space is allocated, a power of two: a smaller write allocates a
    /// whole unit.
    pub fn allocation_unit(&self) -> u64 {
        self.format().allocation_unit()
    }

    /// The name for users: mostly the path.
    pub fn name(&self) -> &str {
        self.layer().name()
    }

    /// As [`name`](Self::name), but for a raw image with a side file the name of the raw image.
    pub fn image_name(&self) -> &str {
        self.layer().image_name()
    }

    /// The size in bytes, a multiple of 512.
    pub fn size(&self) -> u64 {
        self.layer().size()
    }

    /// The alignment of requests that are passed to the storage as they are. Other requests are
    /// served too.
    pub fn alignment(&self) -> Alignment {
        self.layer().alignment()
    }

    /// The capabilities that an export may advertise: the storage's, as changed by the options.
    /// Zero writes always work; the capability says whether they are quick.
    pub fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.layer().data_capabilities();
        if self.format().has_metadata() {
            // Metadata is written at a flush, and clusters can always be freed.
            capabilities.write_cache = WriteCache::Volatile;
            capabilities.discard = Offload::Available;
        }
        if self.options.durability.sync().is_some() {
            capabilities.write_cache = WriteCache::None;
        }
        if self.options.discard == Discard::Ignore {
            capabilities.discard = Offload::Unavailable;
        }
        capabilities
    }

    /// The description of the image at a [`depth`](crate::MapEntry::depth) of the chain; `None` if
    /// the chain is shorter.
    pub fn layer_at(&self, depth: usize) -> Option<LayerInfo<'_>> {
        let layer = self.layer().layers().nth(depth)?;
        Some(LayerInfo {
            name: layer.name(),
            data_name: layer.data().name(),
            format_name: layer.format().name(),
            size: layer.size(),
            is_encrypted: layer.format().is_encrypted(),
            features: layer.format().header().features(),
        })
    }

    /// Checks the image for errors. All changes must be flushed before, and the image must not
    /// change during the check. `None` if the format has nothing to check.
    ///
    /// # Errors
    /// Only storage errors: errors of the image are in the report.
    pub async fn check(&self) -> Result<Option<CheckReport>> {
        self.check_with(&ToolProgress::default()).await
    }

    /// As [`check`](Self::check); `progress` counts the tables read.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub async fn check_with(&self, progress: &ToolProgress) -> Result<Option<CheckReport>> {
        rare(self.format().check(progress)).await
    }

    /// Refuses a range that reaches past the end.
    ///
    /// # Errors
    /// `InvalidInput`.
    pub(crate) fn check_inside(&self, range: ByteRange) -> Result<()> {
        self.check_end(range.offset(), range.length(), ErrorKind::InvalidInput).map(|_| ())
    }

    /// The range, if all of it is on the disk; otherwise an error of this kind.
    pub(crate) fn check_end(&self, offset: u64, length: u64, kind: ErrorKind) -> Result<ByteRange> {
        let size = self.size();
        match ByteRange::new(offset, length) {
            Some(range) if range.end() <= size => Ok(range),
            _ => {
                let what = format!("{length} bytes reach past the end of {size} bytes");
                Err(Error::new(kind, what).on(self.name()).at(offset))
            }
        }
    }

    /// Makes everything durable, and releases the resources of the image's storage on another host,
    /// before the image is dropped. The image must not be used afterwards.
    ///
    /// The state file, if there is one, is removed, unless it has acknowledged changes that could
    /// not be written to the image. The state file also stays if the image is dropped without being
    /// closed, as if the process was killed.
    ///
    /// # Errors
    /// Errors of the storage.
    pub async fn close(&self) -> Result<()> {
        let format = self.format();
        let (image, data) = (format.storage(), format.data());
        let layers = self.layer().opened().flush(SyncMode::Data).await;
        image.begin_close();
        data.begin_close();
        let closed = format.close().await;
        if let Some(state) = self.state() {
            state.close();
        }
        let image_closed = image.close().await;
        let data_closed = if std::ptr::eq(image, data) { Ok(()) } else { data.close().await };
        closed.and(image_closed).and(data_closed).and(layers)
    }
}

/// The description of one image of a chain, for people.
#[derive(Clone, Copy, Debug)]
pub struct LayerInfo<'a> {
    /// The name of the image: mostly its path.
    pub name: &'a str,
    /// The path of the file with the guest's data, which may be the image.
    pub data_name: &'a str,
    /// The name of the image's format, as `--format` takes it.
    pub format_name: &'static str,
    /// Bytes of the guest's disk that the image describes.
    pub size: u64,
    /// Whether the guest's data is encrypted in the image.
    pub is_encrypted: bool,
    /// The features in the image's header, if the format has one.
    pub features: Option<Features>,
}

/// Whether an image usually moves a request's bytes without touching them, so that they can stay in
/// the kernel's pages ([`KernelPages`](blockhouse_core::KernelPages)). Any image carries out such
/// requests. With encryption, with detection of zeros, and without a local file, each of them costs
/// a copy.
pub fn takes_kernel_pages<S: Storage>(image: &Image<S>) -> bool {
    let layer = image.layer();
    image.options.detect_zeroes == DetectZeroes::Off
        && !layer.is_encrypted()
        && layer.data().takes_kernel_pages()
}
