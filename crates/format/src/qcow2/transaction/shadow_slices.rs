//! Slices of refcounts in memory, with their old content (as on disk) and their new content. A
//! missing slice is all zeros.
//!
//! The slice that was used last is found without a lookup by number, because successive references
//! are often to neighbouring clusters.

use std::cell::Cell;
use std::collections::HashMap;

/// The slices of refcounts by their number; see the module's documentation.
#[derive(Default)]
pub(super) struct ShadowSlices {
    slices: Vec<Slice>,
    /// Index in `slices`, by the number of the slice.
    index: HashMap<u64, usize>,
    /// The last looked up number, and the index of its slice.
    last: Cell<Option<(u64, usize)>>,
}

struct Slice {
    now: Vec<u8>,
    /// The content on disk, if the slice was changed; empty if this content is all zeros.
    before: Option<Vec<u8>>,
}

impl ShadowSlices {
    /// Adds a slice that was read from disk.
    pub(super) fn insert(&mut self, number: u64, now: Vec<u8>) {
        self.index.insert(number, self.slices.len());
        self.slices.push(Slice { now, before: None });
    }

    fn find(&self, number: u64) -> Option<usize> {
        match self.last.get() {
            Some((last, at)) if last == number => Some(at),
            _ => {
                let at = *self.index.get(&number)?;
                self.last.set(Some((number, at)));
                Some(at)
            }
        }
    }

    /// The new content of a slice; empty if it is all zeros.
    pub(super) fn now(&self, number: u64) -> &[u8] {
        self.find(number).map_or(&[], |at| &self.slices[at].now)
    }

    /// The content of a slice on disk; empty if it is all zeros.
    pub(super) fn before(&self, number: u64) -> &[u8] {
        let Some(at) = self.find(number) else { return &[] };
        let Slice { now, before } = &self.slices[at];
        before.as_ref().unwrap_or(now)
    }

    /// A slice for a further change; `None` if the slice was not changed before.
    pub(super) fn changed_mut(&mut self, number: u64) -> Option<&mut [u8]> {
        let at = self.find(number)?;
        let Slice { now, before } = &mut self.slices[at];
        before.is_some().then_some(now)
    }

    /// A slice of `size` bytes for its first change.
    pub(super) fn begin_change(&mut self, number: u64, size: usize) -> &mut [u8] {
        let at = self.find(number).unwrap_or_else(|| {
            self.insert(number, Vec::new());
            self.slices.len() - 1
        });
        let Slice { now, before } = &mut self.slices[at];
        *before = Some(now.clone());
        now.resize(size, 0);
        now
    }

    /// The changed slices in order of their numbers: number, content on disk, new content.
    pub(super) fn changed(&self) -> impl Iterator<Item = (u64, &[u8], &[u8])> {
        let mut numbers: Vec<(u64, usize)> =
            self.index.iter().map(|(&number, &at)| (number, at)).collect();
        numbers.sort_unstable();
        numbers.into_iter().filter_map(|(number, at)| {
            let Slice { now, before } = &self.slices[at];
            Some((number, before.as_deref()?, &now[..]))
        })
    }

    /// Removes a slice and returns its new content; empty if it is all zeros.
    pub(super) fn take(&mut self, number: u64) -> Vec<u8> {
        let at = self.find(number);
        at.map_or_else(Vec::new, |at| std::mem::take(&mut self.slices[at].now))
    }
}
