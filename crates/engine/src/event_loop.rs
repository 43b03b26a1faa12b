//! The event loop: one per thread, with an engine of its own.
//!
//! A turn polls the tasks that are ready, then lets the engine submit everything they asked for and
//! reap everything that completed, with one system call where the engine can. Other threads reach a
//! loop through its [`Handle`]; see `mailbox` for what they are promised.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_channel::oneshot;

use crate::driver::Completion;
use crate::engine::{self, Engine, EngineChoice, EngineReport};
use crate::fixed::FixedFiles;
use crate::io_poll::IoPoll;
use crate::local::{Entered, Local, current, try_current};
use crate::remote::{Note, Remote};
use crate::spawn::spawn_party;

/// How often the tasks that are ready are polled between two system calls. A request goes from task
/// to task (receiver, worker, sender), and with a turn for each hand-over it would cost that many
/// system calls.
const ROUNDS: usize = 3;

/// A loop that runs futures on this thread. It stays on the thread that made it.
///
/// ```
/// use std::time::Duration;
///
/// use blockhouse_engine::{EngineChoice, EventLoop, sleep, spawn};
///
/// let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
/// let answer = event_loop.block_on(async {
///     let other = spawn(async { 6 * 7 });
///     sleep(Duration::from_millis(1)).await;
///     other.await
/// });
/// assert_eq!(answer, 42);
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct EventLoop {
    local: Rc<Local>,
    done: Vec<Completion>,
    notes: Vec<Note>,
}

impl EventLoop {
    /// A loop with the engine that `choice` allows.
    ///
    /// # Errors
    /// When the engine that was asked for cannot be had here, with the kernel's reason; `Auto`
    /// always finds one.
    pub fn new(choice: EngineChoice) -> io::Result<Self> {
        let remote = Remote::new()?;
        let (driver, report) = engine::open(choice, &remote)?;
        let local = Local::new(remote, driver, report);
        Ok(Self { local: Rc::new(local), done: Vec::new(), notes: Vec::new() })
    }

    /// Before it sleeps, the loop looks out for events for up to `time` where experience says that
    /// one will come so soon; zero for never. A new loop does for [`DEFAULT_POLLING`].
    ///
    /// [`DEFAULT_POLLING`]: crate::DEFAULT_POLLING
    pub fn poll_at_most(&mut self, time: Duration) {
        self.local.poll_at_most(time);
    }

    /// Whether this loop's ring keeps open files in a table of its own, [`FixedFiles::Off`] unless set
    /// here. The other engines have no such table, and nothing changes for them. A file that is
    /// dropped on another thread, or while this loop does not run, stays open in the table until the
    /// loop's next turn; its locks go at once.
    ///
    /// # Panics
    /// While operations are under way.
    pub fn fix_files(&mut self, fixed: FixedFiles) {
        assert!(self.local.running().is_empty(), "operations under way name files by their slots");
        self.local.fix_files(fixed);
    }

    /// Whether this loop polls for completions where [`check_io_poll`] finds nothing against it;
    /// [`IoPoll::Off`] unless set here. Those are completions of direct reads, and on block devices of
    /// writes, durable ones among them where the device needs no flush for that. While any such operation
    /// is under way the loop does not sleep; with none, it sleeps as ever. Everything else, and what the
    /// kernel refuses to poll for, completes as without. Only the io_uring engine can; nothing changes
    /// for the others.
    ///
    /// [`check_io_poll`]: crate::check_io_poll
    ///
    /// # Panics
    /// While operations are under way.
    pub fn io_poll(&mut self, io_poll: IoPoll) {
        assert!(self.local.running().is_empty(), "operations under way complete as they began");
        self.local.set_io_poll(io_poll);
    }

    /// What other threads reach this loop by.
    pub fn handle(&self) -> Handle {
        Handle(Arc::clone(&self.local.remote))
    }

    /// The engine in use.
    pub fn engine(&self) -> Engine {
        self.local.report.engine
    }

    /// The engine in use and why.
    pub fn report(&self) -> &EngineReport {
        &self.local.report
    }

    /// Runs `future` and everything that is spawned meanwhile, until `future` is ready.
    ///
    /// # Panics
    /// Inside of another loop.
    pub fn block_on<F: Future>(&mut self, future: F) -> F::Output {
        assert!(try_current(|_| ()).is_none(), "an event loop cannot run inside of another");
        let _entered = Entered::new(&self.local);
        let local = Rc::clone(&self.local);
        let waker = local.tasks.main_waker();
        let mut future = pin!(future);
        loop {
            if local.tasks.ready.take_main() {
                local.tasks.budget.renew();
                let poll = future.as_mut().poll(&mut Context::from_waker(&waker));
                if let Poll::Ready(output) = poll {
                    return output;
                }
            }
            for _ in 0..ROUNDS {
                local.tasks.run_ready();
            }
            local.turn(&mut self.done, &mut self.notes);
            local.tasks.run_behind();
        }
    }
}

impl Drop for EventLoop {
    /// Drops all tasks, then waits until the kernel has given back everything that it holds.
    fn drop(&mut self) {
        let local = &self.local;
        let _entered = Entered::new(local);
        local.tasks.clear();
        // Those whose futures live on elsewhere have not been asked yet.
        local.running().into_iter().for_each(|token| local.cancel(token));
        while !local.running().is_empty() {
            local.turn(&mut self.done, &mut self.notes);
            // Nothing is run any more: neither what came in, nor what was woken.
            local.tasks.clear();
        }
        drop(local.remote.mailbox.close());
        // Nobody hears any more of what is closed or unused; the ring itself may be kept by a future.
        local.fix_files(FixedFiles::Off);
        local.forget_all_memory();
    }
}

/// Submits to a loop from any thread.
///
/// ```
/// use blockhouse_engine::{EngineChoice, EventLoop};
///
/// let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
/// let handle = event_loop.handle();
/// let (done, is_done) = futures_channel::oneshot::channel();
/// let thread = std::thread::spawn(move || {
///     // The closure goes to the loop's thread; the future that it returns never leaves it.
///     let submission = handle.spawn(|| async { 6 * 7 });
///     let _ = done.send(submission.wait());
/// });
/// assert_eq!(event_loop.block_on(is_done), Ok(Some(42)));
/// # thread.join().unwrap();
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone)]
pub struct Handle(Arc<Remote>);

impl Handle {
    /// The loop of the current thread.
    ///
    /// # Panics
    /// Outside of an event loop.
    pub fn current() -> Self {
        current(|local| Self(Arc::clone(&local.remote)))
    }

    /// Runs the future that `make` makes on the loop's thread. With what it spawns it is a party: while
    /// it computes for long, those of others get their turns in between. The loop is woken if it sleeps, once
    /// for all that is submitted before it runs again.
    pub fn spawn<F, R>(&self, make: impl FnOnce() -> F + Send + 'static) -> Submission<R>
    where
        F: Future<Output = R> + 'static,
        R: Send + 'static,
    {
        let (sender, receiver) = oneshot::channel();
        self.0.post(Note::Call(Box::new(move || {
            spawn_party(async move {
                // Nobody may be waiting any more; the task has run all the same.
                let _ = sender.send(make().await);
            });
        })));
        Submission(receiver)
    }
}

/// The outcome of what was submitted through a [`Handle`]. Dropping it lets the task run on.
pub struct Submission<R>(oneshot::Receiver<R>);

impl<R> Submission<R> {
    /// Blocks the calling thread, which must not be the loop's, until the outcome is there; `None`
    /// when the loop ended before.
    pub fn wait(self) -> Option<R> {
        futures_executor::block_on(self)
    }
}

impl<R> Future for Submission<R> {
    type Output = Option<R>;

    fn poll(mut self: std::pin::Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        std::pin::Pin::new(&mut self.0).poll(cx).map(Result::ok)
    }
}
