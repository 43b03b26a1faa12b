//! `cargo xtask compare --start`: the time from the start of a server until it is ready, with its
//! sandbox and without.
//!
//! In each round all ways take turns, one start a turn: a drift of the machine's speed affects all.
//! The time ends when the line "ready" is read. Ratios are to the first way, of the same turn.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use blockhouse_figures::median_interval;
use lab_tools::workspace::Workspace;
use rustix::process::{Pid, Signal, kill_process};

use crate::config::{Config, Options};
use crate::report::{Environment, spread, terminal};
use crate::servers::Kind;

/// Starts of each way in each round.
const STARTS: usize = 10;

/// A way to start a server.
struct Way<'a> {
    name: String,
    program: &'a Path,
    arguments: Vec<String>,
    /// Milliseconds, of each turn.
    times: Vec<f64>,
}

/// Measures, as `options` say.
pub fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    options.refuse_files("--start")?;
    let config = Config::new(workspace, options, Vec::new(), &[Kind::Blockhouse])?;
    let are_ours = |kind: &Kind| matches!(kind, Kind::Blockhouse | Kind::Baseline);
    ensure!(config.servers.iter().all(are_ours), "--start measures our servers alone");
    terminal::environment(&Environment::find(&config)?);
    let folder = config.folder.path();
    let image = folder.join("image");
    std::fs::File::create(&image)?.set_len(options.bytes()?)?;
    let mut ways = ways(&config, folder);
    for _ in 0..config.rounds * STARTS {
        for way in &mut ways {
            config.interrupt.check()?;
            way.times.push(time_of_start(way, folder, &image)?);
        }
    }
    print(&ways);
    Ok(())
}

fn ways<'a>(config: &'a Config, folder: &Path) -> Vec<Way<'a>> {
    let control = format!("--control {}", folder.join("control").display());
    let mut ways = Vec::new();
    for more in [String::new(), control] {
        for &kind in &config.servers {
            let (program, own) = match kind {
                Kind::Baseline => (&config.programs.baseline, &config.programs.baseline_args),
                _ => (&config.programs.blockhouse, &config.programs.serve_args),
            };
            for sandbox in ["on", "off"] {
                let words = format!("--sandbox {sandbox} {more}");
                let arguments = words.split_whitespace().map(str::to_owned);
                let arguments = arguments.chain(own.iter().cloned()).collect();
                let with_control = if more.is_empty() { "" } else { ", --control" };
                let name = format!("{}, --sandbox {sandbox}{with_control}", kind.name());
                ways.push(Way { name, program, arguments, times: Vec::new() });
            }
        }
    }
    ways
}

/// Starts a server, and stops it when it is ready. Returns the time until it was ready, in
/// milliseconds.
fn time_of_start(way: &Way<'_>, folder: &Path, image: &Path) -> Result<f64> {
    let socket = folder.join("nbd");
    let mut command = Command::new(way.program);
    command.arg("serve").arg("--nbd");
    command.arg(format!("nbd+unix:///?socket={}", socket.display()));
    command.args(&way.arguments).arg(image);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let started = Instant::now();
    let mut server = Started(command.spawn().context("cannot start the server")?);
    let output = server.0.stdout.take().context("it has no output")?;
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line)?;
    let elapsed = started.elapsed();
    ensure!(line.starts_with("ready "), "{}: the server is not ready: {line:?}", way.name);
    kill_process(Pid::from_child(&server.0), Signal::TERM)?;
    let status = server.0.wait()?;
    ensure!(status.success(), "{}: the server ended with {status}", way.name);
    Ok(elapsed.as_secs_f64() * 1e3)
}

/// A server that is killed when this is dropped.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn print(ways: &[Way<'_>]) {
    println!();
    let Some(first) = ways.first() else { return };
    for way in ways {
        let time = spread(way.times.iter().copied(), 1);
        let ratios = way.times.iter().zip(&first.times).map(|(own, first)| own / first);
        let interval = median_interval(ratios);
        let interval = interval
            .map_or_else(String::new, |(from, to)| format!("  {from:.2}..{to:.2} of the first"));
        println!("  {:44} {time:28} ms{interval}", way.name);
    }
}
