//! The threads that do the work: one event loop each.

use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Result;
use blockhouse_engine::{
    DESCRIPTORS_HINT, EngineChoice, EngineReport, EventLoop, FixedFiles, Handle, IoPoll,
    LoopThread, is_out_of_descriptors,
};
use futures_channel::oneshot;

/// What loops are like.
#[derive(Clone, Copy)]
pub struct LoopOptions {
    /// The engine, or which ones are acceptable.
    pub engine: EngineChoice,
    /// How long a loop looks out for events before it sleeps.
    pub polling: Duration,
    /// Whether open images are in the ring's table.
    pub fixed_files: FixedFiles,
    /// Whether completions on images are polled for.
    pub io_poll: IoPoll,
}

/// Running event loops.
pub struct Workers {
    /// Never empty.
    threads: Vec<Worker>,
    /// The engine of the first, and so of all.
    report: EngineReport,
}

struct Worker {
    handle: Handle,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl Workers {
    /// Starts `count` loops, at least one.
    pub fn start(count: usize, options: LoopOptions) -> Result<Self> {
        let (first, report) = start_one(0, options)?;
        let mut threads = vec![first];
        for index in 1..count {
            threads.push(start_one(index, options)?.0);
        }
        Ok(Self { threads, report })
    }

    /// The engine that they use.
    pub fn report(&self) -> &EngineReport {
        &self.report
    }

    /// The loop for single jobs.
    pub fn first(&self) -> &Handle {
        &self.threads[0].handle
    }

    /// All loops.
    pub fn handles(&self) -> Vec<Handle> {
        self.threads.iter().map(|worker| worker.handle.clone()).collect()
    }

    /// Runs a future on the first loop and waits for it.
    pub fn run<F, R>(&self, make: impl FnOnce() -> F + Send + 'static) -> R
    where
        F: Future<Output = R> + 'static,
        R: Send + 'static,
    {
        self.first().spawn(make).wait().expect("a worker runs until it is stopped")
    }

    /// Ends all loops. What runs on them is dropped.
    pub fn stop(self) {
        for Worker { stop, thread, .. } in self.threads {
            // A thread that is gone already needs no telling.
            let _ = stop.send(());
            let _ = thread.join();
        }
    }
}

fn start_one(index: usize, options: LoopOptions) -> Result<(Worker, EngineReport)> {
    let (stop, stopped) = oneshot::channel();
    let prepare = move |event_loop: &mut EventLoop| {
        event_loop.poll_at_most(options.polling);
        event_loop.fix_files(options.fixed_files);
        event_loop.io_poll(options.io_poll);
    };
    let main = async {
        // An error means that the one who could stop us is gone.
        let _ = stopped.await;
    };
    let name = format!("blockhouse-{index}");
    let started = LoopThread::start(name, options.engine, prepare, main);
    let LoopThread { handle, report, thread } =
        started.map_err(|error| unavailable(options.engine, &error))?;
    Ok((Worker { handle, stop, thread }, report))
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
