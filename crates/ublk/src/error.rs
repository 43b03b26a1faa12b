//! Errors, with the cause and a hint.

use std::io;

use blockhouse_core::errno;

/// An error of creating, using or removing a ublk device.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel has no driver.
    #[error(
        "cannot make a ublk device: /dev/ublk-control is missing; load the driver with 'modprobe ublk_drv' (Linux 6.5 or later), or use --nbd or --vhost-user-blk"
    )]
    NoDriver,
    /// This user may not use the driver.
    #[error(
        "cannot make a ublk device: {0}; /dev/ublk-control needs root's rights (CAP_SYS_ADMIN)"
    )]
    Forbidden(io::Error),
    /// The driver cannot be reached.
    #[error("cannot use /dev/ublk-control by io_uring: {0}; use --nbd or --vhost-user-blk")]
    Unusable(io::Error),
    /// The driver is too old.
    #[error(
        "cannot make a ublk device: the kernel's driver is too old; use Linux 6.5 or later, or --nbd or --vhost-user-blk"
    )]
    TooOld,
    /// The driver refuses a step.
    #[error("cannot {what} /dev/ublkb{id}: {cause}")]
    Refused {
        /// The step that was attempted.
        what: &'static str,
        /// The device.
        id: u32,
        /// The driver's answer.
        cause: io::Error,
    },
    /// The server runs in a PID namespace. The driver compares process IDs of the initial one.
    #[error(
        "cannot {what} /dev/ublkb{id}: {cause}; Linux 6.16 and later serve no device from a PID namespace: run the \
         server in the host's (--pid=host of a container)"
    )]
    PidNamespace {
        /// The step that was attempted.
        what: &'static str,
        /// The device.
        id: u32,
        /// The driver's answer.
        cause: io::Error,
    },
    /// Another server has the device.
    #[error(
        "/dev/ublkb{id} is served by process {server}; use another number, or stop that process"
    )]
    InUse {
        /// The device.
        id: u32,
        /// The server.
        server: i32,
    },
    /// The device was made for another image.
    #[error(
        "/dev/ublkb{id} is of another image, and waits for its server; use another number, or, if nothing uses it, remove it with 'blockhouse detach /dev/ublkb{id}'"
    )]
    OtherImage {
        /// The device.
        id: u32,
    },
    /// The device was made by a server that has not started it.
    #[error(
        "/dev/ublkb{id} was made by process {server}, which has not started it; use another number, or, if that process is no server that starts, remove the device with 'blockhouse detach /dev/ublkb{id}'"
    )]
    NotStarted {
        /// The device.
        id: u32,
        /// The process that made it.
        server: i32,
    },
    /// The device was removed, but its block device is still open.
    #[error(
        "/dev/ublkb{id} was removed, but something still has it open, such as a mounted file system: unmount it, or use another number"
    )]
    StillOpen {
        /// The device.
        id: u32,
    },
    /// The device can no longer be taken over.
    #[error(
        "/dev/ublkb{id} can be taken over no more, because a server was killed while it did so, and this kernel allows that once (Linux 6.16 and later allow it again): {cause}; remove it with 'blockhouse detach /dev/ublkb{id}', and attach the image again"
    )]
    Lost {
        /// The device.
        id: u32,
        /// The driver's answer.
        cause: io::Error,
    },
    /// Something uses the block device.
    #[error(
        "/dev/ublkb{id} is in use, mounted or held by another device; unmount it first, or use --force, and what is not written yet is lost to it"
    )]
    Used {
        /// The device.
        id: u32,
    },
    /// The server of the device has other exports.
    #[error(
        "/dev/ublkb{id} is not all that process {server} serves; remove it with 'blockhouse ctl SOCKET unexport /dev/ublkb{id}', or use --force to end that process with all its exports"
    )]
    ServesMore {
        /// The device.
        id: u32,
        /// The server.
        server: i32,
    },
    /// The device is served, with another image.
    #[error("/dev/ublkb{id} is of another image; use another number")]
    OtherServed {
        /// The device.
        id: u32,
    },
    /// The device was made by another program.
    #[error("/dev/ublkb{id} is of another program; use another number")]
    Foreign {
        /// The device.
        id: u32,
    },
    /// There is no such device.
    #[error("there is no ublk device {id}")]
    Missing {
        /// The device.
        id: u32,
    },
    /// The device of a dead server is not released yet.
    #[error(
        "/dev/ublkb{id} is still held by what is left of process {server}; try again when that has ended"
    )]
    NotReleased {
        /// The device.
        id: u32,
        /// The server.
        server: i32,
    },
    /// The disk has changed, and the device cannot take the change.
    #[error(
        "/dev/ublkb{id} waits for its server, but the image has changed: {what}; if nothing uses it, remove it with 'blockhouse detach /dev/ublkb{id}'"
    )]
    Changed {
        /// The device.
        id: u32,
        /// The change.
        what: String,
    },
    /// There is no memory for the requests of a queue, or no loop that serves the queue.
    #[error("cannot serve /dev/ublkb{id}: {cause}")]
    Queue {
        /// The device.
        id: u32,
        /// The reason.
        cause: io::Error,
    },
    /// The size cannot change.
    #[error(
        "/dev/ublkb{id} keeps its size: this kernel cannot change it (Linux 6.16 and later can); it has the new one after a restart of the server"
    )]
    FixedSize {
        /// The device.
        id: u32,
    },
}

impl Error {
    /// Whether no process can have a device here, because the driver is missing or unusable.
    pub fn has_no_driver(&self) -> bool {
        matches!(self, Self::NoDriver | Self::TooOld | Self::Unusable(_))
    }

    /// The error for a driver that could not be opened.
    pub(crate) fn opening(source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::NotFound => Self::NoDriver,
            io::ErrorKind::PermissionDenied => Self::Forbidden(source),
            _ => Self::Unusable(source),
        }
    }

    /// Whether the driver reported that there is no such device.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Self::Refused { cause, .. } if cause.raw_os_error() == Some(errno::ENODEV))
    }

    /// The error for the step `what` of device `id`, which the driver refused.
    pub(crate) fn refused(what: &'static str, id: u32) -> impl FnOnce(io::Error) -> Self {
        move |source| match source.kind() {
            io::ErrorKind::PermissionDenied => Self::Forbidden(source),
            _ => Self::Refused { what, id, cause: source },
        }
    }
}
