//! The needs of a server after everything is open, from its setup only. Fewer needs allow a
//! narrower sandbox.

use std::path::PathBuf;

use blockhouse_config::disk::DiskConfig;
use blockhouse_config::setup::Setup;
use blockhouse_storage::Location;

/// Capabilities of root (`<linux/capability.h>`) that keep file access as it was at the start: use,
/// creation and removal of other users' files (`CHOWN`, `DAC_OVERRIDE`, `DAC_READ_SEARCH`,
/// `FOWNER`), locked memory (`IPC_LOCK`), and a file system's space reserved for root
/// (`SYS_RESOURCE`).
const FILES: [u32; 6] = [0, 1, 2, 3, 14, 24];
/// `NET_BIND_SERVICE`: ports below 1024.
const LISTENING: [u32; 1] = [10];

/// The actions that must be possible while the server runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Opening files by path: TLS files at a reload, the pid file at the end, files that a
    /// connection needs (name resolution, Ceph, TLS), and all files opened on request.
    pub(crate) opens: bool,
    /// Opening further disks and exports at a user's request (control socket, configuration).
    pub(crate) changes: bool,
    /// Listening at further sockets.
    pub(crate) listens: bool,
    /// Connecting to other servers.
    pub(crate) connects: bool,
    /// Guests by vhost-user-blk.
    pub(crate) guests: bool,
    /// Taking over from another process, and being sandboxed again after that.
    pub(crate) takes_over: bool,
    /// Taking over ublk devices of this host, for which rings are created.
    pub(crate) takes_ublk: bool,
}

impl Needs {
    /// The needs of this server.
    pub(crate) fn of(setup: &Setup) -> Self {
        let changes = setup.takes_changes();
        let connects = changes || setup.disks.iter().any(is_remote);
        Self {
            opens: changes || connects || setup.tls.is_some() || setup.server.pid_file.is_some(),
            changes,
            // The previous process still has the addresses of metrics and QMP when this one starts.
            listens: changes
                || (setup.hand_over
                    && (setup.server.metrics.is_some() || setup.server.qmp.is_some())),
            connects,
            guests: changes || !setup.devices.is_empty(),
            takes_over: false,
            takes_ublk: false,
        }
    }

    /// The needs of this server while it takes over from another process.
    pub(crate) fn to_take_over(setup: &Setup) -> Self {
        let takes_ublk = !setup.ublk.is_empty();
        Self { opens: true, takes_over: true, takes_ublk, ..Self::of(setup) }
    }

    /// The capabilities of a process that is started to take over from this server. Capabilities
    /// that it would drop are not given to it.
    pub(crate) fn capabilities_of_successor(setup: &Setup) -> u64 {
        let listens = Self::of(setup).listens || setup.server.metrics.is_some();
        Self { listens, ..Self::to_take_over(setup) }.capabilities()
    }

    /// The capabilities that the server keeps if root started it, one bit each. Without the others
    /// it cannot trace other processes, open raw sockets or administer the host.
    pub(crate) fn capabilities(self) -> u64 {
        if self.takes_ublk {
            // The ublk driver requires administrator capabilities.
            return u64::MAX;
        }
        let listening = if self.listens { &LISTENING[..] } else { &[] };
        FILES.iter().chain(listening).fold(0, |all, capability| all | 1 << capability)
    }
}

/// Whether a part of the disk may be on another server.
fn is_remote(disk: &DiskConfig) -> bool {
    let is_here =
        |name: &PathBuf| matches!(Location::of(name), Ok(Location::File(_) | Location::Null(_)));
    disk.allow_remote || !disk.images().all(is_here)
}
