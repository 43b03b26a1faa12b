//! Where mapped extents point to: host clusters of the image, or an external data file.
//!
//! This is decided once, when the image is opened. In a data file each guest cluster has one host
//! offset, its own, as in QEMU: nothing is allocated or counted, and no host cluster ever gets
//! another owner. The L2 entry says whether the data there counts.
//!
//! - Zeros and discards of data go to the data file, and its entries stay. So nothing has to be
//!   punched after a writeback, when the cluster may have data again. Entries say zero only where
//!   there is no data.
//! - Where the data file is the raw disk (`data_file_raw`), entries never say zero: all zeros are
//!   written there, so that it reads as the disk without the image.
//! - A write whose future was dropped may still write its COW padding. There is no other host
//!   cluster to go to, so the next change of the cluster waits for that write.

use std::collections::HashSet;
use std::ops::Range;

use blockhouse_core::sync::WaitGroup;
use blockhouse_core::{ByteRange, IoVector};

use crate::qcow2::layout::header::Header;
use crate::qcow2::layout::options::DataFile;
use crate::qcow2::tables::{Blocked, Step};

/// Where the data of guest clusters lies.
pub(super) enum DataPlacement {
    /// In host clusters of the image.
    Image,
    /// In a data file, each cluster at its own offset.
    DataFile(DataFilePlacement),
}

/// The mapping's knowledge of the data file.
pub(super) struct DataFilePlacement {
    /// Its block in bytes: writes there are aligned to it.
    block: u64,
    is_raw_disk: bool,
    /// Writes that carry COW padding.
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

    /// Blocked while writes with dropped futures may write their COW padding to these clusters.
    pub(super) fn wait_for_cow_writes(&mut self, clusters: &Range<u64>) -> Step<()> {
        let Self::DataFile(file) = self else { return Ok(()) };
        if clusters.clone().any(|cluster| file.dropped.contains(&cluster)) {
            if let Some(end) = file.cow_writes.listen() {
                return Err(Blocked::Wait(end));
            }
            // None is in flight: all have completed.
            file.dropped.clear();
        }
        Ok(())
    }

    /// The range of a change that becomes visible. In a data file it ends with the disk of `size`
    /// bytes, so that the file is no longer than that (up to the end of a block).
    pub(super) fn within_disk(&self, whole: ByteRange, guest: ByteRange, size: u64) -> ByteRange {
        let Self::DataFile(file) = self else { return whole };
        let end = size.next_multiple_of(file.block).max(guest.end());
        whole.before(end)
    }

    /// The data file is open, and has blocks of this many bytes.
    pub(super) fn set_block(&mut self, block: u64) {
        if let Self::DataFile(file) = self {
            file.block = block;
        }
    }

    /// The memory of a write with COW padding: the write counts as in flight until it is dropped.
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

    /// The future of a write to these clusters was dropped.
    pub(super) fn note_dropped(&mut self, clusters: Range<u64>) {
        self.dropped.extend(clusters);
    }
}
