//! Applies a changed configuration, without touching its unchanged parts.

use std::iter;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, anyhow};
use blockhouse_config::disk::DiskConfig;
use blockhouse_config::export_address::ExportAddress;
use blockhouse_config::file;
use blockhouse_config::limits::LimitsConfig;
use blockhouse_config::offers::ExportOptions;
use blockhouse_disk::Access;
use schemars::JsonSchema;
use serde::Serialize;

use super::configuration::ClosedDisk;
use super::room::{watch_room, watch_use};
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

impl ClosedDisk {
    /// The state of an open disk. The image exists, so nothing is created.
    fn of(running: &Running, open: &RunningDisk, old: DiskConfig) -> Self {
        let setup = DiskConfig {
            create: None,
            exports: Vec::new(),
            limits: open.limits(),
            ..open.setup_now()
        };
        let (access, write_threshold) = (open.disk.access(), open.write_threshold());
        let exports = running.exports.of_disk(open.name());
        Self { old, setup, path: open.path(), write_threshold, access, exports }
    }

    fn name(&self) -> &str {
        self.setup.name()
    }

    /// The limits that the disk had. A group with other members keeps its present limits.
    fn limits(&self, running: &Running) -> LimitsConfig {
        let group = self.setup.limits.group.clone();
        let joins = LimitsConfig { group, ..LimitsConfig::default() };
        let has_members = joins.group.is_some() && running.disks.check_limits(&joins).is_ok();
        if has_members { joins } else { self.setup.limits.clone() }
    }

    /// Opens the disk with its options `new` of the file; `wanted` has the options of all disks.
    /// Limits, access and exports that requests have set stay, unless the file has changed them,
    /// too.
    ///
    /// # Errors
    /// The disk cannot be opened.
    async fn open_as(
        &self,
        running: &Running,
        new: &DiskConfig,
        wanted: &[DiskConfig],
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
        // An export stays if a request has given it other options at an address of the file, or has
        // added it at an address that the file has for no disk and had not for this disk.
        let requested = self.exports.iter().filter(|RunningExport { address, options, .. }| {
            match new.exports.contains(address) {
                true => *options != ExportOptions::default(),
                false => ![old].into_iter().chain(wanted).any(|one| one.exports.contains(address)),
            }
        });
        let requested: Vec<_> = requested.collect();
        let is_requested =
            |address: &ExportAddress| requested.iter().any(|one| one.address == *address);
        setup.exports.retain(|address| !is_requested(address));
        let is_same_access = new.is_read_only() == old.is_read_only();
        let access = if is_same_access { self.access } else { new.access() };
        self.open(running, setup, access, requested, done).await?.set_configured(new.clone());
        Ok(())
    }

    /// Opens the disk as it was, with its exports.
    ///
    /// # Errors
    /// The disk cannot be opened.
    async fn reopen(&self, running: &Running, done: &mut ReloadResult) -> Result<()> {
        let setup = DiskConfig { limits: self.limits(running), ..self.setup.clone() };
        let open = self.open(running, setup, self.access, &self.exports, done).await?;
        open.set_configured(self.old.clone());
        Ok(())
    }

    /// Opens the disk, and adds exports. One that fails does not prevent the others.
    async fn open(
        &self,
        running: &Running,
        setup: DiskConfig,
        access: Access,
        exports: impl IntoIterator<Item = &RunningExport>,
        done: &mut ReloadResult,
    ) -> Result<Arc<RunningDisk>> {
        let open = running.open_and_serve(setup, access).await?;
        if self.write_threshold.is_some() {
            watch_use(running, &open, self.write_threshold);
        }
        let name = self.name();
        for RunningExport { address, options, .. } in exports {
            let added =
                running.add_export(name, address.clone(), options.clone(), (&[], None)).await;
            done.failed.extend(added.err().map(|error| format!("{name}: {error:#}")));
        }
        Ok(open)
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
    let wanted = known_by_address(running, file::read(path)?.disks);
    let mut done = ReloadResult::default();
    let closed = close_changed(running, &wanted, &mut done).await;
    // Exports are removed before others are added, so that an export can move to another disk.
    for new in &wanted {
        if let Some((open, old)) = staying(running, new) {
            remove_exports(running, (&open, &old), &new.exports, &mut done).await;
        }
    }
    for new in opening_order(&wanted, &closed) {
        let former = closed.iter().find(|closed| closed.name() == new.name());
        match running.disks.find(new.name()) {
            Some(open) if open.configured().is_none() => done.failed.push(format!(
                "{}: a request has opened another disk of this name; close it first",
                open.name()
            )),
            Some(open) => take_over(running, &open, new, &mut done).await,
            None => open_configured(running, new, former, &wanted, &mut done).await,
        }
    }
    let is_lost = |closed: &ClosedDisk| running.disks.find(closed.name()).is_none();
    *running.configuration.lost.lock() = closed.into_iter().filter(is_lost).collect();
    running.disks.sort_as(wanted.iter().map(DiskConfig::name));
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

/// The open disk that can have the options `new` without being opened again, and the options that
/// the file had for it.
fn staying(running: &Running, new: &DiskConfig) -> Option<(Arc<RunningDisk>, DiskConfig)> {
    let open = running.disks.find(new.name())?;
    let old = open.configured()?;
    open.stays_open(&old, new).then_some((open, old))
}

/// The disks in the order in which they are opened: a disk that takes the image of another one
/// follows it. Reason: the other one needs its image if it goes on with the old options. Disks that
/// exchange their images are opened in any order, and may lose them to each other.
fn opening_order<'a>(wanted: &'a [DiskConfig], closed: &[ClosedDisk]) -> Vec<&'a DiskConfig> {
    let follows = |disk: &DiskConfig| {
        let path = disk.path.canonicalize().unwrap_or_else(|_| disk.path.clone());
        let former = closed.iter().find(|closed| closed.path == path)?;
        named(wanted, former.name()).filter(|other| other.name() != disk.name())
    };
    let depth = |disk: &&'a DiskConfig| {
        iter::successors(Some(*disk), |disk| follows(disk)).take(wanted.len()).count()
    };
    let mut order: Vec<_> = wanted.iter().collect();
    order.sort_by_cached_key(depth);
    order
}

/// Closes the disks that are not wanted, or wanted with other options. Returns the closed disks
/// that are wanted, including disks that an earlier reload has lost.
async fn close_changed(
    running: &Running,
    wanted: &[DiskConfig],
    done: &mut ReloadResult,
) -> Vec<ClosedDisk> {
    let mut closed = std::mem::take(&mut *running.configuration.lost.lock());
    closed.retain(|lost| named(wanted, lost.name()).is_some());
    for open in running.disks.all() {
        let Some(old) = open.configured() else { continue };
        let (name, new) = (open.name(), named(wanted, open.name()));
        if new.is_some_and(|new| open.stays_open(&old, new)) {
            continue;
        }
        let as_before = ClosedDisk::of(running, &open, old);
        let outcome = match new.and_then(|_| reason_to_stay(&open, &as_before.exports)) {
            Some(reason) => Err(reason),
            None => running.close(name, true).await,
        };
        match outcome {
            Ok(()) if new.is_none() => done.closed.push(name.to_owned()),
            Ok(()) => closed.push(as_before),
            Err(error) => {
                done.failed.push(format!("{name}: {error:#}"));
                // A disk whose last changes cannot be made durable is closed nevertheless.
                let is_closed = new.is_some() && running.disks.find(name).is_none();
                closed.extend(is_closed.then_some(as_before));
            }
        }
    }
    closed
}

/// The reason why a disk with these exports cannot be opened as it was: it was forked, mirrored or
/// handed over, so the image that the file had named is not the disk's image any longer; or clients
/// may request bitmaps that the disk was not opened with.
fn reason_to_stay(open: &RunningDisk, exports: &[RunningExport]) -> Option<anyhow::Error> {
    let moved = open.moved().map(|moved| moved.path.display().to_string());
    if let Some(place) = moved.or_else(|| open.disk.retired_to().map(ToOwned::to_owned)) {
        return Some(anyhow!(
            "the disk goes on in {place}: name that image in the file, with the same options, or close the disk first"
        ));
    }
    let export = exports.iter().find(|export| !export.added_bitmaps.is_empty())?;
    Some(anyhow!(
        "{} offers bitmaps that its disk was not opened with, and the disk cannot be opened again with them: remove the export first ('blockhouse ctl SOCKET unexport')",
        export.address
    ))
}

/// Adds new exports and limits to a disk that stays open. The old options of a disk that could not
/// be closed stay recorded, so that the next reload tries again.
async fn take_over(
    running: &Running,
    open: &Arc<RunningDisk>,
    new: &DiskConfig,
    done: &mut ReloadResult,
) {
    let Some((_, old)) = staying(running, new) else { return };
    add_exports(running, new, done).await;
    // A limit that a request has set stays, unless the file has changed it, too.
    if new.threshold != old.threshold {
        watch_room(running, open, new.threshold);
    }
    let mut configured = new.clone();
    if !new.limits.means(&old.limits) {
        match running.limit(open.name(), &new.limits).await {
            Ok(()) => done.limited.push(open.name().to_owned()),
            Err(error) => {
                done.failed.push(format!("{}: {error:#}", open.name()));
                configured.limits = old.limits;
            }
        }
    }
    // An export that could not be removed is removed by the next reload.
    let served = running.exports.of_disk(open.name());
    let left = old.exports.into_iter().filter(|address| {
        !new.exports.contains(address) && served.iter().any(|one| one.address == *address)
    });
    configured.exports.extend(left);
    open.set_configured(configured);
}

/// Opens a disk. If this fails, opens it again as it was before a reload has closed it.
async fn open_configured(
    running: &Running,
    new: &DiskConfig,
    former: Option<&ClosedDisk>,
    wanted: &[DiskConfig],
    done: &mut ReloadResult,
) {
    let name = new.name();
    let opened = match former {
        Some(former) => former.open_as(running, new, wanted, done).await,
        None => running
            .open_and_serve(new.clone(), Access::ReadWrite)
            .await
            .map(|open| open.set_configured(new.clone())),
    };
    let Err(error) = opened else {
        return done.opened.push(name.to_owned());
    };
    let reopened = match former {
        Some(former) => Some(former.reopen(running, done).await),
        None => None,
    };
    done.failed.push(match reopened {
        None => format!("{name}: {error:#}"),
        Some(Ok(())) => format!("{name}: {error:#}; it goes on with the old options"),
        Some(Err(second)) => {
            format!(
                "{name}: {error:#}; it cannot be opened with the old options either: {second:#}"
            )
        }
    });
}

/// Removes the exports of a disk that stays open, except the wanted ones.
async fn remove_exports(
    running: &Running,
    (open, old): (&RunningDisk, &DiskConfig),
    wanted: &[ExportAddress],
    done: &mut ReloadResult,
) {
    let served = running.exports.of_disk(open.name());
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
        match running.add_export(name, address.clone(), ExportOptions::default(), (&[], None)).await
        {
            Ok(address) => done.added.push(address.to_string()),
            Err(error) => done.failed.push(format!("{name}: {error:#}")),
        }
    }
}
