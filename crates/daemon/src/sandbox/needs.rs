//! What a server does after everything is open, from its description alone: the less, the narrower its sandbox.

use blockhouse_disk::RemoteBacking;
use blockhouse_storage::Location;

use crate::setup::{DiskSetup, Setup};

/// Capabilities of root (`<linux/capability.h>`) without which it could not do with files what it did at the start: files
/// of others, which it also makes and removes (`CHOWN`, `DAC_OVERRIDE`, `DAC_READ_SEARCH`, `FOWNER`), memory that stays in
/// place (`IPC_LOCK`), and the space that a file system keeps for root (`SYS_RESOURCE`).
const FILES: [u32; 6] = [0, 1, 2, 3, 14, 24];
/// `NET_BIND_SERVICE`: ports below 1024.
const LISTENING: [u32; 1] = [10];

/// What is to be possible while it serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Opening files by their paths: those of TLS at a reload, the pid file at the end, and all that is opened on request.
    pub(crate) opens: bool,
    /// Opening further disks and exports, because a user asks for it (control socket, configuration).
    pub(crate) changes: bool,
    /// Listening at further sockets.
    pub(crate) listens: bool,
    /// Connecting to other servers.
    pub(crate) connects: bool,
    /// Guests by vhost-user-blk.
    pub(crate) guests: bool,
}

impl Needs {
    /// What this server needs.
    pub(crate) fn of(setup: &Setup) -> Self {
        let changes = setup.control.is_some() || setup.config.is_some();
        let connects = changes || setup.disks.iter().any(is_remote);
        Self {
            opens: changes || connects || setup.tls.is_some() || setup.pid_file.is_some(),
            changes,
            // The process before still has the address of the metrics when this one starts.
            listens: changes || (setup.hand_over && setup.metrics.is_some()),
            connects,
            guests: changes || !setup.devices.is_empty(),
        }
    }

    /// The capabilities that it keeps if root started it, a bit for each. Without the others it is no tracer of other
    /// processes, opens no raw sockets, and administers nothing.
    pub(crate) fn capabilities(self) -> u64 {
        let listening = if self.listens { &LISTENING[..] } else { &[] };
        FILES.iter().chain(listening).fold(0, |all, capability| all | 1 << capability)
    }
}

/// Whether a part of the disk may be at another server.
fn is_remote(disk: &DiskSetup) -> bool {
    disk.remote_backing == RemoteBacking::Allowed
        || !matches!(Location::of(&disk.path), Ok(Location::File(_)))
}
