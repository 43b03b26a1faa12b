//! The free space that is left for a guest's writes.

use blockhouse_core::{Result, Storage};
use blockhouse_engine::{FileKind, HostFile};
use blockhouse_format::{Format, Qcow2};
use blockhouse_storage::ImageStorage;

use super::image_disk::{ImageDisk, StoredImage};
use crate::durability::FlushTracker;

/// The free space and the total space, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// The free space.
    pub left: u64,
    /// The total space.
    pub total: u64,
}

/// The space that an image takes and has on the host, in bytes. `None` if the host does not tell,
/// as for an image on another server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostSpace {
    /// The space that the image takes, with its data file and without its backing file.
    pub allocated: Option<u64>,
    /// The free space.
    pub left: Option<u64>,
}

impl ImageDisk {
    /// Free space on the device of a qcow2 image, or in the file system of a file, which other
    /// files may use too. `None` for a raw block device, which is fully allocated, and for an image
    /// on another server.
    ///
    /// # Errors
    /// The host's.
    pub async fn room_left(&self) -> Result<Option<Room>> {
        let image = self.begin_use();
        Ok(match limit_of(&image) {
            None => None,
            Some((file, None)) => {
                let (left, total) = file.query_file_system().await?;
                Some(Room { left, total })
            }
            Some((device, Some(qcow2))) => {
                Some(Room { left: qcow2.room_left().await?, total: device.size() })
            }
        })
    }

    /// The offset in the storage after the last cluster in use of a qcow2 image, in bytes. `None`
    /// for other formats, and for an image with an external data file.
    ///
    /// # Errors
    /// The host's.
    pub async fn end_in_use(&self) -> Result<Option<u64>> {
        let image = self.begin_use();
        match image.format() {
            Format::Qcow2(qcow2) if qcow2.facts().data_file.is_none() => {
                qcow2.end_in_use().await.map(Some)
            }
            _ => Ok(None),
        }
    }

    /// The file systems of the image and of its data, which [`host_space`](Self::host_space) asks.
    /// `None` for an image on another server, or in many files.
    pub fn file_systems(&self) -> [Option<u64>; 2] {
        let image = self.begin_use();
        let storages = [image.format().storage(), image.format().data()];
        storages.map(|storage| Some(storage.storage().as_file()?.file_system()))
    }

    /// The space that the image takes and has. Blocks if one of its [file
    /// systems](Self::file_systems) hangs.
    pub fn host_space(&self) -> HostSpace {
        let allocated = self.image().allocated_bytes().ok().flatten();
        HostSpace { allocated, left: self.room_left_now() }
    }

    /// As [`room_left`](Self::room_left), but blocks if the file system of a file hangs. `None`
    /// also for a qcow2 image on a device if tables would have to be read, and after an error.
    fn room_left_now(&self) -> Option<u64> {
        let image = self.begin_use();
        match limit_of(&image)? {
            (file, None) => file.file_system_room().ok().map(|(left, _)| left),
            (_, Some(qcow2)) => qcow2.room_left_in_memory(),
        }
    }
}

/// The file whose file system limits an image's space, or the device that limits a qcow2 image.
fn limit_of(
    image: &StoredImage,
) -> Option<(&HostFile, Option<&Qcow2<FlushTracker<ImageStorage>>>)> {
    let format = image.format();
    let file = format.data().storage().as_file()?;
    match (file.kind(), format) {
        (FileKind::Regular, _) => Some((file, None)),
        (FileKind::BlockDevice, Format::Qcow2(qcow2)) if qcow2.facts().data_file.is_none() => {
            Some((file, Some(qcow2)))
        }
        (FileKind::BlockDevice, _) => None,
    }
}
