//! The arguments of the command line, and their meaning on this machine.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use lab_tools::build::{Profile, build_binary};
use lab_tools::workspace::Workspace;
use tempfile::TempDir;

use crate::interrupt::Interrupt;
use crate::plain_server;
use crate::rows::{Export, Row};
use crate::servers::{self, Kind, Programs};
use crate::storage;

/// The rows to compare, and their length.
#[derive(Args)]
pub struct Options {
    /// Format of the image that is compared
    #[arg(long, value_enum, default_value = "raw")]
    pub format: servers::Format,
    /// Compare saving and loading the state of a machine of --size instead, on --dir
    #[arg(long)]
    pub vmstate: bool,
    /// Compare how figures change when queues, the disk, the chain of backing files, snapshots or
    /// the extents of a request grow, on tmpfs
    #[arg(long)]
    pub growth: bool,
    /// Measure the rate of writes with a bitmap, and while a backup runs, on a disk of --format
    #[arg(long)]
    pub backup: bool,
    /// Measure the rate of writes during a mirror to a file, to another server and to each
    /// --mirror-target, and the pause of the guest when the mirror completes
    #[arg(long)]
    pub mirror: bool,
    /// Mirror to this location, too: a URI such as rbd:POOL/IMAGE, as long as the image. Its
    /// content is lost
    #[arg(long, value_name = "LOCATION", requires = "mirror")]
    pub mirror_target: Vec<String>,
    /// Whether writes wait for their copy: auto, background or write-blocking
    #[arg(long, value_name = "MODE", default_value = "auto", requires = "mirror")]
    pub mirror_mode: String,
    /// Measure the pause of a guest that writes while its disk is forked, a hundred times a round,
    /// compared with blockdev-snapshot of qemu-storage-daemon. The disk has 64 GiB, and --size of
    /// it was written just before, without a flush
    #[arg(long)]
    pub forks: bool,
    /// Compare with qemu-storage-daemon where the image is on another server: on NBD servers that
    /// are started for it, or at these locations (rbd:POOL/IMAGE?conf=FILE,
    /// nbd+unix:///NAME?socket=PATH). Their content is lost
    #[arg(long, value_name = "LOCATION", num_args = 0..)]
    pub remote: Option<Vec<String>>,
    /// Measure the gain and the cost of busy-polling if a client pauses between its requests,
    /// compared with qemu-nbd
    #[arg(long)]
    pub gaps: bool,
    /// Compare with qemu-img how images of the shapes that clouds publish are converted, in --dir;
    /// the copies have to be equal
    #[arg(long)]
    pub images: bool,
    /// Compare reads over TLS, by nbdcopy, with qemu-nbd
    #[arg(long)]
    pub tls: bool,
    /// Measure the time from the start of a server until it is ready, with its sandbox and without
    #[arg(long)]
    pub start: bool,
    /// 3 rounds of 1 second instead of 5 rounds of 3 seconds
    #[arg(long)]
    pub quick: bool,
    /// Seconds that count in each measurement
    #[arg(long, value_name = "SECONDS")]
    pub seconds: Option<f64>,
    /// Measurements of each server in each row
    #[arg(long, value_name = "COUNT")]
    pub rounds: Option<usize>,
    /// The storages of the image
    #[arg(long, value_enum, num_args = 1.., default_values = ["tmpfs", "loop", "ext4"])]
    pub storage: Vec<storage::Kind>,
    /// Exports to compare
    #[arg(long, value_enum, num_args = 1.., default_values = ["nbd"])]
    pub export: Vec<Export>,
    /// Rows of these names, or whose names contain one of these
    #[arg(long, num_args = 1.., value_name = "ROW")]
    pub rows: Vec<String>,
    /// Servers to start; without it, all
    #[arg(long, value_enum, num_args = 1..)]
    pub servers: Vec<Kind>,
    /// Microseconds for which the vhost-user client polls for replies before it sleeps
    #[arg(long, default_value_t = 0, value_name = "MICROSECONDS")]
    pub poll_time: u64,
    /// Size of the image in MiB; left out, 1024, of --mirror 4096, of --forks 2048
    #[arg(long, value_name = "MIB")]
    pub size: Option<u64>,
    /// Folder for the image of storage ext4; without it, the target folder
    #[arg(long)]
    pub dir: Option<PathBuf>,
    /// Our binary; without it, a build of this checkout as packages have it
    #[arg(long)]
    pub binary: Option<PathBuf>,
    /// Another build of our binary to compare it with, as server "baseline"; without --servers,
    /// these two alone
    #[arg(long, value_name = "BINARY")]
    pub baseline: Option<PathBuf>,
    /// Further arguments of our serve, as one string
    #[arg(long, default_value = "", value_name = "ARGS", allow_hyphen_values = true)]
    pub serve_args: String,
    /// Arguments of the baseline's serve, instead of --serve-args
    #[arg(long, value_name = "ARGS", allow_hyphen_values = true, requires = "baseline")]
    pub baseline_args: Option<String>,
    /// Start the servers of a row once and load them in turn, so that many short rounds cost
    /// little. A short change of the machine's speed then affects all servers. The servers share
    /// the image: choose rows that read, and read-only servers (--serve-args=--read-only)
    #[arg(long)]
    pub alternate: bool,
    /// Write the report as Markdown, too
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Write all figures as JSON, too
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

impl Options {
    /// Size of the image in MiB.
    pub fn mebibytes(&self) -> u64 {
        let usual = match self {
            Self { mirror: true, .. } => 4096,
            Self { forks: true, .. } => 2048,
            _ => 1024,
        };
        self.size.unwrap_or(usual)
    }

    /// Size of the image in bytes.
    pub fn bytes(&self) -> Result<u64> {
        self.mebibytes().checked_mul(1 << 20).context("--size is beyond 64 bits")
    }

    /// Refuses the options that write a report to a file: the comparison `option` only prints.
    pub fn refuse_files(&self, option: &str) -> Result<()> {
        ensure!(
            self.markdown.is_none() && self.json.is_none(),
            "{option} prints its figures, and writes no file: leave --markdown and --json out"
        );
        Ok(())
    }

    /// Writes the report to the files that the options name.
    pub fn write_files(
        &self,
        markdown: impl FnOnce() -> Result<String>,
        json: impl FnOnce() -> Result<String>,
    ) -> Result<()> {
        if let Some(file) = &self.markdown {
            write(file, &markdown()?)?;
        }
        if let Some(file) = &self.json {
            write(file, &json()?)?;
        }
        Ok(())
    }
}

/// The choices of [`Options`], resolved.
pub struct Config {
    pub rows: Vec<Row>,
    pub servers: Vec<Kind>,
    pub rounds: usize,
    pub duration: Duration,
    /// Whether the servers of a row run for all its rounds.
    pub alternate: bool,
    pub programs: Programs,
    pub folder: TempDir,
    pub interrupt: Interrupt,
    /// For how long the vhost-user client polls for replies before it sleeps.
    pub poll_time: Duration,
    /// A number that marks the writes of one measurement.
    pub generation: u64,
}

impl Config {
    /// Resolves `options`. `all` are the servers that are used if `options` name none.
    pub fn new(
        workspace: &Workspace,
        options: &Options,
        rows: Vec<Row>,
        all: &[Kind],
    ) -> Result<Self> {
        let (rounds, seconds) = if options.quick { (3, 1.0) } else { (5, 3.0) };
        let rounds = options.rounds.unwrap_or(rounds);
        let seconds = options.seconds.unwrap_or(seconds);
        ensure!(rounds > 0 && seconds > 0.0, "no rounds or no seconds measure nothing");
        let servers = match (options.servers.as_slice(), &options.baseline) {
            ([], None) => all.to_vec(),
            ([], Some(_)) => vec![Kind::Blockhouse, Kind::Baseline],
            (chosen, _) => chosen.to_vec(),
        };
        let takes_part = servers.contains(&Kind::Baseline);
        ensure!(
            takes_part == options.baseline.is_some(),
            "--baseline names the binary of the server \"baseline\": give both, or --baseline alone"
        );
        let ours = servers.iter().any(|kind| kind.is_ours());
        let blockhouse = match &options.binary {
            Some(binary) => binary.clone(),
            None if ours => build_binary(workspace, Profile::Dist)?,
            None => PathBuf::new(),
        };
        let folder = tempfile::Builder::new()
            .prefix("blockhouse-compare-")
            .tempdir()
            .context("cannot make a temporary folder")?;
        let is_plain = |kind: &Kind| matches!(kind, Kind::PlainC | Kind::PlainCCached);
        let plain_server = if servers.iter().any(is_plain) {
            plain_server::build(folder.path())?
        } else {
            PathBuf::new()
        };
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect();
        let baseline_args = options.baseline_args.as_ref().unwrap_or(&options.serve_args);
        Ok(Self {
            rows,
            servers,
            rounds,
            duration: Duration::try_from_secs_f64(seconds).context("bad --seconds")?,
            alternate: options.alternate,
            programs: Programs {
                blockhouse,
                baseline: options.baseline.clone().unwrap_or_default(),
                serve_args: words(&options.serve_args),
                peer_args: Vec::new(),
                baseline_args: words(baseline_args),
                own: std::env::current_exe().context("cannot find this program")?,
                plain_server,
            },
            folder,
            interrupt: Interrupt::install()?,
            poll_time: Duration::from_micros(options.poll_time),
            generation: 0,
        })
    }
}

impl Config {
    /// As [`new`](Self::new), for the comparison `option`, which prints the figures of our own
    /// server alone.
    pub fn of_blockhouse(workspace: &Workspace, options: &Options, option: &str) -> Result<Self> {
        options.refuse_files(option)?;
        let config = Self::new(workspace, options, Vec::new(), &[Kind::Blockhouse])?;
        let is_alone = config.servers == [Kind::Blockhouse];
        ensure!(is_alone, "{option} measures the server blockhouse alone");
        Ok(config)
    }

    /// As [`new`](Self::new), for a comparison of servers of qcow2 images.
    pub fn of_qcow2(workspace: &Workspace, options: &Options, all: &[Kind]) -> Result<Self> {
        let config = Self::new(workspace, options, Vec::new(), all)?;
        for kind in &config.servers {
            let is_known = *kind == Kind::Baseline || Kind::QCOW2.contains(kind);
            let name = kind.name();
            ensure!(is_known, "{name} does not serve qcow2 images: choose other --servers");
        }
        Ok(config)
    }
}

/// Writes a report.
pub fn write(file: &PathBuf, text: &str) -> Result<()> {
    std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}

/// The rows whose name is one of `wanted`, or contains one of `wanted` that is no row's full name.
/// All rows if `wanted` is empty.
pub fn chosen<R: Copy>(
    rows: &[R],
    name: fn(&R) -> &'static str,
    wanted: &[String],
) -> Result<Vec<R>> {
    let is_name = |part: &str| rows.iter().any(|row| name(row) == part);
    let fits =
        |row: &R, part: &str| name(row) == part || !is_name(part) && name(row).contains(part);
    let is_wanted = |row: &&R| wanted.is_empty() || wanted.iter().any(|part| fits(row, part));
    let chosen: Vec<R> = rows.iter().filter(is_wanted).copied().collect();
    let names = || rows.iter().map(name).collect::<Vec<_>>().join(" ");
    ensure!(!chosen.is_empty(), "no row is called {}; there are: {}", wanted.join(" "), names());
    Ok(chosen)
}
