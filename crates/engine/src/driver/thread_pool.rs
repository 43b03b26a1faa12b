//! Threads for blocking calls: all file operations if neither io_uring nor Linux AIO is available,
//! and the rare calls that neither supports.
//!
//! One pool serves all loops of the process. It starts a thread if work waits and no thread is
//! idle, up to a limit; threads never end. If not even the first thread can be started, the calling
//! loop makes the call itself: this is slower, but no request fails.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, OnceLock};

use futures_channel::oneshot;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::driver::loop_shared::{LoopMessage, LoopShared};
use crate::driver::operation::Token;
use crate::driver::system_call::FileCall;

/// The maximum number of threads: more blocking calls at once were no faster on the tested disks.
pub(crate) const MAX_THREADS: usize = 16;

pub(crate) struct ThreadPool {
    state: Mutex<State>,
    work: Condvar,
    /// Starts a worker thread.
    spawn: fn(Arc<Self>) -> io::Result<()>,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    threads: usize,
    idle: usize,
    /// Whether the last attempt to start a thread failed and left no thread.
    is_without_threads: bool,
}

enum Job {
    /// An operation of a loop; the loop gets the result.
    File {
        call: FileCall,
        token: Token,
        shared: Arc<LoopShared>,
    },
    Call(Box<dyn FnOnce() + Send>),
}

impl ThreadPool {
    /// The pool of this process.
    pub(crate) fn shared() -> Arc<Self> {
        static POOL: OnceLock<Arc<ThreadPool>> = OnceLock::new();
        Arc::clone(POOL.get_or_init(|| Self::with(spawn)))
    }

    /// Makes the call on a worker and reports its result to `shared` under `token`.
    ///
    /// # Safety
    /// The operation that `call` was made from stays in the loop's table, unmoved and unused, until
    /// the loop has received the result.
    pub(crate) unsafe fn run_file(
        self: &Arc<Self>,
        call: FileCall,
        token: Token,
        shared: &Arc<LoopShared>,
    ) {
        self.queue(Job::File { call, token, shared: Arc::clone(shared) });
    }

    /// As [`run_file`](Self::run_file) if a thread is idle and less than half of the pool is busy;
    /// otherwise makes no call and returns false. If less than half is busy and no thread is idle,
    /// one is started for later calls.
    ///
    /// # Safety
    /// As for [`run_file`](Self::run_file), if this returns true.
    pub(crate) unsafe fn try_run_file(
        self: &Arc<Self>,
        call: FileCall,
        token: Token,
        shared: &Arc<LoopShared>,
    ) -> bool {
        let Some(mut state) = self.lock_if_idle() else { return false };
        state.queue.push_back(Job::File { call, token, shared: Arc::clone(shared) });
        drop(state);
        self.work.notify_one();
        true
    }

    /// Whether [`try_run_file`](Self::try_run_file) would make a call now; otherwise does what it
    /// does. For callers whose call is costly to prepare.
    pub(crate) fn has_idle_thread(self: &Arc<Self>) -> bool {
        self.lock_if_idle().is_some()
    }

    /// The state, if a thread is idle and less than half of the pool is busy. If less than half is
    /// busy and no thread is idle, one is started.
    fn lock_if_idle(self: &Arc<Self>) -> Option<MutexGuard<'_, State>> {
        let state = self.state.lock();
        let idle = state.idle.saturating_sub(state.queue.len());
        if state.threads - idle >= MAX_THREADS / 2 {
            return None;
        }
        if idle == 0 {
            self.start_thread(state);
            return None;
        }
        Some(state)
    }

    fn queue(self: &Arc<Self>, job: Job) {
        let mut state = self.state.lock();
        state.queue.push_back(job);
        if state.idle < state.queue.len() && state.threads < MAX_THREADS {
            self.start_thread(state);
        } else {
            drop(state);
            self.work.notify_one();
        }
    }

    fn with(spawn: fn(Arc<Self>) -> io::Result<()>) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), work: Condvar::new(), spawn })
    }

    fn start_thread(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        state.threads += 1;
        drop(state);
        if let Err(error) = (self.spawn)(Arc::clone(self)) {
            self.go_on_without_thread(&error);
        }
    }

    /// Handles a failed start of a thread. If there are no threads, runs all queued calls here.
    fn go_on_without_thread(&self, error: &io::Error) {
        let mut state = self.state.lock();
        state.threads -= 1;
        let queue = match state.threads {
            0 if !state.queue.is_empty() => std::mem::take(&mut state.queue),
            _ => return,
        };
        let is_news = !std::mem::replace(&mut state.is_without_threads, true);
        drop(state);
        if is_news {
            tracing::warn!(
                "loops wait for blocking calls themselves, because no thread can be started for them: \
                 {error}; raise the limit on threads (ulimit -u, TasksMax= of the service)"
            );
        }
        queue.into_iter().for_each(Job::run);
    }

    fn work(&self) {
        let mut state = self.state.lock();
        state.is_without_threads = false;
        loop {
            let Some(job) = state.queue.pop_front() else {
                state.idle += 1;
                self.work.wait(&mut state);
                state.idle -= 1;
                continue;
            };
            drop(state);
            job.run();
            state = self.state.lock();
        }
    }
}

impl Job {
    fn run(self) {
        match self {
            Self::File { call, token, shared } => {
                // SAFETY: the caller of `run_file` guarantees that the operation stays.
                let result = unsafe { call.run() };
                shared.post(LoopMessage::Completed(token, result));
            }
            Self::Call(call) => call(),
        }
    }
}

fn spawn(pool: Arc<ThreadPool>) -> io::Result<()> {
    let builder = std::thread::Builder::new().name("blockhouse-io".into());
    builder.spawn(move || pool.work()).map(drop)
}

/// Runs `call` on a worker thread and waits for it without blocking the loop. A dropped future does
/// not stop the call.
pub(crate) async fn blocking<R: Send + 'static>(call: impl FnOnce() -> R + Send + 'static) -> R {
    let (sender, receiver) = oneshot::channel();
    ThreadPool::shared().queue(Job::Call(Box::new(move || {
        // The future may have been dropped.
        let _ = sender.send(call());
    })));
    receiver.await.expect("a worker finishes every call that it takes")
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread::ThreadId;

    use super::*;

    /// The thread on which the pool runs a call.
    fn thread_of_call(pool: &Arc<ThreadPool>) -> ThreadId {
        let (give, take) = mpsc::channel();
        pool.queue(Job::Call(Box::new(move || {
            give.send(std::thread::current().id()).expect("it is waited for");
        })));
        take.recv().expect("every call is made")
    }

    #[test]
    fn without_threads_calls_are_made_by_the_caller() {
        let own = std::thread::current().id();
        let pool = ThreadPool::with(|_| Err(io::Error::from_raw_os_error(libc::EAGAIN)));
        for _ in 0..3 {
            assert_eq!(thread_of_call(&pool), own);
        }
        let state = pool.state.lock();
        assert_eq!((state.threads, state.queue.len()), (0, 0));
    }

    #[test]
    fn a_thread_that_can_be_had_later_makes_the_calls() {
        let pool = ThreadPool::with(spawn);
        pool.state.lock().is_without_threads = true;
        assert_ne!(thread_of_call(&pool), std::thread::current().id());
        assert!(!pool.state.lock().is_without_threads);
    }
}
