//! `blockhouse ctl SOCKET`: short commands to a running server.
//!
//! A command calls one or a few methods of docs/control.md; `call` calls any method. Results are
//! tables, or with `--json` the server's answer.

mod backup;
mod bitmap;
mod fork;
mod params;
mod tables;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use backup::BackupAction;
use bitmap::BitmapAction;
use blockhouse_config::limits::LimitsConfig;
use blockhouse_config::size::{self, NewSize};
use blockhouse_config::switch::on_or_off;
use blockhouse_daemon::control::{Connection, RpcError};
use fork::Fork;
use params::{absolute, absolute_image, add_given};
use serde_json::{Map, Value, json};

use crate::block_size_args::BlockSizeArgs;
use crate::hold_args::HoldArgs;
use crate::output;
use crate::side_file_args::SideFileArgs;

/// Arguments of `ctl`.
#[derive(clap::Args)]
pub struct Arguments {
    /// The server's control socket, as given to its --control.
    socket: PathBuf,
    /// Print the server's answer as JSON.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// List the open disks.
    Disks,
    /// List the exports and their addresses.
    Exports,
    /// Open a disk.
    Open(Box<Open>),
    /// Flush a disk and close it.
    Close {
        /// The disk's name.
        disk: String,
        /// Remove its exports first, which disconnects their clients.
        #[arg(long)]
        force: bool,
    },
    /// Serve a disk at an address.
    Export {
        /// The disk's name.
        disk: String,
        /// An NBD URI, or the path of a vhost-user-blk socket.
        address: String,
        /// Refuse all changes through this export. Other exports may still change the disk.
        #[arg(long, short)]
        read_only: bool,
    },
    /// Stop serving a disk at an address, and disconnect its clients there.
    Unexport {
        /// The address, as `exports` shows it.
        address: String,
    },
    /// Make a disk read-only while it is served, or writable again.
    ReadOnly {
        /// The disk's name.
        disk: String,
        /// on: refuse changes, once changes in flight are complete and durable; off: allow changes
        /// again.
        #[arg(default_value = "on", value_parser = on_or_off, action = clap::ArgAction::Set)]
        switch: bool,
    },
    /// Report when the host has less free space than this for a disk (serve --threshold).
    Threshold {
        /// The disk's name.
        disk: String,
        /// Bytes (10G), a percentage of the total space (10%), or off.
        threshold: String,
    },
    /// Resize a disk, and notify its guests.
    Resize {
        /// The disk's name.
        disk: String,
        /// The new size: 512, 64K, 20G, 1T; or the change of it: +10G, -10G.
        #[arg(value_parser = size::parse_new, allow_hyphen_values = true)]
        size: NewSize,
        /// Allow a smaller size. The data past the new end is lost. The disk must have no exports.
        #[arg(long)]
        shrink: bool,
    },
    /// Check for more space: adopt the new size of a raw image or device that has grown, and retry
    /// held writes (serve --on-full hold).
    Refresh {
        /// The disk's name.
        disk: String,
    },
    /// Show the rate limits of disks: operations and bytes a second.
    Limits {
        /// The disk's name. Left out: all.
        disk: Option<String>,
    },
    /// Give a disk other limits: iops=500,bps=100M and the other keys of serve --limit, or off.
    Limit {
        /// The disk's name.
        disk: String,
        /// The new limits; a rate that is left out is unlimited. With group=NAME the disk joins
        /// that group, and rates that are given become the group's limits.
        #[arg(value_name = "KEY=VALUE,...|off")]
        limits: LimitsConfig,
    },
    /// Give a group of disks other limits.
    LimitGroup {
        /// The group's name.
        group: String,
        /// The new limits; a rate that is left out is unlimited.
        #[arg(value_name = "KEY=VALUE,...|off")]
        limits: LimitsConfig,
    },
    /// List, take, delete and rename the snapshots inside a disk's image.
    Snapshot {
        #[command(subcommand)]
        action: SnapshotAction,
    },
    /// Fork disks at one moment. Each disk continues in a new qcow2 overlay, and its former image
    /// becomes a read-only backing file. New disks can use that file, too. A disk in Ceph keeps its
    /// image; the new disks are clones of it.
    Fork(Fork),
    /// Return a disk to its state at its last fork. Everything written since is lost, and its
    /// overlay is removed.
    Rollback {
        /// The disk's name.
        disk: String,
        /// Roll back even while clients use the disk. Their caches then no longer match the disk.
        #[arg(long)]
        force: bool,
    },
    /// List, add, remove and change the bitmaps of a disk. A bitmap records what changes after it
    /// is added or cleared.
    Bitmap {
        #[command(subcommand)]
        action: BitmapAction,
    },
    /// Freeze disks at one moment, for programs that copy them while their guests run.
    Backup {
        #[command(subcommand)]
        action: BackupAction,
    },
    /// Show the statistics of disks since they were opened.
    Stats {
        /// The disk's name. Left out: all.
        disk: Option<String>,
    },
    /// List the jobs and their progress.
    Jobs,
    /// Copy a disk to another image while its guest runs: a job, which `job NAME complete`
    /// completes.
    Mirror(Mirror),
    /// Copy the data of a disk's image into its backing file while its guest runs: a job, which
    /// `job NAME complete` completes. Then the guest continues on the backing file. Other images
    /// over the same backing file become invalid. With `--top`: merge layers further down the
    /// chain; the guest stays on the disk's image.
    Commit(Commit),
    /// Copy into a disk's image the data that it still reads from its backing file, while the guest
    /// runs. Then detach the backing file.
    Stream(Stream),
    /// Complete, cancel, pause, resume or limit a job.
    Job {
        /// The job's name, as `jobs` shows it.
        name: String,
        #[command(subcommand)]
        action: JobAction,
    },
    /// Print events, a line each, until Ctrl-C.
    Events {
        /// Which events: disk.opened, client.came and so on. Left out: all.
        events: Vec<String>,
    },
    /// Make the server read its configuration again (serve --config).
    Reload,
    /// Show the server's version and capabilities.
    Version,
    /// Call any method, and print its result as JSON.
    Call {
        /// The method: noun.verb.
        method: String,
        /// The parameters: an object.
        #[arg(default_value = "{}", value_parser = parse_object)]
        params: Map<String, Value>,
    },
}

/// A disk to be opened.
#[derive(clap::Args)]
struct Open {
    /// The image.
    path: PathBuf,
    /// The disk's name, which no other disk may have. Left out: the name of the image's file.
    #[arg(long)]
    name: Option<String>,
    /// The image's format; left out, the file's name decides (docs/formats.md; otherwise raw).
    #[arg(long, short)]
    format: Option<String>,
    /// The host's cache: none, writeback, writethrough, directsync or unsafe.
    #[arg(long)]
    cache: Option<String>,
    /// Refuse all writes.
    #[arg(long, short)]
    read_only: bool,
    /// The effect of a guest's discards: unmap or ignore.
    #[arg(long)]
    discard: Option<String>,
    /// Convert writes of zeros to zero writes: off, on, or unmap (which also frees their space).
    #[arg(long)]
    detect_zeroes: Option<String>,
    #[command(flatten)]
    block_sizes: BlockSizeArgs,
    #[command(flatten)]
    hold: HoldArgs,
    #[command(flatten)]
    side_file: SideFileArgs,
    /// Store data that is read from the backing file in the image.
    #[arg(long)]
    copy_on_read: bool,
    /// Copy the backing file's data into the image in the background, at this many bytes a second
    /// (20M; 0: no limit). Then detach the backing file.
    #[arg(long, value_name = "RATE", value_parser = size::parse)]
    prefetch: Option<u64>,
    /// Serve the disk as it was when this snapshot was taken, for reading only.
    #[arg(long)]
    snapshot: Option<String>,
    /// Create the image with this size if it does not exist (512, 64K, 20G, 1T).
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    create: Option<u64>,
    /// Offer this persistent bitmap of the image to NBD clients (qemu:dirty-bitmap:NAME). May be
    /// repeated.
    #[arg(id = "bitmap", long = "bitmap", short = 'B', value_name = "NAME")]
    bitmaps: Vec<String>,
    /// The disk's rate limits: iops=500,bps=100M and the other keys of serve --limit.
    #[arg(long, value_name = "KEY=VALUE,...")]
    limit: Option<LimitsConfig>,
    /// Serve the disk here: an NBD URI, or the path of a vhost-user-blk socket. May be repeated.
    #[arg(long = "export", value_name = "ADDRESS")]
    exports: Vec<String>,
}

/// A mirror to be started.
#[derive(clap::Args)]
struct Mirror {
    /// The disk's name.
    disk: String,
    /// The target: a path, or the URI of an export of another server. A missing file is created.
    target: PathBuf,
    /// The target's format; left out, a file's name decides (.qcow2, otherwise raw).
    #[arg(long, short)]
    format: Option<String>,
    /// Overwrite an existing target: all its data is lost.
    #[arg(long)]
    overwrite: bool,
    #[command(flatten)]
    copying: Copying,
}

/// The mode, speed and name of a job that copies a disk.
#[derive(clap::Args)]
struct Copying {
    /// Whether the guest's writes wait for their copy: auto (only if the copy does not converge
    /// otherwise), background (never) or write-blocking (from the start).
    #[arg(long)]
    mode: Option<String>,
    #[command(flatten)]
    background: Background,
}

/// The speed of a job in the background, and its name.
#[derive(clap::Args)]
struct Background {
    /// Maximum bytes per second in the background: 100M, 1G; 0: no limit.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    speed: Option<u64>,
    /// The new job's name, which no other job may have. Left out: the server chooses one.
    #[arg(long, value_name = "NAME")]
    job: Option<String>,
}

/// A commit to be started.
#[derive(clap::Args)]
struct Commit {
    /// The disk's name.
    disk: String,
    /// Merge the layers from this backing file down to the base into the base, which replaces them.
    /// The guest stays on the disk's image. The job completes by itself.
    #[arg(long, value_name = "FILE")]
    top: Option<PathBuf>,
    /// The backing file to merge into. Left out: that of the disk's image; with `--top` the last
    /// one of the chain.
    #[arg(long, value_name = "FILE")]
    base: Option<PathBuf>,
    /// Remove the files that are no longer part of the chain.
    #[arg(long)]
    delete: bool,
    /// Allow the data of an encrypted image to be stored unencrypted in the backing file.
    #[arg(long)]
    decrypt: bool,
    #[command(flatten)]
    copying: Copying,
}

/// A stream to be started.
#[derive(clap::Args)]
struct Stream {
    /// The disk's name.
    disk: String,
    /// Keep this backing file, further down the chain. Copy only the data of the layers above it,
    /// then drop those layers.
    #[arg(long, value_name = "FILE")]
    base: Option<PathBuf>,
    /// Remove the files that are no longer part of the chain.
    #[arg(long, requires = "base")]
    delete: bool,
    #[command(flatten)]
    background: Background,
}

#[derive(clap::Subcommand)]
enum JobAction {
    /// Wait until the job is ready, then complete it: the guest continues on the target.
    Complete {
        /// The guest continues on another host: this disk then refuses all changes.
        #[arg(long)]
        hand_over: bool,
        /// The guest stays on the disk: the mirror's target is a copy of it at this moment.
        #[arg(long, conflicts_with = "hand_over")]
        copy: bool,
    },
    /// Cancel the job.
    Cancel,
    /// Stop copying in the background.
    Pause,
    /// Continue copying.
    Resume,
    /// Limit the rate of copying in the background.
    Speed {
        /// Maximum bytes per second: 100M, 1G; 0: no limit.
        #[arg(value_parser = size::parse)]
        speed: u64,
    },
    /// Remove an ended job from the list.
    Dismiss,
}

#[derive(clap::Subcommand)]
enum SnapshotAction {
    /// List the snapshots.
    List {
        /// The disk's name.
        disk: String,
    },
    /// Take a snapshot while the disk's guests continue.
    Create {
        /// The disk's name.
        disk: String,
        /// The new name: 1 to 255 bytes, which no other snapshot of the disk has.
        name: String,
    },
    /// Delete a snapshot.
    Delete {
        /// The disk's name.
        disk: String,
        /// The snapshot's name, or its id.
        name: String,
    },
    /// Give a snapshot another name.
    Rename {
        /// The disk's name.
        disk: String,
        /// The snapshot's name, or its id.
        name: String,
        /// The new name.
        new_name: String,
    },
}

/// Runs the command.
pub fn run(arguments: Arguments) -> Result<()> {
    let Arguments { socket, json, action } = arguments;
    let mut server = Connection::open(&socket)?;
    if let Action::Events { events } = action {
        return follow(&mut server, events, json);
    }
    let is_call = matches!(action, Action::Call { .. });
    let (method, params) = action.request(&mut server)?;
    let result = server.call(&method, params);
    let result = result.map_err(|error| if is_call { error } else { in_words_of_people(error) })?;
    let text = if json || is_call { format!("{result:#}") } else { tables::show(&method, &result) };
    if !text.is_empty() {
        output::print(&text)?;
    }
    let failed = result["failed"].as_array().map_or(0, Vec::len);
    if method == "server.reload" && !is_call && failed > 0 {
        bail!("changes failed: {failed}; all others were made");
    }
    Ok(())
}

/// The server's error, with the names of `ctl` commands in place of the names of methods.
fn in_words_of_people(error: anyhow::Error) -> anyhow::Error {
    const WORDS: [(&str, &str); 7] = [
        ("'disk.list'", "'ctl SOCKET disks'"),
        ("'export.list'", "'ctl SOCKET exports'"),
        ("'job.list'", "'ctl SOCKET jobs'"),
        ("'backup.list'", "'ctl SOCKET backup list'"),
        ("'limit.get'", "'ctl SOCKET limits'"),
        ("'bitmap.list'", "'ctl SOCKET bitmap list DISK'"),
        ("'server.version'", "'ctl SOCKET version'"),
    ];
    let Some(RpcError { code, message }) = error.downcast_ref() else { return error };
    let replace = |text: String, (method, words): &(&str, &str)| text.replace(method, words);
    let message = WORDS.iter().fold(message.clone(), replace);
    // The code decides the exit status.
    RpcError { code: *code, message }.into()
}

/// Prints events until the server ends.
fn follow(server: &mut Connection, events: Vec<String>, json: bool) -> Result<()> {
    let wanted = if events.is_empty() { Value::Null } else { json!(events) };
    server.call("event.subscribe", json!({ "events": wanted }))?;
    loop {
        let event = server.next_event()?;
        output::print_of_stream(&if json { event.to_string() } else { tables::event(&event) })?;
    }
}

impl Action {
    /// The method and its parameters.
    fn request(self, server: &mut Connection) -> Result<(String, Value)> {
        let (method, params) = match self {
            Self::Disks => ("disk.list", json!({})),
            Self::Exports => ("export.list", json!({})),
            Self::Open(open) => ("disk.open", open.params()?),
            Self::Close { disk, force } => ("disk.close", json!({ "disk": disk, "force": force })),
            Self::Export { disk, address, read_only } => {
                tell_of_kind(&address);
                let mut params = json!({ "disk": disk, "export": absolute_export(&address)? });
                // Older servers refuse this parameter, so it is sent only if needed.
                if read_only {
                    params["read-only"] = true.into();
                }
                ("export.add", params)
            }
            Self::Unexport { address } => ("export.remove", json!({ "export": address })),
            Self::ReadOnly { disk, switch } => {
                ("disk.set", json!({ "disk": disk, "read-only": switch }))
            }
            Self::Threshold { disk, threshold } => {
                ("disk.set", json!({ "disk": disk, "threshold": threshold }))
            }
            Self::Resize { disk, size, shrink } => {
                let size = new_size(server, &disk, size)?;
                ("disk.resize", json!({ "disk": disk, "size": size, "shrink": shrink }))
            }
            Self::Refresh { disk } => ("disk.refresh", json!({ "disk": disk })),
            Self::Limits { disk } => ("limit.get", json!({ "disk": disk })),
            Self::Limit { disk, limits } => {
                ("limit.set", json!({ "disk": disk, "limits": limits }))
            }
            Self::LimitGroup { group, limits } => {
                ("limit.set", json!({ "group": group, "limits": limits }))
            }
            Self::Snapshot { action } => action.request(),
            Self::Fork(fork) => ("disk.fork", fork.params()?),
            Self::Rollback { disk, force } => {
                ("disk.rollback", json!({ "disk": disk, "force": force }))
            }
            Self::Bitmap { action } => action.request(),
            Self::Backup { action } => action.request()?,
            Self::Stats { disk } => ("disk.stats", json!({ "disk": disk })),
            Self::Jobs => ("job.list", json!({})),
            Self::Mirror(mirror) => ("job.start", mirror.params()?),
            Self::Commit(commit) => ("job.start", commit.params()?),
            Self::Stream(stream) => ("job.start", stream.params()?),
            Self::Job { name, action } => action.request(&name),
            Self::Events { events } => ("event.subscribe", json!({ "events": events })),
            Self::Reload => ("server.reload", json!({})),
            Self::Version => ("server.version", json!({})),
            Self::Call { method, params } => return Ok((method, Value::Object(params))),
        };
        Ok((method.to_owned(), params))
    }
}

impl SnapshotAction {
    fn request(self) -> (&'static str, Value) {
        match self {
            Self::List { disk } => ("snapshot.list", json!({ "disk": disk })),
            Self::Create { disk, name } => {
                ("snapshot.create", json!({ "disk": disk, "name": name }))
            }
            Self::Delete { disk, name } => {
                ("snapshot.delete", json!({ "disk": disk, "name": name }))
            }
            Self::Rename { disk, name, new_name } => {
                ("snapshot.rename", json!({ "disk": disk, "name": name, "new-name": new_name }))
            }
        }
    }
}

impl JobAction {
    fn request(self, job: &str) -> (&'static str, Value) {
        match self {
            Self::Complete { hand_over, copy } => {
                ("job.complete", json!({ "job": job, "hand-over": hand_over, "copy": copy }))
            }
            Self::Cancel => ("job.cancel", json!({ "job": job })),
            Self::Pause => ("job.pause", json!({ "job": job })),
            Self::Resume => ("job.resume", json!({ "job": job })),
            Self::Speed { speed } => ("job.set-speed", json!({ "job": job, "speed": speed })),
            Self::Dismiss => ("job.dismiss", json!({ "job": job })),
        }
    }
}

impl Mirror {
    fn params(self) -> Result<Value> {
        let target = absolute_image(&self.target)?;
        let mut params = json!({
            "kind": "mirror",
            "disk": self.disk,
            "target": target,
            "overwrite": self.overwrite,
        });
        add_given(&mut params, [("format", self.format.map(Value::from))]);
        self.copying.add_to(&mut params);
        Ok(params)
    }
}

impl Copying {
    fn add_to(self, params: &mut Value) {
        add_given(params, [("mode", self.mode.map(Value::from))]);
        self.background.add_to(params);
    }
}

impl Background {
    fn add_to(self, params: &mut Value) {
        let given = [("speed", self.speed.map(Value::from)), ("job", self.job.map(Value::from))];
        add_given(params, given);
    }
}

impl Commit {
    fn params(self) -> Result<Value> {
        let mut params = json!({ "kind": "commit", "disk": self.disk, "decrypt": self.decrypt });
        let image = |path: Option<PathBuf>| path.as_deref().map(absolute_image).transpose();
        let (top, base) = (image(self.top)?, image(self.base)?);
        let delete = self.delete.then_some(json!(true));
        let given = [("top", top.map(|top| json!(top))), ("base", base.map(|base| json!(base)))];
        add_given(&mut params, given);
        add_given(&mut params, [("delete", delete)]);
        self.copying.add_to(&mut params);
        Ok(params)
    }
}

impl Stream {
    fn params(self) -> Result<Value> {
        let base = self.base.as_deref().map(absolute_image).transpose()?;
        let mut params = json!({ "kind": "stream", "disk": self.disk });
        let delete = self.delete.then_some(json!(true));
        add_given(&mut params, [("base", base.map(|base| json!(base))), ("delete", delete)]);
        self.background.add_to(&mut params);
        Ok(params)
    }
}

impl Open {
    fn params(self) -> Result<Value> {
        let exports = self.exports.iter().map(|export| absolute_export(export));
        let bitmaps_in = self.side_file.bitmaps.as_deref().map(absolute).transpose()?;
        let bitmaps_in = bitmaps_in.map(|path| path.to_string_lossy().into_owned());
        let mut params = json!({
            "path": absolute_image(&self.path)?,
            "read-only": self.read_only,
            "exports": exports.collect::<Result<Vec<_>>>()?,
            "bitmaps": self.bitmaps,
        });
        let optional = [
            ("name", self.name.map(Value::from)),
            ("format", self.format.map(Value::from)),
            ("cache", self.cache.map(Value::from)),
            ("discard", self.discard.map(Value::from)),
            ("detect-zeroes", self.detect_zeroes.map(Value::from)),
            ("logical-block-size", self.block_sizes.logical_block_size.map(Value::from)),
            ("physical-block-size", self.block_sizes.physical_block_size.map(Value::from)),
            ("discard-granularity", self.block_sizes.discard_granularity.map(Value::from)),
            ("on-full", self.hold.on_full.map(Value::from)),
            ("hold-seconds", self.hold.hold_seconds.map(Value::from)),
            ("threshold", self.hold.threshold.map(|threshold| threshold.to_string().into())),
            ("bitmaps-in", bitmaps_in.map(Value::from)),
            ("trust-bitmaps", self.side_file.trust_bitmaps.then(|| true.into())),
            ("copy-on-read", self.copy_on_read.then(|| true.into())),
            ("prefetch", self.prefetch.map(Value::from)),
            ("snapshot", self.snapshot.map(Value::from)),
            ("create", self.create.map(Value::from)),
            ("limits", self.limit.map(|limits| json!(limits))),
        ];
        add_given(&mut params, optional);
        Ok(params)
    }
}

fn parse_object(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text)
        .map_err(|error| format!("the parameters are not a JSON object: {error}"))
}

/// Tells the user that an address without a scheme is a vhost-user-blk socket, because NBD clients
/// cannot use it.
fn tell_of_kind(address: &str) {
    if !address.contains("://") && !output::is_quiet() {
        output::tell(&format!(
            "blockhouse: {address}: is served as vhost-user-blk; for NBD give nbd+unix:///?socket=PATH"
        ));
    }
}

/// The address with an absolute path. A URI is passed as it is: the server refuses a relative path
/// in it.
fn absolute_export(address: &str) -> Result<String> {
    if address.contains("://") {
        Ok(address.to_owned())
    } else {
        Ok(absolute(Path::new(address))?.display().to_string())
    }
}

/// The new size in bytes. A relative size (+10G) is applied to the disk's current size.
fn new_size(server: &mut Connection, disk: &str, size: NewSize) -> Result<u64> {
    let now = match size {
        NewSize::Absolute(_) => 0,
        NewSize::Grow(_) | NewSize::Shrink(_) => {
            let disks = server.call("disk.list", json!({}))?;
            let mut disks = disks.as_array().into_iter().flatten();
            let found = disks.find(|one| one["disk"] == disk);
            let size = found.and_then(|one| one["size"].as_u64());
            size.with_context(|| {
                format!("no disk is called {disk:?}; 'ctl SOCKET disks' lists the disks")
            })?
        }
    };
    size.of(now).map_err(|why| anyhow::anyhow!("{disk}: {why}"))
}
