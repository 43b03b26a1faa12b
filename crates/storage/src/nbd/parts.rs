//! The memory of one read, part by part as its data comes.

use blockhouse_core::IoVector;
use smallvec::SmallVec;

/// Parts of a range of the export, each with the memory for it.
type List = SmallVec<[(u64, IoVector); 1]>;

/// The memory of a read. What is taken out is given back with its data.
pub(super) struct Parts {
    missing: List,
    filled: List,
    /// How many are taken out.
    taken: usize,
}

impl Parts {
    /// All of a read that begins at `offset`: nothing of it has come.
    pub(super) fn new(offset: u64, into: IoVector) -> Self {
        Self { missing: List::from_iter([(offset, into)]), filled: List::new(), taken: 0 }
    }

    /// Takes the memory of `length` bytes at `offset` out. `None` unless all of it is missing.
    pub(super) fn take(&mut self, offset: u64, length: usize) -> Option<IoVector> {
        let end = offset.checked_add(length as u64)?;
        let covers =
            |(start, part): &(u64, IoVector)| *start <= offset && end <= start + part.len() as u64;
        let index = self.missing.iter().position(covers)?;
        let (start, mut before) = self.missing.swap_remove(index);
        let mut taken = before.split_off((offset - start) as usize);
        let after = taken.split_off(length);
        let around = [(start, before), (end, after)];
        self.missing.extend(around.into_iter().filter(|(_, part)| !part.is_empty()));
        self.taken += 1;
        Some(taken)
    }

    /// Takes everything out. `None` if something has come.
    pub(super) fn take_all(&mut self) -> Option<(u64, IoVector)> {
        if self.missing.len() != 1 || self.taken > 0 || !self.filled.is_empty() {
            return None;
        }
        self.taken = 1;
        self.missing.pop()
    }

    /// Gives what was taken out back, with its data.
    pub(super) fn give_back(&mut self, offset: u64, memory: IoVector) {
        self.taken -= 1;
        self.filled.push((offset, memory));
    }

    /// Whether all data is there.
    pub(super) fn is_complete(&self) -> bool {
        self.missing.is_empty() && self.taken == 0
    }

    /// Everything is missing again.
    pub(super) fn forget_data(&mut self) {
        self.missing.append(&mut self.filled);
        self.missing.sort_by_key(|(offset, _)| *offset);
        let mut whole = List::new();
        for (offset, part) in self.missing.drain(..) {
            match whole.pop() {
                None => whole.push((offset, part)),
                Some((start, before)) => whole.push((start, before.chain(part))),
            }
        }
        self.missing = whole;
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
            chunks in prop::collection::vec((0u64..70, 1usize..70), 1..40),
            again in any::<bool>(),
        ) {
            let mut buffer = Buffer::new(64);
            let mut parts = Parts::new(1000, buffer.lend());
            let mut come = [false; 64];
            for (start, length) in chunks {
                let range = start as usize..start as usize + length;
                let is_new = come.get(range.clone()).is_some_and(|bytes| !bytes.contains(&true));
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
    fn absurd_ranges_are_refused() {
        let mut buffer = Buffer::new(16);
        let mut parts = Parts::new(u64::MAX - 16, buffer.lend());
        assert!(parts.take(u64::MAX - 1, 16).is_none());
        assert!(parts.take(0, 1).is_none());
        assert!(parts.take(u64::MAX - 16, 8).is_some());
        assert!(parts.take_all().is_none());
    }
}
