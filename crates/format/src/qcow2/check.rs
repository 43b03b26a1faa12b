//! Is an image what it says? Every table is read from the storage and compared with the refcounts.
//!
//! A cluster that is counted more often than it is referred to is a leak; everything else that is
//! wrong is a corruption, counted as `qemu-img check` does.

use blockhouse_core::{Result, Storage};

use super::Qcow2;
use super::entry::{self, Entry};
use super::geometry::Geometry;
use super::header::Header;
use super::references::References;
use super::{refcount, table_io};

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// How much is wrong and endangers data.
    pub corruptions: u64,
    /// Clusters that are counted but not used.
    pub leaks: u64,
    /// Clusters of the guest's disk.
    pub total_clusters: u64,
    /// Those of them that have space in the file.
    pub allocated_clusters: u64,
    /// Those of them that are compressed.
    pub compressed_clusters: u64,
    /// Those of them that do not lie behind the one before them, or are compressed.
    pub fragmented_clusters: u64,
    /// Where the last cluster in use ends, in bytes.
    pub end: u64,
    /// What is wrong, in words; the first thousand.
    pub problems: Vec<String>,
}

/// Checks an image that nobody changes meanwhile and whose changes are all flushed. Takes 8 bytes of
/// memory for each cluster of the file.
///
/// # Errors
/// Only what the storage answers: what is wrong with the image is in the report.
pub async fn check<S: Storage>(image: &Qcow2<S>) -> Result<CheckReport> {
    let header = image.state.lock().disk_header.clone();
    check_tables(image.storage(), &header).await
}

/// As [`check`], by the header alone.
pub(super) async fn check_tables<S: Storage>(storage: &S, header: &Header) -> Result<CheckReport> {
    let mut references = References::count(storage, header).await?;
    let recorded = Recorded::read(storage, header, references.counts.len()).await?;
    let mut report = CheckReport {
        total_clusters: header.geometry.clusters_for(header.size),
        allocated_clusters: references.allocated,
        compressed_clusters: references.compressed,
        fragmented_clusters: references.fragmented,
        ..CheckReport::default()
    };
    let counts = std::mem::take(&mut references.counts);
    for (cluster, (&counted, &recorded)) in counts.iter().zip(&recorded.counts).enumerate() {
        let offset = header.geometry.offset_of(cluster as u64);
        if recorded > 0 || counted > 0 {
            report.end = offset + header.geometry.cluster_size();
        }
        if recorded > counted {
            report.leaks += 1;
        } else if recorded < counted {
            let what =
                format!("the cluster at offset {offset} has {counted} users but counts {recorded}");
            references.problem(what);
        }
    }
    let ownership = Ownership { storage, header, recorded: &recorded };
    ownership.check(&mut references).await?;
    report.corruptions = references.corruptions;
    report.problems = references.problems;
    Ok(report)
}

/// The refcounts on disk.
pub(super) struct Recorded {
    geometry: Geometry,
    /// By host cluster, as far as the file goes.
    pub(super) counts: Vec<u32>,
}

impl Recorded {
    pub(super) async fn read<S: Storage>(
        storage: &S,
        header: &Header,
        clusters: usize,
    ) -> Result<Self> {
        let geometry = header.geometry;
        let bytes = (header.refcount_table_clusters as usize) << geometry.cluster_bits;
        let table = table_io::read(storage, header.refcount_table_offset, bytes).await?;
        let mut counts = vec![0; clusters];
        let parts = counts.chunks_mut(geometry.block_refcounts() as usize);
        for (part, word) in parts.zip(table_io::words_of(&table)) {
            let Ok(Some(block)) = entry::refcount_block(word, geometry) else { continue };
            let bytes = table_io::read(storage, block, geometry.cluster_size() as usize).await?;
            for (index, count) in part.iter_mut().enumerate() {
                let value = refcount::get(&bytes, geometry.refcount_order, index);
                *count = u32::try_from(value).unwrap_or(u32::MAX);
            }
        }
        Ok(Self { geometry, counts })
    }

    fn of(&self, offset: u64) -> u32 {
        let cluster = self.geometry.cluster_of(offset) as usize;
        self.counts.get(cluster).copied().unwrap_or(0)
    }
}

/// Whether the active tables say "refcount is one" where it is, and nowhere else.
struct Ownership<'a, S> {
    storage: &'a S,
    header: &'a Header,
    recorded: &'a Recorded,
}

impl<S: Storage> Ownership<'_, S> {
    async fn check(&self, references: &mut References<'_, S>) -> Result<()> {
        let bytes = self.header.l1_entries as usize * 8;
        let l1 = table_io::read(self.storage, self.header.l1_offset, bytes).await?;
        for (index, word) in (0..).zip(table_io::words_of(&l1)) {
            let Ok(Some(table)) = entry::l1_reference(word, self.header.geometry) else { continue };
            self.compare("L2 table", table, references);
            if table.offset < self.storage.size() {
                self.check_l2(table.offset, index, references).await?;
            }
        }
        Ok(())
    }

    async fn check_l2(
        &self,
        offset: u64,
        l1_index: u64,
        references: &mut References<'_, S>,
    ) -> Result<()> {
        let geometry = self.header.geometry;
        let first = l1_index * geometry.l2_entries();
        let table = table_io::read(self.storage, offset, geometry.cluster_size() as usize).await?;
        for index in 0..geometry.l2_entries() as usize {
            if let Ok(Entry::Standard { place: Some(place), .. }) =
                Entry::read(&table, index, geometry)
            {
                let guest = geometry.offset_of(first + index as u64);
                if !geometry.has_data_file {
                    self.compare("cluster", place, references);
                } else if place.offset != guest {
                    let offset = place.offset;
                    let what =
                        format!("the guest's offset {guest} lies at {offset} of the data file");
                    references.problem(what);
                }
            }
        }
        Ok(())
    }

    fn compare(&self, what: &str, reference: entry::Reference, references: &mut References<'_, S>) {
        let recorded = self.recorded.of(reference.offset);
        if (recorded == 1) != reference.is_sole() {
            let says = if reference.is_sole() { "" } else { "not " };
            references.problem(format!(
                "the {what} at offset {} counts {recorded} but is {says}marked as counting one",
                reference.offset
            ));
        }
    }
}
