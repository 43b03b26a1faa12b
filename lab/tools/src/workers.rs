//! Independent pieces of work, in parallel.

use std::sync::Mutex;
use std::thread;

use anyhow::Result;

/// Calls `work` for each of `items`, in as many threads as there are processors. After the first
/// error no more calls begin. Returns when all calls have ended, with an error if one failed.
pub fn side_by_side<T: Sync>(items: &[T], work: impl Fn(&T) -> Result<()> + Sync) -> Result<()> {
    in_threads(thread::available_parallelism()?.get(), items, work)
}

/// As [`side_by_side`], in this many threads.
pub fn in_threads<T: Sync>(
    threads: usize,
    items: &[T],
    work: impl Fn(&T) -> Result<()> + Sync,
) -> Result<()> {
    let waiting = Mutex::new(items.iter());
    let next = || waiting.lock().expect("no thread panics that holds it").next();
    let run = || {
        while let Some(item) = next() {
            if let Err(error) = work(item) {
                *waiting.lock().expect("as above") = [].iter();
                return Err(error);
            }
        }
        Ok(())
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
        let results: Vec<_> =
            workers.into_iter().map(|worker| worker.join().expect("work never panics")).collect();
        results.into_iter().collect()
    })
}
