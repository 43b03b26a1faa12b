//! The threads that do the work: one event loop each.

use std::time::Duration;

use anyhow::Result;
use blockhouse_config::server::LoopOptions;
use blockhouse_engine::{
    DESCRIPTORS_HINT, DeviceCommands, EngineChoice, EngineReport, EventLoop, FixedFiles, Handle,
    IoPoll, LoopThread, is_out_of_descriptors,
};

/// Running event loops.
pub struct Workers {
    /// At least one thread.
    threads: Vec<LoopThread>,
}

impl Workers {
    /// Starts `count` loops, at least one.
    pub fn start(count: usize, options: LoopOptions) -> Result<Self> {
        let threads = (0..count.max(1)).map(|index| start_one(index, options));
        Ok(Self { threads: threads.collect::<Result<_>>()? })
    }

    /// Starts one loop for work that is not for guests; it does not busy-poll.
    ///
    /// # Errors
    /// The errors of [`start`](Self::start).
    pub fn start_aside(engine: EngineChoice) -> Result<Self> {
        let (polling, fixed_files, io_poll) = (Duration::ZERO, FixedFiles::Off, IoPoll::Off);
        let commands = DeviceCommands::Refused;
        Self::start(1, LoopOptions { engine, polling, fixed_files, io_poll, commands })
    }

    /// The engine of the first loop; all loops use the same engine.
    pub fn report(&self) -> &EngineReport {
        self.threads[0].report()
    }

    /// The first loop, for single tasks.
    pub fn first(&self) -> &Handle {
        self.threads[0].handle()
    }

    /// All loops.
    pub fn handles(&self) -> Vec<Handle> {
        self.threads.iter().map(|thread| thread.handle().clone()).collect()
    }

    /// Runs a future on the first loop and waits for it.
    pub fn run<F, R>(&self, make: impl FnOnce() -> F + Send + 'static) -> R
    where
        F: Future<Output = R> + 'static,
        R: Send + 'static,
    {
        self.threads[0].run(make)
    }

    /// Ends all loops. The tasks on them are dropped.
    pub fn stop(self) {
        self.threads.into_iter().for_each(LoopThread::stop);
    }
}

fn start_one(index: usize, options: LoopOptions) -> Result<LoopThread> {
    let prepare = move |event_loop: &mut EventLoop| {
        event_loop.set_max_poll_time(options.polling);
        event_loop.set_fixed_files(options.fixed_files);
        event_loop.io_poll(options.io_poll);
    };
    let name = format!("blockhouse-{index}");
    LoopThread::start_with_commands(name, options.engine, options.commands, prepare)
        .map_err(|error| unavailable(options.engine, &error))
}

fn unavailable(choice: EngineChoice, error: &std::io::Error) -> anyhow::Error {
    match choice {
        _ if is_out_of_descriptors(error) => {
            anyhow::anyhow!("cannot start an event loop: {error}; {DESCRIPTORS_HINT}")
        }
        EngineChoice::Auto => anyhow::anyhow!("no engine can be used here: {error}"),
        EngineChoice::Only(engine) => {
            anyhow::anyhow!("the engine {engine} cannot be used here: {error}; try --engine auto")
        }
    }
}
