//! The settings of a server: the table `server` of a configuration file, or the options of `serve`,
//! with the same names.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use blockhouse_engine::{DEFAULT_POLLING, DeviceCommands, EngineChoice, FixedFiles, IoPoll};
use blockhouse_nbd::uri::{Address, NbdUri, Security};
use blockhouse_nbd::{Limits, SocketPermissions, TlsFiles, TlsMode};
use blockhouse_vhost_user::RegisteredMemory;
use serde::{Deserialize, Deserializer};

use crate::control_socket::ControlSocket;
use crate::limits::{Limit, client_limits};
use crate::metrics_address::MetricsAddress;
use crate::socket_options::{self, SocketMode};
use crate::text_fields::{check_absolute, some_text, text, texts};
use crate::user_options::{self, GroupName, UserIds, UserName};

/// A server.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct ServerConfig {
    /// The control socket.
    #[serde(deserialize_with = "some_text")]
    pub control: Option<ControlSocket>,
    /// The socket of QEMU's monitor protocol. It answers the commands that call only the methods
    /// that the socket allows.
    #[serde(deserialize_with = "some_text")]
    pub qmp: Option<ControlSocket>,
    /// The file that has the process id while the server runs.
    pub pid_file: Option<PathBuf>,
    /// The address of the metrics.
    #[serde(deserialize_with = "some_text")]
    pub metrics: Option<MetricsAddress>,
    /// The state that outlives the process.
    #[serde(deserialize_with = "state")]
    pub state: StateSetup,
    /// The mode of the Unix sockets that the server binds for guests.
    #[serde(deserialize_with = "some_text")]
    pub socket_mode: Option<SocketMode>,
    /// The group of these sockets.
    #[serde(deserialize_with = "some_text")]
    pub socket_group: Option<GroupName>,
    /// How many event loops serve, at least one.
    pub workers: u16,
    /// How many queues a guest may use on a vhost-user-blk device. Left out: one for each
    /// processor.
    pub queues: Option<u16>,
    /// The engine of the loops; auto: the best that the host allows.
    #[serde(deserialize_with = "text")]
    pub engine: EngineChoice,
    /// For how many microseconds a loop busy-polls before it sleeps.
    pub poll_max_us: u32,
    /// Whether open images are registered with io_uring (fixed files).
    pub fixed_files: bool,
    /// Whether completions on images are polled for.
    pub io_poll: bool,
    /// Whether guests' memory is registered with io_uring.
    pub register_memory: bool,
    /// The user to which the process switches once everything is open. Left out: no switch.
    #[serde(deserialize_with = "some_text")]
    pub user: Option<UserName>,
    /// The group to which the process then switches. Left out: the user's.
    #[serde(deserialize_with = "some_text")]
    pub group: Option<GroupName>,
    /// Whether the sandbox confines the process once everything is open.
    pub sandbox: bool,
    /// Folders and files at or below which requests may open disks and sockets in the sandbox,
    /// beside the folders of the configured disks and sockets.
    pub sandbox_allow: Vec<PathBuf>,
    /// The limits of NBD clients.
    #[serde(deserialize_with = "limits")]
    pub limits: Limits,
    /// TLS for NBD clients. Left out: required if there are certificates or keys, otherwise off.
    pub tls: Option<TlsChoice>,
    /// A folder with certificates.
    pub tls_certificates: Option<PathBuf>,
    /// A file of pre-shared keys.
    pub tls_psk: Option<PathBuf>,
    /// Pairs of an export and a client that may use it.
    #[serde(deserialize_with = "allowed")]
    pub tls_allow: Vec<(String, String)>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            control: None,
            qmp: None,
            pid_file: None,
            metrics: None,
            state: StateSetup::Usual,
            socket_mode: None,
            socket_group: None,
            workers: 1,
            queues: None,
            engine: EngineChoice::Auto,
            poll_max_us: DEFAULT_POLLING.as_micros() as u32,
            fixed_files: false,
            io_poll: false,
            register_memory: false,
            user: None,
            group: None,
            sandbox: true,
            sandbox_allow: Vec::new(),
            limits: Limits::default(),
            tls: None,
            tls_certificates: None,
            tls_psk: None,
            tls_allow: Vec::new(),
        }
    }
}

fn state<'de, D: Deserializer<'de>>(from: D) -> Result<StateSetup, D::Error> {
    PathBuf::deserialize(from).map(|path| StateSetup::at(Some(&path)))
}

fn limits<'de, D: Deserializer<'de>>(from: D) -> Result<Limits, D::Error> {
    texts(from).map(|changes: Vec<Limit>| client_limits(&changes))
}

fn allowed<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<(String, String)>, D::Error> {
    struct Allowed((String, String));
    impl FromStr for Allowed {
        type Err = String;

        fn from_str(text: &str) -> Result<Self, String> {
            parse_allowed(text).map(Self)
        }
    }
    let pairs: Vec<Allowed> = texts(from)?;
    Ok(pairs.into_iter().map(|Allowed(pair)| pair).collect())
}

/// The options of loops.
#[derive(Clone, Copy, Debug)]
pub struct LoopOptions {
    /// The engine; auto: the best that the host allows.
    pub engine: EngineChoice,
    /// How long a loop busy-polls before it sleeps.
    pub polling: Duration,
    /// Whether open images are registered with io_uring (fixed files).
    pub fixed_files: FixedFiles,
    /// Whether completions on images are polled for.
    pub io_poll: IoPoll,
    /// Whether rings take commands to devices.
    pub commands: DeviceCommands,
}

/// Where the server keeps the state that outlives its process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StateSetup {
    /// Nowhere.
    Off,
    /// In this directory, which must be usable.
    Dir(PathBuf),
    /// In the usual directory, if that can be used.
    Usual,
}

impl StateSetup {
    /// The meaning of a value of `state`.
    pub fn at(value: Option<&Path>) -> Self {
        match value {
            Some(off) if off == Path::new("off") => Self::Off,
            Some(path) => Self::Dir(path.to_owned()),
            None => Self::Usual,
        }
    }
}

/// Whether NBD clients use TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TlsChoice {
    /// Clients do not use TLS.
    Off,
    /// Clients may use TLS.
    Optional,
    /// Clients must use TLS.
    Required,
}

/// TLS for NBD clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsSetup {
    /// The rule at the sockets that are not in `only`.
    pub mode: TlsMode,
    /// The secrets.
    pub files: TlsFiles,
    /// Pairs of an export and a client that may use it.
    pub allowed: Vec<(String, String)>,
    /// The sockets where every client must use TLS.
    pub only: Vec<Address>,
}

impl TlsSetup {
    /// The rule at a socket.
    pub fn mode_at(&self, address: &Address) -> TlsMode {
        if self.only.contains(address) { TlsMode::Required } else { self.mode }
    }
}

impl ServerConfig {
    /// Checks the values.
    ///
    /// # Errors
    /// A number is out of range, or a path is relative.
    pub fn check(&self) -> Result<(), String> {
        if !(1..=256).contains(&self.workers) || !(1..=256).contains(&self.queues.unwrap_or(1)) {
            return Err("workers and queues are from 1 to 256".into());
        }
        if self.poll_max_us > 1_000_000 {
            return Err("poll-max-us is at most 1000000".into());
        }
        let state = match &self.state {
            StateSetup::Dir(path) => Some(path),
            StateSetup::Off | StateSetup::Usual => None,
        };
        let control = self.control.iter().chain(&self.qmp).map(|control| &control.path);
        let paths = [&self.pid_file, &self.tls_certificates, &self.tls_psk];
        paths
            .into_iter()
            .flatten()
            .chain(state)
            .chain(control)
            .filter(|path| *path != Path::new("off"))
            .try_for_each(|path| check_absolute(path))
    }

    /// How many queues a guest may use on a vhost-user-blk device.
    pub fn queues(&self) -> u16 {
        let processors = || std::thread::available_parallelism().map_or(1, |count| count.get());
        self.queues.unwrap_or_else(|| processors().min(256) as u16)
    }

    /// The users that may connect to the Unix sockets that the server binds for guests.
    pub fn permissions(&self) -> SocketPermissions {
        socket_options::permissions(self.socket_mode, self.socket_group)
    }

    /// Whether guests' memory is registered with io_uring.
    pub fn registered_memory(&self) -> RegisteredMemory {
        if self.register_memory { RegisteredMemory::On } else { RegisteredMemory::Off }
    }

    /// The user that the server switches to.
    ///
    /// # Errors
    /// A group without a user, and a user without a group.
    pub fn user(&self) -> Result<Option<UserIds>, String> {
        user_options::ids(self.user, self.group)
    }

    /// The options of the event loops, with or without commands to devices.
    pub(crate) fn loops(&self, commands: DeviceCommands) -> LoopOptions {
        LoopOptions {
            engine: self.engine,
            polling: Duration::from_micros(self.poll_max_us.into()),
            fixed_files: if self.fixed_files { FixedFiles::On } else { FixedFiles::Off },
            io_poll: if self.io_poll { IoPoll::On } else { IoPoll::Off },
            commands,
        }
    }

    /// The TLS setup for sockets of these URIs. `None`: no TLS.
    ///
    /// # Errors
    /// Two settings contradict each other. The error names the options.
    pub fn tls(&self, uris: &[NbdUri]) -> Result<Option<TlsSetup>, String> {
        let only = addresses(uris, Security::Tls);
        let plain = addresses(uris, Security::Plain);
        if let Some(uri) =
            uris.iter().find(|uri| plain.contains(&uri.address) && only.contains(&uri.address))
        {
            return Err(format!(
                "{uri}: the same socket is named with TLS (nbds) and without (nbd); use one"
            ));
        }
        let files = match (&self.tls_certificates, &self.tls_psk) {
            (Some(_), Some(_)) => return Err("tls-certificates and tls-psk: use one".into()),
            (Some(folder), None) => Some(TlsFiles::Certificates(folder.clone())),
            (None, file) => file.clone().map(TlsFiles::Psk),
        };
        let Some(files) = files.filter(|_| self.tls != Some(TlsChoice::Off)) else {
            return self.check_unused(!only.is_empty()).map(|()| None);
        };
        let mode = match self.tls {
            Some(TlsChoice::Optional) => TlsMode::Optional,
            _ => TlsMode::Required,
        };
        Ok(Some(TlsSetup { mode, files, allowed: self.tls_allow.clone(), only }))
    }

    /// Refuses settings that need TLS, for a server without TLS.
    fn check_unused(&self, has_tls_uri: bool) -> Result<(), String> {
        let needs = match self.tls {
            _ if has_tls_uri => "an nbds URI",
            Some(TlsChoice::Optional | TlsChoice::Required) => "--tls",
            _ if !self.tls_allow.is_empty() => "--tls-allow",
            _ => return Ok(()),
        };
        Err(match self.tls {
            Some(TlsChoice::Off) => format!("{needs} needs TLS; leave --tls off out"),
            _ => format!(
                "{needs} needs TLS to be set up: add --tls-certificates DIR or --tls-psk FILE"
            ),
        })
    }
}

/// Reads `EXPORT=NAME`: a client that may use an export.
///
/// # Errors
/// There is no `=`, or no name.
pub fn parse_allowed(text: &str) -> Result<(String, String), String> {
    match text.rsplit_once('=') {
        Some((export, name)) if !name.is_empty() => Ok((export.into(), name.into())),
        _ => Err("say EXPORT=NAME; the empty export is =NAME".into()),
    }
}

fn addresses(uris: &[NbdUri], security: Security) -> Vec<Address> {
    let matching = uris.iter().filter(|uri| uri.security == security);
    matching.map(|uri| uri.address.clone()).collect()
}
