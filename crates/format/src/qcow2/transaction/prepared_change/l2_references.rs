//! References of the entries of an L2 table, and their COPIED flags.
//!
//! A table consists of whole slices. Long computations yield to other tasks.

use blockhouse_core::{Error, ErrorKind, Result, WorkBudget};

use crate::qcow2::layout::entry::{Entry, Reference};
use crate::qcow2::layout::geometry::Geometry;

use super::reference_counts::{Left, ReferenceCounts};

/// Counts references and changes flags; see the module's documentation.
pub(super) struct L2References {
    geometry: Geometry,
    budget: WorkBudget,
}

/// Bytes of an L2 table, of whole slices.
#[derive(Clone, Copy)]
pub(super) struct Located<'a> {
    pub(super) bytes: &'a [u8],
    /// The image's name and the offset of the bytes in its file, for messages.
    pub(super) name: &'a str,
    pub(super) offset: u64,
}

impl L2References {
    pub(super) fn new(geometry: Geometry) -> Self {
        Self { geometry, budget: WorkBudget::new() }
    }

    /// Counts the references of the entries.
    pub(super) async fn count(&self, l2: Located<'_>, counts: &mut ReferenceCounts) -> Result<()> {
        let add = |cluster| {
            counts.add(cluster);
            Some(())
        };
        self.for_each_cluster(l2, add).await
    }

    /// Subtracts the references of a copy's entries from the counts.
    ///
    /// # Errors
    /// `Corrupt` if these references were not counted: the copy was overwritten.
    pub(super) async fn take_back(
        &self,
        l2: Located<'_>,
        counts: &mut ReferenceCounts,
    ) -> Result<()> {
        self.for_each_cluster(l2, |cluster| counts.remove(cluster)).await
    }

    /// Calls `with` for every reference to a cluster. Fails when `with` returns `None`.
    async fn for_each_cluster(
        &self,
        l2: Located<'_>,
        mut with: impl FnMut(u64) -> Option<()>,
    ) -> Result<()> {
        let (step, geometry) = (self.geometry.slice_size() as usize, self.geometry);
        for (number, slice) in l2.bytes.chunks_exact(step).enumerate() {
            for index in 0..geometry.slice_l2_entries() as usize {
                let at = || l2.offset + self.offset_of(number, index);
                let entry = Entry::read(slice, index, geometry).map_err(|violation| {
                    corrupt(format!("an L2 entry {violation}"), l2.name, at())
                })?;
                let counted = match entry {
                    Entry::Standard { host: None, .. } => Some(()),
                    Entry::Standard { host: Some(host), .. } => {
                        with(geometry.cluster_of(host.offset))
                    }
                    Entry::Compressed(data) => data.host_clusters(geometry).try_for_each(&mut with),
                };
                counted.ok_or_else(|| overwritten(l2.name, at()))?;
            }
            self.budget.spend(WorkBudget::QUANTUM / 4).await;
        }
        Ok(())
    }

    fn offset_of(&self, slice: usize, index: usize) -> u64 {
        slice as u64 * self.geometry.slice_size() + index as u64 * self.geometry.l2_entry_size()
    }

    /// Clears the COPIED flags. Returns whether any flag was set.
    pub(super) async fn clear_copied(&self, l2: &mut [u8]) -> Result<bool> {
        let clear = |host: Reference| Ok(Reference { copied: false, ..host });
        self.change_references(l2, clear).await
    }

    /// Sets the COPIED flag of each cluster that has one reference left. Returns whether any flag
    /// changed. `name` and `offset` are for messages.
    ///
    /// # Errors
    /// `Corrupt` if a cluster has no reference left.
    pub(super) async fn set_copied(
        &self,
        l2: &mut [u8],
        (name, offset): (&str, u64),
        counts: &ReferenceCounts,
    ) -> Result<bool> {
        let set = |host: Reference| match counts.left(self.geometry.cluster_of(host.offset)) {
            Left::More => Ok(host),
            Left::One => Ok(Reference { copied: true, ..host }),
            Left::None => {
                let what = "an L2 table refers to a cluster of which a snapshot has all references";
                Err(corrupt(what.to_owned(), name, offset))
            }
        };
        self.change_references(l2, set).await
    }

    /// Changes references to clusters. Returns whether any reference changed.
    async fn change_references(
        &self,
        l2: &mut [u8],
        change: impl Fn(Reference) -> Result<Reference>,
    ) -> Result<bool> {
        let mut has_changed = false;
        for slice in l2.chunks_exact_mut(self.geometry.slice_size() as usize) {
            for index in 0..self.geometry.slice_l2_entries() as usize {
                let Ok(Entry::Standard { host: Some(host), subclusters }) =
                    Entry::read(slice, index, self.geometry)
                else {
                    continue;
                };
                let new = change(host)?;
                if new != host {
                    has_changed = true;
                    Entry::Standard { host: Some(new), subclusters }.write(
                        slice,
                        index,
                        self.geometry,
                    );
                }
            }
            self.budget.spend(WorkBudget::QUANTUM / 4).await;
        }
        Ok(has_changed)
    }
}

fn corrupt(what: String, name: &str, offset: u64) -> Error {
    let error = Error::new(ErrorKind::Corrupt, what).on(name).at(offset);
    error.hint("check the image before using it")
}

/// The error of a copy whose content differs from the bytes written to it: its cluster has another
/// user, which the refcounts do not count.
pub(super) fn overwritten(name: &str, offset: u64) -> Error {
    corrupt("a new table was overwritten: a refcount is wrong".to_owned(), name, offset)
}
