//! A commit of backing files below a disk in use: the data of the intermediate images is copied
//! into a base further down, and then the image above them uses that base as its backing file.
//!
//! Guarantees: the disk's content never changes. A range is written to the base only if an
//! intermediate image has data there, which hides the base's data; the base gets the data that the
//! image above reads there. So the chain reads the same during the copy and after a crash. Once the
//! base durably has everything, it alone reads the same as the chain; only after that, one header
//! write makes the image above name the base. Other overlays of the intermediate images or of the
//! base would be corrupted, so the caller refuses the commit if there are any.

use std::sync::Arc;

use blockhouse_core::{ByteRange, Result, Storage, SyncMode, WorkBudget};

use super::range_copy::RangeCopy;
use super::rebase::set_backing_file;
use crate::buffers::MAX_POPULATED;
use crate::disk::{Disk, FurtherBase};
use crate::image::{close_as_layer, image_of_layer};
use crate::write::BackedRange;

/// The granularity of the map of ranges where the base may have data: here all ranges are marked.
const GRANULARITY: u64 = 16 << 20;

/// A commit of layers to be carried out. See the module's documentation.
pub struct LayerCommit<S: Storage> {
    disk: Arc<Disk<S>>,
    left_out: FurtherBase,
    /// The image above the layers, open for writing; `None` if it is the disk's own.
    above: Option<Arc<Disk<S>>>,
    /// The highest layer, for reading.
    top: Arc<Disk<S>>,
    base: Arc<Disk<S>>,
    copy: RangeCopy<S>,
    before_naming: Box<dyn Fn() -> Result<()> + Send>,
}

impl<S: Storage> LayerCommit<S> {
    /// From now on `disk` reads the base of `left_out` through `base`, another opening of that
    /// base, for writing. `above` is another opening of the image above the layers, if that is not
    /// the disk's own. The caller [begins](Self::begin) next, and must [end](Self::end) it in every
    /// case.
    ///
    /// # Errors
    /// The host has no memory to copy; then nothing has changed.
    pub fn new(
        disk: Arc<Disk<S>>,
        left_out: FurtherBase,
        above: Option<Arc<Disk<S>>>,
        base: Arc<Disk<S>>,
    ) -> Result<Self> {
        let (top, lowest) = {
            let chain: Vec<_> = left_out.chain_of(&disk).collect();
            (Arc::new(Disk::new(image_of_layer(chain[0]))), Arc::clone(chain[chain.len() - 2]))
        };
        let copy = RangeCopy::new(Arc::clone(&top), Arc::clone(&base), GRANULARITY, false)?;
        disk.image().layer().opened().forget_chains();
        lowest.opened().replace(Arc::clone(base.image().layer()));
        let before_naming = Box::new(|| Ok(()));
        Ok(Self { disk, left_out, above, top, base, copy, before_naming })
    }

    /// Runs `action` when the base has all data, durably, and before the image above names it. If
    /// `action` fails, the commit fails.
    #[must_use]
    pub fn before_naming(mut self, action: impl Fn() -> Result<()> + Send + 'static) -> Self {
        self.before_naming = Box::new(action);
        self
    }

    /// Waits for reads that use an older opening of the base, runs `before_change`, and makes the
    /// base as long as the highest layer.
    ///
    /// # Errors
    /// `Io` if a read takes too long, before anything has changed; errors of `before_change`;
    /// storage errors.
    pub async fn begin(&self, before_change: impl FnOnce() -> Result<()>) -> Result<()> {
        let reads = self.disk.image().layer().opened().reads_ended();
        self.disk.patiently(reads).await?;
        before_change()?;
        if self.base.size() < self.top.size() {
            self.base.resize(self.top.size()).await?;
        }
        Ok(())
    }

    /// The disk.
    pub fn disk(&self) -> &Arc<Disk<S>> {
        &self.disk
    }

    /// The base.
    pub fn base(&self) -> &Arc<Disk<S>> {
        &self.base
    }

    /// The image above, if that is not the disk's own.
    pub fn above(&self) -> Option<&Arc<Disk<S>>> {
        self.above.as_ref()
    }

    /// The layers to be merged, and their position in the chain.
    pub fn left_out(&self) -> &FurtherBase {
        &self.left_out
    }

    /// The number of bytes that are examined.
    pub fn size(&self) -> u64 {
        self.top.size()
    }

    /// The first part from `offset` on that must be copied to the base.
    ///
    /// # Errors
    /// Errors of the lookup.
    pub async fn next_part(&self, offset: u64) -> Result<Option<BackedRange>> {
        let budget = WorkBudget::new();
        let mut rest = ByteRange::between(offset.min(self.size()), self.size());
        while !rest.is_empty() {
            let (place, length) = self.top.image().layer().status().allocation_depth(rest).await?;
            let found = rest.truncate(length);
            // The highest layer has the depth 1, and the base has the depth `steps`.
            if (1..self.left_out.steps()).contains(&(place as usize)) {
                let range = found.truncate(MAX_POPULATED - found.offset() % MAX_POPULATED);
                return Ok(Some(BackedRange { range, is_zero: false }));
            }
            rest = rest.after(found.end());
            budget.spend(WorkBudget::LOOK_UP).await;
        }
        Ok(None)
    }

    /// Copies a part; returns how many bytes of it are not zeros. Not durable before
    /// [`settle`](Self::settle). If `go_on` returns false after the read of the layers, nothing is
    /// written, because the base may be closed by then.
    ///
    /// # Errors
    /// Errors of either storage; the message names it.
    pub async fn copy(&self, part: BackedRange, go_on: &dyn Fn() -> bool) -> Result<u64> {
        self.copy.copy_if(part.range, go_on).await
    }

    /// Makes the base durable, after all parts are copied.
    ///
    /// # Errors
    /// Errors of its storage.
    pub async fn settle(&self) -> Result<()> {
        let base = self.base.image();
        base.layer().flush(SyncMode::Full).await?;
        // From now on a kill does not leave the base marked as open.
        base.format().settle().await
    }

    /// Makes the image above name the base, durably, and the disk skip the layers.
    ///
    /// # Errors
    /// `ReadOnly`; `Io` if changes in flight take too long; errors of the action before, or of the
    /// storage. The image above then still names the layers or, if the header write failed, perhaps
    /// the base: it reads the same in both cases.
    pub async fn name_base(&self) -> Result<()> {
        (self.before_naming)()?;
        let name = Some(self.left_out.name().clone());
        match &self.above {
            Some(above) => set_backing_file(above, name).await?,
            None => {
                let _guard = self.disk.quiesce().await?;
                set_backing_file(&self.disk, name).await?;
            }
        }
        self.left_out.pass_over(&self.disk).await;
        Ok(())
    }

    /// Makes the base a read-only layer again, and closes the image above. No operation of the
    /// commit may be in flight.
    ///
    /// # Errors
    /// Errors of their storages.
    pub async fn end(&self) -> Result<()> {
        let closed = match &self.above {
            Some(above) => above.close().await,
            None => Ok(()),
        };
        close_as_layer(self.base.image()).await.and(closed)
    }
}
