//! Applies a changed configuration, without touching its unchanged parts.

use std::iter;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, anyhow};
use blockhouse_config::disk::DiskConfig;
use blockhouse_config::export_address::ExportAddress;
use blockhouse_config::file;
use blockhouse_config::limits::LimitsConfig;
use blockhouse_config::offers::ExportRights;
use blockhouse_disk::Access;
use schemars::JsonSchema;
use serde::Serialize;

use super::disk::Moved;
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

/// A disk that a reload has closed, as it was until then.
struct ClosedDisk {
    /// The options that the file had for it.
    old: DiskConfig,
    /// The options that open it as it was, with its limits, and without exports.
    setup: DiskConfig,
    access: Access,
    exports: Vec<RunningExport>,
}

impl ClosedDisk {
    /// The state of an open disk, with the image that it goes on in. The image exists, so nothing
    /// is created.
    fn of(running: &Running, open: &RunningDisk, old: &DiskConfig) -> Self {
        let setup = DiskConfig {
            create: None,
            exports: Vec::new(),
            limits: open.limits(),
            ..open.setup_now()
        };
        let setup = match open.moved() {
            Some(Moved { path, format, cache }) => {
                DiskConfig { path, format: Some(format), cache, ..setup }
            }
            None => setup,
        };
        let exports = running.exports.of_disk(open.name());
        Self { old: old.clone(), setup, access: open.disk.access(), exports }
    }

    /// The limits that it had. A group that has other members keeps those that it has now.
    fn limits(&self, running: &Running) -> LimitsConfig {
        let group = self.setup.limits.group.clone();
        let joins = LimitsConfig { group, ..LimitsConfig::default() };
        let has_members = joins.group.is_some() && running.disks.check_limits(&joins).is_ok();
        if has_members { joins } else { self.setup.limits.clone() }
    }

    /// Opens the disk with other options. Limits, access and exports that requests have set stay,
    /// unless the file has changed them, too.
    ///
    /// # Errors
    /// The disk cannot be opened.
    async fn open_as(
        &self,
        running: &Running,
        new: &DiskConfig,
        done: &mut ReloadResult,
    ) -> Result<()> {
        let old = &self.old;
        let mut setup = new.clone();
        if new.limits.means(&old.limits) {
            setup.limits = self.limits(running);
        }
        if new.threshold == old.threshold {
            setup.threshold = self.setup.threshold;
        }
        let is_same_access = new.is_read_only() == old.is_read_only();
        let access = if is_same_access { self.access } else { new.access() };
        running.open_and_serve(setup, access).await?;
        let is_requested = |export: &&RunningExport| {
            [old, new].iter().all(|file| !file.exports.contains(&export.address))
        };
        self.serve(running, self.exports.iter().filter(is_requested), done).await;
        Ok(())
    }

    /// Opens the disk as it was, with its exports.
    ///
    /// # Errors
    /// The disk cannot be opened.
    async fn reopen(&self, running: &Running, done: &mut ReloadResult) -> Result<()> {
        let setup = DiskConfig { limits: self.limits(running), ..self.setup.clone() };
        running.open_and_serve(setup, self.access).await?;
        self.serve(running, &self.exports, done).await;
        Ok(())
    }

    /// Adds exports. One that fails does not prevent the others.
    async fn serve(
        &self,
        running: &Running,
        exports: impl IntoIterator<Item = &RunningExport>,
        done: &mut ReloadResult,
    ) {
        let name = self.setup.name();
        for RunningExport { address, rights, .. } in exports {
            let added = running.add_export(name, address.clone(), *rights, (&[], None)).await;
            done.failed.extend(added.err().map(|error| format!("{name}: {error:#}")));
        }
    }
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
    // The old options of a disk that stays are recorded, so that the next reload tries again.
    let mut staying = before.clone();
    staying.retain(|old| {
        let new = named(&wanted, old.name());
        is_open_as(running, old) && new.is_none_or(|new| !is_open_as(running, new))
    });
    for new in opening_order(&wanted, &closed) {
        if named(&staying, new.name()).is_some() {
            continue;
        }
        let old = named(&before, new.name());
        if let Some(open) = running.disks.find(new.name()) {
            take_over(running, &open, new, old, &mut done).await;
            continue;
        }
        let closed = closed.iter().find(|closed| closed.setup.name() == new.name());
        if !open_configured(running, new, closed, &mut done).await {
            let open = running.disks.find(new.name());
            staying.extend(old.zip(open).map(|(old, open)| old.with_image_of(&open.setup)));
        }
    }
    running.disks.sort_as(wanted.iter().map(DiskConfig::name));
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

/// Whether a disk is open with these options. A request may have closed it or opened another one of
/// its name.
fn is_open_as(running: &Running, setup: &DiskConfig) -> bool {
    running.disks.find(setup.name()).is_some_and(|open| open.is_open_as(setup))
}

/// The disks in the order in which they are opened: a disk that takes the image of another one
/// follows it. Reason: the other one needs its image if it goes on with the old options.
fn opening_order<'a>(wanted: &'a [DiskConfig], closed: &[ClosedDisk]) -> Vec<&'a DiskConfig> {
    let follows = |disk: &DiskConfig| {
        let former = closed.iter().find(|closed| closed.setup.path == disk.path)?;
        named(wanted, former.setup.name()).filter(|other| other.name() != disk.name())
    };
    // Disks that exchange their images form a circle.
    let depth = |disk: &&'a DiskConfig| {
        iter::successors(Some(*disk), |disk| follows(disk)).take(wanted.len()).count()
    };
    let mut order: Vec<_> = wanted.iter().collect();
    order.sort_by_key(depth);
    order
}

/// Closes the disks that are not wanted, or wanted with other options.
async fn close_changed(
    running: &Running,
    before: &[DiskConfig],
    wanted: &[DiskConfig],
    done: &mut ReloadResult,
) -> Vec<ClosedDisk> {
    let mut closed = Vec::new();
    for old in before {
        let (name, new) = (old.name(), named(wanted, old.name()));
        let open = running.disks.find(name).filter(|open| open.is_open_as(old));
        let Some(open) = open.filter(|open| new.is_none_or(|new| !open.is_open_as(new))) else {
            continue;
        };
        let as_before = ClosedDisk::of(running, &open, old);
        let outcome = match open.moved().zip(new) {
            // The image of the file is not the disk's image any longer.
            Some((moved, new)) if !moved.is_in(&new.path) => Err(anyhow!(
                "the disk goes on in {}: name that image in the file, or close the disk first",
                moved.path.display()
            )),
            _ => running.close(name, true).await,
        };
        match outcome {
            Ok(()) if new.is_none() => done.closed.push(name.to_owned()),
            Ok(()) => closed.push(as_before),
            Err(error) => done.failed.push(format!("{name}: {error:#}")),
        }
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

/// Opens a disk. If this fails, opens it again as it was before this reload closed it. Returns
/// whether it has the new options.
async fn open_configured(
    running: &Running,
    new: &DiskConfig,
    closed: Option<&ClosedDisk>,
    done: &mut ReloadResult,
) -> bool {
    let name = new.name();
    let opened = match closed {
        Some(closed) => closed.open_as(running, new, done).await,
        None => running.open_and_serve(new.clone(), new.access()).await.map(drop),
    };
    let Err(error) = opened else {
        done.opened.push(name.to_owned());
        return true;
    };
    let reopened = match closed {
        Some(closed) => closed.reopen(running, done).await.map(|()| true),
        None => Ok(false),
    };
    done.failed.push(match reopened {
        Ok(false) => format!("{name}: {error:#}"),
        Ok(true) => format!("{name}: {error:#}; it goes on with the old options"),
        Err(second) => {
            format!(
                "{name}: {error:#}; it cannot be opened with the old options either: {second:#}"
            )
        }
    });
    false
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
