//! `cargo xtask compare --remote`: storage on another server, by Blockhouse and by
//! qemu-storage-daemon.
//!
//! Both serve the same image over NBD, one after the other in each round: an export of an NBD
//! server at a Unix socket, or an image in Ceph. Client, server and storage share this machine, so
//! the rate depends on all three. The server's processor time for a request shows how the servers
//! differ.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, anyhow, ensure};
use blockhouse_figures::{Spread, median_interval};
use lab_nbd::handshake;
use lab_tools::apt;
use lab_tools::process::{run as run_program, stdout_of};
use lab_tools::workspace::Workspace;
use serde_json::{Map, Value, json};

use crate::config::{Config, Options, chosen, write};
use crate::light::{Content, Operation};
use crate::measurement::Measurement;
use crate::report::{self, kernel, processor};
use crate::rows::{Client, LIGHT, Row};
use crate::servers::{EXPORT, Kind, Server, socket_in, uri};
use crate::storage::{self, Storage};

/// The light client asks for simple replies, as the kernel's client does. fio uses libnbd and asks
/// for structured replies, as QEMU does. In structured replies QEMU's server reports holes, and so
/// it looks for holes at each read.
const READ: Row = Row { name: "randread-4k-d64", ..LIGHT };
const WRITE: Row = Row { name: "randwrite-4k-d64", operation: Operation::Write, ..LIGHT };
const ROWS: &[Row] = &[
    READ,
    WRITE,
    Row { name: "randread-4k-d16", depth: 16, ..READ },
    Row { name: "randwrite-4k-d16", depth: 16, ..WRITE },
    Row { name: "randread-4k-d1", depth: 1, ..READ },
    Row { name: "randwrite-4k-d1", depth: 1, ..WRITE },
    Row { name: "fio-randread-4k-d16", client: Client::Fio, depth: 16, ..READ },
    Row { name: "fio-randwrite-4k-d16", client: Client::Fio, depth: 16, ..WRITE },
    Row { name: "fio-randread-4k-d1", client: Client::Fio, depth: 1, ..READ },
    Row { name: "fio-randwrite-4k-d1", client: Client::Fio, depth: 1, ..WRITE },
];

/// Where the image is.
struct Place {
    description: String,
    /// The location as our command line takes it.
    location: String,
    content: Content,
    // Dropped in this order: the server closes its image before the image is removed.
    server: Option<Server>,
    _image: Option<Storage>,
}

/// One of the servers at one load.
struct Column {
    kind: Kind,
    turns: Vec<Measurement>,
}

impl Column {
    /// Thousands of requests a second.
    fn rates(&self) -> Vec<f64> {
        self.each(|turn| turn.requests_a_second() / 1e3)
    }

    /// Microseconds of processor time a request.
    fn cpu(&self) -> Vec<f64> {
        self.each(Measurement::cpu_a_request)
    }

    fn each(&self, figure: impl Fn(&Measurement) -> f64) -> Vec<f64> {
        self.turns.iter().map(figure).collect()
    }
}

/// Compares, as `options` say.
pub fn run(workspace: &Workspace, options: &Options, given: &[String]) -> Result<()> {
    apt::require(apt::FOR_REMOTE)?;
    ensure!(options.json.is_none(), "--remote writes no JSON: leave --json out");
    let rows = chosen(ROWS, |row| row.name, &options.rows)?;
    let mut config = Config::new(workspace, options, rows, &[Kind::Blockhouse, Kind::QsdNative])?;
    if options.baseline.is_some() && options.servers.is_empty() {
        config.servers.push(Kind::QsdNative);
    }
    let mut report = heading(&config)?;
    print!("{report}");
    let places: &[Option<&str>] = &match given {
        [] => vec![None, Some("")],
        given => given.iter().map(|one| Some(one.as_str())).collect(),
    };
    for place in places {
        let place = match place {
            None => without_storage(&config, options.bytes()?)?,
            Some("") => on_tmpfs(&config, options.bytes()?)?,
            Some(given) => at(given, &config)?,
        };
        for row in config.rows.clone() {
            let lines = lines(&place, row, &config.measure_remote(row, &place)?);
            print!("{lines}");
            report += &lines;
        }
        place.server.map_or(Ok(()), Server::stop)?;
    }
    options.markdown.as_ref().map_or(Ok(()), |file| write(file, &report))
}

fn heading(config: &Config) -> Result<String> {
    let versions: Result<Vec<_>> =
        config.servers.iter().map(|kind| kind.version(&config.programs)).collect();
    let (rounds, seconds, versions) =
        (config.rounds, config.duration.as_secs_f64(), versions?.join(", "));
    let (machine, kernel) = (processor()?, kernel());
    Ok(format!("{rounds} rounds of {seconds} s; {machine}, {kernel}; {versions}\n\n{TABLE}"))
}

const TABLE: &str = "\
| storage | load | server | k/s | its CPU, us a request | p50, us | p99, us | rate, of QEMU (95 %) | CPU, of QEMU (95 %) |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
";

fn lines(place: &Place, row: Row, columns: &[Column]) -> String {
    let mut text = String::new();
    let cell = |values: &[f64], digits: usize| report::spread(values.iter().copied(), digits);
    let ratio = |ours: &[f64], theirs: &[f64]| {
        let median = Spread::of_ratios(ours, theirs).map(|spread| spread.median);
        let spread = report::cell(median, 2);
        let interval = median_interval(ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs));
        let interval =
            interval.map_or_else(String::new, |(from, to)| format!(" ({from:.2}..{to:.2})"));
        spread + &interval
    };
    let peer = columns.iter().find(|column| column.kind == Kind::QsdNative);
    for column in columns {
        let (rates, cpu) = (column.rates(), column.cpu());
        let mut cells = vec![
            place.description.clone(),
            row.name.to_owned(),
            name(column.kind).to_owned(),
            cell(&rates, 2),
            cell(&cpu, 1),
            cell(&column.each(|turn| turn.latency.median.as_secs_f64() * 1e6), 0),
            cell(&column.each(|turn| turn.latency.p99.as_secs_f64() * 1e6), 0),
        ];
        let ratios = peer.map(|peer| [ratio(&rates, &peer.rates()), ratio(&cpu, &peer.cpu())]);
        cells.extend(ratios.unwrap_or_default());
        writeln!(text, "| {} |", cells.join(" | ")).expect("a string");
    }
    text
}

fn name(kind: Kind) -> &'static str {
    if kind == Kind::QsdNative { "qemu-storage-daemon" } else { kind.name() }
}

/// An export of a server without storage: only the server between it and the client is measured.
fn without_storage(config: &Config, size: u64) -> Result<Place> {
    let socket = socket_in(config.folder.path(), "storage")?;
    let mut command = Command::new(&config.programs.own);
    command.arg("null-server").arg(&socket).arg(size.to_string());
    let description = "an NBD server without storage".to_owned();
    Place::behind(command, &socket, config, description, Content::Nothing)
}

/// An export of ours, of an image on tmpfs.
fn on_tmpfs(config: &Config, size: u64) -> Result<Place> {
    let image = Storage::create(storage::Kind::Tmpfs, size, Path::new("/"), &config.interrupt)?;
    let socket = socket_in(config.folder.path(), "storage")?;
    let mut command = Command::new(&config.programs.blockhouse);
    command.arg("serve").arg(image.path()).args(["--format", "raw", "--nbd"]).arg(uri(&socket));
    let description = "Blockhouse over NBD, on tmpfs".to_owned();
    let place = Place::behind(command, &socket, config, description, Content::Image)?;
    Ok(Place { _image: Some(image), ..place })
}

/// An existing image, which gets the content that reads are checked for.
fn at(location: &str, config: &Config) -> Result<Place> {
    let blockhouse = || Command::new(&config.programs.blockhouse);
    let mut info = blockhouse();
    info.args(["info", "--json", location]);
    let info: Value = serde_json::from_str(&stdout_of(info)?).context("what info says")?;
    let size = info["virtual-size"].as_u64().context("an image without a size")?;
    let content = Storage::create(storage::Kind::Tmpfs, size, Path::new("/"), &config.interrupt)?;
    let mut convert = blockhouse();
    convert.args(["convert", "--force", "--format", "raw"]).arg(content.path()).arg(location);
    run_program(convert)?;
    let description = location.split('?').next().unwrap_or(location).to_owned();
    let (location, content) = (location.to_owned(), Content::Image);
    Ok(Place { description, location, content, server: None, _image: None })
}

impl Place {
    /// The export of a server that is started for it.
    fn behind(
        command: Command,
        socket: &Path,
        config: &Config,
        description: String,
        content: Content,
    ) -> Result<Self> {
        let log = config.folder.path().join("storage.log");
        let server = Server::spawn(command, socket.to_owned(), log, &config.interrupt)?;
        let location = uri(server.socket());
        Ok(Self { description, location, content, server: Some(server), _image: None })
    }

    /// The image as a block device of qemu-storage-daemon, which bypasses librbd's cache as ours
    /// does.
    fn block_device(&self) -> Result<Value> {
        let (path, query) = self.location.split_once('?').unwrap_or((&self.location, ""));
        let mut parameters: Map<String, Value> = query
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .map(|(key, value)| (key.to_owned(), value.into()))
            .collect();
        let unknown = || anyhow!("--remote takes rbd: and nbd+unix: locations: {}", self.location);
        let mut device = json!({ "node-name": "disk", "cache": { "direct": true } });
        if let Some(path) = path.strip_prefix("rbd:") {
            let (pool, image) = path.split_once('/').with_context(unknown)?;
            device["driver"] = "rbd".into();
            device["pool"] = pool.into();
            device["image"] = image.into();
            for (ours, theirs) in [("conf", "conf"), ("id", "user")] {
                if let Some(value) = parameters.remove(ours) {
                    device[theirs] = value;
                }
            }
        } else {
            let export = path.strip_prefix("nbd+unix:///").with_context(unknown)?;
            let socket = parameters.remove("socket").with_context(unknown)?;
            device["driver"] = "nbd".into();
            device["export"] = export.into();
            device["server"] = json!({ "type": "unix", "path": socket });
        }
        ensure!(parameters.is_empty(), "--remote compares with no other parameters: {query}");
        Ok(device)
    }
}

impl Config {
    fn measure_remote(&mut self, row: Row, place: &Place) -> Result<Vec<Column>> {
        let mut columns: Vec<_> =
            self.servers.iter().map(|&kind| Column { kind, turns: Vec::new() }).collect();
        for round in 0..self.rounds {
            // The order is reversed in each round, so that no server is always the first.
            if round > 0 {
                columns.reverse();
            }
            for column in &mut columns {
                let turn = self.take_turn(column.kind, row, place);
                let context = || format!("{} on {}", row.name, name(column.kind));
                column.turns.push(turn.with_context(context)?);
            }
        }
        columns.sort_by_key(|column| self.servers.iter().position(|kind| *kind == column.kind));
        Ok(columns)
    }

    fn take_turn(&mut self, kind: Kind, row: Row, place: &Place) -> Result<Measurement> {
        let folder = self.folder.path();
        let socket = socket_in(folder, "server")?;
        let mut command = Command::new(kind.program(&self.programs));
        if kind == Kind::QsdNative {
            command.arg("--blockdev").arg(place.block_device()?.to_string());
            command
                .args(["--nbd-server", &format!("addr.type=unix,addr.path={}", socket.display())]);
            let export = format!("type=nbd,id=export,node-name=disk,writable=on,name={EXPORT}");
            command.args(["--export", &export]);
        } else {
            command.arg("serve").arg(&place.location).args(["--format", "raw", "--cache", "none"]);
            command.arg("--nbd").arg(uri(&socket));
            let is_baseline = kind == Kind::Baseline;
            let Config { programs, .. } = &*self;
            command.args(if is_baseline { &programs.baseline_args } else { &programs.serve_args });
        }
        let server = Server::spawn(command, socket, folder.join("server.log"), &self.interrupt)?;
        // A server may listen before its image is open, and opening is not measured.
        drop(handshake::open(server.socket(), EXPORT)?);
        let measured = self.load(row, place.content, &server)?;
        server.stop()?;
        Ok(measured)
    }
}
