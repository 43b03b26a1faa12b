//! Finds blocks of a file that belong to more than one block of a disk, or that the file does not
//! hold as a whole: for checks, and before a block is read for the first time.
//!
//! Takes 8 bytes of memory for each block in use, up to [`MAX_BLOCKS`].

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;

use blockhouse_core::{Error, ErrorKind, Result, WorkBudget};

use super::refusal::corrupt;
use crate::CheckReport;

/// Maximum number of blocks in use that a check counts, which take 128 MiB of memory.
const MAX_BLOCKS: usize = 16 << 20;
/// Starts that are sorted at once, in some tens of microseconds.
const RUN: usize = 1024;
/// The cost of a start when runs are merged, in the unit of [`WorkBudget`].
const MERGE: u64 = 1024;
/// Maximum number of problems that are described in the report.
const MAX_PROBLEMS: usize = 1000;

/// The findings of a check so far.
pub(super) struct Survey {
    report: CheckReport,
    /// The start of each block in use.
    starts: Vec<u64>,
    /// Bytes of a block of the file.
    block_size: u64,
}

impl Survey {
    /// A survey of a disk of `total` blocks that take `block_size` bytes each.
    pub(super) fn new(total: u64, block_size: u64) -> Self {
        let report = CheckReport { total_clusters: total, ..CheckReport::default() };
        Self { report, starts: Vec::new(), block_size }
    }

    /// Counts block `index` of the disk, which needs `length` bytes of the file from `start` on. A
    /// block that ends past `file_end` is a problem, because reads of it fail. Such a block is not
    /// counted as allocated, but other blocks must not share its data either.
    ///
    /// # Errors
    /// `Unsupported` for more than [`MAX_BLOCKS`] blocks.
    pub(super) fn add(&mut self, index: u64, start: u64, length: u64, file_end: u64) -> Result<()> {
        let follows =
            self.starts.last().is_some_and(|last| last.checked_add(self.block_size) == Some(start));
        if start.checked_add(length).is_none_or(|end| end > file_end) {
            self.problem(|| {
                format!(
                    "block {index} has {length} bytes at {start}, past the end of the file at {file_end}"
                )
            });
        } else {
            if !follows && !self.starts.is_empty() {
                self.report.fragmented_clusters += 1;
            }
            self.report.allocated_clusters += 1;
            self.report.end = self.report.end.max(start.saturating_add(self.block_size));
        }
        if self.starts.len() == MAX_BLOCKS {
            let what = format!("has more than {MAX_BLOCKS} blocks in use, too many to check");
            let error = Error::new(ErrorKind::Unsupported, what).at(start);
            return Err(error.hint("'blockhouse convert' reads all of it, too"));
        }
        self.starts.push(start);
        Ok(())
    }

    /// Counts a problem. `what` makes its description, and is called only if the report keeps the
    /// description, so that no time is spent on millions of further descriptions.
    pub(super) fn problem(&mut self, what: impl FnOnce() -> String) {
        self.report.corruptions += 1;
        if self.report.problems.len() < MAX_PROBLEMS {
            self.report.problems.push(what());
        }
    }

    /// The findings, once all blocks are counted.
    pub(super) async fn finish(mut self) -> CheckReport {
        let starts = std::mem::take(&mut self.starts);
        let block_size = self.block_size;
        let visit = |pair| {
            self.problem(|| describe(pair));
            true
        };
        visit_overlaps(starts, block_size, visit).await;
        self.report
    }

    /// Fails if two blocks of the disk share data of the file: one of them would read the other's
    /// data.
    ///
    /// # Errors
    /// `Corrupt`, with the offset.
    pub(super) async fn check_apart(self) -> Result<()> {
        let mut found = Ok(());
        let visit = |pair: [u64; 2]| {
            found = Err(corrupt(describe(pair), pair[1]));
            false
        };
        visit_overlaps(self.starts, self.block_size, visit).await;
        found
    }
}

/// Passes the starts of two blocks that overlap to `visit`, in ascending order, until it returns
/// `false`. The starts are sorted in runs, which are merged, so that the thread's other tasks run
/// meanwhile: to sort millions of starts at once takes a second.
async fn visit_overlaps(
    mut starts: Vec<u64>,
    block_size: u64,
    mut visit: impl FnMut([u64; 2]) -> bool,
) {
    let budget = WorkBudget::new();
    for run in starts.chunks_mut(RUN) {
        run.sort_unstable();
        budget.spend(WorkBudget::QUANTUM).await;
    }
    let mut runs: Vec<_> = starts.chunks(RUN).map(|run| run.iter().copied()).collect();
    let firsts = runs.iter_mut().enumerate();
    let firsts = firsts.filter_map(|(number, run)| Some(Reverse((run.next()?, number))));
    let (mut heap, mut last) = (firsts.collect::<BinaryHeap<_>>(), None);
    while let Some(mut least) = heap.peek_mut() {
        let Reverse((start, number)) = *least;
        match runs[number].next() {
            Some(next) => {
                *least = Reverse((next, number));
                drop(least);
            }
            None => drop(PeekMut::pop(least)),
        }
        if let Some(last) = last.replace(start)
            && start - last < block_size
            && !visit([last, start])
        {
            return;
        }
        budget.spend(MERGE).await;
    }
}

fn describe([one, other]: [u64; 2]) -> String {
    if one == other {
        format!("two blocks of the disk share the data at offset {one}")
    } else {
        format!("the blocks at offsets {one} and {other} overlap")
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use futures_executor::block_on;

    use super::*;

    fn problems(starts: &[u64]) -> CheckReport {
        let mut survey = Survey::new(100, 1000);
        starts.iter().for_each(|&start| survey.add(0, start, 1000, 20_000_000).unwrap());
        block_on(survey.finish())
    }

    #[test]
    fn blocks_side_by_side_are_sound_in_any_order() {
        let report = problems(&[3000, 1000, 2000, 9000]);
        assert_eq!((report.corruptions, report.allocated_clusters, report.end), (0, 4, 10_000));
        assert_eq!(report.fragmented_clusters, 2);
    }

    #[test]
    fn shared_and_overlapping_blocks_are_found() {
        let report = problems(&[3000, 1000, 3000, 3999]);
        assert_eq!(report.corruptions, 2);
        assert!(report.problems[0].contains("share the data at offset 3000"));
        assert!(report.problems[1].contains("3000 and 3999 overlap"));
    }

    #[test]
    fn many_blocks_are_compared_in_short_steps() {
        let mut survey = Survey::new(100_000, 1000);
        let count = 100_000;
        for index in 0..count {
            survey.add(index, index * 7919 % count * 1000, 1000, u64::MAX).unwrap();
        }
        survey.add(count, 5500, 1000, u64::MAX).unwrap();
        let mut checked = pin!(survey.check_apart());
        let context = &mut Context::from_waker(Waker::noop());
        let steps = (0..).take_while(|_| checked.as_mut().poll(context).is_pending()).count();
        assert!(steps > 90, "{steps} steps");
        let starts: Vec<u64> =
            (0..10_000).map(|index| index * 7919 % 10_000 * 1000).chain([5500, 77_000]).collect();
        let report = problems(&starts);
        assert_eq!(report.corruptions, 3, "{:?}", report.problems);
        assert!(report.problems[2].contains("share the data at offset 77000"));
    }

    #[test]
    fn a_block_that_the_file_does_not_hold_as_a_whole_is_a_problem() {
        let mut survey = Survey::new(100, 1000);
        for (index, start) in [(0, 3000), (1, 4000), (2, 4001), (3, 9000), (4, u64::MAX)] {
            survey.add(index, start, 1000, 5000).unwrap();
        }
        // A block that needs only its first bytes.
        survey.add(5, 4500, 500, 5000).unwrap();
        let report = block_on(survey.finish());
        assert_eq!(report.allocated_clusters, 3);
        for (problem, words) in report.problems.iter().zip(["block 2 ", "block 3 ", "block 4 "]) {
            assert!(problem.contains(words) && problem.contains("past the end"), "{problem}");
        }
        // They share data with other ones, too.
        assert_eq!(report.corruptions, 5, "{:?}", report.problems);
    }

    #[test]
    fn all_problems_are_counted_and_the_first_told() {
        let (mut survey, mut told) = (Survey::new(100, 1000), 0);
        for number in 0..MAX_PROBLEMS + 7 {
            survey.problem(|| {
                told += 1;
                number.to_string()
            });
        }
        let report = block_on(survey.finish());
        assert_eq!((report.corruptions, report.problems.len()), (MAX_PROBLEMS as u64 + 7, told));
        assert_eq!((told, report.problems[999].as_str()), (MAX_PROBLEMS, "999"));
    }
}
