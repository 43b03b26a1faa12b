//! Where each part of a disk is stored, through all layers: for maps that users ask for, not for
//! the I/O path.

use blockhouse_core::{Allocation, ByteRange, ExtentState, Result, Storage};
use blockhouse_format::Intent;

use super::block_status::{HostRuns, LayerStatus};
use super::{BlockStatus, BlockStatusCache, Layer, within};

/// A part of a disk and its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapEntry {
    /// The part.
    pub guest: ByteRange,
    /// The layer that it comes from: 0 is the image itself, 1 its backing file.
    pub depth: usize,
    /// Its kind.
    pub kind: MapEntryKind,
}

/// The kind of a part of a layer. Places are offsets in the layer's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapEntryKind {
    /// Data, from `host` on.
    Data {
        /// The place.
        host: u64,
    },
    /// A place for data, from `host` on, that nothing was written to yet: reads as zeros.
    Unwritten {
        /// The place.
        host: u64,
    },
    /// Compressed data.
    Compressed,
    /// Zeros that the layer names.
    Zero {
        /// The place that is kept for data.
        host: Option<u64>,
    },
    /// Neither the layer nor a backing file has data: reads as zeros.
    Hole {
        /// The place that is kept for data.
        host: Option<u64>,
    },
}

impl<S: Storage> LayerStatus<'_, S> {
    /// Where the first bytes of `range`, which is not empty and lies inside the disk, are stored.
    /// `cache` belongs to this layer alone.
    pub(crate) async fn map_entry(
        &self,
        range: ByteRange,
        cache: &mut BlockStatusCache,
    ) -> Result<MapEntry> {
        let (mut layer, mut rest, mut depth) = (self.0, range, 0);
        loop {
            if layer.format.is_identity() {
                let (guest, content) =
                    LayerStatus(layer).identity_content(rest, cache, depth).await?;
                return Ok(MapEntry { guest, depth, kind: content });
            }
            // While it is held, the backing file is not detached.
            let guard = layer.format.begin_read();
            let extent = layer.format.map(rest, Intent::Read).await?;
            if extent.state == ExtentState::Backing {
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

    /// If the disk is the storage itself, everything has a host offset, holes of the file as well.
    async fn identity_content(
        &self,
        range: ByteRange,
        cache: &mut BlockStatusCache,
        depth: usize,
    ) -> Result<(ByteRange, MapEntryKind)> {
        let host = range.offset();
        // A last sector that the file has only a part of.
        let stored = self.0.data().size().saturating_sub(host);
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

/// The first bytes of `guest`, which are mapped to `host`: clusters that were allocated ahead of
/// their data are holes of the file, or lie past its end.
async fn written<S: Storage>(
    layer: &Layer<S>,
    guest: ByteRange,
    host: u64,
    runs: &mut HostRuns,
) -> Result<(ByteRange, MapEntryKind)> {
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
