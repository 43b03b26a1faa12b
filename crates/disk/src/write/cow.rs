//! Copy on write: the parts of a new cluster that a write does not cover get the old data.
//!
//! New space becomes visible as a whole. So the bytes around the guest's data get the content that
//! the guest would have read there. This content is read through the old mapping, and written
//! together with the guest's data.

use blockhouse_core::{ByteRange, Durability, Extent, IoVector, Result, Storage};
use blockhouse_format::DataPlace;
use futures_util::future::join;

use super::Writer;
use super::prepared_extent::PreparedExtent;
use crate::buffers::ClusterBuffer;
use crate::durability::DurabilityPlan;
use crate::layer::{Layer, Reader};

/// The bytes of an extent's `alloc_range` before and after its `guest` range.
struct CowRegions {
    head: ByteRange,
    tail: ByteRange,
}

impl CowRegions {
    fn of(extent: &Extent) -> Self {
        let Extent { guest, alloc_range, .. } = *extent;
        Self {
            head: ByteRange::between(alloc_range.offset(), guest.offset()),
            tail: ByteRange::between(guest.end(), alloc_range.end()),
        }
    }

    /// Location of the first byte of the head. `host` is the host offset of the guest's own bytes.
    fn place(&self, host: u64) -> DataPlace {
        DataPlace { guest: self.head.offset(), host: host - self.head.length() }
    }

    fn length(&self) -> usize {
        (self.head.length() + self.tail.length()) as usize
    }

    /// Memory for head and tail, lent from one buffer.
    fn lend(&self, buffer: &mut ClusterBuffer<'_>) -> (IoVector, IoVector) {
        let mut head = buffer.lend_range(0, self.length());
        let tail = head.split_off(self.head.length() as usize);
        (head, tail)
    }

    /// Reads the content of head and tail that the guest would read.
    async fn read<S: Storage>(
        &self,
        layer: &Layer<S>,
        buffer: &mut ClusterBuffer<'_>,
    ) -> Result<()> {
        let (head, tail) = self.lend(buffer);
        let (head, tail) =
            join(read_region(layer, self.head, head), read_region(layer, self.tail, tail)).await;
        head.and(tail)
    }
}

impl<S: Storage> Writer<S> {
    /// Writes head, `from` and tail as one write. `host` is the host offset of the first byte of
    /// `from`.
    pub(super) async fn write_with_cow(
        &self,
        extent: PreparedExtent<'_, S>,
        host: u64,
        from: IoVector,
        plan: DurabilityPlan,
    ) -> Result<()> {
        let regions = CowRegions::of(&extent);
        let mut buffer = self.layer.cluster_buffers().for_cow(regions.length()).await?;
        if let Err(error) = regions.read(&self.layer, &mut buffer).await {
            return extent.complete(Err(error), plan.write_durability()).await;
        }
        let (head, tail) = regions.lend(&mut buffer);
        let all = head.chain(from).chain(tail);
        let all = self.layer.format().track_cow_write(all);
        self.store(extent, regions.place(host), all, plan).await
    }

    /// Writes only the head and the tail, without FUA.
    pub(super) async fn copy_cow_regions(
        &self,
        extent: &mut PreparedExtent<'_, S>,
        host: u64,
    ) -> Result<()> {
        let regions = CowRegions::of(extent);
        if regions.length() == 0 {
            return Ok(());
        }
        let mut buffer = self.layer.cluster_buffers().for_cow(regions.length()).await?;
        regions.read(&self.layer, &mut buffer).await?;
        let (head, tail) = regions.lend(&mut buffer);
        let start = regions.place(host);
        extent.begin_io();
        let (head, tail) = join(
            write_region(&self.layer, start, head),
            write_region(&self.layer, start.skip(regions.tail.offset() - start.guest), tail),
        )
        .await;
        extent.end_io();
        head.and(tail)
    }
}

async fn read_region<S: Storage>(layer: &Layer<S>, range: ByteRange, into: IoVector) -> Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    layer.read_aligned(range, into, Reader::Change).await
}

async fn write_region<S: Storage>(
    layer: &Layer<S>,
    place: DataPlace,
    from: IoVector,
) -> Result<()> {
    if from.is_empty() {
        return Ok(());
    }
    layer.write_data(place, layer.format().track_cow_write(from), Durability::None).await
}
