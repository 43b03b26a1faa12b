//! The event loop: one per thread, with an engine of its own.
//!
//! An iteration polls the tasks that are ready. Then the engine submits all operations that they
//! started and reaps all completions, if possible with one system call. Other threads reach a loop
//! through its [`Handle`]; `mailbox` states the guarantees to these threads.

pub(crate) mod clock;
pub(crate) mod event_signal;
pub(crate) mod local;
pub(crate) mod loop_thread;
pub(crate) mod signal_rings;
pub(crate) mod sleep;
pub(crate) mod spawn;
pub(crate) mod submit;
pub(crate) mod task;
pub(crate) mod timer;
pub(crate) mod wait_released;
pub(crate) mod watch;

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_channel::oneshot;

use crate::driver::Completion;
use crate::driver::engine::{self, Engine, EngineChoice, EngineReport};
use crate::driver::fixed_files::FixedFiles;
use crate::driver::io_poll::IoPoll;
use crate::driver::loop_shared::{LoopMessage, LoopShared};
use crate::driver::ring_restrictions::DeviceCommands;
use crate::event_loop::local::{EnterGuard, Local, try_current};
use crate::event_loop::spawn::spawn_party;

/// How often the tasks that are ready are polled between two system calls. A request goes from task
/// to task (receiver, handler, sender). With one poll in each iteration, a request would need one
/// system call for each of these tasks.
const MAX_POLLS_PER_ITERATION: usize = 3;

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
    messages: Vec<LoopMessage>,
}

impl EventLoop {
    /// A loop with the engine that `choice` allows.
    ///
    /// # Errors
    /// If the requested engine cannot be used here, with the kernel's reason; `Auto` always finds
    /// one.
    pub fn new(choice: EngineChoice) -> io::Result<Self> {
        Self::with_commands(choice, DeviceCommands::Refused)
    }

    /// As [`new`](Self::new), with a ring that carries out commands to devices or refuses them, for
    /// its whole life. The other engines carry out none.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub fn with_commands(choice: EngineChoice, commands: DeviceCommands) -> io::Result<Self> {
        let shared = LoopShared::new()?;
        let (driver, report) = engine::open(choice, commands, &shared)?;
        let local = Local::new(shared, driver, report);
        Ok(Self { local: Rc::new(local), done: Vec::new(), messages: Vec::new() })
    }

    /// Sets how long the loop busy-polls before a sleep: for up to `time`, if the loop expects an
    /// event that soon; zero means never. A new loop busy-polls for up to [`DEFAULT_POLLING`].
    ///
    /// [`DEFAULT_POLLING`]: crate::DEFAULT_POLLING
    pub fn set_max_poll_time(&mut self, time: Duration) {
        self.local.set_max_poll_time(time);
    }

    /// Sets whether this loop's ring keeps open files in a table of its own; [`FixedFiles::Off`] by
    /// default. This has no effect on engines other than io_uring. A file that is dropped on
    /// another thread, or while this loop does not run, stays open in the table until the loop's
    /// next iteration; its locks are released at once.
    ///
    /// # Panics
    /// While operations are in flight.
    pub fn set_fixed_files(&mut self, fixed: FixedFiles) {
        assert!(
            self.local.in_flight().is_empty(),
            "operations in flight name files by their slots"
        );
        self.local.set_fixed_files(fixed);
    }

    /// Sets whether this loop polls for completions on files for which [`check_io_poll`] succeeds;
    /// [`IoPoll::Off`] by default. The loop polls for direct reads. On block devices the loop also
    /// polls for direct writes, including durable ones if the device needs no flush for them. While
    /// any such operation is in flight the loop does not sleep; with none, it sleeps as usual. All
    /// other operations, and those that the kernel refuses to poll for, complete by interrupts.
    /// This has no effect on engines other than io_uring.
    ///
    /// [`check_io_poll`]: crate::check_io_poll
    ///
    /// # Panics
    /// While operations are in flight.
    pub fn io_poll(&mut self, io_poll: IoPoll) {
        assert!(self.local.in_flight().is_empty(), "operations in flight complete as they began");
        self.local.set_io_poll(io_poll);
    }

    /// A handle for other threads.
    pub fn handle(&self) -> Handle {
        Handle(Arc::clone(&self.local.shared))
    }

    /// The engine in use.
    pub fn engine(&self) -> Engine {
        self.local.report.engine
    }

    /// The engine in use, and why no better engine is used.
    pub fn report(&self) -> &EngineReport {
        &self.local.report
    }

    /// Runs `future` and all tasks of the loop, until `future` is ready.
    ///
    /// # Panics
    /// Inside of another loop.
    pub fn block_on<F: Future>(&mut self, future: F) -> F::Output {
        let mut output = None;
        {
            let main = pin!(async { output = Some(future.await) });
            self.run(main);
        }
        output.expect("the loop runs until its main future is ready")
    }

    /// [`block_on`](Self::block_on), compiled once for all futures.
    fn run(&mut self, mut main: Pin<&mut dyn Future<Output = ()>>) {
        assert!(try_current(|_| ()).is_none(), "an event loop cannot run inside of another");
        let _entered = EnterGuard::new(&self.local);
        let local = Rc::clone(&self.local);
        let waker = local.tasks.main_waker();
        loop {
            if local.tasks.ready.take_main() {
                local.tasks.budget.renew();
                if main.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                    return;
                }
            }
            for _ in 0..MAX_POLLS_PER_ITERATION {
                local.tasks.run_ready();
            }
            local.poll(&mut self.done, &mut self.messages);
            local.tasks.run_deferred();
        }
    }
}

impl Drop for EventLoop {
    /// Drops all tasks, then waits until the kernel has completed all operations, except commands
    /// to devices: these complete when their device is stopped, which may have been refused. These
    /// commands keep their memory and their files until the process ends.
    fn drop(&mut self) {
        let local = &self.local;
        let _entered = EnterGuard::new(local);
        local.tasks.clear();
        // Operations whose futures are owned elsewhere are not cancelled yet.
        local.in_flight().into_iter().for_each(|token| local.cancel(token));
        while local.has_transfers_in_flight() {
            local.poll(&mut self.done, &mut self.messages);
            // Neither new nor woken tasks may run.
            local.tasks.clear();
        }
        drop(local.shared.mailbox.close());
        // The loop no longer learns of closed files and unused memory, so their slots are freed
        // now: a future may keep the ring alive.
        local.set_fixed_files(FixedFiles::Off);
        local.unregister_all_memory();
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
pub struct Handle(Arc<LoopShared>);

impl Handle {
    /// Runs the future of `make` on the loop's thread. The future and the tasks that it spawns form
    /// a party. While a party runs for long, other parties get turns in between. A sleeping loop is
    /// woken, once for everything that is submitted before it runs again.
    pub fn spawn<F, R>(&self, make: impl FnOnce() -> F + Send + 'static) -> Submission<R>
    where
        F: Future<Output = R> + 'static,
        R: Send + 'static,
    {
        let (sender, receiver) = oneshot::channel();
        self.0.post(LoopMessage::Call(Box::new(move || {
            spawn_party(async move {
                // The submission may have been dropped; the task has still run.
                let _ = sender.send(make().await);
            });
        })));
        Submission(receiver)
    }
}

/// The outcome of a future submitted through a [`Handle`]. If the submission is dropped, the task
/// continues.
pub struct Submission<R>(oneshot::Receiver<R>);

impl<R> Submission<R> {
    /// Blocks the calling thread, which must not be the loop's, until the outcome is available;
    /// `None` if the loop ended before.
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

#[cfg(test)]
mod tests {
    use blockhouse_core::Buffer;

    use super::*;
    use crate::driver::operation::{CommandData, DeviceCommand, Operation};

    #[test]
    fn a_command_that_never_completes_does_not_keep_a_loop_from_ending() {
        let event_loop = EventLoop::new(EngineChoice::Auto).unwrap();
        let file = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        let mut buffer = Buffer::new(4096);
        let (file, memory) = (Arc::new(file), buffer.lend());
        let kept = Arc::downgrade(&file);
        let data = CommandData::Memory(memory);
        let command = DeviceCommand { file, code: 0, argument: [0; 8], data };
        event_loop.local.hold(Operation::Command(command));
        drop(event_loop);
        assert!(kept.upgrade().is_some(), "the driver may still write to its memory");
    }
}
