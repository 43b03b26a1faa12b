//! Compressed clusters of a state, collected for one large write.

/// Compressed clusters that are written together.
#[derive(Default)]
pub(super) struct CompressedBatch {
    /// The number in the state and the compressed bytes of each cluster.
    pub(super) clusters: Vec<(u64, Vec<u8>)>,
    /// The windows of these clusters. Each occurs once, because clusters are added window by
    /// window.
    pub(super) windows: Vec<u64>,
    length: u64,
}

/// The result of [`CompressedBatch::add`].
pub(super) enum AddResult {
    /// The cluster is in the batch.
    Added,
    /// The caller stores it uncompressed.
    Incompressible,
}

impl CompressedBatch {
    /// Adds a compressed cluster. `compressed` is `None` if compression does not make the cluster
    /// smaller.
    pub(super) fn add(
        &mut self,
        window: u64,
        cluster: u64,
        compressed: Option<Vec<u8>>,
    ) -> AddResult {
        let Some(compressed) = compressed else { return AddResult::Incompressible };
        self.length += compressed.len() as u64;
        self.clusters.push((cluster, compressed));
        if self.windows.last() != Some(&window) {
            self.windows.push(window);
        }
        AddResult::Added
    }

    /// Whether the batch has a cluster of a window.
    pub(super) fn holds(&self, window: u64) -> bool {
        self.windows.contains(&window)
    }

    /// Compressed bytes of all clusters.
    pub(super) fn length(&self) -> u64 {
        self.length
    }
}
