//! The command line of qemu-storage-daemon: the commands and devices that its options request.

use std::path::PathBuf;

use blockhouse_config::setup::FirstCommand;
use blockhouse_config::switch;
use clap::{ArgMatches, FromArgMatches};
use serde_json::{Map, Value};

use super::chardev::{self, Chardev};
use super::keyval::{self, Parsed};

/// Arguments of `qemu-storage-daemon`.
#[derive(clap::Args)]
struct Options {
    /// Open a node: [driver=]DRIVER,node-name=NAME,... or the same as JSON. Drivers are those of
    /// 'blockdev-add'.
    #[arg(long, value_name = "OPTIONS")]
    blockdev: Vec<String>,
    /// Serve NBD clients here: addr.type=unix with addr.path=SOCKET, addr.type=inet with
    /// addr.host=HOST and addr.port=PORT, or addr.type=fd with addr.str=N for a socket that is open
    /// as descriptor N; tls-creds=ID for TLS.
    #[arg(long, value_name = "OPTIONS")]
    nbd_server: Vec<String>,
    /// Export a node: nbd or vhost-user-blk, with id=ID and node-name=NAME; writable=on lets
    /// clients write. nbd: name=EXPORT is the export's name; vhost-user-blk: addr.type=unix and
    /// addr.path=SOCKET are the socket.
    #[arg(long, value_name = "OPTIONS")]
    export: Vec<String>,
    /// Make an object: [qom-type=]KIND,id=ID,... of the kind iothread, secret, throttle-group,
    /// tls-creds-x509 or tls-creds-psk.
    #[arg(long, value_name = "OPTIONS")]
    object: Vec<String>,
    /// Make a character device: socket,id=ID,path=SOCKET[,server=on], the same with fd=N for a
    /// socket that is open as descriptor N, or stdio,id=ID.
    #[arg(long, value_name = "OPTIONS")]
    chardev: Vec<String>,
    /// Accept QMP commands at a character device: [chardev=]ID.
    #[arg(long, value_name = "OPTIONS")]
    monitor: Vec<String>,
    /// Continue in the background, once everything listens.
    #[arg(long)]
    daemonize: bool,
    /// Write the process id to this file when everything listens; it is removed at the end.
    #[arg(long, value_name = "FILE")]
    pidfile: Option<PathBuf>,
    /// For QEMU's users; no effect, because there are no trace events here.
    #[arg(short = 'T', long, value_name = "PATTERN")]
    trace: Vec<String>,
    /// Print the version.
    #[arg(short = 'V', long)]
    version: bool,
    /// Set in the process that --daemonize starts.
    #[arg(long, hide = true)]
    in_background: bool,
}

/// Options that are executed in the order of the command line.
const IN_ORDER: [&str; 6] = ["blockdev", "nbd_server", "export", "object", "chardev", "monitor"];

/// The command line.
pub struct Arguments {
    /// The options that are executed in order, each with its argument.
    words: Vec<(&'static str, String)>,
    /// Whether the server continues in a background process.
    pub daemonize: bool,
    /// The file for the process id.
    pub pidfile: Option<PathBuf>,
    /// Whether only the version is requested.
    pub version: bool,
    /// Whether this process is the one in the background.
    pub in_background: bool,
}

impl clap::Args for Arguments {
    fn augment_args(command: clap::Command) -> clap::Command {
        Options::augment_args(command.infer_long_args(true))
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Options::augment_args_for_update(command)
    }
}

impl FromArgMatches for Arguments {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut words = Vec::new();
        for name in IN_ORDER {
            let values = matches.get_many::<String>(name).into_iter().flatten();
            let places = matches.indices_of(name).into_iter().flatten();
            words.extend(places.zip(values).map(|(place, value)| (place, name, value.clone())));
        }
        words.sort();
        let words = words.into_iter().map(|(_, name, value)| (name, value)).collect();
        let options = Options::from_arg_matches(matches)?;
        let Options { daemonize, pidfile, version, in_background, .. } = options;
        Ok(Self { words, daemonize, pidfile, version, in_background })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The commands and devices that the command line requests.
#[derive(Debug, Default)]
pub struct Plan {
    /// Commands of QMP, in the order of their options.
    pub commands: Vec<FirstCommand>,
    /// The character devices of monitors.
    pub monitors: Vec<Chardev>,
    /// The TLS object: its id, its kind, and the folder of its files.
    pub tls: Option<(String, TlsKind, PathBuf)>,
    /// The listening sockets of NBD servers that were passed by number, each with its option.
    pub passed: Vec<(String, i32)>,
    /// The number of iothread objects.
    pub threads: usize,
}

/// The kind of credentials for TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TlsKind {
    /// Certificates.
    X509,
    /// Shared keys.
    Psk,
}

impl Arguments {
    /// The plan for the options.
    ///
    /// # Errors
    /// The mistake in an option, with the option.
    pub fn plan(&self) -> Result<Plan, String> {
        let mut plan = Plan::default();
        let mut devices: Vec<Chardev> = Vec::new();
        for (name, text) in &self.words {
            let said = format!("--{} {text}", name.replace('_', "-"));
            let done = match *name {
                "chardev" => chardev::parse(text).and_then(|device| add(&mut devices, device)),
                "monitor" => monitor(text, &devices).map(|device| plan.monitors.push(device)),
                _ => plan.take(name, text, &said),
            };
            done.map_err(|why| format!("{said}: {why}"))?;
        }
        Ok(plan)
    }
}

fn add(devices: &mut Vec<Chardev>, device: Chardev) -> Result<(), String> {
    if devices.iter().any(|other| other.id == device.id) {
        Err(format!("Chardev with id '{}' already exists", device.id))
    } else {
        devices.push(device);
        Ok(())
    }
}

fn monitor(text: &str, devices: &[Chardev]) -> Result<Chardev, String> {
    let Parsed { mut arguments, .. } = keyval::parse(text, Some("chardev"))?;
    let mut take = |name: &str| match arguments.remove(name) {
        Some(Value::String(text)) => Some(text),
        Some(other) => Some(other.to_string()),
        None => None,
    };
    let name = take("chardev").ok_or("Parameter 'chardev' is missing")?;
    if let Some(mode) = take("mode").filter(|mode| mode != "control") {
        return Err(format!(
            "mode '{mode}' is not possible here: monitors are of the mode 'control'"
        ));
    }
    take("id");
    if take("pretty").is_some_and(|pretty| switch::parse(&pretty) != Some(false)) {
        return Err("'pretty' is not possible here: answers are lines".into());
    }
    if let Some(name) = arguments.keys().next() {
        return Err(format!("Parameter '{name}' is unexpected"));
    }
    let device = devices.iter().find(|device| device.id == name);
    device.cloned().ok_or_else(|| format!("chardev \"{name}\" not found"))
}

impl Plan {
    /// Adds an option that is a QMP command.
    fn take(&mut self, option: &str, text: &str, said: &str) -> Result<(), String> {
        let (name, implied) = match option {
            "blockdev" => ("blockdev-add", Some("driver")),
            "export" => ("block-export-add", Some("type")),
            "object" => ("object-add", Some("qom-type")),
            _ => ("nbd-server-start", None),
        };
        let Parsed { arguments, are_words } = keyval::parse(text, implied)?;
        if name == "object-add" {
            self.note_object(&arguments)?;
        }
        let address = arguments.get("addr").filter(|_| name == "nbd-server-start");
        if let Some(address) = address.filter(|address| address["type"] == "fd")
            && let Some(number) = address["str"].as_str().and_then(|text| text.parse().ok())
        {
            self.passed.push((said.to_owned(), number));
        }
        self.commands.push(FirstCommand { said: said.to_owned(), name, arguments, are_words });
        Ok(())
    }

    /// Records iothread and TLS objects, because threads and credentials must exist before anything
    /// listens.
    fn note_object(&mut self, arguments: &Map<String, Value>) -> Result<(), String> {
        let text = |name: &str| arguments.get(name).and_then(Value::as_str).unwrap_or_default();
        let kind = match text("qom-type") {
            "iothread" => {
                self.threads += 1;
                return Ok(());
            }
            "tls-creds-x509" => TlsKind::X509,
            "tls-creds-psk" => TlsKind::Psk,
            _ => return Ok(()),
        };
        // Credentials of a client are not recorded, because the QMP command reads them.
        if text("endpoint") != "server" {
            return Ok(());
        }
        if self.tls.is_some() {
            return Err("one object has the certificates or keys of all NBD clients here".into());
        }
        if text("dir").is_empty() {
            return Err("Parameter 'dir' is missing".into());
        }
        self.tls = Some((text("id").to_owned(), kind, text("dir").into()));
        Ok(())
    }
}
