//! Repairing what a check found, on an image that nobody else has open.
//!
//! The order that no crash can turn into more damage, each step durable before the next:
//!
//! 1. an image with corruption is marked as corrupt (version 3): until the end nobody writes to it;
//! 2. entries that contradict the format or point out of the file lose what is wrong of them;
//! 3. references are counted, and "the refcount is one" is taken from entries where it is not so;
//! 4. refcounts become what was counted, at their places or, where the refcount table is broken, in a
//!    new one that the header points to with one write. So none is lowered before the reference is gone;
//! 5. entries whose refcount is one say so. An entry that says less than it might is copied once too
//!    often, and harmless: of all states on the way this is the only one in which a repair of leaks
//!    alone shows as an error to a check;
//! 6. space that nobody refers to is given back to the host;
//! 7. if a new check finds no corruption, the marks "corrupt" and "dirty" are taken away.
//!
//! Where two guest clusters share a host cluster, both keep it, counted twice: it is copied when one of
//! them is written. (The other has it alone then and does not say so, which the next repair corrects.) Where it cannot be told who refers to what (a damaged snapshot table), no refcount
//! is lowered.

use blockhouse_core::{Result, Storage, Sync};

use super::check::{CheckReport, Recorded, check_tables};
use super::edit::{Ownerships, Scrub, edit};
use super::entry::Ownership;
use super::header::{Header, Incompatible};
use super::recount::{has_blocks, store_anew, store_header, store_in_place};
use super::references::References;
use super::snapshots::{L1Place, SnapshotPlaces};
use super::{KNOWN_AUTOCLEAR, read_header, table_io};

/// What is repaired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repair {
    /// Clusters that are counted but not used. Nothing that a guest could read changes.
    Leaks,
    /// Everything for which there is a safe answer. Data that cannot be found reads as zeros (in
    /// version 2: as the backing file) afterwards.
    All,
}

/// What a repair did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repaired {
    /// What was wrong.
    pub found: CheckReport,
    /// What is wrong still.
    pub left: CheckReport,
}

impl Repaired {
    /// How many corruptions are gone.
    pub fn corruptions_fixed(&self) -> u64 {
        self.found.corruptions.saturating_sub(self.left.corruptions)
    }

    /// How many leaks are gone.
    pub fn leaks_fixed(&self) -> u64 {
        self.found.leaks.saturating_sub(self.left.leaks)
    }
}

/// Checks the image in `storage`, which nobody else may have open, repairs it, and checks it again. Takes
/// 8 bytes of memory for each cluster of the file.
///
/// # Errors
/// `Corrupt` or `Unsupported` when the header makes no sense, which cannot be repaired; `NoSpace`; or what
/// the storage answers. A repair that failed can be tried again.
pub async fn repair<S: Storage>(storage: &S, what: Repair) -> Result<Repaired> {
    let header = read_header(storage).await?;
    let found = check_tables(storage, &header).await?;
    let mut image = Repairing { storage, header };
    match what {
        Repair::All if found.corruptions > 0 => image.repair_all().await?,
        _ if found.leaks > 0 => image.repair_leaks(found.corruptions).await?,
        _ => {}
    }
    let left = check_tables(storage, &image.header).await?;
    let marks = Incompatible::CORRUPT | Incompatible::DIRTY;
    if left.corruptions == 0 && image.header.incompatible.intersects(marks) {
        image.header.incompatible.remove(marks);
        store_header(storage, &image.header).await?;
    }
    Ok(Repaired { found, left })
}

/// An image under repair.
struct Repairing<'a, S> {
    storage: &'a S,
    /// As on disk.
    header: Header,
}

/// Who refers to what, and who is said to.
struct Counts {
    /// What each refcount should be.
    wanted: Vec<u32>,
    recorded: Vec<u32>,
    /// Whether all references could be found.
    is_complete: bool,
    /// Whether the refcount table and its blocks cannot stay where they are.
    is_broken: bool,
    /// Their clusters.
    refcount_clusters: Vec<u64>,
}

impl Counts {
    /// The refcount table and its blocks do not refer to their clusters any more.
    fn leave_refcounts(&mut self) {
        for &cluster in &self.refcount_clusters {
            let count = &mut self.wanted[cluster as usize];
            *count = count.saturating_sub(1);
        }
    }
}

impl<S: Storage> Repairing<'_, S> {
    async fn repair_leaks(&mut self, corruptions: u64) -> Result<()> {
        let mut counts = self.count().await?;
        if !counts.is_complete || counts.is_broken {
            return Ok(());
        }
        for (wanted, &recorded) in counts.wanted.iter_mut().zip(&counts.recorded) {
            *wanted = recorded.min(*wanted);
        }
        self.begin(Incompatible::empty()).await?;
        store_in_place(self.storage, &self.header, &counts.wanted).await?;
        self.storage.flush(Sync::Data).await?;
        // Where refcounts are wrong otherwise, one of them is no proof.
        if corruptions == 0 {
            self.correct_ownership(&counts.wanted, Ownership::Sole).await?;
        }
        self.give_back(&counts).await;
        Ok(())
    }

    async fn repair_all(&mut self) -> Result<()> {
        self.begin(Incompatible::CORRUPT).await?;
        self.scrub().await?;
        let mut counts = self.count().await?;
        if !counts.is_complete {
            for (wanted, &recorded) in counts.wanted.iter_mut().zip(&counts.recorded) {
                *wanted = recorded.max(*wanted);
            }
        }
        self.correct_ownership(&counts.wanted, Ownership::Shared).await?;
        if counts.is_broken || !has_blocks(self.storage, &self.header, &counts.wanted).await? {
            counts.leave_refcounts();
            store_anew(self.storage, &mut self.header, &mut counts.wanted).await?;
        } else {
            store_in_place(self.storage, &self.header, &counts.wanted).await?;
            self.storage.flush(Sync::Data).await?;
        }
        if counts.is_complete {
            self.correct_ownership(&counts.wanted, Ownership::Sole).await?;
        }
        self.give_back(&counts).await;
        Ok(())
    }

    /// Marks the image (a version 3 one), and clears what writing makes untrue.
    async fn begin(&mut self, mark: Incompatible) -> Result<()> {
        let before = self.header.clone();
        if self.header.geometry.version >= 3 {
            self.header.incompatible.insert(mark);
            self.header.autoclear &= KNOWN_AUTOCLEAR;
        }
        if self.header != before {
            store_header(self.storage, &self.header).await?;
        }
        Ok(())
    }

    /// Makes all entries keep to the format and to the file, durably.
    async fn scrub(&self) -> Result<()> {
        let geometry = self.header.geometry;
        let snapshots = SnapshotPlaces::read(self.storage, &self.header).await?;
        let clusters = geometry.clusters_for(self.storage.size());
        let scrub = Scrub::new(&self.header, &snapshots, clusters);
        for l1 in snapshots.l1_tables.into_iter().chain([L1Place::active(&self.header)]) {
            if l1.is_possible(geometry) && l1.offset + l1.length() <= self.storage.size() {
                edit(self.storage, geometry, l1, &scrub).await?;
            }
        }
        self.storage.flush(Sync::Data).await
    }

    async fn count(&self) -> Result<Counts> {
        let references = References::count(self.storage, &self.header).await?;
        let clusters = references.counts.len();
        let recorded = Recorded::read(self.storage, &self.header, clusters).await?.counts;
        Ok(Counts {
            recorded,
            is_complete: references.corruptions == references.broken_refcounts,
            is_broken: references.broken_refcounts > 0,
            refcount_clusters: references.refcount_clusters,
            wanted: references.counts,
        })
    }

    /// Corrects one of the two in the active tables, durably.
    async fn correct_ownership(&self, counts: &[u32], wanted: Ownership) -> Result<()> {
        let geometry = self.header.geometry;
        let editor = Ownerships { geometry, counts, wanted };
        edit(self.storage, geometry, L1Place::active(&self.header), &editor).await?;
        self.storage.flush(Sync::Data).await
    }

    /// Gives the space of clusters that were counted and are free now back to the host. Only a hint.
    async fn give_back(&self, counts: &Counts) {
        let geometry = self.header.geometry;
        let both = counts.recorded.iter().zip(&counts.wanted).zip(0..);
        let mut freed = both
            .filter(|&((&recorded, &wanted), _)| recorded > 0 && wanted == 0)
            .map(|(_, cluster): (_, u64)| cluster)
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
