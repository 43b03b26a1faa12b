//! Repairs the findings of a check, on an image that no other program has open.
//!
//! The order of the steps, each durable before the next, so that no crash causes more damage:
//!
//! 1. an image with corruption is marked as corrupt (version 3), so that no program writes to it
//!    until the repair ends;
//! 2. snapshots that cannot be used are removed from the snapshot table: see `repair_snapshots`;
//! 3. bitmaps are removed if one is damaged or past the end of the file: a refcount that the repair
//!    sets to zero would let a guest's data use the clusters of a bitmap. If the repair will change
//!    the disk's content, enabled bitmaps mark the whole disk as changed;
//! 4. the invalid parts of entries that violate the format or point past the end of the file are
//!    removed;
//! 5. references are counted, and the COPIED flag is cleared in entries whose refcount is not one;
//! 6. refcounts are set to the counted references: in place, or in a new table if the old table is
//!    broken or lacks blocks. One write of the header switches to the new table. So no refcount is
//!    lowered before the reference is removed on disk;
//! 7. entries whose refcount is one get the COPIED flag. An entry without the flag is harmless: its
//!    cluster is copied once more than necessary. In a repair of leaks only, a missing flag is the
//!    only intermediate state that a check reports as an error;
//! 8. space without references is discarded on the host;
//! 9. if a new check finds no corruption, the marks "corrupt" and "dirty" are removed. If it finds
//!    corruption, the image gets back the marks that it had before the repair, and no others,
//!    because a repair must not make an image read-only. Exception: an image in which a cluster has
//!    more users than its refcount can count is marked as corrupt, because a change would lose
//!    data.
//!
//! If two guest clusters share a host cluster, both entries still refer to it, and its refcount
//! becomes 2, so that the cluster is copied when one of them is written. (After the copy, the other
//! entry lacks the COPIED flag; the next repair sets it.) If some references are unknown, no
//! refcount is lowered, and no COPIED flag is set.

use blockhouse_core::{Error, ErrorKind, Result, Storage, SyncMode, ToolProgress};

use crate::qcow2::layout::extensions::{self, BITMAPS};
use crate::qcow2::layout::header::{self, Header, Incompatible, SESSION_BITS};
use crate::qcow2::layout::table_io::{self, read_header};

use super::bitmaps;
use super::counts::Counts;
use super::disk_refcounts::{DiskRefcounts, merge_counts};
use super::edit::{CopiedFix, CopiedFlagEditor, Edit, SanitizeEntries};
use super::refcount_rewrite::{has_blocks, rebuild_refcount_table, store_header, store_in_place};
use super::references::References;
use super::repair_snapshots::repair_snapshots;
use super::report::{CheckReport, check_tables};
use super::snapshot_survey::{L1Location, SnapshotSurvey};
use crate::qcow2::layout::bitmap_directory::{BITMAPS_CONSISTENT, LIVE_BITMAPS};

/// Autoclear features that remain valid when tables are repaired: consistent bitmaps, and a data
/// file that reads as the disk.
const KNOWN_AUTOCLEAR: u64 = BITMAPS_CONSISTENT | header::RAW_DATA_FILE;
/// As [`KNOWN_AUTOCLEAR`], for a repair that does not change the disk's content. After such a
/// repair, bitmaps in which a process recorded changes until it died still contain all changes.
const KNOWN_WHERE_DATA_STAYS: u64 = KNOWN_AUTOCLEAR | LIVE_BITMAPS;

/// The number of passes of a repair over an image: a check, the counting, and another check.
pub const REPAIR_PASSES: u64 = 3;

/// The scope of a repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repair {
    /// Only leaks: clusters with a refcount but without references. The disk's content does not
    /// change.
    Leaks,
    /// All faults that can be repaired safely. Data that cannot be found reads as zeros afterwards
    /// (in version 2, from the backing file).
    All,
}

/// The result of a repair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepairReport {
    /// The faults that were found.
    pub found: CheckReport,
    /// The faults that are left.
    pub left: CheckReport,
    /// The faults of the snapshot table in words, with the snapshots that are lost.
    pub snapshots: Vec<String>,
}

impl RepairReport {
    /// The number of corruptions that were repaired.
    pub fn corruptions_fixed(&self) -> u64 {
        self.found.corruptions.saturating_sub(self.left.corruptions)
    }

    /// The number of leaks that were repaired.
    pub fn leaks_fixed(&self) -> u64 {
        self.found.leaks.saturating_sub(self.left.leaks)
    }
}

/// Checks the image in `storage`, which no other program may have open, repairs it, and checks it
/// again. Takes as much memory as a check without repair.
///
/// # Errors
/// `Corrupt` or `Unsupported` for an invalid header, `Corrupt` for an L1 table past the end of the
/// file (neither can be repaired); `NoSpace`; or errors of the storage. A repair that failed can be
/// repeated.
pub async fn repair<S: Storage>(storage: &S, what: Repair) -> Result<RepairReport> {
    repair_with(storage, what, &ToolProgress::default()).await
}

/// As [`repair`]; `progress` counts tables that were read, in [`REPAIR_PASSES`].
///
/// # Errors
/// As [`repair`].
pub async fn repair_with<S: Storage>(
    storage: &S,
    what: Repair,
    progress: &ToolProgress,
) -> Result<RepairReport> {
    let header = read_header(storage).await?;
    check_l1_table(storage, &header)?;
    let marks = header.incompatible & (Incompatible::CORRUPT | Incompatible::DIRTY);
    let header_can_be_marked = header.geometry.version >= 3 && what == Repair::All;
    let found = check_tables(storage, &header, progress).await?;
    let mut image = RepairRun { storage, header, snapshots: Vec::new(), progress };
    match what {
        Repair::All if found.corruptions > 0 => image.repair_all().await?,
        _ if found.leaks > 0 => image.repair_leaks(found.corruptions).await?,
        _ => {}
    }
    let left = check_tables(storage, &image.header, progress).await?;
    let remaining = match left {
        CheckReport { corruptions: 0, .. } => Incompatible::empty(),
        // A cluster has more references than its refcount can count. If writes were allowed, the
        // cluster would be freed while some entries still refer to it.
        CheckReport { uncountable: 1.., .. } if header_can_be_marked => {
            marks | Incompatible::CORRUPT
        }
        _ => marks,
    };
    let is = image.header.incompatible;
    image.header.incompatible.remove(Incompatible::CORRUPT | Incompatible::DIRTY);
    image.header.incompatible.insert(remaining);
    // Autoclear bits that this program does not know may state something that the repair made
    // untrue. Without bitmaps, the autoclear bits of bitmaps are cleared too.
    let has_bitmaps = extensions::find(&image.header.extensions, BITMAPS).is_some();
    let known = if has_bitmaps { KNOWN_WHERE_DATA_STAYS } else { header::RAW_DATA_FILE };
    let unknown = image.header.autoclear & !(known | SESSION_BITS) != 0;
    if image.header.incompatible != is || (unknown && what == Repair::All) {
        // The header write also clears the session bit of a killed server, so that the server's
        // redo log can no longer be replayed on the image.
        image.header.autoclear &= known;
        store_header(storage, &image.header).await?;
    }
    Ok(RepairReport { found, left, snapshots: image.snapshots })
}

/// Refuses to repair an image whose L1 table is past the end of the file: the location of the data
/// is unknown, and a repair would place new tables at the offsets of the missing ones.
fn check_l1_table<S: Storage>(storage: &S, header: &Header) -> Result<()> {
    let l1 = L1Location::active(header);
    if l1.entries == 0 || l1.is_in(storage, header.geometry) {
        return Ok(());
    }
    let what = "the L1 table, which says where the data is, lies past the end of the file";
    let error = Error::new(ErrorKind::Corrupt, what).on(storage.name()).at(l1.offset);
    Err(error.hint("get the whole file again"))
}

/// An image under repair.
struct RepairRun<'a, S> {
    storage: &'a S,
    progress: &'a ToolProgress,
    /// The header as it is on disk.
    header: Header,
    /// The faults of the snapshot table, in words.
    snapshots: Vec<String>,
}

/// The counted references, and the refcounts on disk.
struct Counted {
    /// The value that each refcount must get.
    wanted: Counts,
    recorded: DiskRefcounts,
    /// Whether all references could be found.
    is_complete: bool,
    /// Whether the refcount table and its blocks must be replaced by new ones.
    is_broken: bool,
    /// The clusters of the refcount table and its blocks.
    refcount_clusters: Vec<u64>,
}

impl Counted {
    /// The end of the last cluster in use; if references are unknown, of the last cluster that can
    /// be counted.
    fn end(&self) -> u64 {
        if self.is_complete { self.wanted.end() } else { self.wanted.clusters() }
    }

    /// Removes the counted references to the old refcount table and its blocks.
    fn leave_refcounts(&mut self) -> Result<()> {
        for &cluster in &self.refcount_clusters {
            self.wanted.set(cluster, self.wanted.get(cluster).saturating_sub(1))?;
        }
        Ok(())
    }

    /// Limits the changes to those that lower a refcount.
    fn lower_only(&mut self) -> Result<()> {
        let lower = self.wanted.iter().filter_map(|(cluster, wanted)| {
            let recorded = self.recorded.get(cluster);
            (recorded < wanted).then_some((cluster, recorded))
        });
        for (cluster, recorded) in lower.collect::<Vec<_>>() {
            self.wanted.set(cluster, recorded)?;
        }
        Ok(())
    }

    /// Limits the changes to those that raise a refcount.
    fn raise_only(&mut self) -> Result<()> {
        for (cluster, recorded) in self.recorded.iter() {
            if recorded > self.wanted.get(cluster) {
                self.wanted.set(cluster, recorded)?;
            }
        }
        Ok(())
    }
}

impl<S: Storage> RepairRun<'_, S> {
    async fn repair_leaks(&mut self, corruptions: u64) -> Result<()> {
        let mut counts = self.count().await?;
        if !counts.is_complete || counts.is_broken {
            return Ok(());
        }
        counts.lower_only()?;
        self.begin(Incompatible::empty()).await?;
        store_in_place(self.storage, &self.header, &counts.wanted).await?;
        self.storage.flush(SyncMode::Data).await?;
        // If other refcounts are wrong, a refcount of one does not prove that the cluster has one
        // reference.
        if corruptions == 0 {
            self.fix_copied_flags(&counts.wanted, CopiedFix::Set).await?;
        }
        self.give_back(&counts).await;
        Ok(())
    }

    async fn repair_all(&mut self) -> Result<()> {
        self.begin(Incompatible::CORRUPT).await?;
        self.snapshots = repair_snapshots(self.storage, &mut self.header).await?;
        self.mark_bitmaps().await?;
        self.scrub().await?;
        let mut counts = self.count().await?;
        if !counts.is_complete {
            counts.raise_only()?;
        }
        self.fix_copied_flags(&counts.wanted, CopiedFix::Clear).await?;
        if counts.is_broken || !has_blocks(&counts.recorded, &counts.wanted) {
            let start = counts.end();
            counts.leave_refcounts()?;
            rebuild_refcount_table(self.storage, &mut self.header, &mut counts.wanted, start)
                .await?;
        } else {
            store_in_place(self.storage, &self.header, &counts.wanted).await?;
            self.storage.flush(SyncMode::Data).await?;
        }
        if counts.is_complete {
            self.fix_copied_flags(&counts.wanted, CopiedFix::Set).await?;
        }
        self.give_back(&counts).await;
        Ok(())
    }

    /// Marks an image of version 3, and clears autoclear features that writing makes invalid.
    async fn begin(&mut self, mark: Incompatible) -> Result<()> {
        let before = self.header.clone();
        if self.header.geometry.version >= 3 {
            self.header.incompatible.insert(mark);
            self.header.autoclear &=
                if mark.is_empty() { KNOWN_WHERE_DATA_STAYS } else { KNOWN_AUTOCLEAR };
        }
        if self.header != before {
            store_header(self.storage, &self.header).await?;
        }
        Ok(())
    }

    /// Records in bitmaps the changes that the repair of entries is going to make. Removes all
    /// bitmaps if that is impossible, or if one is damaged.
    async fn mark_bitmaps(&mut self) -> Result<()> {
        let active = L1Location::active(&self.header);
        if self.header.autoclear & BITMAPS_CONSISTENT == 0 {
            return Ok(());
        }
        if bitmaps::are_damaged(self.storage, &self.header).await? {
            return self.remove_bitmaps().await;
        }
        let (_, scrub) = self.sanitizer().await?;
        if !Edit::new(self.storage, self.header.geometry, &scrub).would_change(active).await? {
            return Ok(());
        }
        let counts =
            References::count(self.storage, &self.header, &ToolProgress::default()).await?.counts;
        if bitmaps::mark_all(self.storage, &self.header, &counts).await? {
            return Ok(());
        }
        self.remove_bitmaps().await
    }

    /// Makes all bitmaps invalid, durably, so that their clusters have no references.
    async fn remove_bitmaps(&mut self) -> Result<()> {
        self.header.autoclear &= !BITMAPS_CONSISTENT;
        store_header(self.storage, &self.header).await
    }

    async fn sanitizer(&self) -> Result<(SnapshotSurvey, SanitizeEntries)> {
        let snapshots = SnapshotSurvey::read(self.storage, &self.header).await?;
        let clusters = self.header.geometry.clusters_for(self.storage.size());
        let scrub = SanitizeEntries::new(&self.header, &snapshots, clusters);
        Ok((snapshots, scrub))
    }

    /// Durably removes from all entries the parts that violate the format or point past the end of
    /// the file.
    async fn scrub(&self) -> Result<()> {
        let geometry = self.header.geometry;
        let (snapshots, scrub) = self.sanitizer().await?;
        let mut edit = Edit::new(self.storage, geometry, &scrub);
        for l1 in snapshots.l1_tables().chain([L1Location::active(&self.header)]) {
            if l1.is_in(self.storage, geometry) {
                edit.l1(l1).await?;
            }
        }
        self.storage.flush(SyncMode::Data).await
    }

    async fn count(&self) -> Result<Counted> {
        let references = References::count(self.storage, &self.header, self.progress).await?;
        Ok(Counted {
            recorded: DiskRefcounts::read(self.storage, &self.header).await?,
            is_complete: references.corruptions == references.broken_refcounts,
            is_broken: references.broken_refcounts > 0,
            refcount_clusters: references.refcount_clusters,
            wanted: references.counts,
        })
    }

    /// Corrects copied flags in the active tables, durably.
    async fn fix_copied_flags(&self, counts: &Counts, fix: CopiedFix) -> Result<()> {
        let geometry = self.header.geometry;
        let editor = CopiedFlagEditor { geometry, counts, fix };
        let mut edit = Edit::new(self.storage, geometry, &editor);
        edit.l1(L1Location::active(&self.header)).await?;
        self.storage.flush(SyncMode::Data).await
    }

    /// Discards clusters that had a refcount and are free now, so that the host can reuse the
    /// space. Errors are ignored.
    async fn give_back(&self, counts: &Counted) {
        let geometry = self.header.geometry;
        let mut freed = merge_counts(&counts.wanted, &counts.recorded)
            .filter(|&(_, wanted, recorded)| recorded > 0 && wanted == 0)
            .map(|(cluster, ..)| cluster)
            .peekable();
        while let Some(first) = freed.next() {
            let mut end = first + 1;
            while freed.next_if_eq(&end).is_some() {
                end += 1;
            }
            if let Some(range) = table_io::whole_blocks(self.storage, geometry.bytes_of(first..end))
            {
                let _ = self.storage.discard(range).await;
            }
        }
    }
}
