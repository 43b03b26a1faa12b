//! The methods of JSON-RPC: their parameters and results. control.schema.json is generated from
//! them.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use blockhouse_config::disk::DiskConfig;
use blockhouse_config::limits::LimitsConfig;
use blockhouse_config::offers::ExportOptions;
use blockhouse_config::text_fields::lossy;
use schemars::{JsonSchema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::Listed;
use super::backup_methods::{BackupBeginParams, BackupInfo, BackupParams};
use super::bitmap_methods::{BitmapAddParams, BitmapInfo, BitmapMergeParams, BitmapParams};
use super::fork_methods::{ForkParams, ForkResult, RollbackParams, RollbackResult};
use super::image_methods::ImageCreateParams;
use super::job_methods::{JobCompleteParams, JobInfo, JobParams, JobSpeedParams, JobStartParams};
use super::transaction_methods::TransactionParams;
use crate::events::Event;
use crate::running::reload::ReloadResult;

/// The version of the protocol. It rises with an incompatible change; `server.version` lists the
/// methods and events, and so shows additions.
pub const VERSION: u32 = 1;

/// No parameters.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NoParams {}

/// No result.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Done {}

/// The server's version and abilities.
#[derive(Debug, Serialize, JsonSchema)]
pub struct VersionResult {
    /// The version of the program.
    pub version: &'static str,
    /// The version of this protocol.
    pub protocol: u32,
    /// The parts of the sandbox that are in force, as "seccomp", or "off".
    pub sandbox: String,
    /// The methods that this socket answers.
    pub methods: Vec<&'static str>,
    /// The events that there are.
    pub events: Vec<&'static str>,
}

/// A disk.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskParams {
    /// The name.
    pub disk: String,
}

/// A disk, or all.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StatsParams {
    /// The name. Left out: all.
    pub disk: Option<String>,
}

/// A disk that is open.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct DiskInfo {
    /// The name.
    pub disk: String,
    /// The canonical path of the image.
    #[serde(serialize_with = "lossy")]
    pub path: PathBuf,
    /// raw, qcow2.
    pub format: String,
    /// The size in bytes.
    pub size: u64,
    /// Bytes of its sectors.
    pub logical_block_size: u64,
    /// Bytes of a block that is best written at once.
    pub physical_block_size: u64,
    /// Bytes of the unit of discards that guests see.
    pub discard_granularity: u64,
    /// Whether all writes are refused.
    pub read_only: bool,
    /// The host's cache.
    pub cache: String,
    /// The snapshot that is served in place of the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Where it is served.
    pub exports: Vec<String>,
    /// How many bytes of room the host has left for what its guest writes, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub room_left: Option<u64>,
    /// How little room is left when that is told: bytes, or a part of all (10%).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threshold: Option<String>,
    /// How many requests are held because the host has no room for them, if there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub held: Option<u64>,
    /// The read of a backing file that a request in flight waits for, in one line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waits: Option<String>,
}

/// A disk that was opened.
#[derive(Debug, Serialize, JsonSchema)]
pub struct OpenResult {
    /// The name.
    pub disk: String,
    /// The size in bytes.
    pub size: u64,
    /// Where it is served, with the real port where port 0 was asked for.
    pub exports: Vec<String>,
}

/// A disk to be closed.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CloseParams {
    /// The name.
    pub disk: String,
    /// Whether its exports are removed first. Otherwise a disk with exports stays open.
    #[serde(default)]
    pub force: bool,
}

/// The changes of a disk.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct DiskSetParams {
    /// The name.
    pub disk: String,
    /// Whether all changes are refused from now on, until this is set again or the disk is closed.
    /// Left out: as it is.
    pub read_only: Option<bool>,
    /// How little room may be left before that is told from now on: bytes, as a text like "10G",
    /// "10%" of all, or "off". Left out: as it is.
    pub threshold: Option<String>,
    /// How many bytes of its file or device a qcow2 image may use before that is told, once; 0 for
    /// any number. Left out: as it is.
    pub write_threshold: Option<u64>,
    /// The name of the backing file in the image from now on. It matters when the image is opened
    /// again; nothing changes in this server. Left out: as it is.
    pub backing_file: Option<String>,
}

/// A new size.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ResizeParams {
    /// The name of the disk.
    pub disk: String,
    /// Bytes, a multiple of 512.
    pub size: u64,
    /// Whether it may become shorter: what lies beyond is lost. Refused while the disk has
    /// exports.
    #[serde(default)]
    pub shrink: bool,
}

/// A disk that may have another size.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct ResizeResult {
    /// Bytes before.
    pub old_size: u64,
    /// Bytes now.
    pub size: u64,
}

/// A disk whose storage was looked at anew.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct RefreshResult {
    /// The size in bytes: more than before where its raw image became longer.
    pub size: u64,
    /// How many held requests are tried again.
    pub held: u64,
}

/// An export to be added.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct ExportAddParams {
    /// The name of the disk.
    pub disk: String,
    /// The URI of an NBD export, or the absolute path of a vhost-user-blk socket.
    pub export: String,
    /// Whether its clients may not change the disk, whoever else may.
    #[serde(default)]
    pub read_only: bool,
    /// Whether NBD clients may ask which image of the chain has the data.
    #[serde(default = "usual_depth")]
    pub allocation_depth: bool,
    /// A text that NBD clients show their users: at most 4096 bytes.
    #[serde(default)]
    pub description: String,
    /// Of a disk that a backup has frozen: bitmaps of the disk that goes on, of which clients may
    /// ask what has changed. They may say that more has.
    #[serde(default)]
    pub bitmaps: Vec<String>,
    /// The disk that has these bitmaps, if it is another one of the same size.
    #[serde(default)]
    pub bitmaps_of: Option<String>,
}

fn usual_depth() -> bool {
    ExportOptions::default().has_depth
}

/// An export.
#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportParams {
    /// The URI of an NBD export, or the path of a vhost-user-blk socket or a ublk device, as
    /// `export.list` shows it.
    pub export: String,
}

/// A socket of NBD clients.
#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SocketParams {
    /// An NBD URI without a name of an export.
    pub address: String,
}

/// A new socket of NBD clients.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct SocketAddParams {
    /// An NBD URI without a name of an export.
    pub address: String,
    /// How many connections it has at most; others wait until one ends.
    #[serde(default)]
    pub max_connections: Option<NonZeroUsize>,
}

/// An export that is served.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct ExportInfo {
    /// The URI, or the path of its socket or block device.
    pub export: String,
    /// nbd, vhost-user-blk or ublk.
    pub kind: &'static str,
    /// The name of its disk.
    pub disk: String,
    /// How many clients it has: of NBD, or a front-end of vhost-user-blk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clients: Option<usize>,
    /// The peers: for each connection a process of this host, or an address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peers: Option<Vec<String>>,
    /// True where its clients may not change the disk, whoever else may.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
}

/// A snapshot of a disk.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotParams {
    /// The name of the disk.
    pub disk: String,
    /// The snapshot's name, or its id where there is one already.
    pub name: String,
}

/// A snapshot and its new name.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct SnapshotRenameParams {
    /// The name of the disk.
    pub disk: String,
    /// The snapshot's name or id.
    pub name: String,
    /// The new name.
    pub new_name: String,
}

/// A snapshot that was taken.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct SnapshotResult {
    /// The snapshot's id.
    pub id: String,
    /// For how long the guests' changes were held off, in microseconds.
    pub pause_us: u64,
}

/// A change of the image that was made.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct PauseResult {
    /// For how long the guests' changes were held off, in microseconds.
    pub pause_us: u64,
}

/// The counters of a disk since it was opened.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct DiskStats {
    /// The name.
    pub disk: String,
    /// Reads asked for.
    pub reads: u64,
    /// Bytes of them.
    pub read_bytes: u64,
    /// Writes asked for.
    pub writes: u64,
    /// Bytes of them.
    pub written_bytes: u64,
    /// Zero writes asked for.
    pub zero_writes: u64,
    /// Discards asked for.
    pub discards: u64,
    /// Flushes asked for.
    pub flushes: u64,
    /// Requests in flight.
    pub in_flight: u64,
    /// Requests that failed, by the name of their errno's number.
    pub errors: Vec<ErrorStats>,
}

/// How often requests failed with one errno.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ErrorStats {
    /// The errno, as on Linux.
    pub errno: i32,
    /// How often.
    pub count: u64,
}

/// Limits of a disk or a group of disks.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LimitSetParams {
    /// The name of the disk.
    pub disk: Option<String>,
    /// Or the name of the group.
    pub group: Option<String>,
    /// All that is limited from now on; what is left out is not. A disk that is to share limits
    /// names a `group`, and rates only if these are the group's from now on.
    #[serde(default)]
    pub limits: LimitsConfig,
}

/// The limits of a disk.
#[derive(Debug, Serialize, JsonSchema)]
pub struct LimitInfo {
    /// The name.
    pub disk: String,
    /// The limits; empty: none. Those of its group are the group's.
    pub limits: LimitsConfig,
    /// Requests that wait because of them.
    pub waiting: u64,
    /// Requests that waited or wait, since the disk was opened or joined its group.
    pub delayed: u64,
}

/// A process that goes on.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct UpgradeParams {
    /// The program. Left out: the first one of `--upgrade-to`, or else the one that the server was
    /// started from.
    pub binary: Option<PathBuf>,
    /// Whether clients with TLS are disconnected first; they cannot be handed over, but may
    /// connect again.
    #[serde(default)]
    pub disconnect_tls: bool,
}

/// An upgrade that succeeded.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct UpgradeReply {
    /// The id of the process that serves now.
    pub process: u32,
    /// For how long nothing was served, in microseconds.
    pub gap_us: u64,
}

/// Events that are wanted.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SubscribeParams {
    /// The names. Left out: all.
    pub events: Option<Vec<String>>,
}

type MakeSchema = fn(&mut SchemaGenerator) -> (Value, Value);

fn of<P: JsonSchema, R: JsonSchema>(generator: &mut SchemaGenerator) -> (Value, Value) {
    (generator.subschema_for::<P>().to_value(), generator.subschema_for::<R>().to_value())
}

/// All methods, what each does, its parameters and its result.
pub(super) const METHODS: &[(&str, &str, MakeSchema)] = &[
    (
        "server.version",
        "The version of the server, and the methods and events that it has.",
        of::<NoParams, VersionResult>,
    ),
    ("server.reload", "Takes over the configuration of --config.", of::<NoParams, ReloadResult>),
    ("server.upgrade", "Has another process go on.", of::<UpgradeParams, UpgradeReply>),
    ("disk.list", "The disks that are open.", of::<NoParams, Vec<DiskInfo>>),
    (
        "disk.open",
        "Opens a disk, and serves it where that is asked for.",
        of::<DiskConfig, OpenResult>,
    ),
    ("disk.close", "Makes everything durable and closes a disk.", of::<CloseParams, Done>),
    (
        "disk.set",
        "Makes a disk read-only while it is served, or writable again.",
        of::<DiskSetParams, Done>,
    ),
    (
        "disk.refresh",
        "Takes in a raw image that became longer, and tries held requests again.",
        of::<DiskParams, RefreshResult>,
    ),
    (
        "disk.resize",
        "Gives a disk another size, and tells its guests.",
        of::<ResizeParams, ResizeResult>,
    ),
    (
        "disk.fork",
        "Has disks go on in overlays over what they are at one moment, and makes other disks over that.",
        of::<ForkParams, ForkResult>,
    ),
    (
        "disk.transaction",
        "Changes bitmaps of disks, and begins backups of them, at one moment, all or none.",
        of::<TransactionParams, PauseResult>,
    ),
    ("image.create", "Makes a new image.", of::<ImageCreateParams, Done>),
    (
        "socket.add",
        "Listens for NBD clients at an address, also while it has no exports.",
        of::<SocketAddParams, SocketParams>,
    ),
    (
        "socket.remove",
        "Listens there no longer; a socket with exports stays until they are removed.",
        of::<SocketParams, Done>,
    ),
    (
        "disk.rollback",
        "Has a disk go back to the layer that its last fork left, and removes its overlay.",
        of::<RollbackParams, RollbackResult>,
    ),
    ("export.list", "The exports: disks with their addresses.", of::<NoParams, Vec<ExportInfo>>),
    ("export.add", "Serves a disk at an address.", of::<ExportAddParams, ExportParams>),
    ("export.remove", "Serves it there no longer; its clients end.", of::<ExportParams, Done>),
    ("limit.get", "The limits of disks.", of::<StatsParams, Vec<LimitInfo>>),
    (
        "limit.set",
        "Gives a disk or a group of disks other limits, or none.",
        of::<LimitSetParams, Done>,
    ),
    ("snapshot.list", "The snapshots inside a disk's image.", of::<DiskParams, Vec<Listed>>),
    (
        "snapshot.create",
        "Takes a snapshot while guests go on.",
        of::<SnapshotParams, SnapshotResult>,
    ),
    ("snapshot.delete", "Deletes a snapshot.", of::<SnapshotParams, PauseResult>),
    ("snapshot.rename", "Gives a snapshot another name.", of::<SnapshotRenameParams, PauseResult>),
    ("bitmap.list", "The persistent bitmaps of a disk.", of::<DiskParams, Vec<BitmapInfo>>),
    ("bitmap.add", "Adds a bitmap without any change in it.", of::<BitmapAddParams, PauseResult>),
    ("bitmap.remove", "Removes a bitmap.", of::<BitmapParams, PauseResult>),
    ("bitmap.clear", "Forgets the changes in a bitmap.", of::<BitmapParams, PauseResult>),
    ("bitmap.enable", "Records changes in it from now on.", of::<BitmapParams, PauseResult>),
    ("bitmap.disable", "Records nothing more in it.", of::<BitmapParams, PauseResult>),
    (
        "bitmap.merge",
        "Adds the changes of one bitmap to those of another one.",
        of::<BitmapMergeParams, PauseResult>,
    ),
    (
        "backup.begin",
        "Freezes disks at one moment, and serves them for reading.",
        of::<BackupBeginParams, BackupInfo>,
    ),
    ("backup.end", "Serves the disks of a backup no longer.", of::<BackupParams, Done>),
    ("backup.list", "The backups that have begun.", of::<NoParams, Vec<BackupInfo>>),
    (
        "stats.get",
        "All metrics, as /metrics.json has them (docs/metrics.md).",
        of::<NoParams, Value>,
    ),
    (
        "disk.stats",
        "Counts of requests since the disks were opened.",
        of::<StatsParams, Vec<DiskStats>>,
    ),
    ("job.list", "The jobs, those included that have ended.", of::<NoParams, Vec<JobInfo>>),
    ("job.start", "Starts a job on a disk.", of::<JobStartParams, JobParams>),
    ("job.pause", "Has it copy nothing more in the background.", of::<JobParams, Done>),
    ("job.resume", "Has it go on.", of::<JobParams, Done>),
    ("job.set-speed", "Limits what it copies in the background.", of::<JobSpeedParams, Done>),
    (
        "job.complete",
        "Waits until it has its result, and ends it.",
        of::<JobCompleteParams, PauseResult>,
    ),
    ("job.cancel", "Ends it without its result.", of::<JobParams, Done>),
    ("job.dismiss", "Lists one that has ended no longer.", of::<JobParams, Done>),
    (
        "event.subscribe",
        "Has events sent on this connection, as notifications.",
        of::<SubscribeParams, Done>,
    ),
    ("event.unsubscribe", "Has no more of them sent.", of::<NoParams, Done>),
];

/// The schema of the protocol (JSON Schema, draft 2020-12): `methods` has each method's parameters
/// and result, `event` the parameters of the notification `event`.
pub fn schema() -> Value {
    let mut generator = SchemaGenerator::default();
    let event = generator.subschema_for::<Event>().to_value();
    let methods: Map<String, Value> = METHODS
        .iter()
        .map(|(name, description, make)| {
            let (params, result) = make(&mut generator);
            let method = json!({ "description": description, "params": params, "result": result });
            ((*name).to_owned(), method)
        })
        .collect();
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "The control socket of 'blockhouse serve'",
        "protocol": VERSION,
        "methods": methods,
        "event": event,
        "$defs": generator.take_definitions(true),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use blockhouse_config::control_socket::all_methods;

    #[test]
    fn a_control_socket_knows_of_each_method_whether_it_changes_something() {
        let names: BTreeSet<_> = METHODS.iter().map(|(name, ..)| *name).collect();
        assert_eq!(names, all_methods().collect());
        assert_eq!(names.len(), all_methods().count());
    }
}
