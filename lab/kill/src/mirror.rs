//! Mirrors whose server is killed: while they copy, when they are ready, while they complete, and
//! after that. Then the record beside the source and the mark of the target say which image is the
//! disk, and that image holds all acknowledged changes.
//!
//! Record and mark are interpreted as docs/jobs.md says: without a record beside the source, the
//! source is the disk. With a record, the target is the disk if it opens; the source is the disk if
//! the target is marked as incomplete.
//!
//! A run repeats this with the image that is the disk now. If the target is on another server, that
//! server is killed too in half of the cases, after the first server.

mod steer;
mod target;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use fastrand::Rng;
use lab_tools::control::Control;

use self::steer::{MOMENTS, Moment, Told, steer};
use self::target::{KINDS, Kind, Target};
use crate::combination::Image;
use crate::folders::{Finding, Folders, Setting};
use crate::load::{Flushes, Load, Phase};
use crate::model::Model;
use crate::nbd_client;
use crate::report::Counts;
use crate::run::{outcome_of, when_unlocked};
use crate::server::{Serve, Server};
use crate::template::{content_of, quiet};

/// Bytes of the disk: enough that the first pass takes a while.
const SIZE: u64 = (16 << 20) + 7 * 512;
/// Bytes of one read.
const PART: u64 = 1 << 20;
/// The server's error texts for a target that is not complete, and for a source that has a record.
const INCOMPLETE: &str = "a mirror that was not completed";
const MOVED: &str = "was moved to";

/// Which image is the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Disk {
    Source,
    Target,
}

struct Run<'a> {
    setting: &'a Setting,
    folders: &'a Folders,
    kind: Kind,
    random: Rng,
    load: Load,
    image: PathBuf,
    format: &'static str,
    made: u32,
    options: Vec<String>,
    counts: Vec<Counts>,
}

/// Kills the servers of one disk. The seed determines the kind of target of its mirrors, among
/// others.
pub fn run(setting: &Setting, seed: u64) -> Result<(Vec<Counts>, Option<Finding>)> {
    let mut random = Rng::with_seed(seed);
    let folders = Folders::new(setting, false)?;
    let kind = KINDS[(seed % KINDS.len() as u64) as usize];
    let format = ["raw", "qcow2"][random.usize(..2)];
    let size = SIZE.to_string();
    quiet(folders.images(), "qemu-img", &["create", "-q", "-f", format, "disk0", &size])?;
    let options = folders.random_options(setting, &mut random);
    // No discard is sure to zero: the target may have another format, whose discards zero other
    // parts.
    let model = Model::new(vec![0; SIZE as usize], None);
    let load = Load::new(&Image::Raw, model, Flushes::Sometimes);
    let image = folders.images().join("disk0");
    let what = format!("mirrors of {format} to {}, {}", kind.name(), options.join(" "));
    let (made, counts) = (0, Vec::new());
    let mut run = Run {
        setting,
        folders: &folders,
        kind,
        random,
        load,
        image,
        format,
        made,
        options,
        counts,
    };
    let outcome = run.run_mirrors();
    let counts = run.counts;
    let Err(error) = outcome else { return Ok((counts, None)) };
    Ok((counts, Some(folders.finding(&format!("{what}: {error:#}")))))
}

impl Run<'_> {
    fn run_mirrors(&mut self) -> Result<()> {
        for _ in 0..self.setting.kills {
            let moment = MOMENTS[self.random.usize(..MOMENTS.len())];
            let disk =
                self.mirror(moment).with_context(|| format!("killed while {}", moment.name()))?;
            let rows = [
                ("mirror to", self.kind.name()),
                ("mirror killed while", moment.name().into()),
                ("mirror's disk after that", format!("{disk:?}").to_lowercase()),
                ("scenario", "mirror".into()),
            ];
            let requests = self.load.model().requests();
            self.counts.push(Counts::of_kill(rows, requests, &self.counts));
        }
        // Other programs read the same content.
        let server = self.start()?;
        self.read_back(&server)?;
        server.stop()?;
        let name = self.image.to_str().context("a path that is no text")?;
        let content = content_of(self.folders.images(), self.format, name)?;
        self.load.model().verify(0, &content).context("read by qemu-img at the end")?;
        if self.format == "qcow2" {
            let mut check = Command::new("qemu-img");
            check.args(["check", "-f", "qcow2", name]);
            let (code, said) = when_unlocked(&mut check)?;
            ensure!(matches!(code, Some(0 | 3)), "more than leaks: {said}");
        }
        Ok(())
    }

    /// Runs one mirror, whose server is killed; returns which image is the disk then.
    fn mirror(&mut self, moment: Moment) -> Result<Disk> {
        self.load.model().next_server();
        self.load.set_phase(Phase::Running);
        let server = self.start()?;
        self.read_back(&server)?;
        self.made += 1;
        let suffix = if self.kind.format() == "raw" { "img" } else { "qcow2" };
        let name = format!("disk{}.{suffix}", self.made);
        let mut target = Target::new(self.setting, self.folders, self.kind, &name, SIZE)?;
        let told = self.kill_under_load(server, &target, moment)?;
        let with_target = self.random.bool();
        target.stop(!with_target).context("the target's server")?;
        let disk = self.find_disk(&mut target, told)?;
        target.stop(true).context("the target's server")?;
        self.go_on_with(disk, target)?;
        Ok(disk)
    }

    fn start(&self) -> Result<Server> {
        self.serve(&self.image, self.format).start()
    }

    /// The command line of a server.
    fn serve(&self, image: &Path, format: &str) -> Serve {
        let mut options = self.options.clone();
        options.extend(["--format".into(), format.into(), "--name".into(), "disk".into()]);
        Serve::over_nbd(self.setting, self.folders, image.to_owned(), options)
    }

    /// Reads the whole disk and compares it with the model.
    fn read_back(&mut self, server: &Server) -> Result<()> {
        nbd_client::read_back_from(server, self.folders, &self.load, &mut self.random)
    }

    /// Begins a mirror under load, and kills the server at some moment. Returns what the server
    /// said about the mirror before.
    fn kill_under_load(&mut self, server: Server, target: &Target, moment: Moment) -> Result<Told> {
        let Self { load, random, folders, image, .. } = self;
        let (load, record) = (&*load, record_of(image));
        let mut control = Control::connect(&folders.in_memory("control"))?;
        let client = nbd_client::connect(&folders.in_memory("nbd"), random);
        let (depth, mut numbers) = (random.usize(1..=24), random.fork());
        std::thread::scope(|scope| {
            let random = random.fork();
            let mut worker =
                Some(scope.spawn(move || nbd_client::run(client, load, depth, random)));
            let mut drain = || -> Result<()> {
                load.set_phase(Phase::Draining);
                let drained = worker.take().map_or(Ok(()), outcome_of);
                load.set_phase(Phase::Running);
                drained
            };
            let asked = steer(&mut control, (target, &record), moment, &mut numbers, &mut drain);
            load.set_phase(Phase::Ending);
            let killed = server.kill();
            load.set_phase(Phase::Gone);
            let worked = worker.map_or(Ok(()), outcome_of);
            // A connection that ended by itself has its reason in the server.
            killed?;
            worked?;
            asked?.told(&mut control)
        })
    }

    /// Determines which image is the disk. That image must hold all acknowledged changes.
    fn find_disk(&mut self, target: &mut Target, told: Told) -> Result<Disk> {
        let has_record = record_of(&self.image).exists();
        let source = self.serve(&self.image, self.format).start();
        match (source, has_record) {
            (Ok(server), false) => drop(server),
            (Ok(_), true) => bail!("the source opens although it has a record"),
            (Err(error), true) if error.to_string().contains(MOVED) => {}
            (Err(error), _) => return Err(error.context("the source does not open")),
        }
        let is_remote = !matches!(target.kind, Kind::File { .. });
        let (location, format) = (PathBuf::from(target.location()), target.kind.format());
        // An export is raw whatever its server's image is. That server may already refuse the
        // image.
        let serve = self.serve(&location, if is_remote { "raw" } else { format });
        let served = target.start().and_then(|()| serve.start());
        let disk = match (served, has_record) {
            (Ok(server), true) => {
                self.read_back(&server).context("the target opens, and is not the disk")?;
                server.stop()?;
                Disk::Target
            }
            (Ok(server), false) => {
                ensure!(is_remote, "the target opens although the source has no record");
                self.check_untouched().context("the target has no mark, and is not what it was")?;
                server.stop()?;
                Disk::Source
            }
            (Err(error), _) if error.to_string().contains(INCOMPLETE) => Disk::Source,
            (Err(_), false) if !target.path.exists() => Disk::Source,
            (Err(error), _) => return Err(error.context("the target neither opens nor is marked")),
        };
        match (told, disk) {
            (Told::Target, Disk::Source) => bail!("it was complete, and the source is the disk"),
            (Told::Source, Disk::Target) => bail!("it was not to complete, and did"),
            (Told::Source, Disk::Source) if has_record => {
                bail!("it has a record too early, or still")
            }
            _ => Ok(disk),
        }
    }

    /// Checks that the served image holds only zeros, as a target does before it gets its mark.
    fn check_untouched(&mut self) -> Result<()> {
        let mut client = nbd_client::connect(&self.folders.in_memory("nbd"), &mut self.random);
        for start in (0..SIZE).step_by(PART as usize) {
            let read = client.read(start, PART.min(SIZE - start));
            let bytes = read.map_err(|error| anyhow::anyhow!("reading failed: {error}"))?;
            ensure!(bytes.iter().all(|byte| *byte == 0), "there is data after {start}");
        }
        client.disconnect();
        Ok(())
    }

    /// Removes the other image, and the record that says which one is the disk.
    fn go_on_with(&mut self, disk: Disk, target: Target) -> Result<()> {
        let record = record_of(&self.image);
        if record.exists() {
            std::fs::remove_file(record)?;
        }
        let (format, path) = (target.kind.format(), target.path);
        let other = match disk {
            Disk::Source => path,
            Disk::Target => {
                self.format = format;
                std::mem::replace(&mut self.image, path)
            }
        };
        match std::fs::remove_file(other) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }
}

/// The record beside a source.
fn record_of(image: &Path) -> PathBuf {
    let mut name = image.as_os_str().to_owned();
    name.push(".moved");
    name.into()
}
