//! Taking over a configuration that has changed, without touching what has not.

use std::path::Path;

use anyhow::Result;
use blockhouse_disk::Access;

use super::{ExportAddress, Running};
use crate::config::{Config, ConfiguredDisk};
use crate::running::claims::Name;
use crate::setup::DiskSetup;

/// The result of a reload.
#[derive(Debug, Default)]
pub(crate) struct Reloaded {
    /// The names of disks that were opened.
    pub(crate) opened: Vec<String>,
    /// The names of disks that were closed, and not opened again.
    pub(crate) closed: Vec<String>,
    /// The addresses of exports that were added to disks that stayed open.
    pub(crate) added: Vec<String>,
    /// The addresses of exports that were removed from them.
    pub(crate) removed: Vec<String>,
    /// The names of disks that stayed open and have other limits.
    pub(crate) limited: Vec<String>,
    /// The changes that failed: a line each. All others were made.
    pub(crate) failed: Vec<String>,
}

impl Reloaded {
    /// Tells the log.
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

impl Running {
    /// Reads the configuration again. Disks that are no longer in it are closed, and their clients
    /// end; disks with other options are closed and opened again; new ones are opened; exports
    /// and limits come and go. What the configuration neither had nor has is left alone:
    /// requests have opened that.
    ///
    /// # Errors
    /// The file cannot be read, or something in it is wrong: then nothing was done.
    pub(crate) async fn reload(&self, path: &Path) -> Result<Reloaded> {
        let _claim = self.claims.claim([Name::Configuration]).await;
        let wanted = self.known_by_address(Config::read(path)?.disks);
        let before = self.list.lock().configured.clone();
        let mut done = Reloaded::default();
        for old in before.iter().filter(|old| self.is_open_as(&old.setup)) {
            let new = wanted.iter().find(|new| new.setup.name == old.setup.name);
            if new.is_none_or(|new| !new.setup.opens_like(&old.setup)) {
                self.close_configured(old, new.is_some(), &mut done).await;
            }
        }
        // Before others are added: what moves to another disk is free then.
        for old in before.iter().filter(|old| self.is_open_as(&old.setup)) {
            let new = wanted.iter().find(|new| new.setup.name == old.setup.name);
            self.remove_exports(old, new.map_or(&[], |new| &new.addresses), &mut done).await;
        }
        for new in &wanted {
            let old = before.iter().find(|old| old.setup.name == new.setup.name);
            self.take_over(new, old, &mut done).await;
        }
        let mut list = self.list.lock();
        let place = |name: &str| wanted.iter().position(|disk| disk.setup.name == name);
        list.disks.sort_by_key(|disk| place(disk.name()).unwrap_or(usize::MAX));
        list.configured = wanted;
        Ok(done)
    }

    /// These disks, with the addresses by which their exports are known when they are served.
    fn known_by_address(&self, mut disks: Vec<ConfiguredDisk>) -> Vec<ConfiguredDisk> {
        for address in disks.iter_mut().flat_map(|disk| &mut disk.addresses) {
            if let ExportAddress::Nbd(uri) = address {
                *uri = self.known_as(uri.clone());
            }
        }
        disks
    }

    /// Whether a disk is open as this says: not closed by a request, nor another one of its name.
    fn is_open_as(&self, setup: &DiskSetup) -> bool {
        self.find(&setup.name).is_some_and(|open| open.setup.opens_like(setup))
    }

    async fn close_configured(&self, old: &ConfiguredDisk, is_reopened: bool, done: &mut Reloaded) {
        let name = &old.setup.name;
        match self.close(name, true).await {
            Ok(()) if is_reopened => {}
            Ok(()) => done.closed.push(name.clone()),
            Err(error) => done.failed.push(format!("{name}: {error:#}")),
        }
    }

    /// Opens a disk that is not open, and gives an open one the exports and limits that it has not.
    async fn take_over(
        &self,
        new: &ConfiguredDisk,
        old: Option<&ConfiguredDisk>,
        done: &mut Reloaded,
    ) {
        let Some(open) = self.find(&new.setup.name) else {
            return self.open_configured(new, done).await;
        };
        if !open.setup.opens_like(&new.setup) {
            return done.failed.push(format!(
                "{}: a request has opened another disk of this name; close it first",
                open.name()
            ));
        }
        self.add_exports(new, done).await;
        // A change by a request stays, unless the file has changed, too.
        let before = old.map_or_else(|| open.throttle(), |old| old.setup.throttle.clone());
        let before_threshold = old.map_or_else(|| open.room.threshold(), |old| old.setup.threshold);
        if new.setup.threshold != before_threshold {
            self.watch_room(&open, new.setup.threshold);
        }
        if new.setup.throttle != before {
            match self.limit_disk(open.name(), new.setup.throttle.as_ref()).await {
                Ok(()) => done.limited.push(open.name().to_owned()),
                Err(error) => done.failed.push(format!("{}: {error:#}", open.name())),
            }
        }
    }

    async fn open_configured(&self, new: &ConfiguredDisk, done: &mut Reloaded) {
        let name = &new.setup.name;
        match self.open_and_serve(new.setup.clone(), new.addresses.clone()).await {
            Ok(_) => done.opened.push(name.clone()),
            Err(error) => done.failed.push(format!("{name}: {error:#}")),
        }
    }

    /// Removes exports of a disk that stays open, but those that are wanted.
    async fn remove_exports(
        &self,
        old: &ConfiguredDisk,
        wanted: &[ExportAddress],
        done: &mut Reloaded,
    ) {
        let served = self.exports_of(&old.setup.name);
        let is_served =
            |address: &&ExportAddress| served.iter().any(|one| one.address == **address);
        let gone = old.addresses.iter().filter(|address| !wanted.contains(address));
        for address in gone.filter(is_served) {
            let address = address.to_string();
            match self.remove_export(&address).await {
                Ok(()) => done.removed.push(address),
                Err(error) => done.failed.push(format!("{error:#}")),
            }
        }
    }

    /// Adds the exports that a disk has not.
    async fn add_exports(&self, new: &ConfiguredDisk, done: &mut Reloaded) {
        let name = &new.setup.name;
        let served = self.exports_of(name);
        let is_served = |address: &ExportAddress| served.iter().any(|one| one.address == *address);
        for address in new.addresses.iter().filter(|address| !is_served(address)) {
            match self.add_export(name, address.clone(), Access::ReadWrite, &[]).await {
                Ok(address) => done.added.push(address.to_string()),
                Err(error) => done.failed.push(format!("{name}: {error:#}")),
            }
        }
    }
}
