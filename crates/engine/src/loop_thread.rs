//! A loop on a thread of its own.

use std::future::Future;
use std::io;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use crate::engine::{EngineChoice, EngineReport};
use crate::event_loop::{EventLoop, Handle};

/// A loop that runs on a thread of its own.
pub struct LoopThread {
    /// What other threads reach it by.
    pub handle: Handle,
    /// The engine in use and why.
    pub report: EngineReport,
    /// Its thread, which ends with its loop.
    pub thread: JoinHandle<()>,
}

impl LoopThread {
    /// Starts a loop with the engine that `choice` allows, on a new thread called `name`. `prepare` sets
    /// it up; it runs until `main` is ready.
    ///
    /// # Errors
    /// As [`EventLoop::new`]; or the thread cannot be started.
    pub fn start(
        name: String,
        choice: EngineChoice,
        prepare: impl FnOnce(&mut EventLoop) + Send + 'static,
        main: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<Self> {
        let (give, made) = mpsc::channel();
        let work = move || match EventLoop::new(choice) {
            Err(error) => drop(give.send(Err(error))),
            Ok(mut event_loop) => {
                prepare(&mut event_loop);
                let made = (event_loop.handle(), event_loop.report().clone());
                if give.send(Ok(made)).is_ok() {
                    event_loop.block_on(main);
                }
            }
        };
        let thread = thread::Builder::new().name(name).spawn(work)?;
        let Ok(made) = made.recv() else {
            let panic = thread.join().expect_err("a loop tells how it began");
            std::panic::resume_unwind(panic);
        };
        let (handle, report) = made?;
        Ok(Self { handle, report, thread })
    }
}
