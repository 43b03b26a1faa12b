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

/// The version of the protocol. An incompatible change increments it. An addition does not:
/// `server.version` lists the methods and events.
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
    /// The parts of the sandbox that apply, such as "landlock,seccomp", or "off".
    pub sandbox: String,
    /// The methods that this socket answers.
    pub methods: Vec<&'static str>,
    /// The events that the server can send.
    pub events: Vec<&'static str>,
}

/// A disk.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskParams {
    /// The name.
    pub disk: String,
}

/// A disk, or all disks.
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
    /// The canonical path of the image, or its address on another server.
    #[serde(serialize_with = "lossy")]
    pub path: PathBuf,
    /// The image's format: raw, qcow2 and so on.
    pub format: String,
    /// The size in bytes.
    pub size: u64,
    /// Bytes of a sector.
    pub logical_block_size: u64,
    /// The physical block size in bytes: the best unit for writes.
    pub physical_block_size: u64,
    /// The discard granularity that guests see, in bytes.
    pub discard_granularity: u64,
    /// Whether all writes are refused.
    pub read_only: bool,
    /// The cache mode with which the disk was opened.
    pub cache: String,
    /// The snapshot that is served in place of the disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// The addresses at which it is served.
    pub exports: Vec<String>,
    /// The free bytes on the host for its guest's writes, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub room_left: Option<u64>,
    /// The threshold: the event `disk.threshold` reports less free space. Bytes, or a percentage
    /// (10%).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threshold: Option<String>,
    /// The number of requests that are held because of ENOSPC, if there are any.
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
    /// The addresses at which it is served, with the real port if port 0 was requested.
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
    /// Whether the disk refuses all changes, until this is set again or the disk is closed. Left
    /// out: unchanged.
    pub read_only: Option<bool>,
    /// The new threshold: the event `disk.threshold` reports less free space. Bytes, as a text like
    /// "10G", or "10%" of all space, or "off". Left out: unchanged.
    pub threshold: Option<String>,
    /// The write threshold: the event `disk.write-threshold` reports once that a qcow2 image uses
    /// more bytes of its file or device; 0: none. Left out: unchanged.
    pub write_threshold: Option<u64>,
    /// The new name of the backing file in the image. The name is used when the image is opened
    /// again; this server keeps the backing file that is open. Left out: unchanged.
    pub backing_file: Option<String>,
}

/// A new size.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ResizeParams {
    /// The name of the disk.
    pub disk: String,
    /// Bytes: a multiple of 512 and of the disk's sector size.
    pub size: u64,
    /// Whether the disk may become smaller: the data past the new end is lost. Refused while the
    /// disk has exports.
    #[serde(default)]
    pub shrink: bool,
}

/// The size of a disk before and after a resize.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct ResizeResult {
    /// Bytes before.
    pub old_size: u64,
    /// Bytes now.
    pub size: u64,
}

/// The result of a refresh of a disk.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct RefreshResult {
    /// The size in bytes: larger than before if the raw image has grown.
    pub size: u64,
    /// The number of held requests that are retried.
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
    /// Whether the export is read-only. Other exports may still change the disk.
    #[serde(default)]
    pub read_only: bool,
    /// Whether NBD clients may query which image of the chain has the data.
    #[serde(default = "usual_depth")]
    pub allocation_depth: bool,
    /// A text that NBD clients show their users: at most 4096 bytes.
    #[serde(default)]
    pub description: String,
    /// Bitmaps of the disk that NBD clients may query. For a disk that a backup has frozen, they
    /// are the original disk's: they have all changes up to the freeze, and perhaps later ones.
    #[serde(default)]
    pub bitmaps: Vec<String>,
    /// For a frozen disk: another disk that has these bitmaps. For a read-only disk: a read-only
    /// disk that has them, as they are now. Its size must be the same.
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

/// A listening socket for NBD clients.
#[derive(Debug, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SocketParams {
    /// An NBD URI without an export name.
    pub address: String,
}

/// A new listening socket for NBD clients.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct SocketAddParams {
    /// An NBD URI without an export name.
    pub address: String,
    /// The maximum number of connections; further clients wait in the backlog until one ends.
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
    /// The number of its NBD clients or vhost-user front-ends; left out for ublk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clients: Option<usize>,
    /// The peers: for each connection a process of this host, or an address; left out for ublk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peers: Option<Vec<String>>,
    /// True if the export is read-only, otherwise left out. Other exports may still change the
    /// disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
}

/// A snapshot of a disk.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotParams {
    /// The name of the disk.
    pub disk: String,
    /// The snapshot's name; for an existing snapshot also its id.
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
    /// The time for which the guests' changes were paused, in microseconds.
    pub pause_us: u64,
}

/// A completed change of the image.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct PauseResult {
    /// The time for which the guests' changes were paused, in microseconds.
    pub pause_us: u64,
}

/// The counters of a disk since it was opened.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct DiskStats {
    /// The name.
    pub disk: String,
    /// Requested reads.
    pub reads: u64,
    /// Bytes of them.
    pub read_bytes: u64,
    /// Requested writes.
    pub writes: u64,
    /// Bytes of them.
    pub written_bytes: u64,
    /// Requested zero writes.
    pub zero_writes: u64,
    /// Requested discards.
    pub discards: u64,
    /// Requested flushes.
    pub flushes: u64,
    /// Requests in flight.
    pub in_flight: u64,
    /// The failed requests, counted for each errno.
    pub errors: Vec<ErrorStats>,
}

/// The number of requests that failed with one errno.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ErrorStats {
    /// The errno, as on Linux.
    pub errno: i32,
    /// The number of these requests.
    pub count: u64,
}

/// Limits of a disk or a group of disks.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LimitSetParams {
    /// The name of the disk.
    pub disk: Option<String>,
    /// The name of the group. Either `disk` or `group` is given.
    pub group: Option<String>,
    /// The new limits; a rate that is left out is unlimited. With `group` the disk joins that
    /// group, and rates that are given become the group's limits.
    #[serde(default)]
    pub limits: LimitsConfig,
}

/// The limits of a disk.
#[derive(Debug, Serialize, JsonSchema)]
pub struct LimitInfo {
    /// The name.
    pub disk: String,
    /// The limits; empty: none. A disk of a group has the group's limits.
    pub limits: LimitsConfig,
    /// Requests that wait now because of the limits.
    pub waiting: u64,
    /// Requests that waited since the disk was opened or joined its group, those that still wait
    /// included.
    pub delayed: u64,
}

/// The process that takes over.
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
    /// The time in which nothing was served, in microseconds.
    pub gap_us: u64,
}

/// A subscription to events.
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

/// All methods, each with its description, its parameters and its result.
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
