//! Block status through all layers: which parts of a disk have data, and which read as zeros.
//!
//! A mapped cluster whose bytes are a hole of the host file reads as zeros. So the host is queried
//! for every mapped range (`SEEK_DATA` and `SEEK_HOLE`, see [`Storage::block_status`]). Guarantee:
//! data whose write was acknowledged before the query's [`BlockStatusCache`] was made is never
//! reported as zeros. Reason: the host is queried after the lookup, and the host range is not
//! reallocated meanwhile. A hole that an earlier query found is valid only until the next write to
//! the host file, because a change of one sector may move the rest of its cluster into that hole.
//! Changes made later may be missing. A host range past the end of the file counts as data, because
//! only a read shows its content.

use std::collections::BTreeMap;

use blockhouse_core::{Allocation, ByteRange, ExtentState, Result, Storage};
use blockhouse_format::Intent;
use futures_util::future::LocalBoxFuture;
use smallvec::SmallVec;

use super::{Layer, Reader, within};

/// Maximum runs that are cached for one file.
const MAX_RUNS: usize = 4096;

/// The state of a range of a guest's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockStatus {
    /// Space is allocated and holds data.
    Data,
    /// No space is allocated, or the image says that the range is zeros; reads as zeros.
    Hole,
    /// The image maps the range to a hole of the host file; reads as zeros.
    Zero,
}

/// The host's answers about the files of a disk and its backing files, so that each run of data and
/// each hole is queried once. For one walk, or one client request: later changes of the disk may be
/// missing from the answers.
#[derive(Debug, Default)]
pub struct BlockStatusCache {
    /// By depth: the disk itself is the first.
    layers: Vec<HostRuns>,
}

impl BlockStatusCache {
    /// The runs of the layer at a depth.
    pub(crate) fn layer(&mut self, depth: usize) -> &mut HostRuns {
        if self.layers.len() <= depth {
            self.layers.resize_with(depth + 1, HostRuns::default);
        }
        &mut self.layers[depth]
    }
}

/// Runs of data and holes of one host file.
#[derive(Debug, Default)]
pub(crate) struct HostRuns {
    /// Sorted by their first byte. They do not overlap.
    runs: BTreeMap<u64, Run>,
    /// The address of the layer that has the file. Another layer may replace it during a walk. A
    /// replaced layer stays in memory, so its address is not reused.
    layer: usize,
    /// Bytes that had been written to the file when the holes among the runs were found.
    written: u64,
}

#[derive(Clone, Copy, Debug)]
struct Run {
    end: u64,
    status: Allocation,
}

impl HostRuns {
    /// Forgets the runs of another layer's file, and all holes if this layer's file was written to
    /// since the holes were found. The caller calls it between the lookup of a host range and the
    /// query of its status.
    pub(crate) fn begin<S: Storage>(&mut self, layer: &Layer<S>) {
        let address = std::ptr::from_ref(layer).addr();
        let written = layer.data().stats().written();
        if std::mem::replace(&mut self.layer, address) != address {
            self.runs.clear();
        }
        if std::mem::replace(&mut self.written, written) != written {
            self.runs.retain(|_, run| run.status == Allocation::Data);
        }
    }

    /// The status of `file` at the start of `range`, which must not be empty, and the number of
    /// bytes with that status: at least one, at most the length of `range`.
    pub(crate) async fn block_status<S: Storage>(
        &mut self,
        file: &S,
        range: ByteRange,
    ) -> Result<(Allocation, u64)> {
        let start = range.offset();
        let size = file.size();
        if start >= size {
            return Ok((Allocation::Data, range.length()));
        }
        let run = match self.find(start) {
            Some(run) => run,
            None => self.ask(file, start, size).await?,
        };
        Ok((run.status, run.end.min(range.end()) - start))
    }

    fn find(&self, at: u64) -> Option<Run> {
        let (_, &run) = self.runs.range(..=at).next_back()?;
        (run.end > at).then_some(run)
    }

    /// Queries the run at `at`: its whole rest, up to `size`, the end of the file. A cached run
    /// shortly after `at` suggests a backward walk. Then the query also covers as many bytes before
    /// `at` as that run has, so that the number of queries grows with the logarithm of the run's
    /// length.
    async fn ask<S: Storage>(&mut self, file: &S, at: u64, size: u64) -> Result<Run> {
        let from = self.look_back(at);
        if from < at {
            let run = self.ask_from(file, from, size).await?;
            if run.end > at {
                return Ok(run);
            }
        }
        self.ask_from(file, at, size).await
    }

    async fn ask_from<S: Storage>(&mut self, file: &S, from: u64, size: u64) -> Result<Run> {
        let (status, length) = file.block_status(ByteRange::between(from, size)).await?;
        let run = Run { end: from + length, status };
        if self.runs.len() >= MAX_RUNS {
            self.runs.clear();
        }
        // The new run replaces the runs that begin inside it. A run that reaches beyond the new one
        // is queried again.
        let covered: Vec<u64> = self.runs.range(from..run.end).map(|(&start, _)| start).collect();
        for start in covered {
            self.runs.remove(&start);
        }
        self.runs.insert(from, run);
        Ok(run)
    }

    fn look_back(&self, at: u64) -> u64 {
        let before = self.runs.range(..at).next_back().map_or(0, |(_, run)| run.end);
        let Some((&start, next)) = self.runs.range(at..).next() else { return at };
        let known = next.end - start;
        let is_near = start - at <= known;
        if is_near { at.saturating_sub(known).max(before.min(at)) } else { at }
    }
}

/// Queries about the parts of a disk, through all layers from this one on.
pub(crate) struct LayerStatus<'a, S: Storage>(pub(super) &'a Layer<S>);

impl<S: Storage> Layer<S> {
    /// Queries about the parts of the disk.
    pub(crate) fn status(&self) -> LayerStatus<'_, S> {
        LayerStatus(self)
    }
}

impl<S: Storage> LayerStatus<'_, S> {
    /// The status of the first bytes of `range`, through all layers from this one on, and the
    /// number of bytes with that status (at least one, at most the length of `range`, which is not
    /// empty). This layer is at `depth` of the disk that `cache` belongs to.
    pub(crate) async fn block_status(
        &self,
        range: ByteRange,
        cache: &mut BlockStatusCache,
        depth: usize,
    ) -> Result<(BlockStatus, u64)> {
        // The host range is not reallocated until the host has answered.
        let guard = self.0.format.begin_read();
        let extent = self.0.format.map(range, Intent::Read).await?;
        let length = extent.guest.length();
        let status = match extent.state {
            ExtentState::Mapped { host } => {
                let place = ByteRange::between(host, host + length);
                let (status, asked) = self.0.host_status(cache.layer(depth), place).await?;
                let is_identity = self.0.format.is_identity();
                // The last sector of a disk that is the file itself is whole, even if the file ends
                // inside it.
                let is_end = is_identity && host + asked >= self.0.data().size();
                let length = if is_end { length } else { asked };
                let status = match status {
                    Allocation::Data => BlockStatus::Data,
                    Allocation::Hole if is_identity => BlockStatus::Hole,
                    Allocation::Hole => BlockStatus::Zero,
                };
                return Ok((status, length));
            }
            ExtentState::Compressed { .. } => BlockStatus::Data,
            // As in QEMU, also a cluster of zeros whose host cluster is kept is a hole to clients.
            ExtentState::Zero | ExtentState::Hole => BlockStatus::Hole,
            ExtentState::Backing => {
                // The read is registered before the drop of the guard: afterwards the backing file
                // may be detached.
                let _read = self.0.backing_reads.begin(extent.guest, Reader::Read);
                let backing = self.0.backing()?;
                drop(guard);
                let inside = within(extent.guest, backing.size());
                if inside.is_empty() {
                    return Ok((BlockStatus::Hole, length));
                }
                let behind = backing.status();
                let asked: LocalBoxFuture<'_, _> =
                    Box::pin(behind.block_status(inside, cache, depth + 1));
                return asked.await;
            }
        };
        Ok((status, length))
    }

    /// As [`block_status`](Self::block_status) of the disk's first layer, for its backing chain:
    /// `range` begins before the end of the backing disk.
    pub(crate) async fn below(
        &self,
        range: ByteRange,
        cache: &mut BlockStatusCache,
    ) -> Result<(BlockStatus, u64)> {
        let _read = self.0.backing_reads.begin(range, Reader::Read);
        let backing = self.0.backing()?;
        backing.status().block_status(within(range, backing.size()), cache, 1).await
    }

    /// The layer that has the first bytes of `range`, and the number of bytes for which this holds
    /// (as for [`block_status`](Self::block_status)): 1 for this layer, 2 for its backing file, and
    /// so on; 0 if no layer has them.
    pub(crate) async fn allocation_depth(&self, range: ByteRange) -> Result<(u32, u64)> {
        let (mut layer, mut rest, mut depth) = (self.0, range, 1);
        let mut passed: SmallVec<[_; 2]> = SmallVec::new();
        loop {
            let _guard = layer.format.begin_read();
            let extent = layer.format.map(rest, Intent::Read).await?;
            let length = extent.guest.length();
            match extent.state {
                ExtentState::Backing => {
                    // As in `block_status`.
                    passed.push(layer.backing_reads.begin(extent.guest, Reader::Read));
                    let backing = layer.backing()?;
                    let inside = within(extent.guest, backing.size());
                    depth += 1;
                    if inside.is_empty() {
                        // Zeros past the end of a backing file count as that file's own. An empty
                        // file represents a backing file that is left out, and has no zeros.
                        return Ok((if backing.size() == 0 { 0 } else { depth }, length));
                    }
                    (layer, rest) = (backing, inside);
                }
                ExtentState::Hole => return Ok((0, length)),
                _ => return Ok((depth, length)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use blockhouse_sim::{Config, OperationKind, Sim, SimDisk};

    use super::*;

    const MIB: u64 = 1 << 20;

    /// Queries `ranges` of a file with these bytes; returns the answers, and the number of queries
    /// to the file.
    fn ask(bytes: Vec<u8>, ranges: Vec<ByteRange>) -> (Vec<(Allocation, u64)>, usize) {
        let sim = Sim::new(1);
        let file = SimDisk::new(&sim, Config::default(), bytes);
        let inner = file.clone();
        let answers = sim.block_on(async move {
            let (mut runs, mut answers) = (HostRuns::default(), Vec::new());
            for range in ranges {
                answers.push(runs.block_status(&inner, range).await.expect("no failure"));
            }
            answers
        });
        let log = file.take_log();
        (answers, log.iter().filter(|one| one.kind() == OperationKind::Status).count())
    }

    fn clusters(offsets: impl IntoIterator<Item = u64>) -> Vec<ByteRange> {
        offsets.into_iter().map(|at| ByteRange::between(at, at + 4096)).collect()
    }

    #[test]
    fn each_run_is_asked_for_once_whatever_the_order() {
        let mut bytes = vec![0; 4 << 20];
        bytes[1 << 20..3 << 20].fill(1);
        let offsets: Vec<u64> = (0..MIB / 4096).map(|index| (index * 37 % 256) * 16384).collect();
        let (answers, asked) = ask(bytes, clusters(offsets.iter().copied()));
        for (at, (status, length)) in offsets.into_iter().zip(answers) {
            let expected =
                if (MIB..3 * MIB).contains(&at) { Allocation::Data } else { Allocation::Hole };
            assert_eq!((status, length), (expected, 4096), "at {at}");
        }
        assert!(asked < 40, "{asked} questions for 256 clusters in three runs");
    }

    #[test]
    fn a_run_that_is_gone_through_backwards_is_asked_for_few_times() {
        let offsets = (0..1024).rev().map(|index| index * 4096);
        let (answers, asked) = ask(vec![1; 4 << 20], clusters(offsets));
        assert!(answers.iter().all(|&answer| answer == (Allocation::Data, 4096)));
        assert!(asked <= 24, "{asked} questions for one run");
    }

    #[test]
    fn runs_end_where_they_do_and_past_the_file_is_data() {
        let mut bytes = vec![0; 12288];
        bytes[4096..8192].fill(1);
        let all = ByteRange::between(0, 12288);
        let (answers, _) = ask(
            bytes,
            vec![
                all,
                all.skip(4096),
                all.skip(8192),
                all.skip(4096).truncate(512),
                ByteRange::between(12288, 20480),
                all,
            ],
        );
        use Allocation::{Data, Hole};
        let expected =
            [(Hole, 4096), (Data, 4096), (Hole, 4096), (Data, 512), (Data, 8192), (Hole, 4096)];
        assert_eq!(answers, expected);
    }
}
