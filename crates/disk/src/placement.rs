//! Where each part of a disk is stored, through all layers: for people who ask, not for the I/O path.

use blockhouse_core::{Allocation, ByteRange, ExtentState, Result, Storage};
use blockhouse_format::Intent;

use crate::block_status::HostRuns;
use crate::layers::within;
use crate::{BlockStatus, BlockStatusCache, Disk};

/// What a part of a disk is, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The part.
    pub guest: ByteRange,
    /// Which layer it comes from: 0 is the image itself, 1 the file behind it.
    pub depth: usize,
    /// What it is there.
    pub content: Content,
}

/// What a part of a layer is. Places are offsets in the layer's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
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
    /// The layer has nothing, nor does any behind it: reads as zeros.
    Hole {
        /// The place that is kept for data.
        host: Option<u64>,
    },
}

impl<S: Storage> Disk<S> {
    /// Where the first bytes of `range` are stored. `range` must not be empty; `cache` belongs to this
    /// disk alone.
    ///
    /// # Errors
    /// `InvalidInput` when `range` reaches past the end; what the storages answer.
    pub async fn placement(
        &self,
        range: ByteRange,
        cache: &mut BlockStatusCache,
    ) -> Result<Placement> {
        self.check_inside(range)?;
        let (mut layer, mut rest, mut depth) = (self, range, 0);
        loop {
            if layer.format.is_identity() {
                let (guest, content) = layer.identity_content(rest, cache, depth).await?;
                return Ok(Placement { guest, depth, content });
            }
            let extent = layer.format.map(rest, Intent::Read).await?;
            if extent.state == ExtentState::Backing {
                let behind = layer.backing()?;
                let inside = within(extent.guest, behind.size());
                if !inside.is_empty() {
                    (layer, rest, depth) = (behind, inside, depth + 1);
                    continue;
                }
            }
            let runs = cache.layer(depth);
            let (guest, content) = layer.mapped_content(extent.guest, extent.state, runs).await?;
            return Ok(Placement { guest, depth, content });
        }
    }

    /// The layer at a [`depth`](Placement::depth).
    pub fn layer(&self, depth: usize) -> Option<&Self> {
        let mut layer = self;
        for _ in 0..depth {
            layer = layer.backing.as_deref()?;
        }
        Some(layer)
    }

    /// Where the disk is the storage everything has its place, holes of the file as well.
    async fn identity_content(
        &self,
        range: ByteRange,
        cache: &mut BlockStatusCache,
        depth: usize,
    ) -> Result<(ByteRange, Content)> {
        let (status, length) = self.status_of_layers(range, cache, depth).await?;
        let host = range.offset();
        let content = match status {
            BlockStatus::Data => Content::Data { host },
            BlockStatus::Hole | BlockStatus::Zero => Content::Zero { host: Some(host) },
        };
        Ok((range.truncate(length), content))
    }

    async fn mapped_content(
        &self,
        guest: ByteRange,
        state: ExtentState,
        runs: &mut HostRuns,
    ) -> Result<(ByteRange, Content)> {
        Ok(match state {
            ExtentState::Mapped { host } => written(self.storage(), guest, host, runs).await?,
            ExtentState::Compressed { .. } => (guest, Content::Compressed),
            ExtentState::Zero => {
                let (host, length) = self.format.preallocated_offset(guest).await?;
                (guest.truncate(length), Content::Zero { host })
            }
            ExtentState::Hole | ExtentState::Backing => {
                let (host, length) = self.format.preallocated_offset(guest).await?;
                (guest.truncate(length), Content::Hole { host })
            }
        })
    }
}

/// The first bytes of `guest`, which are mapped to `host`: clusters that were allocated ahead of
/// their data are holes of the file, or lie past its end.
async fn written<S: Storage>(
    file: &S,
    guest: ByteRange,
    host: u64,
    runs: &mut HostRuns,
) -> Result<(ByteRange, Content)> {
    let inside = file.size().saturating_sub(host).min(guest.length());
    let Some(range) = ByteRange::new(host, inside).filter(|range| !range.is_empty()) else {
        return Ok((guest, Content::Unwritten { host }));
    };
    let (status, length) = runs.block_status(file, range).await?;
    let content = match status {
        Allocation::Data => Content::Data { host },
        Allocation::Hole => Content::Unwritten { host },
    };
    Ok((guest.truncate(length), content))
}
