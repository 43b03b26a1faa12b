//! Durable writes that are alone: the loop has no other durable write in flight.
//!
//! A file system completes an asynchronous durable write by a kernel thread, which flushes the
//! disk, and the kernel wakes the loop only then. A synchronous write flushes on the thread that
//! waits. With free processors both take as long; with busy processors each wake-up waits for a
//! processor, so the asynchronous write takes several times as long. So the loop measures both ways
//! for each file, and uses the shorter one ([`Trial`]). Durable writes that are not alone share
//! wake-ups and flushes, so they always stay asynchronous.
//!
//! Durable writes to block devices stay asynchronous, too: the kernel adds a flush to each
//! synchronous one.
//!
//! At most one thread of the pool is occupied by a loop's durable write, however long the write
//! takes.

use std::os::fd::RawFd;

use blockhouse_core::metrics::{Timestamp, clock};

use crate::driver::file::{Caching, File, Medium};
use crate::driver::operation::{Operation, Token, WriteThrough};
use crate::driver::thread_pool::ThreadPool;
use crate::driver::trial::{Trial, Way};

/// How many trials there are. Files that share a trial only make it less exact.
const TRIALS: usize = 64;

/// The durable writes in flight of one loop, and the trials by file.
pub(crate) struct LoneWrites {
    /// The number of durable writes in flight.
    in_flight: usize,
    trials: Box<[Trial]>,
    measured: Option<Measured>,
}

/// A durable write that has been alone since its start.
struct Measured {
    token: Token,
    way: Way,
    began: Timestamp,
}

impl LoneWrites {
    pub(crate) fn new() -> Self {
        let trials = vec![Trial::new(Way::Cheap); TRIALS].into_boxed_slice();
        Self { in_flight: 0, trials, measured: None }
    }

    /// An operation starts. Returns whether a thread of the pool, which has room, should make its
    /// call.
    pub(crate) fn start(&mut self, token: Token, operation: &Operation) -> bool {
        let Some(file) = durably_written(operation) else { return false };
        self.in_flight += 1;
        self.measured = None;
        let waits_for_device = file.caching == Caching::Direct && file.medium == Medium::Device;
        let is_candidate = file.is_regular && waits_for_device && self.in_flight == 1;
        if !is_candidate || !ThreadPool::shared().has_room() {
            return false;
        }
        let way = self.trials[trial_of(file.raw())].choose();
        self.measured = Some(Measured { token, way, began: clock::now() });
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
        let file = Arc::new(File::new(file.into(), Medium::Device, caching));
        let transfer = Transfer { file, offset: 0, vector: Buffer::new(512).lend() };
        Operation::Write(transfer, WriteThrough::Yes)
    }

    /// Makes 1000 writes one after the other, each with a second one beside it if `pairs`, and
    /// returns how many a thread made.
    fn on_threads(lone: &mut LoneWrites, operation: &Operation, pairs: bool) -> usize {
        let [first, second] = [0, 1].map(Token::from_u64);
        let mut count = 0;
        for _ in 0..1000 {
            count += usize::from(lone.start(first, operation));
            if pairs {
                assert!(!lone.start(second, operation), "it is not alone");
                lone.complete(second, operation, 512);
            }
            lone.complete(first, operation, 512);
        }
        assert!(lone.in_flight == 0 && lone.measured.is_none());
        count
    }

    #[test]
    fn only_writes_that_are_alone_are_measured() {
        let mut lone = LoneWrites::new();
        let operation = durable_write(Caching::Direct);
        assert!(on_threads(&mut lone, &operation, false) > 0, "both ways are tried");
        let mut lone = LoneWrites::new();
        on_threads(&mut lone, &operation, true);
        assert!(lone.trials.iter().all(Trial::is_new));
    }

    #[test]
    fn writes_through_the_page_cache_stay_in_the_engine() {
        let operation = durable_write(Caching::PageCache);
        assert_eq!(on_threads(&mut LoneWrites::new(), &operation, false), 0);
    }
}
