//! Threads for what can only be done by waiting: all file operations where neither io_uring nor
//! Linux AIO can be had, and the rare calls that neither offers.
//!
//! One pool serves all loops of the process. Threads are started when work waits and nobody is idle,
//! up to a bound, and stay.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use futures_channel::oneshot;
use parking_lot::{Condvar, Mutex};

use crate::operation::Token;
use crate::remote::{Note, Remote};
use crate::system_call::FileCall;

/// More than this many blocking calls at once gain nothing on the disks that we have seen.
pub(crate) const MOST_THREADS: usize = 16;

pub(crate) struct ThreadPool {
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

enum Job {
    /// An operation of a loop, which is told the result.
    File {
        call: FileCall,
        token: Token,
        remote: Arc<Remote>,
    },
    Call(Box<dyn FnOnce() + Send>),
}

impl ThreadPool {
    /// The pool of this process.
    pub(crate) fn shared() -> Arc<Self> {
        static POOL: OnceLock<Arc<ThreadPool>> = OnceLock::new();
        let make = || Arc::new(Self { state: Mutex::default(), work: Condvar::new() });
        Arc::clone(POOL.get_or_init(make))
    }

    /// Makes the call on a worker and reports its result to `remote` under `token`.
    ///
    /// # Safety
    /// The operation that `call` was made of stays in the loop's table, unmoved and unused, until
    /// the loop was told the result.
    pub(crate) unsafe fn run_file(
        self: &Arc<Self>,
        call: FileCall,
        token: Token,
        remote: &Arc<Remote>,
    ) {
        self.queue(Job::File { call, token, remote: Arc::clone(remote) });
    }

    fn queue(self: &Arc<Self>, job: Job) {
        let mut state = self.state.lock();
        state.queue.push_back(job);
        if state.idle < state.queue.len() && state.threads < MOST_THREADS {
            state.threads += 1;
            drop(state);
            self.start_thread();
        } else {
            drop(state);
            self.work.notify_one();
        }
    }

    fn start_thread(self: &Arc<Self>) {
        let pool = Arc::clone(self);
        let builder = std::thread::Builder::new().name("blockhouse-io".into());
        if let Err(error) = builder.spawn(move || pool.work()) {
            let mut state = self.state.lock();
            state.threads -= 1;
            assert!(state.threads > 0, "cannot start a thread for blocking calls: {error}");
        }
    }

    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            let Some(job) = state.queue.pop_front() else {
                state.idle += 1;
                self.work.wait(&mut state);
                state.idle -= 1;
                continue;
            };
            drop(state);
            match job {
                Job::File { call, token, remote } => {
                    // SAFETY: `run_file` was promised that the operation stays.
                    let result = unsafe { call.run() };
                    remote.post(Note::Completed(token, result));
                }
                Job::Call(call) => call(),
            }
            state = self.state.lock();
        }
    }
}

/// Runs `call` on a worker thread and waits for it without blocking the loop. If the waiting future
/// is dropped the call runs to its end all the same.
pub(crate) async fn blocking<R: Send + 'static>(call: impl FnOnce() -> R + Send + 'static) -> R {
    let (sender, receiver) = oneshot::channel();
    ThreadPool::shared().queue(Job::Call(Box::new(move || {
        // Nobody may be waiting any more.
        let _ = sender.send(call());
    })));
    receiver.await.expect("a worker finishes every call that it takes")
}
