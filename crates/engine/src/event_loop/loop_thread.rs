//! An event loop on a thread of its own, for programs whose own threads have other work.
//!
//! Guarantee: when [`LoopThread::stop`] returns, the loop's tasks are dropped and the kernel has
//! returned all memory that their operations lent to it, except that of commands to devices.

use std::future::Future;
use std::io;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use futures_channel::oneshot;

use crate::driver::engine::{EngineChoice, EngineReport};
use crate::driver::ring_restrictions::DeviceCommands;
use crate::event_loop::{EventLoop, Handle};

/// An event loop that runs on its own thread until it is stopped.
///
/// Dropping the value stops the loop, too, without waiting for its thread.
///
/// ```
/// use blockhouse_engine::{EngineChoice, LoopThread};
///
/// let disk_loop = LoopThread::start("disk-0".into(), EngineChoice::Auto, |_| ())?;
/// println!("{}", disk_loop.report());
/// // The closure runs on the loop's thread and makes a future there; this thread waits for its
/// // outcome.
/// assert_eq!(disk_loop.run(|| async { 6 * 7 }), 42);
/// disk_loop.stop();
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct LoopThread {
    handle: Handle,
    report: EngineReport,
    /// The loop runs until this is dropped.
    running: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl LoopThread {
    /// Starts a loop with the engine that `choice` allows, on a new thread called `name`. `prepare`
    /// configures the loop before it runs.
    ///
    /// # Errors
    /// The errors of [`EventLoop::new`]; or the kernel's error, if the thread cannot be started.
    pub fn start(
        name: String,
        choice: EngineChoice,
        prepare: impl FnOnce(&mut EventLoop) + Send + 'static,
    ) -> io::Result<Self> {
        Self::start_with_commands(name, choice, DeviceCommands::Refused, prepare)
    }

    /// As [`start`](Self::start), with a loop from [`EventLoop::with_commands`].
    ///
    /// # Errors
    /// The errors of [`start`](Self::start).
    pub fn start_with_commands(
        name: String,
        choice: EngineChoice,
        commands: DeviceCommands,
        prepare: impl FnOnce(&mut EventLoop) + Send + 'static,
    ) -> io::Result<Self> {
        let (running, stopped) = oneshot::channel::<()>();
        let (sender, started) = mpsc::channel();
        let work = move || match EventLoop::with_commands(choice, commands) {
            Err(error) => drop(sender.send(Err(error))),
            Ok(mut event_loop) => {
                prepare(&mut event_loop);
                let parts = (event_loop.handle(), event_loop.report().clone());
                if sender.send(Ok(parts)).is_ok() {
                    // Nothing is ever sent: the channel closes when the loop is to stop.
                    let _ = event_loop.block_on(stopped);
                }
            }
        };
        let thread = thread::Builder::new().name(name).spawn(work)?;
        let Ok(started) = started.recv() else {
            let panic = thread.join().expect_err("a thread that does not panic sends its loop");
            std::panic::resume_unwind(panic);
        };
        let (handle, report) = started?;
        Ok(Self { handle, report, running, thread })
    }

    /// Submits to the loop, from any thread.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// The engine in use, and why no better engine is used.
    pub fn report(&self) -> &EngineReport {
        &self.report
    }

    /// Runs the future of `make` on the loop, and blocks the calling thread until it is ready. Must
    /// not be called on the loop's own thread, which would wait for itself.
    ///
    /// # Panics
    /// When the loop's thread panicked.
    pub fn run<F, R>(&self, make: impl FnOnce() -> F + Send + 'static) -> R
    where
        F: Future<Output = R> + 'static,
        R: Send + 'static,
    {
        self.handle.spawn(make).wait().expect("a loop runs until it is stopped")
    }

    /// Stops the loop and waits for its thread. Tasks that have not ended are dropped.
    ///
    /// # Panics
    /// With the panic of the loop's thread, if it panicked.
    pub fn stop(self) {
        let Self { running, thread, .. } = self;
        drop(running);
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
}
