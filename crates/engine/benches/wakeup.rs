//! The cost of requests that come from another thread than the ring's.
//!
//! The case that showed a lost wake-up: 128 MiB are read with direct I/O in pieces of 128 KiB, 16
//! of them a batch, with a pause of 1 ms before each batch is submitted and 1 ms after each
//! completion is handled; otherwise the process is idle. So the loop sleeps whenever a batch comes.
//!
//! Here a thread does that through a [`Handle`] to a loop on another thread, once per engine,
//! against a plain single-threaded loop over a ring of its own. The variants take turns.
//! `blockhouse bench wakeup` shows a loop that is never woken.
//!
//! `cargo bench -p blockhouse-engine --bench wakeup -- [--file PATH] [--rounds N] [--json]`
#![allow(clippy::print_stdout, reason = "the table is for the person who asked for it")]

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use blockhouse_core::{Buffer, IoVector, Storage};
use blockhouse_engine::{
    Engine, EngineChoice, EventLoop, Handle, HostFile, LoopThread, OpenMode, PageCache, Submission,
};
use blockhouse_figures::Spread;
use clap::Parser;
use io_uring::{IoUring, opcode, types::Fd};
use serde_json::json;

const TOTAL: u64 = 128 << 20;
const PIECE: usize = 128 << 10;
const BATCH: usize = 16;
const PAUSE: Duration = Duration::from_millis(1);

/// A submission from another thread may take this many times the plain loop's time.
const LIMIT: f64 = 1.05;

#[derive(Parser)]
struct Options {
    /// Read this file, of at least 128 MiB, instead of a temporary one
    #[arg(long)]
    file: Option<PathBuf>,
    /// Run every variant this many times
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let path = match &options.file {
        Some(path) => path.clone(),
        None => new_file(folder.path())?,
    };
    let file = HostFile::open(&path, OpenMode::ReadOnly, PageCache::Bypassed)?;
    ensure!(file.size() >= TOTAL, "{}: has less than 128 MiB", path.display());
    let file = Arc::new(file);

    let mut ways = vec![Way::Plain];
    for engine in Engine::ALL {
        match EventLoop::new(EngineChoice::Only(engine)) {
            Ok(_) => ways.push(Way::Handle(engine)),
            Err(error) => eprintln!("{engine} left out: {error}"),
        }
    }
    let mut rows: Vec<Row> = ways.into_iter().map(|way| Row { way, times: Vec::new() }).collect();
    for _ in 0..options.rounds {
        for row in &mut rows {
            row.times.push(row.way.measure(&file)?);
        }
    }
    if options.json {
        print_json(&rows)
    } else {
        print_table(&rows)
    }
    Ok(())
}

fn new_file(folder: &Path) -> Result<PathBuf> {
    let path = folder.join("disk");
    let mut file = File::create(&path)?;
    // Data, not holes, which would be read from nowhere.
    let mebibyte = vec![0x5a; 1 << 20];
    for _ in 0..TOTAL >> 20 {
        file.write_all(&mebibyte)?;
    }
    file.sync_all()?;
    Ok(path)
}

/// One way to get the reads done.
#[derive(Clone, Copy)]
enum Way {
    Plain,
    Handle(Engine),
}

impl Way {
    fn name(self) -> String {
        match self {
            Self::Plain => "plain loop".into(),
            Self::Handle(engine) => format!("handle, {engine}"),
        }
    }

    fn measure(self, file: &Arc<HostFile>) -> Result<Duration> {
        match self {
            Self::Plain => Ok(run(&mut Plain::new(file)?)),
            Self::Handle(engine) => {
                let choice = EngineChoice::Only(engine);
                let started = LoopThread::start("wakeup".into(), choice, |_| ())?;
                let time = run(&mut ByHandle::new(started.handle().clone(), file));
                started.stop();
                Ok(time)
            }
        }
    }
}

/// Reads pieces of the file.
trait Reader {
    /// Starts to read one piece at each of the offsets.
    fn submit(&mut self, offsets: &[u64]);

    /// Waits for a piece.
    fn complete(&mut self);
}

/// The published case.
fn run(reader: &mut impl Reader) -> Duration {
    let offsets: Vec<u64> = (0..TOTAL).step_by(PIECE).collect();
    let begin = Instant::now();
    for batch in offsets.chunks(BATCH) {
        thread::sleep(PAUSE);
        reader.submit(batch);
        for _ in batch {
            reader.complete();
            thread::sleep(PAUSE);
        }
    }
    begin.elapsed()
}

fn new_buffers() -> Vec<Buffer> {
    (0..BATCH).map(|_| Buffer::new(PIECE)).collect()
}

/// One thread, one ring, nothing in between.
struct Plain {
    /// Dropped before the memory that its reads go to, of which none is in flight then.
    ring: IoUring,
    memory: Vec<IoVector>,
    file: Arc<HostFile>,
}

impl Plain {
    fn new(file: &Arc<HostFile>) -> Result<Self> {
        let memory = new_buffers().iter_mut().map(Buffer::lend).collect();
        Ok(Self { ring: IoUring::new(BATCH as u32)?, memory, file: Arc::clone(file) })
    }
}

impl Reader for Plain {
    fn submit(&mut self, offsets: &[u64]) {
        let file = Fd(self.file.descriptor().as_raw_fd());
        for (&offset, vector) in offsets.iter().zip(&self.memory) {
            let address = vector.segments()[0].address.as_ptr();
            let entry = opcode::Read::new(file, address, PIECE as u32).offset(offset).build();
            // SAFETY: the reader owns the memory and the file, and `run` waits for every read.
            unsafe { self.ring.submission().push(&entry) }.expect("there is room for a batch");
        }
        self.ring.submit().expect("the ring takes the batch");
    }

    fn complete(&mut self) {
        if self.ring.completion().is_empty() {
            self.ring.submit_and_wait(1).expect("the ring waits");
        }
        let entry = self.ring.completion().next().expect("it waited for one");
        assert_eq!(entry.result(), PIECE as i32, "a read failed or was short");
    }
}

/// The result of a read.
type Outcome = (Buffer, blockhouse_core::Result<()>);

async fn read(file: Arc<HostFile>, offset: u64, mut buffer: Buffer) -> Outcome {
    let result = file.read(offset, buffer.lend()).await;
    (buffer, result)
}

/// Through the handle of a loop on another thread, one call for each piece.
struct ByHandle {
    handle: Handle,
    file: Arc<HostFile>,
    buffers: Vec<Buffer>,
    submitted: VecDeque<Submission<Outcome>>,
}

impl ByHandle {
    fn new(handle: Handle, file: &Arc<HostFile>) -> Self {
        let (file, buffers) = (Arc::clone(file), new_buffers());
        Self { handle, file, buffers, submitted: VecDeque::new() }
    }
}

impl Reader for ByHandle {
    fn submit(&mut self, offsets: &[u64]) {
        for (&offset, buffer) in offsets.iter().zip(self.buffers.drain(..)) {
            let file = Arc::clone(&self.file);
            self.submitted.push_back(self.handle.spawn(move || read(file, offset, buffer)));
        }
    }

    fn complete(&mut self) {
        let next = self.submitted.pop_front().expect("a piece was submitted");
        let (buffer, result) = next.wait().expect("the loop runs until all is read");
        result.expect("a read");
        self.buffers.push(buffer);
    }
}

/// The times of one way.
struct Row {
    way: Way,
    times: Vec<Duration>,
}

impl Row {
    /// In seconds.
    fn spread(&self) -> Spread {
        let seconds = self.times.iter().map(Duration::as_secs_f64);
        Spread::of(seconds).expect("every way is measured at least once")
    }
}

fn print_table(rows: &[Row]) {
    println!("{:<18} {:>9} {:>19} {:>6}  limit {LIMIT}", "", "median", "fastest..slowest", "ratio");
    for row in rows {
        let Spread { median, min: fastest, max: slowest } = row.spread();
        let ratio = median / rows[0].spread().median;
        let verdict = match row.way {
            Way::Handle(_) if ratio > LIMIT => "missed",
            Way::Handle(_) => "kept",
            Way::Plain => "",
        };
        let name = row.way.name();
        println!(
            "{name:<18} {median:>7.3} s {fastest:>8.3}..{slowest:.3} s {ratio:>6.3}  {verdict}"
        );
    }
}

fn print_json(rows: &[Row]) {
    let rows = rows.iter().map(|row| {
        let Spread { median, min: fastest, max: slowest } = row.spread();
        json!({
            "way": row.way.name(),
            "median_seconds": median,
            "fastest_seconds": fastest,
            "slowest_seconds": slowest,
            "ratio": median / rows[0].spread().median,
        })
    });
    println!("{}", json!({ "limit": LIMIT, "rows": rows.collect::<Vec<_>>() }));
}
