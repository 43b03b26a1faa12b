//! The needs of a server after everything is open, from its setup only. The fewer, the narrower its
//! sandbox.

use blockhouse_config::disk::DiskConfig;
use blockhouse_config::setup::Setup;
use blockhouse_storage::Location;

/// Capabilities of root (`<linux/capability.h>`) without which it could not do with files what it
/// did at the start: files of others, which it also makes and removes (`CHOWN`, `DAC_OVERRIDE`,
/// `DAC_READ_SEARCH`, `FOWNER`), memory that stays in place (`IPC_LOCK`), and the space that a file
/// system keeps for root (`SYS_RESOURCE`).
const FILES: [u32; 6] = [0, 1, 2, 3, 14, 24];
/// `NET_BIND_SERVICE`: ports below 1024.
const LISTENING: [u32; 1] = [10];

/// The actions that must be possible while it serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Opening files by their paths: those of TLS at a reload, the pid file at the end, and all
    /// that is opened on request.
    pub(crate) opens: bool,
    /// Opening further disks and exports, because a user asks for it (control socket,
    /// configuration).
    pub(crate) changes: bool,
    /// Listening at further sockets.
    pub(crate) listens: bool,
    /// Connecting to other servers.
    pub(crate) connects: bool,
    /// Guests by vhost-user-blk.
    pub(crate) guests: bool,
    /// Taking over from another process, and being confined once more after that.
    pub(crate) takes_over: bool,
    /// Taking over block devices of this host, for which rings are made.
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
            // The process before still has the addresses of metrics and QMP when this one starts.
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

    /// The capabilities of a process that is started to take over from this server: what it would
    /// drop, it never has.
    pub(crate) fn capabilities_of_successor(setup: &Setup) -> u64 {
        let listens = Self::of(setup).listens || setup.server.metrics.is_some();
        Self { listens, ..Self::to_take_over(setup) }.capabilities()
    }

    /// The capabilities that it keeps if root started it, a bit for each. Without the others it is
    /// no tracer of other processes, opens no raw sockets, and administers nothing.
    pub(crate) fn capabilities(self) -> u64 {
        if self.takes_ublk {
            // The driver asks for those of administrators.
            return u64::MAX;
        }
        let listening = if self.listens { &LISTENING[..] } else { &[] };
        FILES.iter().chain(listening).fold(0, |all, capability| all | 1 << capability)
    }
}

/// Whether a part of the disk may be at another server.
fn is_remote(disk: &DiskConfig) -> bool {
    let is_here = matches!(Location::of(&disk.path), Ok(Location::File(_) | Location::Null(_)));
    disk.allow_remote || !is_here
}
