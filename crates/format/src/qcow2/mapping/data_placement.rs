//! The placement of the guest's data: in host clusters of the image, or in an external data file.
//!
//! The placement is fixed when the image is opened. In a data file, the host offset of each guest
//! cluster is its guest offset, as in QEMU: nothing is allocated or counted, and host clusters are
//! never reused for other guest clusters. The L2 entry states whether the data at this offset is
//! valid.
//!
//! - Zero writes and discards of data are made in the data file, and the L2 entries do not change.
//!   So no hole is punched later, after a writeback, when the cluster may have data again. The zero
//!   flag is set only where a cluster, or its part that is zeroed, is not all data; data in some of
//!   the zeroed subclusters then stays in the file, and no entry shows it.
//! - If the data file is the raw disk (`data_file_raw`), the zero flag is never set: all zeros are
//!   written to the data file, so that the file without the image reads as the disk.
//! - A write whose future was dropped may still write its COW padding. The cluster has a fixed host
//!   offset, so the next change of the cluster waits for that write.

use std::collections::HashSet;
use std::ops::Range;

use blockhouse_core::sync::WaitGroup;
use blockhouse_core::{ByteRange, IoVector};

use crate::qcow2::layout::header::Header;
use crate::qcow2::layout::options::DataFile;
use crate::qcow2::tables::{Blocked, Step};

/// The location of the data of guest clusters.
pub(super) enum DataPlacement {
    /// In host clusters of the image.
    Image,
    /// In a data file, each cluster at its guest offset.
    DataFile(DataFilePlacement),
}

/// The state of the mapping for a data file.
pub(super) struct DataFilePlacement {
    /// Bytes of a block of the data file. Writes to the data file are aligned to blocks.
    block: u64,
    is_raw_disk: bool,
    /// Writes in flight with COW padding.
    cow_writes: WaitGroup,
    /// Clusters of writes with dropped futures.
    dropped: HashSet<u64>,
}

impl DataPlacement {
    pub(super) fn new(header: &Header) -> Self {
        match &header.data_file {
            None => Self::Image,
            Some(file) => Self::DataFile(DataFilePlacement {
                block: 1,
                is_raw_disk: DataFile::is_raw_disk(file),
                cow_writes: WaitGroup::new(),
                dropped: HashSet::new(),
            }),
        }
    }

    /// Returns `Blocked` while writes with dropped futures may write their COW padding to these
    /// clusters.
    pub(super) fn wait_for_cow_writes(&mut self, clusters: &Range<u64>) -> Step<()> {
        let Self::DataFile(file) = self else { return Ok(()) };
        if clusters.clone().any(|cluster| file.dropped.contains(&cluster)) {
            if let Some(end) = file.cow_writes.listen() {
                return Err(Blocked::Wait(end));
            }
            // No write with COW padding is in flight.
            file.dropped.clear();
        }
        Ok(())
    }

    /// The range of a change that becomes visible. In a data file, the range ends at the end of the
    /// disk of `size` bytes, rounded up to a block, or at the end of `guest` if that is later. So
    /// padding does not extend the file past the disk's last block.
    pub(super) fn within_disk(&self, whole: ByteRange, guest: ByteRange, size: u64) -> ByteRange {
        let Self::DataFile(file) = self else { return whole };
        let end = size.next_multiple_of(file.block).max(guest.end());
        whole.before(end)
    }

    /// Sets the block size of the data file, in bytes, after the file is opened.
    pub(super) fn set_block(&mut self, block: u64) {
        if let Self::DataFile(file) = self {
            file.block = block;
        }
    }

    /// Attaches a guard to the memory of a write with COW padding: the write counts as in flight
    /// until the memory is dropped.
    pub(super) fn track_cow_write(&self, from: IoVector) -> IoVector {
        match self {
            Self::Image => from,
            Self::DataFile(file) => from.with_guard(file.cow_writes.enter()),
        }
    }
}

impl DataFilePlacement {
    /// Whether the data file reads as the disk.
    pub(super) fn is_raw_disk(&self) -> bool {
        self.is_raw_disk
    }

    /// Records that the future of a write to these clusters was dropped.
    pub(super) fn note_dropped(&mut self, clusters: Range<u64>) {
        self.dropped.extend(clusters);
    }
}
