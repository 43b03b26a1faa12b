//! Applies a changed configuration, without touching its unchanged parts.

use std::path::Path;

use anyhow::Result;
use blockhouse_config::disk::DiskConfig;
use blockhouse_config::export_address::ExportAddress;
use blockhouse_config::file;
use blockhouse_config::offers::ExportRights;
use schemars::JsonSchema;
use serde::Serialize;

use super::Running;
use super::room::watch_room;
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

/// Reads the configuration again. Disks that are no longer in it are closed with their exports;
/// disks with other options are closed and opened again; new ones are opened; exports and limits
/// are added, changed and removed. Disks and exports that requests have added stay as they are.
///
/// # Errors
/// The file cannot be read or is invalid. In these cases nothing has changed.
pub(crate) async fn reload(running: &Running, path: &Path) -> Result<ReloadResult> {
    let _claim = running.claims.claim([Name::Configuration]).await;
    let wanted = known_by_address(running, file::read(path)?.disks);
    let before = running.configuration.disks();
    let mut done = ReloadResult::default();
    for old in before.iter().filter(|old| is_open_as(running, old)) {
        let new = wanted.iter().find(|new| new.name() == old.name());
        if new.is_none_or(|new| !new.opens_like(old)) {
            close_configured(running, old, new.is_some(), &mut done).await;
        }
    }
    // Exports are removed before others are added, so that an export can move to another disk.
    for old in before.iter().filter(|old| is_open_as(running, old)) {
        let new = wanted.iter().find(|new| new.name() == old.name());
        remove_exports(running, old, new.map_or(&[], |new| &new.exports), &mut done).await;
    }
    for new in &wanted {
        let old = before.iter().find(|old| old.name() == new.name());
        take_over(running, new, old, &mut done).await;
    }
    running.disks.sort_as(wanted.iter().map(DiskConfig::name));
    running.configuration.set(wanted);
    Ok(done)
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

/// Whether a disk is open with these options. A request may have closed it or opened another one of
/// its name.
fn is_open_as(running: &Running, setup: &DiskConfig) -> bool {
    running.disks.find(setup.name()).is_some_and(|open| open.setup.opens_like(setup))
}

async fn close_configured(
    running: &Running,
    old: &DiskConfig,
    is_reopened: bool,
    done: &mut ReloadResult,
) {
    let name = old.name();
    match running.close(name, true).await {
        Ok(()) if is_reopened => {}
        Ok(()) => done.closed.push(name.to_owned()),
        Err(error) => done.failed.push(format!("{name}: {error:#}")),
    }
}

/// Opens a disk that is not open; adds new exports and limits to a disk that is.
async fn take_over(
    running: &Running,
    new: &DiskConfig,
    old: Option<&DiskConfig>,
    done: &mut ReloadResult,
) {
    let Some(open) = running.disks.find(new.name()) else {
        return open_configured(running, new, done).await;
    };
    if !open.setup.opens_like(new) {
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
        watch_room(running, &open, new.threshold);
    }
    if !new.limits.means(&before) {
        match running.limit(open.name(), &new.limits).await {
            Ok(()) => done.limited.push(open.name().to_owned()),
            Err(error) => done.failed.push(format!("{}: {error:#}", open.name())),
        }
    }
}

async fn open_configured(running: &Running, new: &DiskConfig, done: &mut ReloadResult) {
    let name = new.name();
    match running.open_and_serve(new.clone()).await {
        Ok(_) => done.opened.push(name.to_owned()),
        Err(error) => done.failed.push(format!("{name}: {error:#}")),
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
