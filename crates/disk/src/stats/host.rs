//! Statistics of the operations at a storage: number, size, duration and errors.

use std::sync::OnceLock;

use blockhouse_core::Result;
use blockhouse_core::metrics::{Counter, Histogram, PerThread, Timestamp, clock};

use super::errors::Errors;
use super::labels::{HostOperation, Stage};
use super::reading::StageMetrics;

/// The bytes that an operation at a storage moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Content {
    /// Guests' bytes.
    Data,
    /// The image's metadata.
    Metadata,
}

/// The operations at a storage, and the flushes that were not needed.
#[derive(Debug, Default)]
pub(crate) struct HostStats {
    blocks: PerThread<Block>,
}

/// The counters of one thread.
#[derive(Debug, Default)]
struct Block {
    skipped_flushes: Counter,
    shared_flushes: Counter,
    operations: [[OnceLock<Box<Operations>>; HostOperation::ALL.len()]; CONTENTS.len()],
}

const CONTENTS: [Content; 2] = [Content::Data, Content::Metadata];

#[derive(Debug, Default)]
#[repr(C)]
struct Operations {
    bytes: Counter,
    durations: Histogram,
    errors: Errors,
}

/// The timer of an operation in flight. If the timer is dropped before it [ends](Self::end), the
/// operation was cancelled, and is not recorded.
#[must_use]
pub(crate) struct HostTimer<'a> {
    stats: &'a HostStats,
    operation: HostOperation,
    content: Content,
    bytes: u64,
    began: Timestamp,
}

impl HostStats {
    /// Starts to time an operation on `bytes` bytes.
    pub(crate) fn begin(
        &self,
        operation: HostOperation,
        content: Content,
        bytes: u64,
    ) -> HostTimer<'_> {
        HostTimer { stats: self, operation, content, bytes, began: clock::now() }
    }

    /// Counts a flush that was skipped, because everything was stable.
    pub(crate) fn flush_skipped(&self) {
        self.blocks.mine().skipped_flushes.add(1);
    }

    /// Counts a flush that another flush covered.
    pub(crate) fn flush_shared(&self) {
        self.blocks.mine().shared_flushes.add(1);
    }

    /// The number of bytes of all completed writes, with FUA or without. A write to new space is
    /// counted before its extent is linked, so every sum after a lookup of the extent includes the
    /// write.
    pub(crate) fn written(&self) -> u64 {
        let of = |block: &Block, content: Content, operation: HostOperation| {
            let operations = block.operations[content as usize][operation as usize].get();
            operations.map_or(0, |operations| operations.bytes.get())
        };
        let writes = [HostOperation::Write, HostOperation::WriteFua];
        self.blocks.sum(|block| {
            let all = CONTENTS.iter().flat_map(|content| writes.map(|write| (*content, write)));
            all.map(|(content, write)| of(block, content, write)).sum()
        })
    }

    pub(super) fn skipped_flushes(&self) -> u64 {
        self.blocks.sum(|block| block.skipped_flushes.get())
    }

    pub(super) fn shared_flushes(&self) -> u64 {
        self.blocks.sum(|block| block.shared_flushes.get())
    }

    /// The metrics of each operation and content that occurred.
    pub(super) fn operations(&self) -> impl Iterator<Item = StageMetrics> {
        let all = CONTENTS.into_iter();
        let all = all.flat_map(|content| HostOperation::ALL.map(|one| (content, one)));
        all.filter_map(|(content, operation)| self.operations_of(content, operation))
    }

    fn operations_of(&self, content: Content, operation: HostOperation) -> Option<StageMetrics> {
        let blocks = self.blocks.iter();
        let mut blocks = blocks
            .filter_map(|block| block.operations[content as usize][operation as usize].get())
            .peekable();
        blocks.peek()?;
        let mut metrics = StageMetrics::new(stage_of(content, operation), operation.as_str());
        for block in blocks {
            metrics.bytes += block.bytes.get();
            metrics.durations.add(&block.durations.read());
            block.errors.add_to(&mut metrics.errors);
        }
        Some(metrics)
    }
}

impl HostTimer<'_> {
    /// Records the operation, which has completed.
    pub(crate) fn end(self, outcome: &Result<()>) {
        let block = self.stats.blocks.mine();
        let operations = &block.operations[self.content as usize][self.operation as usize];
        let operations = operations.get_or_init(Box::default);
        operations.bytes.add(self.bytes);
        operations.durations.record(clock::now().nanoseconds_since(self.began));
        if let Err(error) = outcome {
            operations.errors.count(error.errno());
        }
    }
}

fn stage_of(content: Content, operation: HostOperation) -> Stage {
    match (content, operation) {
        (_, HostOperation::Flush) => Stage::Flush,
        (Content::Data, _) => Stage::Host,
        (Content::Metadata, _) => Stage::Metadata,
    }
}
