//! The gain of a ring's own table of files over descriptors.
//!
//! Random reads of 4 KiB, one or 64 at a time: on the only thread of the process, on one thread
//! beside an idle one (the kernel then counts references to descriptors with care), and on two
//! threads that share the file. With and without take turns, in both orders; ratios are taken
//! within a round.
//!
//! `cargo bench -p blockhouse-engine --bench fixed_files -- --file PATH [--cached] [--rounds N]`
#![allow(clippy::print_stdout, reason = "the table is for the person who asked for it")]

use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use blockhouse_core::{Buffer, Storage};
use blockhouse_engine::{
    Engine, EngineChoice, EventLoop, FixedFiles, HostFile, OpenMode, PageCache, spawn,
};
use blockhouse_figures::Spread;
use clap::Parser;

const BLOCK: usize = 4096;
const DEPTHS: [usize; 2] = [1, 64];

#[derive(Parser)]
struct Options {
    /// Read this file or block device, not one on tmpfs
    #[arg(long)]
    file: PathBuf,
    /// Through the page cache
    #[arg(long)]
    cached: bool,
    /// Run every variant this many times
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// For so long each
    #[arg(long, default_value_t = 350)]
    milliseconds: u64,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

/// The threads of the process.
#[derive(Clone, Copy, Debug)]
enum Crowd {
    Alone,
    BesideIdle,
    Two,
}

/// Requests per second, and nanoseconds of processor time for each.
type Sample = (f64, f64);

fn main() -> Result<()> {
    let options = Options::parse();
    let cache = if options.cached { PageCache::Used } else { PageCache::Bypassed };
    let file = Arc::new(HostFile::open(&options.file, OpenMode::ReadOnly, cache)?);
    ensure!(file.size() >= 1 << 20, "{}: has less than 1 MiB", options.file.display());
    let time = Duration::from_millis(options.milliseconds);
    let cases: Vec<_> = [Crowd::Alone, Crowd::BesideIdle, Crowd::Two]
        .into_iter()
        .flat_map(|crowd| DEPTHS.map(|depth| (crowd, depth)))
        .collect();
    let mut samples = vec![Vec::new(); cases.len()];
    for round in 0..options.rounds {
        for (&(crowd, depth), samples) in cases.iter().zip(&mut samples) {
            let measure = |fixed| sample(&file, crowd, depth, fixed, time);
            let pair = if round % 2 == 0 {
                let off = measure(FixedFiles::Off)?;
                (off, measure(FixedFiles::On)?)
            } else {
                let on = measure(FixedFiles::On)?;
                (measure(FixedFiles::Off)?, on)
            };
            samples.push(pair);
        }
    }
    println!("| threads | depth | kIOPS off | on | rate on/off | CPU ns off | on | CPU on/off |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |");
    for ((crowd, depth), samples) in cases.iter().zip(&samples) {
        print_row(*crowd, *depth, samples);
    }
    Ok(())
}

fn sample(
    file: &Arc<HostFile>,
    crowd: Crowd,
    depth: usize,
    fixed: FixedFiles,
    time: Duration,
) -> Result<Sample> {
    let (began, cpu) = (Instant::now(), processor_time());
    let count = match crowd {
        Crowd::Alone => read(file, depth, fixed, time)?,
        Crowd::BesideIdle => thread::scope(|scope| {
            let (stop, stopped) = std::sync::mpsc::channel::<()>();
            scope.spawn(move || stopped.recv());
            let count = read(file, depth, fixed, time);
            drop(stop);
            count
        })?,
        Crowd::Two => thread::scope(|scope| {
            let other = scope.spawn(|| read(file, depth, fixed, time));
            let own = read(file, depth, fixed, time)?;
            Ok::<_, anyhow::Error>(own + other.join().expect("a reader does not panic")?)
        })?,
    };
    let cpu = processor_time() - cpu;
    Ok((count as f64 / began.elapsed().as_secs_f64(), cpu.as_nanos() as f64 / count as f64))
}

/// Reads for that long on a loop of its own. Gives the number of reads.
fn read(file: &Arc<HostFile>, depth: usize, fixed: FixedFiles, time: Duration) -> Result<u64> {
    let mut event_loop = EventLoop::new(EngineChoice::Only(Engine::IoUring))?;
    event_loop.set_fixed_files(fixed);
    let until = Instant::now() + time;
    event_loop.block_on(async {
        let reader = |_| {
            let file = Arc::clone(file);
            spawn(async move {
                let (mut buffer, mut count) = (Buffer::new(BLOCK), 0);
                let blocks = file.size() / BLOCK as u64;
                while Instant::now() < until {
                    let offset = fastrand::u64(..blocks) * BLOCK as u64;
                    file.read(offset, buffer.lend()).await?;
                    count += 1;
                }
                Ok::<_, blockhouse_core::Error>(count)
            })
        };
        let readers: Vec<_> = (0..depth).map(reader).collect();
        let mut count = 0;
        for reader in readers {
            count += reader.await?;
        }
        Ok(count)
    })
}

/// Of this process.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes one timespec, which lives on this stack.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    assert_eq!(result, 0, "every process has this clock");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn print_row(crowd: Crowd, depth: usize, samples: &[(Sample, Sample)]) {
    let of = |value: fn(&(Sample, Sample)) -> f64| {
        Spread::of(samples.iter().map(value)).expect("at least one round was measured")
    };
    let (off, on) = (of(|pair| pair.0.0 / 1e3).median, of(|pair| pair.1.0 / 1e3).median);
    let (cpu_off, cpu_on) = (of(|pair| pair.0.1).median, of(|pair| pair.1.1).median);
    let rate = of(|pair| pair.1.0 / pair.0.0);
    let cpu = of(|pair| pair.1.1 / pair.0.1);
    println!(
        "| {crowd:?} | {depth} | {off:.1} | {on:.1} | {rate:.2} | {cpu_off:.0} | {cpu_on:.0} | {cpu:.2} |"
    );
}
