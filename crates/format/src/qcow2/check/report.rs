//! The check of an image: every table is read from the storage and compared with the refcounts.
//!
//! A cluster whose refcount exceeds the number of its references is a leak; every other fault is a
//! corruption. Both are counted as `qemu-img check` does.

use std::collections::HashSet;

use blockhouse_core::{ByteRange, Result, Storage, ToolProgress};

use crate::qcow2::layout::entry::{self, Entry};
use crate::qcow2::layout::header::Header;
use crate::qcow2::layout::sparse_reader::SparseReader;
use crate::qcow2::layout::words;

use super::counts::Counts;
use super::disk_refcounts::{DiskRefcounts, merge_counts};
use super::finding::{Finding, Refcounts};
use super::references::References;
use super::snapshot_survey::L1Location;

/// The findings of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Number of faults that endanger data.
    pub corruptions: u64,
    /// Clusters whose refcount exceeds the number of their references.
    pub leaks: u64,
    /// Clusters of the guest's disk.
    pub total_clusters: u64,
    /// The clusters that have space in the file.
    pub allocated_clusters: u64,
    /// The clusters that are compressed.
    pub compressed_clusters: u64,
    /// The clusters that do not directly follow the previous one in the file, or are compressed.
    pub fragmented_clusters: u64,
    /// Clusters with more users than refcounts of this width can count: no repair can correct them.
    pub uncountable: u64,
    /// The end of the last cluster in use, in bytes.
    pub end: u64,
    /// The faults, in words; the first thousand.
    pub problems: Vec<String>,
    /// The faults and the leaks, with their figures; the first thousand.
    pub findings: Vec<Finding>,
    /// Entries whose COPIED flag agrees with a wrong refcount on disk: a repair changes both. They
    /// do not count as further corruptions, but are among `findings`.
    pub flags_to_follow: u64,
    /// Entries whose COPIED flag is right and contradicts a wrong refcount on disk: corruptions
    /// that a repair of the refcount ends.
    pub flags_to_keep: u64,
}

/// Checks the image that `header`, as it is on disk, describes. The image must not change during
/// the check. Takes about 6 bytes of memory for each cluster in use (with refcounts of 16 bits),
/// however long the file is. The check is one pass of `progress`.
///
/// # Errors
/// Errors of the storage, or ENOMEM; faults of the image are in the report.
pub(crate) async fn check_tables<S: Storage>(
    storage: &S,
    header: &Header,
    progress: &ToolProgress,
) -> Result<CheckReport> {
    let mut references = References::count(storage, header, progress).await?;
    let recorded = DiskRefcounts::read(storage, header).await?;
    let mut report = CheckReport {
        total_clusters: header.geometry.clusters_for(header.size),
        allocated_clusters: references.allocated,
        compressed_clusters: references.compressed,
        fragmented_clusters: references.fragmented,
        ..CheckReport::default()
    };
    let counts = std::mem::replace(&mut references.counts, Counts::new(0));
    for (cluster, counted, recorded) in merge_counts(&counts, &recorded) {
        let offset = header.geometry.offset_of(cluster);
        report.end = offset + header.geometry.cluster_size();
        let max = header.geometry.max_refcount();
        if u64::from(counted) > max {
            report.uncountable += 1;
            let bits = 1 << header.geometry.refcount_order;
            references.problem(format!(
                "the cluster at offset {offset} has {counted} references, and refcounts of {bits} bits \
                 reach {max}: this cannot be repaired; 'convert' copies what can be read"
            ));
            continue;
        }
        let [recorded, counted] = [recorded, counted].map(u64::from);
        let finding = Finding::Refcount { cluster, recorded, counted };
        if recorded > counted {
            report.leaks += 1;
            references.find(finding);
        } else if recorded < counted {
            let what = format!(
                "the cluster at offset {offset} has refcount {recorded}, but {counted} references"
            );
            references.problem_with(what, finding);
        }
    }
    let mut flags = CopiedFlagCheck {
        storage,
        header,
        recorded: &recorded,
        counts: &counts,
        to_follow: 0,
        to_keep: 0,
        reader: SparseReader::new(storage, header.geometry),
        checked: HashSet::new(),
        progress,
    };
    flags.check(&mut references).await?;
    report.flags_to_follow = flags.to_follow;
    report.flags_to_keep = flags.to_keep;
    report.corruptions = references.corruptions;
    report.problems = references.problems;
    report.findings = references.findings;
    Ok(report)
}

/// The check that the active tables have the COPIED flag exactly in the entries whose refcount is
/// one.
struct CopiedFlagCheck<'a, S> {
    storage: &'a S,
    header: &'a Header,
    recorded: &'a DiskRefcounts,
    counts: &'a Counts,
    /// See [`CheckReport::flags_to_follow`].
    to_follow: u64,
    /// See [`CheckReport::flags_to_keep`].
    to_keep: u64,
    reader: SparseReader<'a, S>,
    /// The offsets of the L2 tables that were checked: each table is read once, however many L1
    /// entries refer to it.
    checked: HashSet<u64>,
    progress: &'a ToolProgress,
}

impl<S: Storage> CopiedFlagCheck<'_, S> {
    async fn check(&mut self, references: &mut References<'_, S>) -> Result<()> {
        let place = L1Location::active(self.header);
        let mut l1 = SparseReader::new(self.storage, self.header.geometry);
        let mut rest = ByteRange::between(place.offset, place.offset + place.length());
        while let Some((data, words)) = l1.read(&mut rest).await? {
            let first = (data.offset() - place.offset) / 8;
            for (index, word) in (first..).zip(words::words_of(&words)) {
                let reference = entry::l1_reference(word, self.header.geometry);
                let Ok(Some(table)) = reference else { continue };
                self.compare("L2 table", table, Some(index), references);
                if self.checked.insert(table.offset) {
                    self.check_l2(table.offset, index, references).await?;
                    self.progress.advance(self.header.geometry.cluster_size());
                } else if self.header.geometry.has_data_file {
                    let offset = place.offset + index * 8;
                    references.problem(format!(
                        "the L1 entry at offset {offset} names the L2 table of another"
                    ));
                }
            }
        }
        Ok(())
    }

    async fn check_l2(
        &mut self,
        offset: u64,
        l1_index: u64,
        references: &mut References<'_, S>,
    ) -> Result<()> {
        let geometry = self.header.geometry;
        let mut rest = ByteRange::between(offset, offset + geometry.cluster_size());
        while let Some((data, table)) = self.reader.read(&mut rest).await? {
            let first = (data.offset() - offset) / geometry.l2_entry_size();
            let first = l1_index * geometry.l2_entries() + first;
            for index in 0..table.len() / geometry.l2_entry_size() as usize {
                if let Ok(Entry::Standard { host: Some(place), .. }) =
                    Entry::read(&table, index, geometry)
                {
                    let guest = geometry.offset_of(first + index as u64);
                    self.check_host_offset(place, guest, references);
                }
            }
        }
        Ok(())
    }

    fn check_host_offset(
        &mut self,
        place: entry::Reference,
        guest: u64,
        references: &mut References<'_, S>,
    ) {
        if !self.header.geometry.has_data_file {
            self.compare("cluster", place, None, references);
        } else if place.offset != guest {
            let offset = place.offset;
            references.problem(format!(
                "guest offset {guest} is mapped to offset {offset} of the data file"
            ));
        }
    }

    fn compare(
        &mut self,
        what: &str,
        reference: entry::Reference,
        l1_index: Option<u64>,
        references: &mut References<'_, S>,
    ) {
        let cluster = self.header.geometry.cluster_of(reference.offset);
        let recorded = self.recorded.get(cluster);
        let counted = self.counts.get(cluster);
        let entry = entry::l1_word(reference);
        let finding = |refcount: u32, contradicts| Finding::CopiedFlag {
            l1_index,
            entry,
            refcount: refcount.into(),
            contradicts,
        };
        let is_right = (counted == 1) == reference.is_copied();
        if (recorded == 1) != reference.is_copied() {
            self.to_keep += u64::from(is_right);
            let contradicts = if is_right { Refcounts::OnDisk } else { Refcounts::Both };
            let flag = if reference.is_copied() { "set" } else { "not set" };
            let what = format!(
                "the {what} at offset {} has refcount {recorded}, but its COPIED flag is {flag}",
                reference.offset
            );
            references.problem_with(what, finding(recorded, contradicts));
        } else if !is_right {
            self.to_follow += 1;
            references.find(finding(counted, Refcounts::Counted));
        }
    }
}
