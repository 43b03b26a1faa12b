//! Maps of disks for users, not for the I/O path: the location of each part of a disk, through all
//! layers.

use blockhouse_core::{Allocation, ByteRange, ExtentState, Result, Storage};
use blockhouse_format::Intent;
use smallvec::SmallVec;

use super::block_status::{HostRuns, LayerStatus};
use super::{BlockStatus, BlockStatusCache, Layer, Reader, within};

/// A part of a disk and its location.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapEntry {
    /// The part.
    pub guest: ByteRange,
    /// The layer that has the part: 0 is the image itself, 1 its backing file.
    pub depth: usize,
    /// The kind of the part.
    pub kind: MapEntryKind,
}

/// The kind of a part of a layer. Offsets are offsets in the layer's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapEntryKind {
    /// Data, from `host` on.
    Data {
        /// The offset.
        host: u64,
    },
    /// Space for data, allocated from `host` on and not written yet: reads as zeros.
    Unwritten {
        /// The offset.
        host: u64,
    },
    /// Compressed data.
    Compressed,
    /// Zeros, as the layer's metadata says.
    Zero {
        /// The offset of the space allocated for data.
        host: Option<u64>,
    },
    /// Neither the layer nor a backing file has data: reads as zeros.
    Hole {
        /// The offset of the space allocated for data.
        host: Option<u64>,
    },
}

impl MapEntryKind {
    /// The offset of the range's space, if it has any.
    pub fn host(self) -> Option<u64> {
        match self {
            Self::Data { host } | Self::Unwritten { host } => Some(host),
            Self::Zero { host } | Self::Hole { host } => host,
            Self::Compressed => None,
        }
    }

    /// Whether two ranges have the same flags in QEMU's block status.
    pub(crate) fn has_flags_of(self, other: Self) -> bool {
        std::mem::discriminant(&self) == std::mem::discriminant(&other)
            && self.host().is_some() == other.host().is_some()
    }
}

impl<S: Storage> LayerStatus<'_, S> {
    /// The location of the first bytes of `range`, which is not empty and lies inside the disk.
    /// `cache` belongs to this layer alone.
    pub(crate) async fn map_entry(
        &self,
        range: ByteRange,
        cache: &mut BlockStatusCache,
    ) -> Result<MapEntry> {
        let (mut layer, mut rest, mut depth) = (self.0, range, 0);
        let mut passed: SmallVec<[_; 2]> = SmallVec::new();
        loop {
            if layer.format.is_identity() {
                let (guest, content) =
                    LayerStatus(layer).identity_content(rest, cache, depth).await?;
                return Ok(MapEntry { guest, depth, kind: content });
            }
            let guard = layer.format.begin_read();
            let extent = layer.format.map(rest, Intent::Read).await?;
            if extent.state == ExtentState::Backing {
                // The lookup is registered before the drop of the guard: afterwards the backing
                // file may be detached.
                passed.push(layer.backing_reads.begin(extent.guest, Reader::Read));
                let backing = layer.backing()?;
                let inside = within(extent.guest, backing.size());
                if !inside.is_empty() {
                    (layer, rest, depth) = (backing, inside, depth + 1);
                    continue;
                }
            }
            drop(guard);
            let runs = cache.layer(depth);
            let (guest, content) =
                LayerStatus(layer).mapped_content(extent.guest, extent.state, runs).await?;
            return Ok(MapEntry { guest, depth, kind: content });
        }
    }

    /// For a disk that is the storage itself: all bytes have a host offset, even holes of the file.
    async fn identity_content(
        &self,
        range: ByteRange,
        cache: &mut BlockStatusCache,
        depth: usize,
    ) -> Result<(ByteRange, MapEntryKind)> {
        let host = range.offset();
        // The file may end inside the last sector. The block of the storage at the end counts as a
        // whole, because direct I/O transfers only whole blocks.
        let block = u64::from(self.0.data().capabilities().alignment.offset);
        let stored = self.0.data().size().next_multiple_of(block).saturating_sub(host);
        if stored == 0 {
            return Ok((range, MapEntryKind::Zero { host: Some(host) }));
        }
        let (status, length) = self.block_status(range, cache, depth).await?;
        let length = if status == BlockStatus::Data { length.min(stored) } else { length };
        let content = match status {
            BlockStatus::Data => MapEntryKind::Data { host },
            BlockStatus::Hole | BlockStatus::Zero => MapEntryKind::Zero { host: Some(host) },
        };
        Ok((range.truncate(length), content))
    }

    async fn mapped_content(
        &self,
        guest: ByteRange,
        state: ExtentState,
        runs: &mut HostRuns,
    ) -> Result<(ByteRange, MapEntryKind)> {
        Ok(match state {
            ExtentState::Mapped { host } => written(self.0, guest, host, runs).await?,
            ExtentState::Compressed { .. } => (guest, MapEntryKind::Compressed),
            ExtentState::Zero => {
                let (host, length) = self.0.format.preallocated_offset(guest).await?;
                (guest.truncate(length), MapEntryKind::Zero { host })
            }
            ExtentState::Hole | ExtentState::Backing => {
                let (host, length) = self.0.format.preallocated_offset(guest).await?;
                (guest.truncate(length), MapEntryKind::Hole { host })
            }
        })
    }
}

/// The first bytes of `guest`, which are mapped to `host`, and their kind. Clusters that were
/// allocated before their data was written are holes of the file, or lie past its end. If the data
/// is encrypted, they do not read as zeros, because a read decrypts the zeros of the file.
async fn written<S: Storage>(
    layer: &Layer<S>,
    guest: ByteRange,
    host: u64,
    runs: &mut HostRuns,
) -> Result<(ByteRange, MapEntryKind)> {
    if layer.is_encrypted() {
        return Ok((guest, MapEntryKind::Data { host }));
    }
    let inside = layer.data().size().saturating_sub(host).min(guest.length());
    let Some(range) = ByteRange::new(host, inside).filter(|range| !range.is_empty()) else {
        return Ok((guest, MapEntryKind::Unwritten { host }));
    };
    let (status, length) = layer.host_status(runs, range).await?;
    let content = match status {
        Allocation::Data => MapEntryKind::Data { host },
        Allocation::Hole => MapEntryKind::Unwritten { host },
    };
    Ok((guest.truncate(length), content))
}
