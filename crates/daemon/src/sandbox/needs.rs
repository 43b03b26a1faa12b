//! What a server does after everything is open, from its description alone: the less, the narrower its sandbox.

use blockhouse_disk::RemoteBacking;
use blockhouse_storage::Location;

use crate::setup::{DiskSetup, Setup};

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
}

/// Whether a part of the disk may be at another server.
fn is_remote(disk: &DiskSetup) -> bool {
    disk.remote_backing == RemoteBacking::Allowed
        || !matches!(Location::of(&disk.path), Ok(Location::File(_)))
}
