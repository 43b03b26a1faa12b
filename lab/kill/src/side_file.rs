//! A raw volume with its bitmaps in a side file (`--bitmaps`), whose servers are killed: while
//! guests write, and while a backup is begun, is read or ends. An incremental backup by the bitmap
//! has all changes that were acknowledged before, and the next server finds the bitmap as it was.
//!
//! The report says how many bytes a bitmap marks as changed beyond those that clients changed.

mod volume;

use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use fastrand::Rng;
use lab_tools::control::Control;
use lab_tools::process::line;
use serde_json::{Value, json};

use self::volume::{KINDS, Volume};
use crate::combination::Image;
use crate::folders::{Finding, Folders, Setting};
use crate::load::{Flushes, Load, Phase};
use crate::model::Model;
use crate::nbd_client;
use crate::report::Counts;
use crate::run::{outcome_of, when_unlocked};
use crate::server::{Serve, Server};
use crate::template::{content_of, quiet};

/// Bytes of the disk.
const SIZE: u64 = (16 << 20) + 7 * 512;
/// Limits for the bytes that a bitmap marks beyond those that clients changed, and their names in
/// the report.
const EXCESSES: [(u64, &str); 4] =
    [(0, "nothing"), (1 << 20, "1 MiB"), (4 << 20, "4 MiB"), (SIZE, "the disk")];

/// When a server is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    /// While guests write.
    Writing,
    /// While a backup begins.
    Beginning,
    /// While the backup is read.
    Reading,
    /// While the backup ends.
    Ending,
}

const MOMENTS: [Moment; 6] = [
    Moment::Writing,
    Moment::Writing,
    Moment::Writing,
    Moment::Beginning,
    Moment::Reading,
    Moment::Ending,
];

impl Moment {
    fn name(self) -> &'static str {
        match self {
            Self::Writing => "guests write",
            Self::Beginning => "a backup begins",
            Self::Reading => "a backup is read",
            Self::Ending => "a backup ends",
        }
    }
}

struct Run<'a> {
    setting: &'a Setting,
    folders: &'a Folders,
    volume: Volume,
    random: Rng,
    load: Load,
    options: Vec<String>,
    granularity: u64,
    /// The number of incremental backups so far.
    increments: u32,
    /// The number of the first request after the bitmap began.
    first: u64,
    counts: Vec<Counts>,
}

/// Kills the servers of a volume. The seed determines the kind of volume, among others.
pub fn run(setting: &Setting, seed: u64) -> Result<(Vec<Counts>, Option<Finding>)> {
    let mut random = Rng::with_seed(seed);
    let folders = Folders::new(setting, random.u8(..3) == 0)?;
    let kind = KINDS[(seed % KINDS.len() as u64) as usize];
    let volume = Volume::new(&folders, kind, SIZE)?;
    let options = folders.random_options(setting, &mut random);
    let flushes = if random.bool() { Flushes::Sometimes } else { Flushes::Never };
    let model = Model::new(vec![0; SIZE as usize], None);
    let load = Load::new(&Image::Raw, model, flushes);
    let granularity = [512, 4096, 65_536][random.usize(..3)];
    let what = format!("bitmaps of {} of {granularity} bytes, {}", kind.name(), options.join(" "));
    let mut run = Run {
        setting,
        folders: &folders,
        volume,
        random,
        load,
        options,
        granularity,
        increments: 0,
        first: 0,
        counts: Vec::new(),
    };
    let outcome = run.run_increments();
    let Run { counts, volume, .. } = run;
    drop(volume);
    let Err(error) = outcome else { return Ok((counts, None)) };
    Ok((counts, Some(folders.finding(&format!("{what}: {error:#}")))))
}

impl Run<'_> {
    fn run_increments(&mut self) -> Result<()> {
        let size = SIZE.to_string();
        quiet(self.folders.images(), "qemu-img", &["create", "-q", "-f", "raw", &copy(0), &size])?;
        // A server would make this folder, but a command needs it before.
        std::fs::DirBuilder::new().mode(0o700).create(self.folders.in_memory("state"))?;
        self.bitmap("add", 0)?;
        for kill in 0..self.setting.kills {
            let moment = MOMENTS[self.random.usize(..MOMENTS.len())];
            let found =
                self.kill(moment).with_context(|| format!("killed while {}", moment.name()));
            let excess = found?;
            // Sometimes a bitmap records across the kills of several servers.
            if self.random.u8(..3) > 0 || kill + 1 == self.setting.kills {
                self.increment()
                    .with_context(|| format!("after a kill while {}", moment.name()))?;
            }
            let (_, bucket) =
                EXCESSES.iter().find(|(most, _)| excess <= *most).unwrap_or(&EXCESSES[3]);
            let rows = [
                ("bitmap of", self.volume.kind.name().to_owned()),
                ("volume's server killed while", moment.name().to_owned()),
                ("bitmap says too much of", (*bucket).to_owned()),
                ("scenario", "side-file".to_owned()),
            ];
            let requests = self.load.model().requests();
            self.counts.push(Counts::of_kill(rows, requests, &self.counts));
        }
        Ok(())
    }

    fn name(&self, number: u32) -> String {
        format!("b{number}")
    }

    fn start(&self) -> Result<Server> {
        let mut options = self.options.clone();
        options.extend(["--format", "raw", "--name", "disk"].map(String::from));
        options.extend(self.volume.options());
        Serve::over_nbd(self.setting, self.folders, self.volume.path.clone(), options).start()
    }

    /// Reads the whole disk and compares it with the model.
    fn read_back(&mut self, server: &Server) -> Result<()> {
        nbd_client::read_back_from(server, self.folders, &self.load, &mut self.random)
    }

    /// Kills a server. Returns how many bytes the bitmap marks beyond those that clients changed,
    /// as the next server finds it.
    fn kill(&mut self, moment: Moment) -> Result<u64> {
        self.load.model().next_server();
        self.load.set_phase(Phase::Running);
        let server = self.start()?;
        self.read_back(&server)?;
        self.kill_under_load(server, moment)?;
        let server = self.start()?;
        self.load.model().next_server();
        self.read_back(&server).context("after the kill")?;
        let excess = self.excess()?;
        if self.random.bool() {
            server.kill()?
        } else {
            server.stop()?
        }
        Ok(excess)
    }

    fn kill_under_load(&mut self, server: Server, moment: Moment) -> Result<()> {
        let name = self.name(self.increments);
        let Self { load, random, folders, .. } = self;
        let load = &*load;
        let mut control = Control::connect(&folders.in_memory("control"))?;
        let client = nbd_client::connect(&folders.in_memory("nbd"), random);
        let (depth, frozen) = (random.usize(1..=24), folders.in_memory("frozen"));
        let (time, late) = (random.u64(..120_000), random.u64(..20_000));
        std::thread::scope(|scope| {
            let random = random.fork();
            let worker = scope.spawn(move || nbd_client::run(client, load, depth, random));
            std::thread::sleep(Duration::from_micros(time));
            let places = (&*frozen, folders.images());
            let begun = begin_backup(&mut control, moment, &name, places);
            std::thread::sleep(Duration::from_micros(late));
            load.set_phase(Phase::Ending);
            let killed = server.kill();
            load.set_phase(Phase::Gone);
            let worked = outcome_of(worker);
            // A connection that ended by itself has its reason in the server.
            killed?;
            begun?;
            worked
        })
    }

    /// How many bytes the bitmap marks beyond those that clients changed.
    fn excess(&self) -> Result<u64> {
        let mut control = Control::connect(&self.folders.in_memory("control"))?;
        let listed = call(&mut control, "bitmap.list", &json!({ "disk": "disk" }))?;
        let name = self.name(self.increments);
        let found = listed.as_array().into_iter().flatten().find(|one| one["name"] == *name);
        let found = found.with_context(|| format!("the bitmap is gone: {listed}"))?;
        ensure!(found["inconsistent"] != true && found["recording"] == true, "{found}");
        for other in listed.as_array().into_iter().flatten().filter(|one| one["name"] != *name) {
            ensure!(other["inconsistent"] != true, "{other}");
            call(&mut control, "bitmap.remove", &json!({ "disk": "disk", "name": other["name"] }))?;
        }
        let count = found["count"].as_u64().context("a count")?;
        let mut asked = vec![false; SIZE.div_ceil(self.granularity) as usize];
        for range in self.load.model().changes_since(self.first) {
            let (start, end) =
                (range.start / self.granularity, range.end.div_ceil(self.granularity));
            asked[start as usize..end as usize].fill(true);
        }
        let bits = asked.iter().filter(|asked| **asked).count() as u64;
        Ok(count.saturating_sub(bits * self.granularity))
    }

    /// Makes an incremental backup without a server, which must have the content of the disk. Then
    /// the next bitmap begins.
    fn increment(&mut self) -> Result<()> {
        let (since, next) = (self.increments, self.increments + 1);
        let (base, copy) = (copy(since), copy(next));
        let mut backup = self.command("backup");
        backup.arg(&copy).args(["--incremental", &self.name(since), "--base", &base]);
        self.run_tool(backup)?;
        let content = content_of(self.folders.images(), "qcow2", &copy)?;
        self.load.model().verify(0, &content).context("the increment")?;
        self.bitmap("add", next)?;
        self.bitmap("remove", since)?;
        self.increments = next;
        self.first = self.load.model().requests();
        Ok(())
    }

    fn bitmap(&self, action: &str, number: u32) -> Result<()> {
        let mut command = Command::new(&self.setting.binary);
        command.args(["bitmap", action]).arg(&self.volume.path).arg(self.name(number));
        if action == "add" {
            command.args(["--granularity", &self.granularity.to_string()]);
        }
        self.run_tool(self.with_options(command))
    }

    /// A command with the volume and the options of its bitmaps.
    fn command(&self, word: &str) -> Command {
        let mut command = Command::new(&self.setting.binary);
        command.arg(word).arg(&self.volume.path);
        self.with_options(command)
    }

    fn with_options(&self, mut command: Command) -> Command {
        command.args(self.volume.options());
        command.args(self.folders.state_options(self.setting));
        command.current_dir(self.folders.images());
        command
    }

    fn run_tool(&self, mut command: Command) -> Result<()> {
        let (code, said) = when_unlocked(&mut command)?;
        ensure!(code == Some(0), "{}: exit code {code:?}: {said}", line(&command));
        Ok(())
    }
}

/// The name of a copy. The first one is a raw file of zeros.
fn copy(number: u32) -> String {
    format!("copy{number}.{}", if number == 0 { "img" } else { "qcow2" })
}

/// Begins a backup of the changes since the bitmap `since`, and continues it until the moment of
/// the kill. The backup is served at `socket`, with its scratch file in a folder.
fn begin_backup(
    control: &mut Control,
    moment: Moment,
    since: &str,
    (socket, scratch): (&Path, &Path),
) -> Result<()> {
    if moment == Moment::Writing {
        return Ok(());
    }
    // A server that was killed leaves its socket.
    let _ = std::fs::remove_file(socket);
    let export = format!("nbd+unix:///?socket={}", socket.display());
    let begin = json!({
        "disks": ["disk"], "backup": "backup", "export": export, "since": since, "bitmap": "later",
        "scratch": scratch,
    });
    if moment == Moment::Beginning {
        control.send("backup.begin", &begin)?;
        return Ok(());
    }
    call(control, "backup.begin", &begin)?;
    let (stream, export) = lab_nbd::handshake::open(socket, "disk")?;
    let mut client = lab_nbd::Client::new(stream, lab_nbd::Framing::Simple, export);
    if let Err(error) = client.read(0, 1 << 20) {
        bail!("reading the backup failed: {error}");
    }
    if moment == Moment::Ending {
        drop(client);
        control.send("backup.end", &json!({ "backup": "backup" }))?;
    }
    Ok(())
}

fn call(control: &mut Control, method: &str, params: &Value) -> Result<Value> {
    control.call(method, params)?.map_err(anyhow::Error::msg).context(method.to_owned())
}
