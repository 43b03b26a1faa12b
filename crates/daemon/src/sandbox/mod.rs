//! The sandbox: the restrictions of a server after it has opened its files and sockets.
//!
//! Guarantees: the sandbox applies to all threads before the first client is served, later threads
//! inherit it, and nothing can lift it. A server that takes over from another process enters it
//! before it reads the first byte from that process, which an attacker may control:
//! [`enter_to_take_over`]. A part that the kernel lacks is logged once; the other parts still
//! apply. README.md here has the purpose of each part; docs/security.md has the guarantees for
//! users.
//!
//! - `needs`: the later operations of this server, from its setup, and the capabilities that they
//!   need
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
use blockhouse_config::disk::DiskConfig;
use blockhouse_config::setup::Setup;
use blockhouse_engine::{Confinement, confine, reserve_signal_rings};
use blockhouse_nbd::BoundSocket;
use blockhouse_nbd::uri::Address;
use blockhouse_storage::Location;

pub(crate) use self::files::FileRules;
use self::needs::Needs;
use crate::process::workers::Workers;

/// The number of spare rings for signals to guests of devices that are added later. Without a ring,
/// guests are signalled through Linux AIO.
const SPARE_SIGNAL_RINGS: usize = 16;

/// The restrictions that apply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SandboxReport {
    parts: Vec<&'static str>,
    /// The paths where requests may open disks and create sockets; `None`: everywhere.
    for_requests: Option<Vec<PathBuf>>,
    /// The paths that the process can write.
    reach: Reach,
}

/// The paths that a process can write.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Every path that the process's user may write: the kernel does not restrict the process.
    #[default]
    User,
    /// Below these canonical paths.
    Below(Vec<PathBuf>),
    /// Anywhere: the sandbox is off.
    Anywhere,
}

impl SandboxReport {
    /// The paths that the process can write.
    pub(crate) fn reach(&self) -> &Reach {
        &self.reach
    }

    /// Checks whether a request may open a disk or create a socket at this path.
    ///
    /// # Errors
    /// The path is not allowed. The error names the allowed paths.
    pub(crate) fn check(&self, path: &Path) -> Result<()> {
        self.for_requests.as_ref().map_or(Ok(()), |allowed| files::check(allowed, path))
    }

    /// As [`check`](Self::check), for an image. For an image on another server, checks the files
    /// that its URI names for TLS.
    pub(crate) fn check_image(&self, name: &Path) -> Result<()> {
        match Location::of(name) {
            Ok(location) => location.local_path().map_or(Ok(()), |path| self.check(path)),
            // Opening the image reports the error in the name.
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

/// The paths of the sockets whose file must be removed at the end.
pub(crate) fn socket_files<'a>(sockets: impl Iterator<Item = &'a BoundSocket>) -> Vec<PathBuf> {
    let path = |bound: &BoundSocket| match (&bound.address, &bound.file) {
        (Address::Unix(path), Some(_)) => Some(path.clone()),
        _ => None,
    };
    sockets.filter_map(path).collect()
}

/// The descriptors that a server has open when it is confined.
pub(crate) struct Opened {
    /// The number of vhost-user-blk devices.
    pub(crate) devices: usize,
    /// The files of the server's Unix sockets.
    pub(crate) sockets: Vec<PathBuf>,
    /// The rules that [`enter_before_ceph`] has applied.
    pub(crate) rules_of_writing: Option<FileRules>,
}

/// Confines a process that is going to take over, whose loops are `workers`, according to its setup
/// alone. The process keeps the rights for its later operations and for the hand-over. [`enter`]
/// drops the rights for the hand-over, and reports parts that the kernel lacks.
///
/// # Errors
/// The errors of [`enter`].
pub(crate) fn enter_to_take_over(setup: &Setup, workers: &Workers) -> Result<()> {
    let needs = Needs::to_take_over(setup);
    let sockets = files::own_sockets(setup);
    let opened = Opened { devices: setup.devices.len(), sockets, rules_of_writing: None };
    let rules = files::rules(setup, needs, &opened);
    let ruleset = files::make(&rules, setup, needs);
    if let Some(ids) = setup.user {
        // The sockets belong to this user since they were bound.
        user::become_owner(ids, &[])?;
    }
    if !setup.server.sandbox {
        return Ok(());
    }
    prepare(setup, needs, &opened);
    // `enter` applies these restrictions again, and reports a failure.
    if let Err(error) = confine_threads(ruleset, needs, setup, &opened) {
        tracing::debug!("while this server takes over: {error}");
    }
    if let Err(error) = system_calls::restrict(needs) {
        tracing::debug!("system calls are not restricted while this server takes over: {error:#}");
    }
    probe(workers);
    Ok(())
}

/// Confines this process, whose loops are `workers`, after it has opened everything that it opens
/// at the start.
///
/// # Errors
/// The process cannot become the configured user. The process may then be partly confined, so the
/// caller must end it.
pub(crate) fn enter(setup: &Setup, workers: &Workers, opened: &Opened) -> Result<SandboxReport> {
    let mut report = SandboxReport::default();
    let needs = Needs::of(setup);
    let rules = files::rules(setup, needs, opened);
    let ruleset = files::make(&rules, setup, needs);
    if let Some(ids) = setup.user {
        if !setup.hand_over {
            user::become_owner(ids, &opened.sockets)?;
        }
        report.parts.push("user");
    }
    if !setup.server.sandbox {
        report.reach = Reach::Anywhere;
        return Ok(report);
    }
    if !setup.hand_over {
        prepare(setup, needs, opened);
    }
    // Confine before the filter applies, because the filter forbids these calls.
    match confine_threads(ruleset, needs, setup, opened) {
        Ok(()) => {
            report.parts.push("landlock");
            report.reach = Reach::Below(rules.writable());
            report.for_requests = Some(rules.for_requests);
        }
        Err(missing @ Unrestricted::Missing) => tracing::info!("{missing}"),
        Err(failed) => {
            tracing::warn!("{failed}");
            if let Some(rules) = &opened.rules_of_writing {
                report.parts.push("writes");
                report.reach = Reach::Below(rules.writable());
                report.for_requests = Some(rules.for_requests.clone());
            }
        }
    }
    let restricted = if setup.hand_over {
        // The other restrictions apply already.
        system_calls::restrict_further(needs)
    } else {
        system_calls::restrict(needs)
    };
    match restricted {
        Ok(()) => report.parts.push("seccomp"),
        Err(error) => tracing::warn!(
            "the sandbox does not restrict system calls: {error:#}; --sandbox off does without"
        ),
    }
    let count = system_calls::allowed_count(needs);
    tracing::debug!("sandbox: {report}; {count} system calls are allowed");
    probe(workers);
    Ok(report)
}

/// Drops root's capabilities, and the rights to write outside the server's own paths. This must
/// precede the start of the threads of Ceph's library, because no restriction can be applied to
/// these threads later. Returns the rules for writes, if the kernel restricts them.
pub(crate) fn enter_before_ceph(setup: &Setup) -> Option<FileRules> {
    if !drops_before_ceph(setup) {
        return None;
    }
    let needs = Needs::of(setup);
    let rules = files::rules_of_writing(setup, needs);
    let ruleset = files::make_of_writing(&rules).unwrap_or_else(|error| {
        tracing::warn!("the sandbox restricts no files of Ceph's library: {error:#}");
        None
    });
    let capabilities = needs.capabilities();
    let confinement = Confinement { ruleset: ruleset.as_ref().map(AsFd::as_fd), capabilities };
    if let Err(error) = confine(confinement) {
        tracing::warn!("the sandbox drops neither capabilities nor rights to write: {error}");
        return None;
    }
    #[cfg(debug_assertions)]
    probe::start_aside();
    ruleset.map(|_| rules)
}

/// Whether a server that may have an image in Ceph drops capabilities before it opens any. A server
/// that changes its user has no capabilities afterwards, and a server of ublk devices needs them.
fn drops_before_ceph(setup: &Setup) -> bool {
    let is_ceph = |name: &Path| matches!(Location::of(name), Ok(Location::Rbd(_)));
    // The backing file of a local image may be in Ceph, too, if that is allowed.
    let may_have = |disk: &DiskConfig| disk.allow_remote || disk.images().any(|name| is_ceph(name));
    let keeps = setup.user.is_some() || !setup.ublk.is_empty();
    setup.disks.iter().any(may_have) && !keeps && setup.server.sandbox
}

/// The capabilities of a process that is started to take over from this server.
pub(crate) fn capabilities_of_successor(setup: &Setup) -> u64 {
    if setup.server.sandbox { Needs::capabilities_of_successor(setup) } else { u64::MAX }
}

/// Tries to break out of the sandbox, if a test requests that.
fn probe(workers: &Workers) {
    #[cfg(debug_assertions)]
    probe::run(workers);
    #[cfg(not(debug_assertions))]
    let _ = workers;
}

/// The parts that the kernel does not restrict.
enum Unrestricted {
    /// Files: the kernel has no Landlock.
    Missing,
    /// The restricted parts as text, and the reason.
    Failed(&'static str, anyhow::Error),
}

impl fmt::Display for Unrestricted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => {
                f.write_str("the sandbox does not restrict files: this kernel has no Landlock")
            }
            Self::Failed(what, error) => {
                write!(f, "the sandbox restricts {what}: {error:#}; --sandbox off does without")
            }
        }
    }
}

/// Drops rights to files, and root's capabilities.
///
/// # Errors
/// Rights to files stay, except those dropped before.
fn confine_threads(
    ruleset: Result<Option<OwnedFd>>,
    needs: Needs,
    setup: &Setup,
    opened: &Opened,
) -> Result<(), Unrestricted> {
    let (ruleset, missing) = match ruleset {
        Ok(Some(ruleset)) => (Some(ruleset), None),
        Ok(None) => (None, Some(Unrestricted::Missing)),
        Err(error) => (None, Some(Unrestricted::Failed("no files", error))),
    };
    let capabilities = needs.capabilities();
    let ruleset = ruleset.as_ref().map(AsFd::as_fd);
    let what = match (&opened.rules_of_writing, drops_before_ceph(setup)) {
        (Some(_), _) => "only where files are written",
        (None, true) => "no files",
        (None, false) => "neither files nor capabilities",
    };
    confine(Confinement { ruleset, capabilities })
        .map_err(|error| Unrestricted::Failed(what, error.into()))?;
    missing.map_or(Ok(()), Err)
}

/// Creates and loads everything that the sandbox forbids later.
fn prepare(setup: &Setup, needs: Needs, opened: &Opened) {
    if needs.guests {
        // Each queue has one ring. Each device has one more, for a queue that its front-end
        // changes.
        let queues = opened.devices * (usize::from(setup.server.queues()) + 1);
        let spare = if needs.changes { SPARE_SIGNAL_RINGS } else { 0 };
        reserve_signal_rings(queues + spare);
    }
    if needs.connects {
        // The C library loads code when it resolves the first name, and the sandbox later forbids
        // executable mappings. The result does not matter.
        let _ = std::net::ToSocketAddrs::to_socket_addrs(&("localhost", 1));
    }
}
