//! Copy on write: a new place gets what a write leaves out of it.
//!
//! New space becomes visible as a whole, so the bytes around the guest's own are filled with what the
//! guest would have read there. They are read while the old mapping still holds, and go down with the
//! guest's data as one write.

use blockhouse_core::{ByteRange, Durability, Error, Extent, IoVector, Result, Storage};
use futures_util::future::join;

use crate::Disk;
use crate::clusters::ClusterBuffer;
use crate::durability::DurabilityPlan;
use crate::prepared::Prepared;

/// What lies around an extent's own bytes.
struct Around {
    head: ByteRange,
    tail: ByteRange,
}

impl Around {
    fn of(extent: &Extent) -> Self {
        let Extent { guest, alloc_range: whole, .. } = *extent;
        Self {
            head: ByteRange::between(whole.offset(), guest.offset()),
            tail: ByteRange::between(guest.end(), whole.end()),
        }
    }

    fn length(&self) -> usize {
        (self.head.length() + self.tail.length()) as usize
    }

    /// The memory of both in one buffer.
    fn lend(&self, buffer: &mut ClusterBuffer<'_>) -> (IoVector, IoVector) {
        let mut head = buffer.lend_range(0, self.length());
        let tail = head.split_off(self.head.length() as usize);
        (head, tail)
    }
}

impl<S: Storage> Disk<S> {
    /// Writes `from` to the extent's bytes and their old surroundings around them, as one write.
    /// `host` is the place of the extent's first byte.
    pub(crate) async fn write_whole(
        &self,
        extent: Prepared<'_, S>,
        host: u64,
        from: IoVector,
        plan: DurabilityPlan,
    ) -> Result<()> {
        let around = Around::of(&extent);
        let mut buffer = self.clusters.for_copy(around.length()).await?;
        if let Err(error) = self.read_around(&around, &mut buffer).await {
            return extent.settle(Err(error), plan.write_durability()).await;
        }
        let (head, tail) = around.lend(&mut buffer);
        let all = self.format.track_cow_write(head.chain(from).chain(tail));
        self.store(extent, host - around.head.length(), all, plan).await
    }

    /// Writes only the old surroundings of the extent's bytes, plainly.
    pub(crate) async fn copy_around(&self, extent: &mut Prepared<'_, S>, host: u64) -> Result<()> {
        let around = Around::of(extent);
        if around.length() == 0 {
            return Ok(());
        }
        let mut buffer = self.clusters.for_copy(around.length()).await?;
        self.read_around(&around, &mut buffer).await?;
        let (head, tail) = around.lend(&mut buffer);
        extent.set_moving();
        let (head, tail) = join(
            self.write_part(host - around.head.length(), head),
            self.write_part(host + extent.guest.length(), tail),
        )
        .await;
        extent.set_idle();
        head.and(tail)
    }

    async fn write_part(&self, host: u64, from: IoVector) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        self.storage().write(host, self.format.track_cow_write(from), Durability::None).await
    }

    async fn read_around(&self, around: &Around, buffer: &mut ClusterBuffer<'_>) -> Result<()> {
        let (head, tail) = around.lend(buffer);
        let (head, tail) =
            join(self.read_part(around.head, head), self.read_part(around.tail, tail)).await;
        head.and(tail)
    }

    async fn read_part(&self, range: ByteRange, into: IoVector) -> Result<(), Error> {
        if range.is_empty() {
            return Ok(());
        }
        self.read(range, into).await
    }
}
