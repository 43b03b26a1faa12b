//! One run: several servers serve an image, one after the other; most of them are killed under
//! load.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use fastrand::Rng;
use lab_tools::process::line;

use crate::combination::Combination;
use crate::folders::{Finding, Folders, Setting};
use crate::guest::Guest;
use crate::load::{Flushes, Load, Phase};
use crate::model::Model;
use crate::nbd_client;
use crate::report::Counts;
use crate::server::{Serve, Server};
use crate::template::{self, Template};

/// For how long the kernel may hold the lock of an image whose server was killed.
const LOCK_LIMIT: Duration = Duration::from_secs(5);
const LOCK_PAUSE: Duration = Duration::from_millis(5);

/// How a run's disk is exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Export {
    /// To NBD clients.
    Nbd,
    /// To a guest.
    VhostUser,
    /// To both at once.
    Both,
}

/// What a server logs after it has replayed a redo log.
const REPLAYED: &str = "changes are in the image now";

/// How a server ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// SIGKILL under load.
    Kill,
    /// In order, when the clients have nothing in flight.
    Stop,
    /// In order, under load.
    StopUnderLoad,
    /// In order, but it is killed before it has ended.
    KillWhileStopping,
}

/// A run in progress.
struct Run<'a> {
    setting: &'a Setting,
    combination: Combination,
    random: Rng,
    serve: Serve,
    folder: &'a Path,
    load: Load,
    guest: Option<Guest>,
    counts: Counts,
}

/// Runs one combination by a seed.
pub fn run(
    setting: &Setting,
    template: &Arc<Template>,
    combination: Combination,
    seed: u64,
) -> Result<(Counts, Option<Finding>)> {
    let mut random = Rng::with_seed(seed);
    let is_on_disk = random.u8(..3) == 0;
    let folders = Folders::new(setting, is_on_disk)?;
    let export = [Export::Nbd, Export::VhostUser, Export::Both][random.usize(..3)];
    let serve = serve(setting, &folders, template, combination, export, &mut random)?;
    let image = combination.image;
    let model = Model::new(template.content().to_vec(), image.discard_unit());
    let flushes = if random.u8(..4) == 0 { Flushes::Sometimes } else { Flushes::Never };
    let load = Load::new(&image, model, flushes);
    let medium = if is_on_disk { "disk" } else { "memory" };
    let rows = [
        ("image", image.to_string()),
        ("cache", combination.cache.into()),
        ("engine", combination.engine.into()),
        ("export", format!("{export:?}")),
        ("file in", medium.into()),
        ("flushes", format!("{flushes:?}")),
        ("scenario", "load".into()),
    ];
    let counts = Counts { rows: rows.into(), kills: 0, requests: 0, replays: 0 };
    let folder = folders.images();
    let mut run = Run { setting, combination, random, serve, folder, load, guest: None, counts };
    let outcome = run.run_servers();
    let requests = run.load.model().requests();
    let counts = Counts { requests, ..run.counts };
    let Err(error) = outcome else { return Ok((counts, None)) };
    let what =
        format!("{combination}, {export:?}, file in {medium}, flushes {flushes:?}: {error:#}");
    Ok((counts, Some(folders.finding(&what))))
}

/// The command line of the run's servers.
fn serve(
    setting: &Setting,
    folders: &Folders,
    template: &Template,
    combination: Combination,
    export: Export,
    random: &mut Rng,
) -> Result<Serve> {
    let Combination { image, cache, engine } = combination;
    let path = template.copy(folders.images())?;
    let mut options = folders.state_options(setting);
    let mut option = |name: &str, value: &str| options.extend([name.into(), value.into()]);
    option("--format", image.format());
    option("--cache", cache);
    option("--engine", engine);
    option("--workers", ["1", "2"][random.usize(..2)]);
    option("--detect-zeroes", ["off", "on", "unmap"][random.usize(..3)]);
    option("--fixed-files", ["on", "off"][random.usize(..2)]);
    option("--register-memory", ["on", "off"][random.usize(..2)]);
    let socket = |name, is_there: bool| is_there.then(|| folders.in_memory(name));
    let nbd = socket("nbd", export != Export::VhostUser);
    // The program that starts the servers holds the listening socket, so that clients can always
    // connect.
    let is_held = random.bool() && export == Export::Nbd;
    let held = nbd.as_ref().filter(|_| is_held);
    let listener = held.map(std::os::unix::net::UnixListener::bind).transpose()?;
    let vhost_user = socket("vu", export != Export::Nbd);
    Ok(Serve { nbd, listener, vhost_user, ..Serve::over_nbd(setting, folders, path, options) })
}

impl Run<'_> {
    fn run_servers(&mut self) -> Result<()> {
        while self.counts.kills < self.setting.kills {
            let server = self.start()?;
            let clients = self.connect(&server)?;
            let end = match self.random.u8(..24) {
                0..=2 => End::Stop,
                3 => End::StopUnderLoad,
                4 => End::KillWhileStopping,
                _ => End::Kill,
            };
            self.work(server, clients, end).with_context(|| format!("{end:?}"))?;
            if matches!(end, End::Kill | End::KillWhileStopping) {
                self.counts.kills += 1;
                if self.random.u8(..4) == 0 && !self.combination.image.is_lazy() {
                    self.check().context("while the server is dead")?;
                }
            } else {
                self.check().context("after an orderly end")?;
            }
        }
        let server = self.start()?;
        let clients = self.connect(&server)?;
        self.work(server, clients, End::Stop)?;
        self.check().context("at the end")?;
        let content = template::content(self.folder, &self.combination.image)?;
        self.load.model().verify(0, &content).context("read by qemu-img at the end")
    }

    /// Starts a server, at random after some that are killed before they are ready or while they
    /// resume requests.
    fn start(&mut self) -> Result<Server> {
        self.load.model().next_server();
        self.load.set_phase(Phase::Running);
        while self.random.u8(..6) == 0 {
            let server = self.serve.spawn()?;
            std::thread::sleep(Duration::from_micros(self.random.u64(..40_000)));
            self.note(&server);
            server.kill().context("killed while it started")?;
            self.counts.kills += 1;
        }
        while self.guest.is_some() && self.random.u8(..8) == 0 {
            self.kill_while_resuming().context("killed while it resumed the guest")?;
        }
        let mut server = self.serve.spawn()?;
        if let Some(socket) = &self.serve.nbd
            && self.guest.is_none()
            && self.random.bool()
        {
            let mut client = nbd_client::connect_early(socket).context("connecting early")?;
            let start = self.random.u64(..self.load.size() / 4096) * 4096;
            let bytes = client.read(start, 4096).map_err(|error| anyhow!("error {error}"))?;
            self.load.model().verify(start, &bytes).context("read by an early client")?;
        }
        server.wait_ready()?;
        self.note(&server);
        Ok(server)
    }

    /// Starts a server, and kills it while the guest hands it the requests in flight.
    fn kill_while_resuming(&mut self) -> Result<()> {
        let Self { serve, load, random, guest, .. } = self;
        let (Some(guest), Some(socket)) = (guest, &serve.vhost_user) else { return Ok(()) };
        let server = serve.start()?;
        load.set_phase(Phase::Ending);
        let (time, numbers) = (random.u64(..6_000), random.fork());
        std::thread::scope(|scope| {
            let resumed = scope.spawn(|| guest.reconnect_in_vain(socket, load, numbers));
            std::thread::sleep(Duration::from_micros(time));
            let killed = server.kill();
            load.set_phase(Phase::Gone);
            outcome_of(resumed)?;
            killed
        })?;
        self.counts.kills += 1;
        self.load.set_phase(Phase::Running);
        self.load.model().next_server();
        Ok(())
    }

    /// Counts the server if its log says that it replayed a redo log.
    fn note(&mut self, server: &Server) {
        self.counts.replays += u32::from(server.said().contains(REPLAYED));
    }

    /// Connects all clients, lets the server execute the guest's requests in flight again, and
    /// reads the whole disk back.
    fn connect(&mut self, server: &Server) -> Result<Vec<lab_nbd::Client>> {
        if let Some(socket) = &self.serve.vhost_user {
            match &mut self.guest {
                Some(guest) => guest.reconnect(socket, &self.load)?,
                none => *none = Some(Guest::connect(socket, &self.load, &mut self.random)?),
            }
        }
        let mut clients = Vec::new();
        if let Some(socket) = &self.serve.nbd {
            for _ in 0..self.random.usize(1..=2) {
                clients.push(nbd_client::connect(socket, &mut self.random));
            }
        }
        match (&mut self.guest, clients.first_mut()) {
            (Some(guest), client) if client.is_none() || self.random.bool() => {
                guest.read_back(&self.load, &mut self.random)?;
            }
            (_, Some(client)) => nbd_client::read_back(client, &self.load)?,
            _ => bail!("no client"),
        }
        ensure!(!server.said().contains("panicked"), "{}", server.said());
        Ok(clients)
    }

    /// Load until the server ends.
    fn work(&mut self, server: Server, clients: Vec<lab_nbd::Client>, end: End) -> Result<()> {
        let Self { load, random, guest, .. } = self;
        let load = &*load;
        let time = match random.u8(..4) {
            0 => random.u64(..8_000),
            1 => random.u64(8_000..200_000),
            _ => random.u64(8_000..80_000),
        };
        let depth = random.usize(1..=24);
        std::thread::scope(|scope| {
            let mut workers = Vec::new();
            for client in clients {
                let random = random.fork();
                workers.push(scope.spawn(move || nbd_client::run(client, load, depth, random)));
            }
            if let Some(guest) = guest {
                let random = random.fork();
                workers.push(scope.spawn(move || guest.run(load, depth, random)));
            }
            std::thread::sleep(Duration::from_micros(time));
            let mut outcomes = Vec::new();
            if end == End::Stop {
                load.set_phase(Phase::Draining);
                outcomes.extend(workers.drain(..).map(outcome_of));
            }
            load.set_phase(Phase::Ending);
            let ended = match end {
                End::Kill => server.kill(),
                End::Stop | End::StopUnderLoad => server.stop(),
                End::KillWhileStopping => server.ask_to_stop().map(|()| {
                    std::thread::sleep(Duration::from_micros(random.u64(..5_000)));
                    server.end();
                }),
            };
            load.set_phase(Phase::Gone);
            outcomes.extend(workers.into_iter().map(outcome_of));
            // If the server failed, its error is the reason of the clients' errors.
            ended?;
            outcomes.into_iter().collect()
        })
    }

    /// Runs our check and QEMU's: both may find leaks, and no errors.
    fn check(&self) -> Result<()> {
        if self.combination.image.layout().is_none() {
            return Ok(());
        }
        let image = &self.serve.image;
        let mut ours = Command::new(&self.setting.binary);
        ours.arg("check").arg("--format").arg("qcow2").arg(image);
        let mut theirs = Command::new("qemu-img");
        theirs.args(["check", "-f", "qcow2"]).arg(image);
        for mut command in [ours, theirs] {
            // QEMU resolves the path of a data file relative to its working folder.
            command.current_dir(self.folder);
            let (code, said) = when_unlocked(&mut command)?;
            ensure!(matches!(code, Some(0 | 3)), "{}: exit code {code:?}: {said}", line(&command));
        }
        Ok(())
    }
}

/// The outcome of a client's thread.
pub fn outcome_of(worker: ScopedJoinHandle<'_, Result<()>>) -> Result<()> {
    worker.join().unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
        bail!("the client: {text}")
    })
}

/// Runs a program on an image once no process that has ended holds its lock; exit code and output.
pub fn when_unlocked(command: &mut Command) -> Result<(Option<i32>, String)> {
    let end = Instant::now() + LOCK_LIMIT;
    loop {
        let output = command.output().with_context(|| format!("cannot start {}", line(command)))?;
        let said = [&*output.stdout, &*output.stderr].concat();
        let said = String::from_utf8_lossy(&said).trim_end().to_owned();
        let is_locked = !output.status.success() && said.contains("lock");
        if !is_locked || Instant::now() > end {
            return Ok((output.status.code(), said));
        }
        std::thread::sleep(LOCK_PAUSE);
    }
}
