//! The running disks by name, and their exports at listening sockets.
//!
//! Guarantees: names are unique. An export's disk is open as long as the export is served. Changes
//! of different disks do not wait for each other ([`claims`](crate::running::claims)), and a change
//! that fails has no effect. A disk or an export is in its list from the start to the end of its
//! service.
//!
//! - `disk_list` (with `limits`), `export_list` (with `nbd_sockets`, `devices`, `ublk_devices`),
//!   `backup_list`, `configuration`: the lists, each with its own state
//! - `disks` (with `activity`): opening, changing and closing a disk; the other files: operations
//!   on several disks

mod activity;
mod backup_list;
pub(crate) mod backups;
pub(crate) mod claims;
mod configuration;
mod devices;
mod disk;
mod disk_list;
mod disks;
mod export;
mod export_list;
pub(crate) mod forks;
pub(crate) mod images;
pub(crate) mod io_poll;
mod limits;
mod nbd_sockets;
pub(crate) mod open;
pub(crate) mod recording;
pub(crate) mod reload;
pub(crate) mod rollbacks;
pub(crate) mod room;
pub(crate) mod scratch;
pub(crate) mod transactions;
mod ublk_devices;

use std::collections::HashMap;
use std::slice;
use std::sync::{Arc, Weak};

use anyhow::Result;
use blockhouse_config::disk::DiskConfig;
use blockhouse_config::server::StateSetup;
use blockhouse_config::setup::Setup;
use blockhouse_disk::{HostSpace, ImageDisk};
use blockhouse_engine::{EngineReport, Handle};
use blockhouse_images::StateUse;
use futures_util::future::join_all;

use self::backup_list::Backups;
use self::claims::Claims;
use self::configuration::Configuration;
use self::disk_list::DiskList;
use self::export_list::ExportList;
use self::open::state_use;
use crate::endpoints::tls::Tls;
use crate::events::Events;
use crate::jobs::Jobs;
use crate::metrics::{MeasuredDisk, Samples, StartTime, gather};
use crate::process::blocking::Questions;
use crate::sandbox::SandboxReport;
pub(crate) use backup_list::{BackupDisk, RunningBackup};
pub use disk::RunningDisk;
pub(crate) use disk::{EarlierLife, Moved, OpenedDisk};
pub(crate) use disks::Refreshed;
pub(crate) use export::{RunningDevice, RunningExport, RunningUblk, ServedSocket};
pub(crate) use nbd_sockets::SocketOffer;

/// The server's disks and exports, and its other state.
pub struct Running {
    loops: Vec<Handle>,
    state: StateSetup,
    /// The user that the server switches to when everything is open; `None` if it keeps its own.
    user: Option<u32>,
    /// Whether completions must be polled for.
    io_poll: bool,
    sandbox: SandboxReport,
    disks: Arc<DiskList>,
    exports: Arc<ExportList>,
    configuration: Configuration,
    claims: Claims,
    events: Events,
    jobs: Jobs,
    backups: Backups,
    questions: Questions,
    measured_since: StartTime,
}

impl Running {
    /// A server without disks and exports, on these loops.
    pub(crate) fn new(
        loops: Vec<Handle>,
        report: &EngineReport,
        setup: &Setup,
        (tls, sandbox): (Option<Tls>, SandboxReport),
        measured_since: StartTime,
    ) -> Self {
        let events = Events::default();
        let exports = ExportList::new(loops.clone(), report, setup, tls, events.clone());
        Self {
            loops,
            state: setup.server.state.clone(),
            user: setup.user.map(|ids| ids.user),
            io_poll: setup.server.io_poll,
            sandbox,
            disks: Arc::default(),
            exports: Arc::new(exports),
            configuration: Configuration::new(setup.config.clone()),
            claims: Claims::default(),
            events,
            jobs: Jobs::default(),
            backups: Backups::default(),
            questions: Questions::default(),
            measured_since,
        }
    }

    /// The disks.
    pub fn disks(&self) -> &Arc<DiskList> {
        &self.disks
    }

    /// The exports.
    pub fn exports(&self) -> &Arc<ExportList> {
        &self.exports
    }

    pub(crate) fn configuration(&self) -> &Configuration {
        &self.configuration
    }

    /// The restrictions of the process.
    pub(crate) fn sandbox(&self) -> &SandboxReport {
        &self.sandbox
    }

    /// The events for clients of control.
    pub fn events(&self) -> &Events {
        &self.events
    }

    /// The claims of operations on disks and exports.
    pub fn claims(&self) -> &Claims {
        &self.claims
    }

    /// The jobs on disks that are served.
    pub fn jobs(&self) -> &Jobs {
        &self.jobs
    }

    pub(crate) fn backups(&self) -> &Backups {
        &self.backups
    }

    /// As [`check_unused`](Self::check_unused); fails for an inactive disk, too.
    pub(crate) fn check_free(&self, disk: &str) -> Result<()> {
        self.check_active(disk)?;
        self.check_unused(disk)
    }

    /// Fails if a job or a backup uses the disk: then it must not be changed.
    pub fn check_unused(&self, disk: &str) -> Result<()> {
        self.jobs.check_free(disk)?;
        self.backups.check_free(disk)
    }

    /// The use of state files by a disk that is opened after the start.
    ///
    /// # Errors
    /// The requested directory cannot be used.
    pub(crate) fn state_use(&self, setup: &DiskConfig) -> Result<StateUse> {
        state_use(&self.state, slice::from_ref(setup), self.user)
    }

    /// The time at which the counters started.
    pub(crate) fn measured_since(&self) -> StartTime {
        self.measured_since
    }

    /// The values of all metrics at this moment. Those of space are left out for a disk whose file
    /// system does not answer.
    pub(crate) async fn gathered(&self) -> Vec<Samples> {
        let named = |disk: Arc<RunningDisk>| (disk.name().to_owned(), Arc::downgrade(&disk.disk));
        let (names, disks): (Vec<_>, Vec<_>) = self.disks.all().into_iter().map(named).unzip();
        let spaces = self.host_spaces(&disks).await;
        let measured = names.into_iter().zip(disks).zip(spaces);
        let measured: Vec<_> =
            measured.map(|((name, disk), space)| MeasuredDisk { name, disk, space }).collect();
        gather(self.measured_since, &measured)
    }

    /// The space of each of `disks`; unknown where a file system does not answer.
    pub(crate) async fn host_spaces(&self, disks: &[Weak<ImageDisk>]) -> Vec<HostSpace> {
        let mut questions: HashMap<_, Vec<_>> = HashMap::new();
        for (index, weak) in disks.iter().enumerate() {
            if let Some(disk) = weak.upgrade() {
                questions.entry(disk.file_systems()).or_default().push((index, weak.clone()));
            }
        }
        let answers = questions.into_iter().map(|(file_systems, disks)| {
            let space = |(index, disk): (usize, Weak<ImageDisk>)| {
                disk.upgrade().map(|disk| (index, disk.host_space()))
            };
            self.questions.run(file_systems, move || disks.into_iter().filter_map(space).collect())
        });
        let mut spaces = vec![HostSpace::default(); disks.len()];
        for answer in join_all(answers).await {
            let known: Vec<_> = answer.unwrap_or_else(|error| {
                tracing::warn!("the space of some disks is not known: {error}");
                Vec::new()
            });
            known.into_iter().for_each(|(index, space)| spaces[index] = space);
        }
        spaces
    }

    /// The options that the command line or the configuration has for the open disks.
    pub(crate) fn configured(&self) -> Vec<DiskConfig> {
        self.disks.all().iter().filter_map(|disk| disk.configured()).collect()
    }

    /// Records these options as those of the configuration, for the disks that are open.
    pub(crate) fn set_configured(&self, options: Vec<DiskConfig>) {
        for options in options {
            if let Some(disk) = self.disks.find(options.name()) {
                disk.set_configured(options);
            }
        }
    }

    /// Records all present disks and exports as those of the command line or the configuration.
    pub(crate) fn set_all_configured(&self) {
        for disk in self.disks.all() {
            let exports = self.exports.of_disk(disk.name()).into_iter();
            let exports = exports.map(|export| export.address).collect();
            disk.set_configured(DiskConfig { limits: disk.limits(), exports, ..disk.setup_now() });
        }
    }
}
