//! The configuration of a server with many disks: a TOML file (docs/operations.md).
//!
//! Guarantee: what is wrong in it is reported with its line and column, before anything is opened
//! or changed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use blockhouse_disk::RateLimits;
use blockhouse_engine::{DEFAULT_POLLING, EngineChoice, FixedFiles, IoPoll};
use blockhouse_nbd::uri::Address;
use blockhouse_vhost_user::RegisteredMemory;
use serde::Deserialize;
use toml::Spanned;

use crate::endpoints::ublk;
use crate::metrics::MetricsAddress;
use crate::options::control_socket::ControlSocket;
use crate::options::limit_options::{DiskThrottle, LimitOptions};
use crate::options::limits::{self, Limit};
use crate::options::socket_options::{self, SocketMode};
use crate::options::text_fields::TextOf;
use crate::options::user_options::{self, GroupName, UserIds, UserName};
use crate::process::workers::LoopOptions;
use crate::running::ExportAddress;
use crate::setup::disk_options::{DiskOptions, check_absolute};
use crate::setup::offers::Offer;
use crate::setup::tls_options::{TlsChoice, TlsOptions, parse_allowed};
use crate::setup::{DiskSetup, SandboxUse, Setup, StateSetup, TlsSetup, UblkSetup};

/// A file, read and checked.
#[derive(Clone, Debug)]
pub struct Config {
    server: ServerOptions,
    tls: Option<TlsSetup>,
    user: Option<UserIds>,
    pub(crate) disks: Vec<ConfiguredDisk>,
}

/// A disk of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ConfiguredDisk {
    /// How it is opened.
    pub(crate) setup: DiskSetup,
    /// Where it is served.
    pub(crate) addresses: Vec<ExportAddress>,
}

/// The file as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default = "no_server")]
    server: Spanned<ServerOptions>,
    #[serde(default)]
    groups: BTreeMap<String, Spanned<LimitOptions>>,
    #[serde(default)]
    disk: Vec<Spanned<DiskOptions>>,
}

fn no_server() -> Spanned<ServerOptions> {
    Spanned::new(0..0, ServerOptions::default())
}

/// The table `server`: options of `serve`, by their names.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
struct ServerOptions {
    control: Option<TextOf<ControlSocket>>,
    qmp: Option<TextOf<ControlSocket>>,
    pid_file: Option<PathBuf>,
    metrics: Option<TextOf<MetricsAddress>>,
    state: Option<PathBuf>,
    socket_mode: Option<TextOf<SocketMode>>,
    socket_group: Option<TextOf<GroupName>>,
    workers: u16,
    queues: Option<u16>,
    engine: TextOf<EngineChoice>,
    poll_max_us: u32,
    fixed_files: bool,
    io_poll: bool,
    register_memory: bool,
    user: Option<TextOf<UserName>>,
    group: Option<TextOf<GroupName>>,
    sandbox: bool,
    sandbox_allow: Vec<PathBuf>,
    limits: Vec<TextOf<Limit>>,
    tls: Option<TlsChoice>,
    tls_certificates: Option<PathBuf>,
    tls_psk: Option<PathBuf>,
    tls_allow: Vec<String>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            control: None,
            qmp: None,
            pid_file: None,
            metrics: None,
            state: None,
            socket_mode: None,
            socket_group: None,
            workers: 1,
            queues: None,
            engine: TextOf(EngineChoice::Auto),
            poll_max_us: DEFAULT_POLLING.as_micros() as u32,
            fixed_files: false,
            io_poll: false,
            register_memory: false,
            user: None,
            group: None,
            sandbox: true,
            sandbox_allow: Vec::new(),
            limits: Vec::new(),
            tls: None,
            tls_certificates: None,
            tls_psk: None,
            tls_allow: Vec::new(),
        }
    }
}

impl ServerOptions {
    /// The user of the server after it gave up its own.
    fn user(&self) -> Result<Option<UserIds>, String> {
        user_options::ids(self.user.map(|TextOf(user)| user), self.group.map(|TextOf(group)| group))
    }

    /// TLS for these disks.
    fn tls(&self, disks: &[ConfiguredDisk]) -> Result<Option<TlsSetup>, String> {
        let uris =
            disks.iter().flat_map(|disk| &disk.addresses).filter_map(|address| match address {
                ExportAddress::Nbd(uri) => Some(uri.clone()),
                ExportAddress::VhostUser(_) | ExportAddress::Ublk(_) => None,
            });
        let allowed = self.tls_allow.iter().map(|text| parse_allowed(text));
        let options = TlsOptions {
            choice: self.tls,
            certificates: self.tls_certificates.clone(),
            psk: self.tls_psk.clone(),
            allowed: allowed.collect::<Result<_, _>>()?,
        };
        options.setup(&uris.collect::<Vec<_>>())
    }
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, or something in it is wrong: one line, with its place.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|error| {
            let name = path.display();
            anyhow::anyhow!(
                "{name}: cannot read the configuration: {error}; name a file that describes disks \
                 (docs/operations.md)"
            )
        })?;
        parse(&text).map_err(|Wrong { at, why }| {
            let (line, column) = place(&text, at);
            anyhow::anyhow!("{}:{line}:{column}: {why}", path.display())
        })
    }

    /// The setup of the server. `hand_over`: as [`Setup::hand_over`]. The file is read again from
    /// `path` by reloads.
    pub fn setup(self, path: PathBuf, hand_over: bool) -> Setup {
        let Self { server, tls, user, disks } = self;
        let limits: Vec<Limit> = server.limits.into_iter().map(|TextOf(limit)| limit).collect();
        let Addresses { nbd, devices, ublk } = addresses(&disks);
        Setup {
            workers: server.workers.into(),
            loops: LoopOptions {
                engine: server.engine.0,
                polling: Duration::from_micros(server.poll_max_us.into()),
                fixed_files: if server.fixed_files { FixedFiles::On } else { FixedFiles::Off },
                io_poll: if server.io_poll { IoPoll::On } else { IoPoll::Off },
                commands: ublk::commands(&ublk),
            },
            disks: disks.iter().map(|disk| disk.setup.clone()).collect(),
            state: match server.state {
                Some(off) if off == Path::new("off") => StateSetup::Off,
                Some(path) => StateSetup::Dir(path),
                None => StateSetup::Usual,
            },
            offers: None,
            nbd,
            devices,
            ublk,
            queues: server.queues.unwrap_or_else(default_queues),
            register_memory: match server.register_memory {
                true => RegisteredMemory::On,
                false => RegisteredMemory::Off,
            },
            limits: limits::limits(&limits),
            tls,
            permissions: socket_options::permissions(
                server.socket_mode.map(|TextOf(mode)| mode),
                server.socket_group.map(|TextOf(group)| group),
            ),
            control: server.control.map(|TextOf(control)| control),
            qmp: server.qmp.map(|TextOf(qmp)| qmp),
            ends_with_clients: false,
            storage_daemon: None,
            pid_file: server.pid_file,
            metrics: server.metrics.map(|TextOf(address)| address),
            user,
            sandbox: if server.sandbox { SandboxUse::On } else { SandboxUse::Off },
            sandbox_allow: server.sandbox_allow,
            upgrade_to: Vec::new(),
            config: Some(path),
            hand_over,
        }
    }
}

/// One queue for each processor.
pub fn default_queues() -> u16 {
    std::thread::available_parallelism().map_or(1, |count| count.get()).min(256) as u16
}

/// The exports and their addresses, as fields of a setup: names and places of disks.
#[derive(Default)]
struct Addresses {
    nbd: Vec<(Address, Vec<Offer>)>,
    devices: Vec<(PathBuf, usize)>,
    ublk: Vec<UblkSetup>,
}

fn addresses(disks: &[ConfiguredDisk]) -> Addresses {
    let mut all = Addresses::default();
    for (image, disk) in disks.iter().enumerate() {
        for address in &disk.addresses {
            match address {
                ExportAddress::VhostUser(path) => all.devices.push((path.clone(), image)),
                ExportAddress::Ublk(id) => {
                    all.ublk.push(UblkSetup { id: Some(*id), disk: image });
                }
                ExportAddress::Nbd(uri) => {
                    let offer = Offer::new(uri.export.clone(), image);
                    match all.nbd.iter_mut().find(|(address, _)| *address == uri.address) {
                        Some((_, offers)) => offers.push(offer),
                        None => all.nbd.push((uri.address.clone(), vec![offer])),
                    }
                }
            }
        }
    }
    all
}

/// The error, and its byte.
#[derive(Debug)]
struct Wrong {
    at: usize,
    why: String,
}

fn parse(text: &str) -> Result<Config, Wrong> {
    let file: File = toml::from_str(text).map_err(|error| Wrong {
        at: error.span().map_or(0, |span| span.start),
        why: error.message().replace('\n', ", "),
    })?;
    let at = file.server.span().start;
    let server = file.server.into_inner();
    check_server(&server).map_err(|why| Wrong { at, why })?;
    let groups = limits_of_groups(&file.groups)?;
    let mut disks: Vec<ConfiguredDisk> = Vec::new();
    for disk in file.disk {
        let at = disk.span().start;
        let disk = configured(&disk.into_inner(), &groups, &disks);
        let disk = disk.map_err(|why| Wrong { at, why })?;
        disks.push(disk);
    }
    let tls = server.tls(&disks).map_err(|why| Wrong { at, why })?;
    let user = server.user().map_err(|why| Wrong { at, why })?;
    Ok(Config { server, tls, user, disks })
}

fn check_server(server: &ServerOptions) -> Result<(), String> {
    if !(1..=256).contains(&server.workers) || !(1..=256).contains(&server.queues.unwrap_or(1)) {
        return Err("workers and queues are from 1 to 256".into());
    }
    if server.poll_max_us > 1_000_000 {
        return Err("poll-max-us is at most 1000000".into());
    }
    let off = Path::new("off");
    let control = server.control.iter().chain(&server.qmp).map(|TextOf(control)| &control.path);
    let paths = [&server.pid_file, &server.state, &server.tls_certificates, &server.tls_psk];
    paths
        .into_iter()
        .flatten()
        .chain(control)
        .filter(|path| *path != off)
        .try_for_each(|path| check_absolute(path))
}

/// The limits that groups of disks share, by their names.
type Groups<'a> = BTreeMap<&'a str, RateLimits>;

fn limits_of_groups<'a>(
    groups: &'a BTreeMap<String, Spanned<LimitOptions>>,
) -> Result<Groups<'a>, Wrong> {
    let limits = |options: &LimitOptions| match options.limits()? {
        _ if options.group.is_some() => Err("a group is in no other group".to_owned()),
        limits if limits.is_unlimited() => Err("a group has a rate, like iops = 1000".into()),
        limits => Ok(limits),
    };
    let group = |(name, options): (&'a String, &Spanned<LimitOptions>)| {
        let at = options.span().start;
        let limits = limits(options.get_ref()).map_err(|why| Wrong { at, why })?;
        Ok((name.as_str(), limits))
    };
    groups.iter().map(group).collect()
}

/// The limits of a disk, which has those of a group or its own.
fn throttle(throttle: DiskThrottle, groups: &Groups<'_>) -> Result<DiskThrottle, String> {
    let Some(name) = &throttle.group else { return Ok(throttle) };
    if !throttle.limits.is_unlimited() {
        return Err(format!("the limits of a group are in a table [groups.{name}]"));
    }
    match groups.get(name.as_str()) {
        Some(limits) => Ok(DiskThrottle { limits: *limits, ..throttle }),
        None => Err(format!("there is no table [groups.{name}]")),
    }
}

/// A disk that fits those before it.
fn configured(
    options: &DiskOptions,
    groups: &Groups<'_>,
    others: &[ConfiguredDisk],
) -> Result<ConfiguredDisk, String> {
    let mut setup = options.setup()?;
    setup.throttle = setup.throttle.map(|own| throttle(own, groups)).transpose()?;
    if others.iter().any(|other| other.setup.name == setup.name) {
        return Err(format!("two disks are called {:?}; give each its own name", setup.name));
    }
    let mut addresses = Vec::new();
    for text in &options.exports {
        let address = ExportAddress::parse_absolute(text)?;
        if matches!(&address, ExportAddress::Nbd(uri) if matches!(uri.address, Address::Tcp { port: 0, .. }))
        {
            return Err(format!("{text}: a configuration names the port"));
        }
        let before = others.iter().flat_map(|other| &other.addresses).chain(&addresses);
        if before.into_iter().any(|other| *other == address) {
            return Err(format!("{text}: is the address of another export, too"));
        }
        addresses.push(address);
    }
    Ok(ConfiguredDisk { setup, addresses })
}

/// The line and the column of a byte, from 1.
fn place(text: &str, at: usize) -> (usize, usize) {
    let before = text.get(..at).unwrap_or(text);
    let line = before.rsplit('\n').next().unwrap_or_default();
    (before.matches('\n').count() + 1, line.chars().count() + 1)
}

#[cfg(test)]
mod tests {
    use blockhouse_engine::DeviceCommands;

    use super::*;

    fn refused(text: &str) -> String {
        let Wrong { at, why } = parse(text).expect_err("it is wrong");
        let (line, column) = place(text, at);
        format!("{line}:{column}: {why}")
    }

    #[test]
    fn a_file_says_what_the_command_line_can() {
        let text = r#"
            [server]
            control = "/run/c"
            engine = "threads"
            limits = ["stall=5", "clients=7"]
            [[disk]]
            path = "/vm/a.qcow2"
            cache = "writeback"
            exports = ["nbd+unix:///a?socket=/run/s", "/run/a.vu"]
            [[disk]]
            path = "/vm/b.img"
            create = "1G"
            exports = ["nbd+unix:///b?socket=/run/s", "/dev/ublkb3"]
            limits = { group = "g" }
            [groups.g]
            iops = 100
            bps = "1M"
        "#;
        let config = parse(text).expect("it is right");
        let setup = config.setup("/etc/c.toml".into(), false);
        assert_eq!(setup.limits.connections, 7);
        assert_eq!(
            setup.disks.iter().map(|disk| &*disk.name).collect::<Vec<_>>(),
            ["a.qcow2", "b.img"]
        );
        assert_eq!(setup.devices, [("/run/a.vu".into(), 0)]);
        assert_eq!(setup.ublk, [UblkSetup { id: Some(3), disk: 1 }]);
        assert_eq!(setup.loops.commands, DeviceCommands::Allowed);
        let throttle = setup.disks[1].throttle.as_ref().expect("limits");
        assert_eq!(throttle.limits.bps.map(std::num::NonZeroU64::get), Some(1 << 20));
        let [(_, offers)] = &setup.nbd[..] else { panic!("one socket: {:?}", setup.nbd) };
        assert_eq!(offers.iter().map(|offer| offer.image).collect::<Vec<_>>(), [0, 1]);
        assert!(parse("").is_ok(), "disks may come later");
    }

    #[test]
    fn what_is_wrong_is_told_with_its_place() {
        for (text, told) in [
            ("[server]\nworker = 2\n", "2:1: unknown field `worker`"),
            ("[server]\nengine = \"warp\"\n", "2:10: there is no engine 'warp'"),
            ("[server]\nlimits = [\"stall=x\"]\n", "2:11: stall=x: write seconds"),
            ("[server]\nsocket-mode = \"9\"\n", "2:15: write an octal mode, like 0660"),
            ("[server]\nworkers = 0\n", "workers and queues are from 1 to 256"),
            ("[[disk]]\n", "missing field `path`"),
            ("[[disk]]\npath = \"/a\"\ncache = \"x\"\n", "3:9: there is no cache mode 'x'"),
            ("[[disk]]\npath = \"a\"\n", "1:1: a: write the whole path"),
            (
                "[[disk]]\npath = \"/a\"\n[[disk]]\npath = \"/b/a\"\n",
                "3:1: two disks are called \"a\"",
            ),
            ("[[disk]]\npath = \"/a\"\nexports = [\"/s\", \"/s\"]\n", "another export"),
            ("[[disk]]\npath = \"/a\"\nexports = [\"nbd://h:0/\"]\n", "names the port"),
            (
                "[[disk]]\npath = \"/a\"\nlimits = { group = \"g\" }\n",
                "1:1: there is no table [groups.g]",
            ),
            ("[[disk]]\npath = \"/a\"\nlimits = { iops = 0 }\n", "1:1: iops cannot be 0"),
            ("[groups.g]\ngroup = \"h\"\n", "a group is in no other group"),
            ("[groups.g]\n", "a group has a rate"),
            ("[[disk]\n", "1:"),
        ] {
            let error = refused(text);
            assert!(error.contains(told), "{text}: {error}");
        }
    }
}
