//! Clusters of a state that are compressed, waiting until they are worth a write.

/// Packed clusters that wait together.
#[derive(Default)]
pub(super) struct Pack {
    /// Cluster of the state and its packed bytes.
    pub(super) blobs: Vec<(u64, Vec<u8>)>,
    /// Of which windows they are, each once.
    pub(super) windows: Vec<u64>,
    length: u64,
}

/// What became of a cluster.
pub(super) enum Added {
    /// It is in the pack.
    Packed,
    /// It is to be stored as it is.
    Plain,
}

impl Pack {
    /// Takes the compressed form of a cluster, if there is one.
    pub(super) fn add(&mut self, window: u64, cluster: u64, packed: Option<Vec<u8>>) -> Added {
        let Some(packed) = packed else { return Added::Plain };
        self.length += packed.len() as u64;
        self.blobs.push((cluster, packed));
        if self.windows.last() != Some(&window) {
            self.windows.push(window);
        }
        Added::Packed
    }

    /// Whether anything of a window waits here.
    pub(super) fn holds(&self, window: u64) -> bool {
        self.windows.contains(&window)
    }

    /// Bytes of all that waits.
    pub(super) fn length(&self) -> u64 {
        self.length
    }
}
