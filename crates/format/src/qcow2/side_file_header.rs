//! The header extension of images that hold the bitmaps of a raw disk. The extension tells whether
//! such an image still belongs to the disk, and is read without opening the image.
//!
//! Such an image is a *side file*: its data file is the raw disk, and the header extension
//! identifies the data file. Other programs keep the extension, and may ignore it.

use std::time::Duration;

use blockhouse_core::{ErrorKind, Result, Storage};

use super::check::create::CreateOptions;
use super::layout::bitmap_directory::{self, BitmapFlags, LIVE_BITMAPS};
use super::layout::data_file_mark::{DataFileMark, Voucher};
use super::layout::options::{DataFile, Switch};
use super::layout::table_io::read_header;

/// The largest disk whose side file has small clusters, in bytes.
const MAX_FINE: u64 = 64 << 30;
/// Bytes of a cluster of side files of disks up to `MAX_FINE`.
const FINE: u64 = 64 << 10;
/// Bytes of a cluster of side files of larger disks.
const COARSE: u64 = 1 << 20;

/// The description that a side file contains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SideFileHeader {
    /// The name of the file that is the raw disk.
    pub name: Vec<u8>,
    /// Bytes of the disk.
    pub size: u64,
    /// The identity of the disk's file, as given at the creation of the side file.
    pub identity: [u8; 16],
    /// The time of the disk's last change ([`Storage::last_change`]) at the moment when its changes
    /// were last recorded. Not valid while `is_live`.
    pub changed: Duration,
    /// Whether a bitmap is enabled. An enabled bitmap has all changes of the disk, except changes
    /// by programs that do not record them.
    pub has_enabled: bool,
    /// Whether a process is recording changes, or died before it closed the image.
    pub is_live: bool,
    /// Another size that the disk may have, because a process died while it changed the size.
    pub other_size: Option<u64>,
    /// The voucher of the process that is recording changes, or that died.
    pub voucher: Option<Voucher>,
}

impl SideFileHeader {
    /// Reads the description in the image in `storage`; `None` if the image is no side file.
    ///
    /// # Errors
    /// Errors of the storage; `Corrupt` or `Unsupported` if the image cannot be opened.
    pub async fn read<S: Storage>(storage: &S) -> Result<Option<Self>> {
        let header = read_header(storage).await?;
        let mark = DataFileMark::of(&header);
        let raw = header.data_file.as_ref().filter(|file| file.raw == Switch::On);
        let (Some(DataFile { name, .. }), Some(mark)) = (raw, mark) else {
            return Ok(None);
        };
        let entries = match bitmap_directory::read(storage, &header).await {
            // The bitmaps are ignored, because the bitmaps of a corrupt directory are unusable.
            Err(error) if error.kind() == ErrorKind::Corrupt => Vec::new(),
            entries => entries?,
        };
        Ok(Some(Self {
            name: name.clone(),
            size: header.size,
            identity: mark.identity,
            changed: mark.changed,
            has_enabled: entries.iter().any(|entry| entry.flags.contains(BitmapFlags::AUTO)),
            is_live: header.autoclear & LIVE_BITMAPS != 0,
            other_size: mark.other_size,
            voucher: mark.voucher,
        }))
    }

    /// The options to create the side file of a disk of `size` bytes. The disk is the file `name`
    /// in the same folder, and `identity` identifies this file.
    pub fn create_options(size: u64, name: Vec<u8>, identity: [u8; 16]) -> CreateOptions {
        // A table has an entry for each cluster, so larger clusters make smaller tables.
        let cluster_size = if size > MAX_FINE { COARSE } else { FINE };
        let data_file = Some(DataFile { name, raw: Switch::On });
        CreateOptions {
            cluster_size,
            data_file,
            identity: Some(identity),
            ..CreateOptions::new(size)
        }
    }
}
