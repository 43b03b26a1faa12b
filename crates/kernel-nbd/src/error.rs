//! Errors, with the cause and a hint.

use std::io;
use std::path::PathBuf;

/// Why a device cannot be attached or detached.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel has no driver.
    #[error("the kernel's NBD client is not there; load it with 'modprobe nbd'")]
    NoDriver,
    /// The driver cannot be reached.
    #[error("cannot use the kernel's NBD client by netlink: {0}")]
    Unusable(io::Error),
    /// This user may not use the driver.
    #[error("cannot {what}: {cause}; the kernel's NBD client needs root's rights (CAP_SYS_ADMIN)")]
    Forbidden {
        /// The attempt.
        what: String,
        /// The kernel's answer.
        cause: io::Error,
    },
    /// The driver refuses a step.
    #[error("cannot {what}: {cause}")]
    Refused {
        /// The attempt.
        what: String,
        /// The kernel's answer.
        cause: io::Error,
    },
    /// The server does not speak NBD, or does not answer.
    #[error("cannot use the NBD server at {}: {what}", .socket.display())]
    Server {
        /// The socket.
        socket: PathBuf,
        /// The reason.
        what: String,
    },
    /// The block device did not appear.
    #[error(
        "/dev/nbd{0} did not appear; /dev must be one in which the kernel's devices appear (devtmpfs)"
    )]
    NoNode(u32),
    /// There is no such device.
    #[error("/dev/nbd{0} is not connected")]
    Missing(u32),
    /// The device was made by another program.
    #[error(
        "/dev/nbd{0} is of another program; disconnect it with that, such as 'nbd-client -d /dev/nbd{0}'"
    )]
    Foreign(u32),
    /// Something uses the block device.
    #[error(
        "/dev/nbd{0} is in use, mounted or held by another device; unmount it first, or use --force, and what is not written yet is lost to it"
    )]
    Used(u32),
    /// The server does not end.
    #[error("process {process}, the server at {}, does not end; try again when it has", .socket.display())]
    NotEnded {
        /// The server.
        process: i32,
        /// The socket.
        socket: PathBuf,
    },
}

impl Error {
    /// The error for a step that the driver refused.
    pub(crate) fn refused(what: String, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::PermissionDenied => Self::Forbidden { what, cause: source },
            _ => Self::Refused { what, cause: source },
        }
    }
}
