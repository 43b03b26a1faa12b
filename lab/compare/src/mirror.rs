//! `cargo xtask compare --mirror`: a guest's rate of writes during a mirror, and for how long the
//! guest gets no reply when the mirror completes.
//!
//! A guest writes blocks of 4 KiB at random places, without a pause, with as many in flight as the
//! row says. In each turn the guest writes without a mirror, then while the mirror copies, then
//! while the mirror is ready and keeps up, then while it completes, and then to the target. Ratios
//! are to the time without a mirror in the same turn. Then the whole disk is read from the target,
//! and has to hold the writes that were answered. A mirror without a guest brings the disk back
//! (from a `--mirror-target`, a copy without a server), so that each turn begins with the same
//! image. Turns of all ways alternate.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use lab_tools::control::Control;
use lab_tools::workspace::Workspace;
use serde_json::{Value, json};

use crate::caching::Caching;
use crate::config::{Config, Options, chosen};
use crate::growth::layouts;
use crate::guest::{self, Content, Progress};
use crate::measurement::milliseconds;
use crate::report::{Environment, spread, terminal};
use crate::rows::Export;
use crate::servers::{EXPORT, Format, Image, Kind, Server, Start, socket_in, uri};
use crate::storage::{self, Storage};

/// The longest time until a mirror is ready, or complete.
const LIMIT: Duration = Duration::from_secs(600);
const PAUSE: Duration = Duration::from_millis(5);
/// The guest writes for this time before and after the switch, so that the gap at the switch is
/// seen.
const AROUND_SWITCH: Duration = Duration::from_millis(200);
const JOB: &str = "measured";

/// A guest and a kind of target.
#[derive(Clone, Copy)]
struct Row {
    name: &'static str,
    depth: u16,
    to: To,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum To {
    /// A file beside the image.
    File,
    /// The same file, as the export of another server of ours.
    Nbd,
    /// The targets of `--mirror-target`.
    Given,
}

const ROWS: &[Row] = &[
    Row { name: "file-d16", depth: 16, to: To::File },
    Row { name: "nbd-d16", depth: 16, to: To::Nbd },
    Row { name: "given-d16", depth: 16, to: To::Given },
    Row { name: "file-d64", depth: 64, to: To::File },
    Row { name: "nbd-d64", depth: 64, to: To::Nbd },
    Row { name: "given-d64", depth: 64, to: To::Given },
];

/// One of the ways that take turns: a row, and the target if that is a `--mirror-target`.
struct Way {
    row: Row,
    given: Option<String>,
    turns: Vec<Turn>,
}

/// The writes of a stretch of time.
#[derive(Clone, Copy, Default)]
struct Stretch {
    /// Thousands of writes a second.
    rate: f64,
    /// The server's processor time for each write, in microseconds.
    cpu: f64,
    /// The longest time without an answer, in milliseconds.
    gap: f64,
}

/// The result of one turn.
#[derive(Clone, Copy, Default)]
struct Turn {
    alone: Stretch,
    copying: Stretch,
    ready: Stretch,
    switch: Stretch,
    moved: Stretch,
    /// Seconds until the mirror was ready.
    time: f64,
    /// For how long the server says that it paused writes, in milliseconds.
    pause: f64,
    /// Bytes that were copied until the mirror was complete, divided by those of the disk.
    copied: f64,
}

/// The images of all turns.
struct Place<'a> {
    config: &'a mut Config,
    format: Format,
    source: Storage,
    target: Storage,
    mode: &'a str,
    /// Bytes of the disk.
    size: u64,
    content: Content,
}

/// Measures, as `options` say.
pub fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    let rows = chosen(ROWS, |row| row.name, &options.rows)?;
    let mut config = Config::of_blockhouse(workspace, options, "--mirror")?;
    terminal::environment(&Environment::find(&config)?);
    let disk = options.dir.clone().unwrap_or_else(|| workspace.target().to_owned());
    let size = options.bytes()?;
    for &kind in options.storage.iter().filter(|kind| **kind != storage::Kind::Loop) {
        if let Some(why) = Storage::unavailable(kind) {
            println!("\n{kind:?} is left out: {why}");
            continue;
        }
        let image =
            |config: &Config| layouts::filled(options.format, kind, size, &disk, &config.interrupt);
        let (source, target) = (image(&config)?, image(&config)?);
        let (name, mebibytes) = (options.format.name(), size >> 20);
        println!(
            "\n{name}, {mebibytes} MiB, {}, mode {}",
            source.description(),
            options.mirror_mode
        );
        let content = Content::new(size);
        let (format, mode) = (options.format, &*options.mirror_mode);
        let mut place = Place { config: &mut config, format, source, target, mode, size, content };
        let mut ways = ways(&rows, &options.mirror_target);
        for _ in 0..place.config.rounds {
            for way in &mut ways {
                let turn = place.take_turn(way).with_context(|| way.name())?;
                way.turns.push(turn);
            }
        }
        ways.iter().for_each(print);
    }
    Ok(())
}

fn ways(rows: &[Row], given: &[String]) -> Vec<Way> {
    let way = |row: &Row, given| Way { row: *row, given, turns: Vec::new() };
    let of_row = |row: &Row| match row.to {
        To::Given => given.iter().map(|one| way(row, Some(one.clone()))).collect(),
        To::File | To::Nbd => vec![way(row, None)],
    };
    rows.iter().flat_map(of_row).collect()
}

/// Selects a stretch of a turn.
type StretchOf = fn(&Turn) -> Stretch;

impl Way {
    fn name(&self) -> String {
        match &self.given {
            Some(given) => format!("{} {given}", self.row.name),
            None => self.row.name.to_owned(),
        }
    }
}

fn print(way: &Way) {
    let figure = |of: fn(&Turn) -> f64, digits: usize| spread(way.turns.iter().map(of), digits);
    println!("  {}", way.name());
    let stretches: [(&str, StretchOf); 4] = [
        ("alone", |turn| turn.alone),
        ("while it copies", |turn| turn.copying),
        ("when it is ready", |turn| turn.ready),
        ("with the target", |turn| turn.moved),
    ];
    for (name, stretch) in stretches {
        let figures = |of: fn(Stretch) -> f64, digits: usize| {
            spread(way.turns.iter().map(|turn| of(stretch(turn))), digits)
        };
        let ratio = way.turns.iter().map(|turn| stretch(turn).rate / turn.alone.rate);
        let ratio = spread(ratio, 2);
        let (rate, cpu, gap) = (
            figures(|stretch| stretch.rate, 1),
            figures(|stretch| stretch.cpu, 1),
            figures(|stretch| stretch.gap, 1),
        );
        println!(
            "    {name:18} {rate:24} k/s  {ratio:20} of alone  {cpu:20} us of CPU  gap {gap} ms"
        );
    }
    println!(
        "    ready after {} s, copied {} of the disk; switch: {} ms without an answer, {} ms by the server",
        figure(|turn| turn.time, 1),
        figure(|turn| turn.copied, 2),
        figure(|turn| turn.switch.gap, 1),
        figure(|turn| turn.pause, 1)
    );
}

impl Place<'_> {
    /// One turn. At its end the disk is in the source again.
    fn take_turn(&mut self, way: &Way) -> Result<Turn> {
        for storage in [&self.source, &self.target] {
            storage.prepare_cache(Caching::Direct)?;
        }
        let folder = self.config.folder.path().to_owned();
        let control = folder.join("control");
        let beside = self.target.path().parent().context("a target without a folder")?;
        let allowed = match way.given {
            Some(_) => ["--sandbox".into(), "off".into()],
            None => ["--sandbox-allow".into(), text(beside)?],
        };
        let own_args = self.config.programs.serve_args.len();
        self.config.programs.serve_args.extend(["--control".into(), text(&control)?]);
        self.config.programs.serve_args.extend(allowed);
        let start = Start { kind: Kind::Blockhouse, export: Export::Nbd, queues: 1 };
        let image = Image { storage: &self.source, format: self.format };
        let interrupt = &self.config.interrupt;
        let server = Server::start(start, &self.config.programs, image, &folder, interrupt);
        self.config.programs.serve_args.truncate(own_args);
        let mut server = server?;
        server.wait_until_it_listens(&control, interrupt)?;
        let mut control = Control::connect(&control)?;
        let other = match way.row.to {
            To::Nbd => Some(self.serve_target(&folder)?),
            To::File | To::Given => None,
        };
        let (location, format) = match (&way.given, &other) {
            (Some(given), _) => (given.clone(), "raw"),
            (None, Some(server)) => (uri(server.socket()), "raw"),
            (None, None) => (text(self.target.path())?, self.format.name()),
        };
        let turn = self.measure(&server, &mut control, way.row.depth, (&location, format))?;
        let verified = self.content.verify(server.socket(), EXPORT);
        verified.context("after the switch the disk is not what was answered")?;
        match &way.given {
            Some(given) => {
                server.stop()?;
                self.copy_back(given)?;
            }
            None => {
                let back = (text(self.source.path())?, self.format.name());
                start_mirror(&mut control, (&back.0, back.1), "background")?;
                self.wait_ready(&mut control)?;
                complete(&mut control)?;
                server.stop()?;
                remove_record(&self.target);
            }
        }
        other.map_or(Ok(()), Server::stop)?;
        Ok(turn)
    }

    /// Copies the disk back with `convert`: a mirror refuses to move a disk without a write cache,
    /// as in Ceph, to a target that has one.
    fn copy_back(&self, given: &str) -> Result<()> {
        remove_record(&self.source);
        let mut command = Command::new(&self.config.programs.blockhouse);
        command.args(["convert", "--force", "--quiet", "-f", "raw", "-O", self.format.name()]);
        let copied = command.arg(given).arg(self.source.path()).status().context("convert")?;
        ensure!(copied.success(), "convert of {given}: {copied}");
        Ok(())
    }

    /// Another server, which exports the target.
    fn serve_target(&self, folder: &Path) -> Result<Server> {
        let Config { programs, interrupt, .. } = &*self.config;
        let socket = socket_in(folder, "target")?;
        let mut command = Command::new(&programs.blockhouse);
        command.arg("serve").arg(self.target.path()).args(["--cache", "none", "--format"]);
        command.arg(self.format.name()).arg("--nbd").arg(uri(&socket));
        Server::spawn(command, socket, folder.join("target.log"), interrupt)
    }

    /// The guest's rates before, beside and after a mirror that completes.
    fn measure(
        &mut self,
        server: &Server,
        control: &mut Control,
        depth: u16,
        target: (&str, &str),
    ) -> Result<Turn> {
        let progress = Progress::default();
        let mut content = std::mem::replace(&mut self.content, Content::new(0));
        let (place, interrupt) = (&*self, &self.config.interrupt);
        let outcome = std::thread::scope(|scope| {
            let (progress, content) = (&progress, &mut content);
            let export = (server.socket(), EXPORT);
            let guest =
                scope.spawn(move || guest::write(export, depth, content, progress, interrupt));
            let turn = place.measure_beside(progress, server, control, target);
            progress.stop();
            let written = guest.join().map_err(|_| anyhow!("the guest panicked"))?;
            written.context("the guest").and(turn)
        });
        self.content = content;
        outcome
    }

    fn measure_beside(
        &self,
        progress: &Progress,
        server: &Server,
        control: &mut Control,
        target: (&str, &str),
    ) -> Result<Turn> {
        let seconds = self.config.duration;
        let stretch = |act: &mut dyn FnMut() -> Result<()>| -> Result<Stretch> {
            let (before, cpu, began) = (progress.answered(), server.cpu()?, Instant::now());
            progress.take_gap();
            act()?;
            let (time, cpu) = (began.elapsed(), server.cpu()?.saturating_sub(cpu));
            let writes = (progress.answered() - before) as f64;
            let rate = writes / time.as_secs_f64() / 1e3;
            let cpu = cpu.as_secs_f64() * 1e6 / writes.max(1.0);
            Ok(Stretch { rate, cpu, gap: milliseconds(progress.take_gap()) })
        };
        let mut rest = || self.rest(seconds);
        // The first one is not counted.
        stretch(&mut rest)?;
        let alone = stretch(&mut rest)?;
        let began = Instant::now();
        let copying = stretch(&mut || {
            start_mirror(control, target, self.mode)?;
            self.wait_ready(control)
        })?;
        let time = began.elapsed().as_secs_f64();
        let ready = stretch(&mut rest)?;
        let mut pause = Duration::ZERO;
        let mut copied = 0.0;
        let switch = stretch(&mut || {
            self.rest(AROUND_SWITCH)?;
            (pause, copied) = complete(control)?;
            self.rest(AROUND_SWITCH)
        })?;
        let moved = stretch(&mut rest)?;
        let (pause, copied) = (milliseconds(pause), copied / self.size as f64);
        Ok(Turn { alone, copying, ready, switch, moved, time, pause, copied })
    }

    fn rest(&self, time: Duration) -> Result<()> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.config.interrupt.check()?;
            std::thread::sleep(PAUSE.min(end.saturating_duration_since(Instant::now())));
        }
        Ok(())
    }

    fn wait_ready(&self, control: &mut Control) -> Result<()> {
        let end = Instant::now() + LIMIT;
        loop {
            let job = job(control)?;
            match job["status"].as_str() {
                Some("ready") => return Ok(()),
                Some("running") => {}
                _ => bail!("the mirror does not become ready: {job}"),
            }
            ensure!(Instant::now() < end, "the mirror does not converge: {job}");
            self.rest(PAUSE)?;
        }
    }
}

/// Removes the record that the disk of this image has moved to another image.
fn remove_record(storage: &Storage) {
    let mut record = storage.path().as_os_str().to_owned();
    record.push(".moved");
    let _ = std::fs::remove_file(PathBuf::from(record));
}

fn start_mirror(control: &mut Control, target: (&str, &str), mode: &str) -> Result<()> {
    let (target, format) = target;
    let start = json!({ "kind": "mirror", "disk": disk(control)?, "job": JOB, "target": target,
        "format": format, "overwrite": true, "mode": mode });
    call(control, "job.start", &start).map(drop)
}

/// Completes the mirror. Returns for how long the server says that it paused writes, and how many
/// bytes were copied.
fn complete(control: &mut Control) -> Result<(Duration, f64)> {
    let done = call(control, "job.complete", &json!({ "job": JOB }))?;
    let pause = done["pause-us"].as_u64().context("a pause")?;
    let copied = job(control)?["copied"].as_u64().context("bytes")?;
    call(control, "job.dismiss", &json!({ "job": JOB }))?;
    Ok((Duration::from_micros(pause), copied as f64))
}

/// The name of the one disk.
fn disk(control: &mut Control) -> Result<Value> {
    Ok(call(control, "disk.list", &json!({}))?[0]["disk"].take())
}

fn job(control: &mut Control) -> Result<Value> {
    Ok(call(control, "job.list", &json!({}))?[0].take())
}

fn call(control: &mut Control, method: &str, params: &Value) -> Result<Value> {
    control.call(method, params)?.map_err(|error| anyhow!("{method}: {error}"))
}

fn text(path: &Path) -> Result<String> {
    Ok(path.to_str().context("a path that is no text")?.to_owned())
}
