//! How much room there is left for what a disk's guest writes.

use blockhouse_core::{Result, Storage};
use blockhouse_engine::FileKind;
use blockhouse_format::Format;

use super::image_disk::ImageDisk;

/// Room, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// The room that is left.
    pub left: u64,
    /// The room in all.
    pub total: u64,
}

impl ImageDisk {
    /// The room on the device that a qcow2 image is on, or in the file system of a file, which
    /// others may take, too. `None` where the disk has all its space, or another server has it.
    ///
    /// # Errors
    /// The host's.
    pub async fn room_left(&self) -> Result<Option<Room>> {
        let image = self.begin_use();
        let format = image.format();
        let Some(file) = format.data().storage().as_file() else { return Ok(None) };
        match (file.kind(), format) {
            (FileKind::Regular, _) => {
                file.query_file_system().await.map(|(left, total)| Some(Room { left, total }))
            }
            (FileKind::BlockDevice, Format::Qcow2(qcow2)) if qcow2.facts().data_file.is_none() => {
                let left = qcow2.room_left().await?;
                Ok(Some(Room { left, total: file.size() }))
            }
            (FileKind::BlockDevice, _) => Ok(None),
        }
    }

    /// Up to which byte of its storage a qcow2 image is used. `None` of other images, and of one
    /// whose data is elsewhere.
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

    /// As [`room_left`](Self::room_left), without waiting; `None` also where it would have to be
    /// looked up.
    pub fn room_left_now(&self) -> Option<u64> {
        let image = self.begin_use();
        let format = image.format();
        let file = format.data().storage().as_file()?;
        match (file.kind(), format) {
            (FileKind::Regular, _) => file.file_system_room().ok().map(|(left, _)| left),
            (FileKind::BlockDevice, Format::Qcow2(qcow2)) if qcow2.facts().data_file.is_none() => {
                qcow2.room_left_in_memory()
            }
            (FileKind::BlockDevice, _) => None,
        }
    }
}
