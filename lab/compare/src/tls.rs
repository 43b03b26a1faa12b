//! `cargo xtask compare --tls`: an image that nbdcopy reads over TLS, by pre-shared keys at a Unix
//! socket, from Blockhouse and from qemu-nbd.
//!
//! nbdcopy decrypts with GnuTLS on one thread for each connection. If that thread is always busy,
//! the client is the limit and not the server. So the client's processor time is printed beside the
//! server's.
//!
//! With pre-shared keys, qemu-nbd uses ChaCha20, and AES only if its options ask for it. It is
//! measured both ways, and ratios are to qemu-nbd with our cipher.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use blockhouse_figures::Spread;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;

use crate::config::{Config, Options, chosen, write};
use crate::report::{cell, kernel, processor};
use crate::servers::{EXPORT, Kind, Server, socket_in};
use crate::storage::{self, Storage};
use lab_tools::apt;
use lab_tools::process::{run as run_program, stdout_of};
use lab_tools::workspace::Workspace;

const USER: &str = "alice";

/// The requests of nbdcopy.
#[derive(Clone, Copy)]
struct Load {
    name: &'static str,
    /// Bytes of a request.
    request: u32,
    /// Requests in flight on a connection.
    depth: u16,
    connections: u16,
}

const LARGE: Load = Load { name: "tls-read-256k", request: 256 << 10, depth: 16, connections: 1 };
const LOADS: &[Load] = &[
    LARGE,
    Load { name: "tls-read-256k-c2", connections: 2, ..LARGE },
    Load { name: "tls-read-256k-c4", connections: 4, ..LARGE },
    Load { name: "tls-read-4k-d64", request: 4096, depth: 64, connections: 1 },
];

/// The server that nbdcopy reads from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Contender {
    Blockhouse,
    Baseline,
    /// With its default cipher.
    QemuNbdAsItIs,
    /// With our cipher, AES-128-GCM.
    QemuNbd,
}

impl Contender {
    fn name(self) -> &'static str {
        match self {
            Self::Blockhouse => "blockhouse",
            Self::Baseline => "baseline",
            Self::QemuNbdAsItIs => "qemu-nbd, ChaCha20",
            Self::QemuNbd => "qemu-nbd",
        }
    }
}

/// The turns of one server at one load.
struct Column {
    contender: Contender,
    /// MiB a second.
    rates: Vec<f64>,
    /// Microseconds of processor time a MiB.
    server: Vec<f64>,
    client: Vec<f64>,
    /// How many processors the client was busy on.
    busy: Vec<f64>,
}

struct Place {
    config: Config,
    storage: Storage,
    /// The folder of `keys.psk`, the name that QEMU demands.
    keys: PathBuf,
}

/// Compares, as `options` say.
pub fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    apt::require(apt::FOR_TLS)?;
    let loads = chosen(LOADS, |load| load.name, &options.rows)?;
    let config = Config::new(workspace, options, Vec::new(), &[Kind::Blockhouse])?;
    let heading = heading(&config, options.mebibytes())?;
    let size = options.bytes()?;
    let storage = Storage::create(storage::Kind::Tmpfs, size, Path::new("/"), &config.interrupt)?;
    let keys = config.folder.path().to_owned();
    let key: String = read_random()?.iter().map(|byte| format!("{byte:02x}")).collect();
    std::fs::write(keys.join("keys.psk"), format!("{USER}:{key}\n"))
        .context("cannot write a key")?;
    let mut contenders = vec![Contender::Blockhouse];
    contenders.extend(options.baseline.as_ref().map(|_| Contender::Baseline));
    contenders.extend([Contender::QemuNbdAsItIs, Contender::QemuNbd]);
    let place = Place { config, storage, keys };
    print!("{heading}");
    let mut report = heading;
    for load in loads {
        let lines = lines(load, &place.measure(load, &contenders)?);
        print!("{lines}");
        report += &lines;
    }
    options.markdown.as_ref().map_or(Ok(()), |file| write(file, &report))
}

fn heading(config: &Config, size: u64) -> Result<String> {
    let mut versions = vec![Kind::Blockhouse.version(&config.programs)?];
    for program in ["qemu-nbd", "nbdcopy"] {
        let mut command = Command::new(program);
        command.arg("--version");
        versions.extend(stdout_of(command)?.lines().next().map(str::to_owned));
    }
    let (rounds, machine, kernel) = (config.rounds, processor()?, kernel());
    let versions = versions.join(", ");
    Ok(format!("{size} MiB on tmpfs, {rounds} rounds; {machine}, {kernel}; {versions}\n\n{TABLE}"))
}

const TABLE: &str = "\
| load | server | MiB/s | its CPU, us a MiB | the client's, us a MiB | processors that the client keeps busy | rate, of \
qemu-nbd | CPU, of qemu-nbd |
| --- | --- | --- | --- | --- | --- | --- | --- |
";

fn lines(load: Load, columns: &[Column]) -> String {
    let mut text = String::new();
    let all = |values: &[f64]| Spread::of(values.iter().copied());
    let peer = columns.last().expect("qemu-nbd");
    for column in columns {
        let Column { contender, rates, server, client, busy } = column;
        let cells = [
            load.name.to_owned(),
            contender.name().to_owned(),
            cell(all(rates), 0),
            cell(all(server), 0),
            cell(all(client), 0),
            cell(all(busy), 2),
            cell(Spread::of_ratios(rates, &peer.rates), 2),
            cell(Spread::of_ratios(server, &peer.server), 2),
        ];
        writeln!(text, "| {} |", cells.join(" | ")).expect("a string");
    }
    text
}

impl Place {
    fn measure(&self, load: Load, contenders: &[Contender]) -> Result<Vec<Column>> {
        let column = |&contender| Column {
            contender,
            rates: Vec::new(),
            server: Vec::new(),
            client: Vec::new(),
            busy: Vec::new(),
        };
        let mut columns: Vec<_> = contenders.iter().map(column).collect();
        for _ in 0..self.config.rounds {
            for column in &mut columns {
                let name = column.contender.name();
                self.turn(load, column).with_context(|| format!("{} on {name}", load.name))?;
            }
        }
        Ok(columns)
    }

    /// One copy from a server that is started for it.
    fn turn(&self, load: Load, column: &mut Column) -> Result<()> {
        let (folder, interrupt) = (self.config.folder.path(), &self.config.interrupt);
        interrupt.check()?;
        let socket = socket_in(folder, "server")?;
        let command = self.server(column.contender, &socket);
        let server = Server::spawn(command, socket, folder.join("server.log"), interrupt)?;
        let before = (server.cpu()?, cpu_of_children()?);
        let started = Instant::now();
        run_program(self.client(load, server.socket()))?;
        let elapsed = started.elapsed().as_secs_f64();
        let after = (server.cpu()?, cpu_of_children()?);
        server.stop()?;
        let mib = self.storage.size() as f64 / f64::from(1 << 20);
        let (server, client) = (after.0 - before.0, after.1 - before.1);
        ensure!(!client.is_zero(), "nothing was copied");
        column.rates.push(mib / elapsed);
        column.server.push(server.as_secs_f64() * 1e6 / mib);
        column.client.push(client.as_secs_f64() * 1e6 / mib);
        column.busy.push(client.as_secs_f64() / elapsed);
        Ok(())
    }

    fn server(&self, contender: Contender, socket: &Path) -> Command {
        let (image, programs) = (self.storage.path(), &self.config.programs);
        let (socket, keys) = (socket.display(), self.keys.display());
        let binary = match contender {
            Contender::Blockhouse => &programs.blockhouse,
            Contender::Baseline => &programs.baseline,
            Contender::QemuNbdAsItIs | Contender::QemuNbd => Path::new("qemu-nbd"),
        };
        let mut command = Command::new(binary);
        if matches!(contender, Contender::QemuNbdAsItIs | Contender::QemuNbd) {
            let mut secrets = format!("tls-creds-psk,id=tls,endpoint=server,dir={keys}");
            if contender == Contender::QemuNbd {
                secrets += ",priority=NORMAL:-CHACHA20-POLY1305";
            }
            command.args(["--object", &secrets, "--tls-creds=tls", "--format=raw"]);
            command.args(["--persistent", "--read-only", "--shared=8", "--export-name", EXPORT]);
            command.arg("--socket").arg(socket.to_string()).arg(image);
            return command;
        }
        command.arg("serve").arg(image).args(["--format", "raw", "--read-only", "--tls-psk"]);
        command.arg(format!("{keys}/keys.psk"));
        command.args(["--nbd", &format!("nbds+unix:///{EXPORT}?socket={socket}")]);
        command.args(match contender {
            Contender::Baseline => &programs.baseline_args,
            _ => &programs.serve_args,
        });
        command
    }

    fn client(&self, load: Load, socket: &Path) -> Command {
        let Load { request, depth, connections, .. } = load;
        let (keys, socket) = (self.keys.display(), socket.display());
        let mut command = Command::new("nbdcopy");
        command.arg("--no-extents").arg(format!("--request-size={request}"));
        command.arg(format!("--requests={depth}"));
        command.arg(format!("--connections={connections}"));
        command.arg(format!("--threads={connections}"));
        let query = format!("socket={socket}&tls-psk-file={keys}/keys.psk");
        command.arg(format!("nbds+unix://{USER}@/{EXPORT}?{query}")).arg("null:");
        command.stdin(Stdio::null());
        command
    }
}

/// The processor time of all children that have ended.
fn cpu_of_children() -> Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN).context("cannot read the client's clock")?;
    let duration =
        |time: TimeVal| Duration::new(time.tv_sec() as u64, time.tv_usec() as u32 * 1000);
    Ok(duration(usage.user_time()) + duration(usage.system_time()))
}

fn read_random() -> Result<[u8; 32]> {
    use std::io::Read;
    let mut bytes = [0; 32];
    let mut source = std::fs::File::open("/dev/urandom").context("no random bytes")?;
    source.read_exact(&mut bytes).context("no random bytes")?;
    Ok(bytes)
}
