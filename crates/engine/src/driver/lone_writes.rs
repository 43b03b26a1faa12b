//! Durable writes that are alone: the loop has no other durable write in flight.
//!
//! A file system completes an asynchronous durable write by a kernel thread, which flushes the
//! disk, and the kernel wakes the loop only then. A synchronous write flushes on the thread that
//! waits. With free processors both take the same time; with busy processors each wake-up waits for
//! a processor, so the asynchronous write takes several times as long. So the loop measures both
//! ways for each file, and uses the faster one ([`Trial`]), unless the engine has only threads.
//! A durable write that starts while another one is in flight shares wake-ups and flushes, so the
//! engine always makes it.
//!
//! Durable writes to block devices stay asynchronous, too: the kernel adds a flush to each
//! synchronous one.
//!
//! A loop's durable writes occupy at most one thread of the pool, however long a write takes. Those
//! of all loops occupy at most half of the pool.

use std::os::fd::RawFd;

use blockhouse_core::metrics::{Timestamp, clock};
use blockhouse_core::trial::{Terms, Trial, Way};

use crate::driver::engine::Engine;
use crate::driver::file::{Caching, File, Medium};
use crate::driver::operation::{Operation, Token, WriteThrough};

/// How many trials there are. Files that share a trial only make it less exact.
const TRIALS: usize = 64;

/// A thread has a cost besides its time, so it must save an eighth.
static TERMS: Terms = Terms {
    first: Way::Cheap,
    min_gain: 8,
    weight: 8,
    loser_weight: 8,
    burst: 4,
    min_backoff: 16,
    max_backoff: 1024,
};

/// The durable writes in flight of one loop, and the trials by file.
pub(crate) struct LoneWrites {
    /// The number of durable writes in flight.
    in_flight: usize,
    /// Whether the engine is asynchronous.
    has_choice: bool,
    trials: Box<[Trial]>,
    measured: Option<Measured>,
}

/// The durable write in flight that was alone when it started.
struct Measured {
    token: Token,
    way: Way,
    began: Timestamp,
}

impl LoneWrites {
    pub(crate) fn new(engine: Engine) -> Self {
        let trials = vec![Trial::new(&TERMS); TRIALS].into_boxed_slice();
        Self { in_flight: 0, has_choice: engine != Engine::Threads, trials, measured: None }
    }

    /// Counts an operation that starts. `try_by_thread` gives its call to a thread of the pool, if
    /// one is free. Returns whether a thread makes the call.
    pub(crate) fn start(
        &mut self,
        token: Token,
        operation: &Operation,
        try_by_thread: impl FnOnce() -> bool,
    ) -> bool {
        let Some(file) = durably_written(operation) else { return false };
        self.in_flight += 1;
        let waits_for_disk = file.caching == Caching::Direct && file.medium == Medium::FileSystem;
        if !self.has_choice || !waits_for_disk || self.in_flight > 1 {
            return false;
        }
        let began = clock::now();
        let way = match self.trials[trial_of(file.raw())].choose() {
            Way::Costly if try_by_thread() => Way::Costly,
            _ => Way::Cheap,
        };
        self.measured = Some(Measured { token, way, began });
        way == Way::Costly
    }

    /// An operation has completed.
    pub(crate) fn complete(&mut self, token: Token, operation: &Operation, result: i32) {
        let Some(file) = durably_written(operation) else { return };
        self.in_flight -= 1;
        if let Some(Measured { way, began, .. }) =
            self.measured.take_if(|measured| measured.token == token)
            && result >= 0
        {
            let time = clock::now().nanoseconds_since(began);
            self.trials[trial_of(file.raw())].record(way, time);
        }
    }
}

/// The file of a durable write.
fn durably_written(operation: &Operation) -> Option<&File> {
    match operation {
        Operation::Write(transfer, WriteThrough::Yes) => Some(&transfer.file),
        _ => None,
    }
}

fn trial_of(descriptor: RawFd) -> usize {
    descriptor as usize % TRIALS
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use blockhouse_core::Buffer;

    use super::*;
    use crate::driver::operation::Transfer;

    fn durable_write(caching: Caching) -> Operation {
        let file = std::fs::File::open("/proc/self/exe").expect("this program");
        let file = Arc::new(File::new(file.into(), Medium::FileSystem, caching));
        let transfer = Transfer { file, offset: 0, vector: Buffer::new(512).lend() };
        Operation::Write(transfer, WriteThrough::Yes)
    }

    /// Makes 1000 pairs of writes, and returns how many a thread made.
    fn on_threads(engine: Engine, operation: &Operation, has_thread: bool) -> usize {
        let mut lone = LoneWrites::new(engine);
        let [first, second] = [0, 1].map(Token::from_u64);
        let mut count = 0;
        for _ in 0..1000 {
            count += usize::from(lone.start(first, operation, || has_thread));
            assert!(!lone.start(second, operation, || true), "it is not alone");
            lone.complete(second, operation, 512);
            lone.complete(first, operation, 512);
        }
        assert!(lone.in_flight == 0 && lone.measured.is_none());
        count
    }

    #[test]
    fn both_ways_are_tried_if_there_are_two() {
        let operation = durable_write(Caching::Direct);
        assert!(on_threads(Engine::IoUring, &operation, true) > 0);
        assert_eq!(on_threads(Engine::IoUring, &operation, false), 0, "all threads are busy");
        assert_eq!(on_threads(Engine::Threads, &operation, true), 0);
    }

    #[test]
    fn writes_through_the_page_cache_stay_in_the_engine() {
        let operation = durable_write(Caching::PageCache);
        assert_eq!(on_threads(Engine::IoUring, &operation, true), 0);
    }
}
