//! The sandbox: what a server may no longer do once everything is open.
//!
//! Guarantees: it is put on all threads before the first client is served, later threads inherit it, and nothing lifts it
//! again. A part that the kernel has not is said once in the log, and the others hold all the same. docs/sandbox.md
//! says what each part is for; docs/security.md tells users what it holds.
//!
//! - `needs`: what this server does later, from its description; which of root's capabilities that takes
//! - `files`: rules about files and TCP ports
//! - `system_calls`: the filter
//! - `user`: another user

mod files;
mod needs;
#[cfg(debug_assertions)]
mod probe;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod system_calls;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
#[path = "no_system_calls.rs"]
mod system_calls;
mod user;

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use anyhow::Result;
use blockhouse_engine::{Confinement, confine, reserve_signal_rings};
use blockhouse_nbd::BoundSocket;
use blockhouse_nbd::uri::Address;
use blockhouse_storage::Location;

use self::needs::Needs;
use crate::setup::{SandboxUse, Setup};
use crate::workers::Workers;

/// Rings for the signals to guests of devices that are added later. Beyond them Linux AIO signals.
const SPARE_SIGNAL_RINGS: usize = 16;

/// What is in force.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SandboxReport {
    parts: Vec<&'static str>,
    /// Where requests may open disks and make sockets; `None`: everywhere.
    for_requests: Option<Vec<PathBuf>>,
    /// Below which canonical paths the process can make files.
    writable: Vec<PathBuf>,
}

impl SandboxReport {
    /// Below which canonical paths the process can make files, as far as that is restricted.
    pub(crate) fn writable(&self) -> &[PathBuf] {
        &self.writable
    }

    /// Whether a request may open a disk, or make a socket, at this path.
    ///
    /// # Errors
    /// It may not; with what is allowed.
    pub(crate) fn check(&self, path: &Path) -> Result<()> {
        self.for_requests.as_ref().map_or(Ok(()), |allowed| files::check(allowed, path))
    }

    /// As [`check`](Self::check), of an image wherever it is: the files that its URI names for TLS.
    pub(crate) fn check_image(&self, name: &Path) -> Result<()> {
        match Location::of(name) {
            Ok(location) => location.local_path().map_or(Ok(()), |path| self.check(path)),
            // Its opening says what is wrong with the name.
            Err(_) => Ok(()),
        }
    }
}

impl fmt::Display for SandboxReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.parts[..] {
            [] => f.write_str("off"),
            parts => f.write_str(&parts.join(",")),
        }
    }
}

/// The paths of those sockets that have a file to be removed at the end.
pub(crate) fn socket_files<'a>(sockets: impl Iterator<Item = &'a BoundSocket>) -> Vec<PathBuf> {
    let path = |bound: &BoundSocket| match (&bound.address, &bound.file) {
        (Address::Unix(path), Some(_)) => Some(path.clone()),
        _ => None,
    };
    sockets.filter_map(path).collect()
}

/// What a server has open when it is confined.
pub(crate) struct Opened {
    /// How many vhost-user-blk devices.
    pub(crate) devices: usize,
    /// The files of its Unix sockets.
    pub(crate) sockets: Vec<PathBuf>,
}

/// Confines this process, whose loops are `workers`. What is opened at the start is open.
///
/// # Errors
/// It cannot become the user that it is to be. Some of it may have been done, and the process is to end.
pub(crate) fn enter(setup: &Setup, workers: &Workers, opened: &Opened) -> Result<SandboxReport> {
    let mut report = SandboxReport::default();
    let needs = Needs::of(setup);
    let rules = files::rules(setup, needs, opened);
    let ruleset = files::make(&rules, setup, needs);
    if let Some(ids) = setup.user {
        user::become_owner(ids, &opened.sockets)?;
        report.parts.push("user");
    }
    if setup.sandbox == SandboxUse::Off {
        return Ok(report);
    }
    prepare(setup, needs, opened);
    // First, because the filter forbids these calls.
    if confine_threads(ruleset, needs) {
        report.parts.push("landlock");
        report.writable = rules.writable();
        report.for_requests = Some(rules.for_requests);
    }
    match system_calls::restrict(needs) {
        Ok(()) => report.parts.push("seccomp"),
        Err(error) => tracing::warn!(
            "the sandbox does not restrict system calls: {error:#}; --sandbox off does without"
        ),
    }
    let count = system_calls::allowed_count(needs);
    tracing::debug!("sandbox: {report}; {count} system calls are allowed");
    #[cfg(debug_assertions)]
    probe::run(workers);
    #[cfg(not(debug_assertions))]
    let _ = workers;
    Ok(report)
}

/// Takes rights to files, and root's capabilities. Whether files are restricted.
fn confine_threads(ruleset: Result<Option<OwnedFd>>, needs: Needs) -> bool {
    let ruleset = match ruleset {
        Ok(Some(ruleset)) => Some(ruleset),
        Ok(None) => {
            tracing::info!("the sandbox does not restrict files: this kernel has no Landlock");
            None
        }
        Err(error) => {
            tracing::warn!(
                "the sandbox does not restrict files: {error:#}; --sandbox off does without"
            );
            None
        }
    };
    let (ruleset, capabilities) = (ruleset.as_ref().map(AsFd::as_fd), needs.capabilities());
    match confine(Confinement { ruleset, capabilities }) {
        Ok(()) => ruleset.is_some(),
        Err(error) => {
            tracing::warn!(
                "the sandbox restricts neither files nor capabilities: {error:#}; --sandbox off does without"
            );
            false
        }
    }
}

/// Makes what cannot be made later.
fn prepare(setup: &Setup, needs: Needs, opened: &Opened) {
    if needs.guests {
        // Each queue has one, and one more while a front-end changes it.
        let queues = opened.devices * (usize::from(setup.queues) + 1);
        let spare = if needs.changes { SPARE_SIGNAL_RINGS } else { 0 };
        reserve_signal_rings(queues + spare);
    }
    if needs.connects {
        // The C library loads code for the look-up of names when it looks up the first one, and no memory becomes
        // executable later. The outcome does not matter.
        let _ = std::net::ToSocketAddrs::to_socket_addrs(&("localhost", 1));
    }
}
