//! `cargo xtask compare --gaps`: what busy-polling brings, and what it costs, where a client pauses
//! between an answer and its next request.
//!
//! The client reads 4 KiB at a time of an image on tmpfs, from Blockhouse with its defaults, from
//! Blockhouse that never polls, and from qemu-nbd. The client pauses for a fixed time, computing or
//! asleep; client and server are free to move between processors, or kept on one each. Ratios are
//! to the server that never polls.

use std::num::NonZeroU64;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use blockhouse_figures::Spread;
use hdrhistogram::Histogram;
use lab_tools::workspace::Workspace;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity, set_current_timer_slack};

use crate::config::{Config, Options};
use crate::light::connection::{Check, Connection, Job, Wait};
use crate::light::{Offsets, Operation, Order};
use crate::report::{cell, kernel, processor, spread};
use crate::servers::{EXPORT, Kind, Server, socket_in, uri};
use crate::storage::{self, Storage};

/// Bytes of a request.
const BLOCK: u32 = 4096;
/// Microseconds between an answer and the next request.
const GAPS: [u64; 5] = [10, 20, 30, 50, 100];
/// The time at the start of a turn that is not counted.
const WARM_UP: Duration = Duration::from_millis(50);
/// Latencies above this many nanoseconds count as this.
const MAX_LATENCY: u64 = 1_000_000_000;

/// The server that is measured.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Contender {
    Polling,
    NeverPolling,
    QemuNbd,
}

impl Contender {
    const ALL: [Self; 3] = [Self::Polling, Self::NeverPolling, Self::QemuNbd];

    fn name(self) -> &'static str {
        match self {
            Self::Polling => "blockhouse",
            Self::NeverPolling => "blockhouse, never polling",
            Self::QemuNbd => "qemu-nbd",
        }
    }
}

/// The client's pause between an answer and its next request.
#[derive(Clone, Copy)]
enum Pause {
    Computing,
    Asleep,
}

/// A behaviour of the client.
#[derive(Clone, Copy)]
struct Way {
    pause: Pause,
    is_pinned: bool,
    gap: Duration,
}

/// The turns of one contender.
#[derive(Default)]
struct Column {
    /// Thousands of requests a second.
    rates: Vec<f64>,
    /// The median latency, and the server's processor time for a request, in microseconds.
    latencies: Vec<f64>,
    cpu: Vec<f64>,
    /// The server's share of one processor.
    busy: Vec<f64>,
}

struct Place {
    config: Config,
    storage: Storage,
}

/// Compares, as `options` say.
pub fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let config = Config::new(workspace, options, Vec::new(), &[Kind::Blockhouse])?;
    let size = options.bytes()?;
    let storage = Storage::create(storage::Kind::Tmpfs, size, Path::new("/"), &config.interrupt)?;
    // With the default timer slack, a sleep may take 50 microseconds longer than asked for.
    set_current_timer_slack(NonZeroU64::new(1)).context("cannot sleep for short times")?;
    let (mebibytes, rounds, seconds) = (size >> 20, config.rounds, config.duration.as_secs_f64());
    let (machine, kernel) = (processor()?, kernel());
    println!("{mebibytes} MiB on tmpfs, {rounds} rounds of {seconds} s; {machine}, {kernel}\n");
    println!(
        "| client, gap | server | thousand a second | of never polling | median, us | of never polling | server's CPU, us a request | of never polling | of a processor |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    let place = Place { config, storage };
    for pause in [Pause::Computing, Pause::Asleep] {
        for is_pinned in [false, true] {
            for gap in GAPS {
                place.compare(Way { pause, is_pinned, gap: Duration::from_micros(gap) })?;
            }
        }
    }
    Ok(())
}

impl Way {
    fn name(self) -> String {
        let pause = match self.pause {
            Pause::Computing => "computing",
            Pause::Asleep => "asleep",
        };
        let place = if self.is_pinned { "a processor each" } else { "anywhere" };
        format!("{pause}, {place}, {} us", self.gap.as_micros())
    }

    fn pause(self) {
        match self.pause {
            Pause::Computing => {
                let end = Instant::now() + self.gap;
                while Instant::now() < end {
                    std::hint::spin_loop();
                }
            }
            Pause::Asleep => thread::sleep(self.gap),
        }
    }
}

impl Place {
    fn compare(&self, way: Way) -> Result<()> {
        let mut columns: [Column; 3] = Default::default();
        for _ in 0..self.config.rounds {
            for (contender, column) in Contender::ALL.into_iter().zip(&mut columns) {
                let turn = self.turn(contender, way, column);
                turn.with_context(|| format!("{}, {}", contender.name(), way.name()))?;
            }
        }
        let [_, base, _] = &columns;
        for (contender, column) in Contender::ALL.into_iter().zip(&columns) {
            print_line(way, contender, column, base);
        }
        Ok(())
    }

    fn turn(&self, contender: Contender, way: Way, column: &mut Column) -> Result<()> {
        let (folder, interrupt) = (self.config.folder.path(), &self.config.interrupt);
        interrupt.check()?;
        let socket = socket_in(folder, "server")?;
        let command = self.server(contender, way, &socket);
        let server = Server::spawn(command, socket, folder.join("server.log"), interrupt)?;
        let all = sched_getaffinity(None).context("cannot tell the processors")?;
        if way.is_pinned {
            let mut first = CpuSet::new();
            first.set(0);
            sched_setaffinity(None, &first).context("cannot stay on processor 0")?;
        }
        let taken = self.ask(&server, way, column);
        sched_setaffinity(None, &all).context("cannot leave processor 0")?;
        taken?;
        server.stop()
    }

    /// Reads one block after the other.
    fn ask(&self, server: &Server, way: Way, column: &mut Column) -> Result<()> {
        let job = Job {
            operation: Operation::Read,
            length: BLOCK,
            depth: 1,
            generation: 1,
            check: Check::Samples,
        };
        let (mut connection, export) = Connection::open(server.socket(), EXPORT, job)?;
        let blocks = export.size / u64::from(BLOCK);
        let mut offsets = Offsets::new(Order::Random, BLOCK.into(), blocks, 1);
        let mut ask_for = |time: Duration, latency: &mut Histogram<u64>| -> Result<Duration> {
            let began = Instant::now();
            while began.elapsed() < time {
                let submitted = Instant::now();
                connection.submit(|| offsets.next(), submitted);
                while connection.busy() > 0 {
                    connection.flush()?;
                    connection.receive(Wait::Block, |_| {})?;
                }
                latency.saturating_record(submitted.elapsed().as_nanos() as u64);
                way.pause();
            }
            Ok(began.elapsed())
        };
        let histogram = || Histogram::new_with_max(MAX_LATENCY, 3).context("no histogram");
        ask_for(WARM_UP, &mut histogram()?)?;
        let (before, mut latency) = (server.cpu()?, histogram()?);
        let elapsed = ask_for(self.config.duration, &mut latency)?.as_secs_f64();
        let cpu = server.cpu()?.saturating_sub(before).as_secs_f64();
        ensure!(!latency.is_empty(), "nothing was answered");
        let count = latency.len() as f64;
        column.rates.push(count / elapsed / 1e3);
        column.latencies.push(latency.value_at_quantile(0.5) as f64 / 1e3);
        column.cpu.push(cpu * 1e6 / count);
        column.busy.push(cpu / elapsed);
        connection.close()
    }

    fn server(&self, contender: Contender, way: Way, socket: &Path) -> Command {
        let (image, programs) = (self.storage.path(), &self.config.programs);
        let program = match contender {
            Contender::Polling | Contender::NeverPolling => &programs.blockhouse,
            Contender::QemuNbd => Path::new("qemu-nbd"),
        };
        let mut command = Command::new(if way.is_pinned { Path::new("taskset") } else { program });
        if way.is_pinned {
            command.args(["-c", "1"]).arg(program);
        }
        if contender == Contender::QemuNbd {
            command.args(["--format=raw", "--cache=none", "--aio=io_uring", "--persistent"]);
            command.args(["--read-only", "--export-name", EXPORT, "--socket"]).arg(socket);
            command.arg(image);
            return command;
        }
        command.arg("serve").arg(image).args(["--format", "raw", "--read-only"]);
        command.args(["--cache", "none", "--nbd"]);
        command.arg(uri(socket));
        if contender == Contender::NeverPolling {
            command.args(["--poll-max-us", "0"]);
        }
        command.args(&programs.serve_args);
        command
    }
}

fn print_line(way: Way, contender: Contender, column: &Column, base: &Column) {
    let all = |values: &[f64], digits: usize| spread(values.iter().copied(), digits);
    let ratio = |values: &[f64], base: &[f64]| cell(Spread::of_ratios(values, base), 2);
    let cells = [
        way.name(),
        contender.name().to_owned(),
        all(&column.rates, 1),
        ratio(&column.rates, &base.rates),
        all(&column.latencies, 1),
        ratio(&column.latencies, &base.latencies),
        all(&column.cpu, 1),
        ratio(&column.cpu, &base.cpu),
        all(&column.busy, 2),
    ];
    println!("| {} |", cells.join(" | "));
}
