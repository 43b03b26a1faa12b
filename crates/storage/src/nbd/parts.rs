//! The memory of one read, in parts, while its data arrives.
//!
//! Guarantees: a part is found in logarithmic time, and the number of parts is limited; the limit
//! suffices if the server reports holes and data sector by sector. Reason: the server chooses how
//! it divides a reply, and the lock of the connection is held during the search.

use std::collections::BTreeMap;

use blockhouse_core::IoVector;
use smallvec::SmallVec;

/// Minimum average length of the parts of a reply, in bytes: a sector.
const MIN_PART: usize = 512;
/// Number of parts that even a short reply may have.
const FEW_PARTS: usize = 16;

/// A part of the export, with the memory for it.
type Part = (u64, IoVector);

/// The memory of a read. The caller takes a part out, receives data into it, and gives it back.
pub(super) struct Parts {
    /// A part without data. Usually it is the only one.
    first: Option<Part>,
    /// The other parts without data, by their offsets.
    rest: BTreeMap<u64, IoVector>,
    filled: SmallVec<[Part; 1]>,
    /// How many parts are taken out now.
    taken: usize,
    max_parts: usize,
}

impl Parts {
    /// The memory of a read that begins at `offset`, before any data has arrived.
    pub(super) fn new(offset: u64, into: IoVector) -> Self {
        Self {
            max_parts: FEW_PARTS + into.len() / MIN_PART,
            first: Some((offset, into)),
            rest: BTreeMap::new(),
            filled: SmallVec::new(),
            taken: 0,
        }
    }

    /// Takes the memory of `length` bytes at `offset` out. `None` if any of it was taken out before
    /// or is not part of the read, if there are too many parts, or if `length` is 0.
    pub(super) fn take(&mut self, offset: u64, length: usize) -> Option<IoVector> {
        let end = offset.checked_add(length as u64)?;
        // An empty part would have the offset of the part after it, and replace it in the map.
        if length == 0 || self.filled.len() >= self.max_parts {
            return None;
        }
        let covers =
            |start: u64, part: &IoVector| start <= offset && end <= start + part.len() as u64;
        let first = self.first.take_if(|(start, part)| covers(*start, part));
        let (start, mut before) = match first {
            Some(part) => part,
            None => {
                let (&start, part) = self.rest.range(..=offset).next_back()?;
                let is_found = covers(start, part);
                (start, is_found.then(|| self.rest.remove(&start)).flatten()?)
            }
        };
        let mut taken = before.split_off((offset - start) as usize);
        let after = taken.split_off(length);
        for (start, part) in [(start, before), (end, after)] {
            if part.is_empty() {
                continue;
            }
            match self.first {
                None => self.first = Some((start, part)),
                Some(_) => drop(self.rest.insert(start, part)),
            }
        }
        self.taken += 1;
        Some(taken)
    }

    /// Takes all the memory out. `None` if a part was taken out before.
    pub(super) fn take_all(&mut self) -> Option<(u64, IoVector)> {
        if !self.rest.is_empty() || self.taken > 0 || !self.filled.is_empty() {
            return None;
        }
        let all = self.first.take()?;
        self.taken = 1;
        Some(all)
    }

    /// Gives back a part that was taken out, with its data.
    pub(super) fn give_back(&mut self, offset: u64, memory: IoVector) {
        self.taken -= 1;
        self.filled.push((offset, memory));
    }

    /// Whether all data has arrived.
    pub(super) fn is_complete(&self) -> bool {
        self.first.is_none() && self.rest.is_empty() && self.taken == 0
    }

    /// Marks all data as missing again.
    pub(super) fn forget_data(&mut self) {
        let mut all = std::mem::take(&mut self.rest);
        all.extend(self.filled.drain(..).chain(self.first.take()));
        let chain = |(start, before): Part, (_, part): Part| (start, before.chain(part));
        self.first = all.into_iter().reduce(chain);
    }
}

#[cfg(test)]
mod tests {
    use blockhouse_core::Buffer;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn each_byte_is_given_once_and_all_of_them_again(
            chunks in prop::collection::vec((0u64..70, 0usize..70), 1..40),
            again in any::<bool>(),
        ) {
            let mut buffer = Buffer::new(64);
            let mut parts = Parts::new(1000, buffer.lend());
            let mut come = [false; 64];
            for (start, length) in chunks {
                let range = start as usize..start as usize + length;
                let is_free = |bytes: &[bool]| !bytes.is_empty() && !bytes.contains(&true);
                let is_new = come.get(range.clone()).is_some_and(is_free);
                let taken = parts.take(1000 + start, length);
                prop_assert_eq!(taken.is_some(), is_new);
                if let Some(mut memory) = taken {
                    prop_assert_eq!(memory.len(), length);
                    prop_assert!(!parts.is_complete());
                    memory.fill(start as u8);
                    parts.give_back(1000 + start, memory);
                    come[range].fill(true);
                }
                prop_assert_eq!(parts.is_complete(), !come.contains(&false));
            }
            if again {
                parts.forget_data();
                let (offset, mut memory) = parts.take_all().expect("nothing has come");
                prop_assert_eq!((offset, memory.len()), (1000, 64));
                memory.copy_from(&std::array::from_fn::<u8, 64, _>(|at| at as u8));
                parts.give_back(offset, memory);
                prop_assert!(parts.is_complete());
                drop(parts);
                prop_assert!(buffer.bytes().iter().enumerate().all(|(at, &byte)| byte == at as u8));
            }
        }
    }

    #[test]
    fn a_reply_in_crumbs_is_refused_before_there_are_many() {
        for step in [2, -2] {
            let mut buffer = Buffer::new(1 << 20);
            let mut parts = Parts::new(0, buffer.lend());
            let mut at = if step < 0 { 1 << 20 } else { -2 };
            let mut next = || {
                at += step;
                let taken = parts.take(at as u64, 1)?;
                parts.give_back(at as u64, taken);
                Some(())
            };
            assert_eq!(std::iter::from_fn(&mut next).count(), FEW_PARTS + (1 << 20) / MIN_PART);
            assert!(!parts.is_complete());
            parts.forget_data();
            assert_eq!(parts.take_all().map(|(at, all)| (at, all.len())), Some((0, 1 << 20)));
        }
    }

    #[test]
    fn absurd_ranges_are_refused() {
        let mut buffer = Buffer::new(16);
        let mut parts = Parts::new(u64::MAX - 16, buffer.lend());
        assert!(parts.take(u64::MAX - 1, 16).is_none());
        assert!(parts.take(0, 1).is_none());
        assert!(parts.take(u64::MAX - 16, 8).is_some());
        assert!(parts.take_all().is_none());
    }
}
