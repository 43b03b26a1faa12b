//! Executes each method, or calls the function that does.

use std::sync::Arc;

use anyhow::Result;
use blockhouse_config::control_socket::Answers;
use blockhouse_config::disk::DiskConfig;
use blockhouse_config::export_address::ExportAddress;
use blockhouse_config::offers::ExportOptions;
use blockhouse_config::threshold::Threshold;
use blockhouse_core::rare;
use blockhouse_disk::Access;
use blockhouse_nbd::uri::NbdUri;
use futures_util::future::LocalBoxFuture;
use serde_json::Value;

use super::Listed;
use super::methods::{
    CloseParams, DiskInfo, DiskParams, DiskSetParams, DiskStats, Done, ErrorStats, ExportAddParams,
    ExportInfo, ExportParams, LimitInfo, LimitSetParams, METHODS, NoParams, OpenResult,
    PauseResult, RefreshResult, ResizeParams, ResizeResult, SnapshotParams, SnapshotRenameParams,
    SnapshotResult, SocketAddParams, SocketParams, StatsParams, VERSION, VersionResult,
};
use super::outcome::{Outcome, invalid, params, result, unknown};
use super::pause_log::log;
use super::rpc::Failure;
use super::snapshots::{delete_snapshot, take_snapshot};
use super::{backups, bitmaps, forks, images, jobs, transactions};
use crate::events::Event;
use crate::metrics::to_json;
use crate::running::images::name_backing;
use crate::running::reload;
use crate::running::room::{set_threshold, set_write_threshold};
use crate::running::{Refreshed, Running, RunningDisk, RunningExport};

/// Executes a request that changes or queries disks, exports or jobs. The module `server` handles
/// `event.*` and `server.upgrade`. A long call stops soon after `is_cancelled` returns true, if the
/// call can still be cancelled.
pub fn call<'a>(
    running: &'a Running,
    answers: &'a Answers,
    method: &'a str,
    given: Value,
    is_cancelled: &'a dyn Fn() -> bool,
) -> LocalBoxFuture<'a, Outcome> {
    rare(dispatch(running, answers, method, given, is_cancelled))
}

async fn dispatch(
    running: &Running,
    answers: &Answers,
    method: &str,
    given: Value,
    is_cancelled: &dyn Fn() -> bool,
) -> Outcome {
    match method {
        "server.version" => params(given).and_then(|NoParams {}| result(version(running, answers))),
        "server.reload" => {
            let NoParams {} = params(given)?;
            reload(running).await
        }
        "disk.list" => {
            let NoParams {} = params(given)?;
            result(disks(running).await)
        }
        "disk.open" => open(running, params(given)?).await,
        "disk.close" => {
            let CloseParams { disk, force } = params(given)?;
            running.close(&disk, force).await?;
            result(Done {})
        }
        "disk.set" => {
            let DiskSetParams { disk, read_only, threshold, write_threshold, backing_file } =
                params(given)?;
            let threshold = threshold.map(|text| threshold_of(&text)).transpose()?;
            if let Some(read_only) = read_only {
                let access = if read_only { Access::ReadOnly } else { Access::ReadWrite };
                running.set_access(&disk, access).await?;
            }
            if let Some(threshold) = threshold {
                set_threshold(running, &disk, threshold).await?;
            }
            if let Some(threshold) = write_threshold {
                let threshold = Some(threshold).filter(|&threshold| threshold > 0);
                set_write_threshold(running, &disk, threshold).await?;
            }
            if let Some(name) = backing_file {
                name_backing(running, &disk, &name).await?;
            }
            result(Done {})
        }
        "disk.resize" => {
            let ResizeParams { disk, size, shrink } = params(given)?;
            let resized = running.resize(&disk, size, shrink).await?;
            result(ResizeResult { old_size: resized.old, size: resized.new })
        }
        "disk.refresh" => {
            let DiskParams { disk } = params(given)?;
            let Refreshed { size, held } = running.refresh(&disk).await?;
            result(RefreshResult { size, held })
        }
        "disk.fork" => forks::fork(running, params(given)?).await,
        "disk.transaction" => Box::pin(transactions::transact(running, params(given)?)).await,
        "image.create" => images::create(running, params(given)?).await,
        "socket.add" => {
            let SocketAddParams { address, max_connections } = params(given)?;
            let added = running.add_socket(socket(&address)?, max_connections).await?;
            result(SocketParams { address: added.to_string() })
        }
        "socket.remove" => {
            let SocketParams { address } = params(given)?;
            running.remove_socket(socket(&address)?).await?;
            result(Done {})
        }
        "disk.rollback" => forks::roll_back(running, params(given)?).await,
        "export.list" => params(given).and_then(|NoParams {}| result(exports(running))),
        "export.add" => {
            let added: ExportAddParams = params(given)?;
            let access = if added.read_only { Access::ReadOnly } else { Access::ReadWrite };
            let has_depth = added.allocation_depth;
            let options = ExportOptions { access, has_depth, description: added.description };
            let address = address(&added.export)?;
            let bitmaps = (&added.bitmaps[..], added.bitmaps_of.as_deref());
            let export = running.add_export(&added.disk, address, options, bitmaps).await?;
            result(ExportParams { export: export.to_string() })
        }
        "export.remove" => {
            let ExportParams { export } = params(given)?;
            running.remove_export(&export).await?;
            result(Done {})
        }
        "limit.get" => limits(running, params(given)?),
        "limit.set" => limit(running, params(given)?).await,
        "disk.stats" => stats(running, params(given)?),
        "stats.get" => {
            let NoParams {} = params(given)?;
            result(to_json(&running.gathered().await))
        }
        _ if method.starts_with("backup.") => backups::call(running, method, given).await,
        _ if method.starts_with("bitmap.") => bitmaps::call(running, method, given).await,
        _ if method.starts_with("job.") => jobs::call(running, method, given).await,
        _ => snapshots(running, method, given, is_cancelled).await,
    }
}

async fn snapshots(
    running: &Running,
    method: &str,
    given: Value,
    is_cancelled: &dyn Fn() -> bool,
) -> Outcome {
    match method {
        "snapshot.list" => {
            let DiskParams { disk } = params(given)?;
            let claimed = running.claim_disk(&disk).await?;
            let snapshots =
                claimed.disk.disk.snapshots().list().await.map_err(anyhow::Error::from)?;
            result(snapshots.iter().map(Listed::from).collect::<Vec<_>>())
        }
        "snapshot.create" => {
            let SnapshotParams { disk, name } = params(given)?;
            let claimed = running.claim_disk(&disk).await?;
            let (id, pause_us) = take_snapshot(&claimed.disk, &name, is_cancelled).await?;
            result(SnapshotResult { id, pause_us })
        }
        "snapshot.delete" => {
            let SnapshotParams { disk, name } = params(given)?;
            let claimed = running.claim_disk(&disk).await?;
            let pause_us = delete_snapshot(&claimed.disk, &name, is_cancelled).await?;
            result(PauseResult { pause_us })
        }
        "snapshot.rename" => {
            let SnapshotRenameParams { disk, name, new_name } = params(given)?;
            let claimed = running.claim_disk(&disk).await?;
            let renamed = claimed.disk.disk.snapshots().rename(&name, &new_name).await;
            let pause = renamed.map_err(anyhow::Error::from)?;
            let what = format!("the snapshot {name:?} is {new_name:?} now");
            result(PauseResult { pause_us: log(&claimed.disk, pause, &what) })
        }
        _ => Err(unknown(method)),
    }
}

fn version(running: &Running, answers: &Answers) -> VersionResult {
    VersionResult {
        version: env!("CARGO_PKG_VERSION"),
        protocol: VERSION,
        sandbox: running.sandbox().to_string(),
        methods: METHODS.iter().map(|(name, ..)| *name).filter(|name| answers.has(name)).collect(),
        events: Event::NAMES.to_vec(),
    }
}

/// Parses the address of a socket.
fn socket(address: &str) -> Result<NbdUri, Failure> {
    match address.parse().map_err(invalid)? {
        ExportAddress::Nbd(uri) if uri.export.is_empty() => Ok(uri),
        _ => Err(invalid(format!("{address}: a socket is an NBD URI without a name of an export"))),
    }
}

/// Parses the address of an export.
fn address(text: &str) -> Result<ExportAddress, Failure> {
    text.parse().map_err(invalid)
}

async fn reload(running: &Running) -> Outcome {
    let Some(path) = running.configuration().path() else {
        return Err(anyhow::anyhow!(
            "this server was started without --config, so there is nothing to reload"
        )
        .into());
    };
    let done = reload::reload(running, path).await?;
    done.log();
    result(done)
}

async fn open(running: &Running, given: DiskConfig) -> Outcome {
    let given = given.checked().map_err(invalid)?;
    let opened = running.open_and_serve(given, Access::ReadWrite).await?;
    let exports = running.exports().of_disk(opened.name());
    result(OpenResult {
        disk: opened.name().to_owned(),
        size: opened.disk.size(),
        exports: exports.iter().map(|export| export.address.to_string()).collect(),
    })
}

async fn disks(running: &Running) -> Vec<DiskInfo> {
    let disks = running.disks().all();
    let asked: Vec<_> = disks.iter().map(|disk| Arc::downgrade(&disk.disk)).collect();
    let exports = running.exports().list();
    let of = |disk: &str| {
        let of_disk = exports.iter().filter(|export| export.disk == disk);
        of_disk.map(|export| export.address.to_string()).collect()
    };
    let info = |disk: Arc<RunningDisk>| DiskInfo {
        disk: disk.name().to_owned(),
        path: disk.path(),
        format: disk.disk.image().image_format_name().to_owned(),
        size: disk.disk.size(),
        logical_block_size: disk.disk.logical_block_size(),
        physical_block_size: disk.disk.physical_block_size(),
        discard_granularity: disk.disk.discard_granularity(),
        read_only: disk.disk.access() == Access::ReadOnly,
        cache: disk.setup.cache.as_str().to_owned(),
        snapshot: disk.setup.snapshot.clone(),
        exports: of(disk.name()),
        room_left: None,
        threshold: disk.threshold().map(|threshold| threshold.to_string()),
        held: Some(disk.disk.hold().count()).filter(|&held| held > 0),
        waits: disk.disk.stats().backing_wait().map(|wait| wait.to_string()),
    };
    let mut infos: Vec<_> = disks.into_iter().map(info).collect();
    // No disk is kept open meanwhile.
    let spaces = running.host_spaces(&asked).await;
    infos.iter_mut().zip(spaces).for_each(|(info, space)| info.room_left = space.left);
    infos
}

/// Parses a threshold; `None` for "off".
fn threshold_of(text: &str) -> Result<Option<Threshold>, Failure> {
    match text {
        "off" => Ok(None),
        text => text.parse().map(Some).map_err(|why: String| invalid(format!("threshold: {why}"))),
    }
}

fn exports(running: &Running) -> Vec<ExportInfo> {
    let info = |export: RunningExport| {
        let peers = running.exports().peers(&export);
        ExportInfo {
            kind: match export.address {
                ExportAddress::Nbd(_) => "nbd",
                ExportAddress::VhostUser(_) => "vhost-user-blk",
                ExportAddress::Ublk(_) => "ublk",
            },
            clients: peers.as_ref().map(Vec::len),
            peers,
            read_only: (export.options.access == Access::ReadOnly).then_some(true),
            export: export.address.to_string(),
            disk: export.disk,
        }
    };
    running.exports().list().into_iter().map(info).collect()
}

/// The disk of this name; without a name, all disks.
fn named_disks(running: &Running, name: Option<&str>) -> Result<Vec<Arc<RunningDisk>>> {
    match name {
        Some(name) => Ok(vec![running.disks().get(name)?]),
        None => Ok(running.disks().all()),
    }
}

fn limits(running: &Running, StatsParams { disk }: StatsParams) -> Outcome {
    let info = |disk: Arc<RunningDisk>| {
        let stats = disk.disk.stats().throttle();
        LimitInfo {
            disk: disk.name().to_owned(),
            limits: disk.limits(),
            waiting: stats.waiting,
            delayed: stats.delayed,
        }
    };
    let disks = named_disks(running, disk.as_deref())?.into_iter();
    result(disks.map(info).collect::<Vec<_>>())
}

async fn limit(running: &Running, params: LimitSetParams) -> Outcome {
    params.limits.check().map_err(invalid)?;
    match (params.disk, params.group) {
        (Some(disk), None) => running.limit(&disk, &params.limits).await?,
        (None, Some(_)) if params.limits.group.is_some() => {
            return Err(invalid("a group is in no other group".into()));
        }
        (None, Some(group)) => {
            let rates = params.limits.rates().map_err(invalid)?;
            running.disks().limit_group(&group, rates)?;
        }
        _ => return Err(invalid("say disk or group, one of them".into())),
    }
    result(Done {})
}

fn stats(running: &Running, StatsParams { disk }: StatsParams) -> Outcome {
    let disks = named_disks(running, disk.as_deref())?;
    result(disks.iter().map(|disk| stats_of(disk)).collect::<Vec<_>>())
}

fn stats_of(disk: &RunningDisk) -> DiskStats {
    let metrics = disk.disk.stats().metrics();
    let counters = metrics.counters();
    let mut errors: Vec<ErrorStats> = Vec::new();
    for one in metrics.requests.iter().flat_map(|requests| &requests.errors) {
        match errors.iter_mut().find(|known| known.errno == one.errno) {
            Some(known) => known.count += one.count,
            None => errors.push(ErrorStats { errno: one.errno, count: one.count }),
        }
    }
    DiskStats {
        disk: disk.name().to_owned(),
        reads: counters.reads,
        read_bytes: counters.read_bytes,
        writes: counters.writes,
        written_bytes: counters.written_bytes,
        zero_writes: counters.zero_writes,
        discards: counters.discards,
        flushes: counters.flushes,
        in_flight: counters.in_flight,
        errors,
    }
}
