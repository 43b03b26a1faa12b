//! The space that an image uses in its storage, and the space left in a storage that cannot grow (a
//! block device).

use blockhouse_core::{Result, Storage};

use super::Qcow2;
use super::tables::{LastCounted, Step, Tables};
use super::writeback::Metadata;

/// A search for the last cluster in use, from the end of the storage backwards.
struct Search {
    /// All clusters from here on are free.
    below: u64,
}

impl Search {
    fn new<S: Storage>(metadata: &Metadata<S>) -> Self {
        Self { below: metadata.storage().size() >> metadata.geometry().cluster_bits }
    }

    fn run(&mut self, tables: &mut Tables) -> Step<()> {
        let geometry = tables.geometry();
        // The refcount table covers this many clusters; later clusters have no refcount.
        let countable = tables.refcount_table().len() as u64 * geometry.block_refcounts();
        self.below = self.below.min(countable);
        while self.below > 0 {
            match tables.refcounts().last_counted(self.below - 1)? {
                LastCounted::NoRefcountBlock(first) | LastCounted::NoneFrom(first) => {
                    self.below = first;
                }
                LastCounted::Cluster(last) => {
                    self.below = last + 1;
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Bytes of the storage after the last cluster in use, plus the bytes of earlier clusters that
    /// became free while the image is open.
    fn room<S: Storage>(&self, metadata: &Metadata<S>) -> u64 {
        let clusters = metadata.storage().size() >> metadata.geometry().cluster_bits;
        let free = metadata.lock().allocator.freed_before(self.below);
        metadata.geometry().offset_of(clusters.saturating_sub(self.below) + free)
    }
}

impl<S: Storage> Qcow2<S> {
    /// Minimum number of bytes of clusters that still fit into a storage that does not grow by
    /// itself. Clusters before the last cluster in use are not counted if they were free when the
    /// image was opened.
    ///
    /// # Errors
    /// Errors of the storage.
    pub async fn room_left(&self) -> Result<u64> {
        let mut search = Search::new(&self.metadata);
        self.metadata.step(|state| search.run(&mut state.tables)).await?;
        Ok(search.room(&self.metadata))
    }

    /// The end of the last cluster of the storage that is in use, in bytes.
    ///
    /// # Errors
    /// Errors of the storage.
    pub async fn end_in_use(&self) -> Result<u64> {
        let mut search = Search::new(&self.metadata);
        self.metadata.step(|state| search.run(&mut state.tables)).await?;
        Ok(self.metadata.geometry().offset_of(search.below))
    }

    /// As [`room_left`](Self::room_left), from the tables in memory. `None` if other tables would
    /// have to be read.
    pub fn room_left_in_memory(&self) -> Option<u64> {
        let mut search = Search::new(&self.metadata);
        let found = search.run(&mut self.metadata.lock().tables);
        found.ok().map(|()| search.room(&self.metadata))
    }
}
