//! Applies a changed configuration, without touching its unchanged parts.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use blockhouse_config::disk::DiskConfig;
use blockhouse_config::export_address::ExportAddress;
use blockhouse_config::file;
use blockhouse_config::offers::ExportRights;
use schemars::JsonSchema;
use serde::Serialize;

use super::room::watch_room;
use super::{Running, RunningDisk, RunningExport};
use crate::running::claims::Name;

/// The result of a reload of the configuration.
#[derive(Debug, Default, Serialize, JsonSchema)]
pub(crate) struct ReloadResult {
    /// Disks that were opened.
    pub(crate) opened: Vec<String>,
    /// Disks that were closed.
    pub(crate) closed: Vec<String>,
    /// Exports that were added to disks that stayed open.
    pub(crate) added: Vec<String>,
    /// Exports that were removed from them.
    pub(crate) removed: Vec<String>,
    /// Disks that stayed open and have other limits.
    pub(crate) limited: Vec<String>,
    /// The changes that failed: a line each. All others were made.
    pub(crate) failed: Vec<String>,
}

impl ReloadResult {
    /// Logs the result.
    pub(crate) fn log(&self) {
        let Self { opened, closed, added, removed, limited, failed } = self;
        let all = [
            ("opened", opened),
            ("closed", closed),
            ("added", added),
            ("removed", removed),
            ("limited", limited),
        ];
        for (what, names) in all {
            names.iter().for_each(|name| tracing::info!("reload: {what} {name}"));
        }
        failed.iter().for_each(|why| tracing::error!("reload: {why}"));
        tracing::info!("reloaded the configuration");
    }
}

/// A disk that a reload has closed.
struct ClosedDisk {
    /// The options that open it again, without exports. They make no image, because it exists.
    setup: DiskConfig,
    exports: Vec<RunningExport>,
}

/// Reads the configuration again. Disks that are no longer in it are closed with their exports;
/// disks with other options are closed and opened again; new ones are opened; exports and limits
/// are added, changed and removed. Disks and exports that requests have added stay as they are, and
/// so does a disk that cannot be closed or opened with other options, until a later reload.
///
/// # Errors
/// The file cannot be read or is invalid. In these cases nothing has changed.
pub(crate) async fn reload(running: &Running, path: &Path) -> Result<ReloadResult> {
    let _claim = running.claims.claim([Name::Configuration]).await;
    let mut wanted = known_by_address(running, file::read(path)?.disks);
    let before = running.configuration.disks();
    let mut done = ReloadResult::default();
    let closed = close_changed(running, &before, &wanted, &mut done).await;
    // Exports are removed before others are added, so that an export can move to another disk.
    for new in wanted.iter().filter(|new| is_open_as(running, new)) {
        if let Some(old) = named(&before, new.name()) {
            remove_exports(running, old, &new.exports, &mut done).await;
        }
    }
    let stays = |old: &DiskConfig| {
        let new = named(&wanted, old.name());
        is_open_as(running, old) && new.is_none_or(|new| !is_open_as(running, new))
    };
    for new in &wanted {
        let old = named(&before, new.name());
        match running.disks.find(new.name()) {
            None => {
                let closed = closed.iter().find(|closed| closed.setup.name() == new.name());
                open_configured(running, new, closed, &mut done).await;
            }
            Some(_) if old.is_some_and(&stays) => {}
            Some(open) => take_over(running, &open, new, old, &mut done).await,
        }
    }
    running.disks.sort_as(wanted.iter().map(DiskConfig::name));
    // The old options of a disk that stays are recorded, so that the next reload tries again.
    let staying: Vec<_> = before.into_iter().filter(stays).collect();
    wanted.retain(|new| named(&staying, new.name()).is_none());
    wanted.extend(staying);
    running.configuration.set(wanted);
    Ok(done)
}

/// The disk of this name.
fn named<'a>(disks: &'a [DiskConfig], name: &str) -> Option<&'a DiskConfig> {
    disks.iter().find(|disk| disk.name() == name)
}

/// These disks, with the addresses by which their exports are known when they are served.
fn known_by_address(running: &Running, mut disks: Vec<DiskConfig>) -> Vec<DiskConfig> {
    for address in disks.iter_mut().flat_map(|disk| &mut disk.exports) {
        if let ExportAddress::Nbd(uri) = address {
            *uri = running.exports.known_as(uri.clone());
        }
    }
    disks
}

/// Whether a disk is open with these options, of which `create` has no effect on an open disk. A
/// request may have closed it or opened another one of its name.
fn is_open_as(running: &Running, setup: &DiskConfig) -> bool {
    running.disks.find(setup.name()).is_some_and(|open| {
        open.setup.opens_like(&DiskConfig { create: open.setup.create, ..setup.clone() })
    })
}

/// Closes the disks that are not wanted, or wanted with other options.
async fn close_changed(
    running: &Running,
    before: &[DiskConfig],
    wanted: &[DiskConfig],
    done: &mut ReloadResult,
) -> Vec<ClosedDisk> {
    let mut closed = Vec::new();
    for old in before.iter().filter(|old| is_open_as(running, old)) {
        let (name, new) = (old.name(), named(wanted, old.name()));
        if new.is_some_and(|new| new.opens_like(old)) {
            continue;
        }
        let setup = DiskConfig { create: None, exports: Vec::new(), ..old.clone() };
        let exports = running.exports.of_disk(name);
        match running.close(name, true).await {
            Ok(()) if new.is_none() => done.closed.push(name.to_owned()),
            Ok(()) => {}
            Err(error) => done.failed.push(format!("{name}: {error:#}")),
        }
        closed.push(ClosedDisk { setup, exports });
    }
    closed
}

/// Adds new exports and limits to a disk that is open.
async fn take_over(
    running: &Running,
    open: &Arc<RunningDisk>,
    new: &DiskConfig,
    old: Option<&DiskConfig>,
    done: &mut ReloadResult,
) {
    if !is_open_as(running, new) {
        return done.failed.push(format!(
            "{}: a request has opened another disk of this name; close it first",
            open.name()
        ));
    }
    add_exports(running, new, done).await;
    // A limit that a request has set stays, unless the file has changed it, too.
    let before = old.map_or_else(|| open.limits(), |old| old.limits.clone());
    let before_threshold = old.map_or_else(|| open.room.threshold(), |old| old.threshold);
    if new.threshold != before_threshold {
        watch_room(running, open, new.threshold);
    }
    if !new.limits.means(&before) {
        match running.limit(open.name(), &new.limits).await {
            Ok(()) => done.limited.push(open.name().to_owned()),
            Err(error) => done.failed.push(format!("{}: {error:#}", open.name())),
        }
    }
}

/// Opens a disk. If this fails, opens it again as it was before this reload closed it.
async fn open_configured(
    running: &Running,
    new: &DiskConfig,
    closed: Option<&ClosedDisk>,
    done: &mut ReloadResult,
) {
    let name = new.name();
    let Err(error) = running.open_and_serve(new.clone()).await else {
        return done.opened.push(name.to_owned());
    };
    let Some(closed) = closed else {
        return done.failed.push(format!("{name}: {error:#}"));
    };
    if let Err(second) = running.open_and_serve(closed.setup.clone()).await {
        let second = format!("{name}: cannot be opened with the old options either: {second:#}");
        return done.failed.extend([format!("{name}: {error:#}"), second]);
    }
    done.failed.push(format!("{name}: {error:#}; it goes on with the old options"));
    for RunningExport { address, rights, .. } in &closed.exports {
        // An export that fails does not prevent the others.
        if let Err(error) = running.add_export(name, address.clone(), *rights, (&[], None)).await {
            done.failed.push(format!("{name}: {error:#}"));
        }
    }
}

/// Removes the exports of a disk that stays open, except the wanted ones.
async fn remove_exports(
    running: &Running,
    old: &DiskConfig,
    wanted: &[ExportAddress],
    done: &mut ReloadResult,
) {
    let served = running.exports.of_disk(old.name());
    let is_served = |address: &&ExportAddress| served.iter().any(|one| one.address == **address);
    let gone = old.exports.iter().filter(|address| !wanted.contains(address));
    for address in gone.filter(is_served) {
        let address = address.to_string();
        match running.remove_export(&address).await {
            Ok(()) => done.removed.push(address),
            Err(error) => done.failed.push(format!("{error:#}")),
        }
    }
}

/// Adds the missing exports of a disk.
async fn add_exports(running: &Running, new: &DiskConfig, done: &mut ReloadResult) {
    let name = new.name();
    let served = running.exports.of_disk(name);
    let is_served = |address: &ExportAddress| served.iter().any(|one| one.address == *address);
    for address in new.exports.iter().filter(|address| !is_served(address)) {
        match running.add_export(name, address.clone(), ExportRights::default(), (&[], None)).await
        {
            Ok(address) => done.added.push(address.to_string()),
            Err(error) => done.failed.push(format!("{name}: {error:#}")),
        }
    }
}
