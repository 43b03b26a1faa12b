//! What fails, and what to do.

use std::io;

/// Why there is no device, or what became of it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel has no driver.
    #[error(
        "cannot make a ublk device: /dev/ublk-control is missing; load the driver with 'modprobe ublk_drv' (Linux 6.5 or later), or use --nbd or --vhost-user-blk"
    )]
    NoDriver,
    /// The driver is forbidden to this user.
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
    #[error("cannot {what} /dev/ublkb{id}: {source}")]
    Refused {
        /// What was tried.
        what: &'static str,
        /// The device.
        id: u32,
        /// The driver's answer.
        source: io::Error,
    },
    /// Another server has the device.
    #[error(
        "/dev/ublkb{id} is served by process {server}; use another number, or stop that process"
    )]
    InUse {
        /// The device.
        id: u32,
        /// Its server.
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
    /// A dead server's device is not released.
    #[error(
        "/dev/ublkb{id} is still held by what is left of process {server}; try again when that has ended"
    )]
    NotReleased {
        /// The device.
        id: u32,
        /// Its server.
        server: i32,
    },
    /// The device cannot be what the disk is now.
    #[error(
        "/dev/ublkb{id} waits for its server, but the image has changed: {what}; if nothing uses it, remove it with 'blockhouse detach /dev/ublkb{id}'"
    )]
    Changed {
        /// The device.
        id: u32,
        /// What has changed.
        what: String,
    },
    /// No memory for the requests of a queue, or no loop that serves it.
    #[error("cannot serve /dev/ublkb{id}: {source}")]
    Queue {
        /// The device.
        id: u32,
        /// Why.
        source: io::Error,
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
    /// The driver could not be opened.
    pub(crate) fn opening(source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::NotFound => Self::NoDriver,
            io::ErrorKind::PermissionDenied => Self::Forbidden(source),
            _ => Self::Unusable(source),
        }
    }

    /// The driver refused `what` of device `id`.
    pub(crate) fn refused(what: &'static str, id: u32) -> impl FnOnce(io::Error) -> Self {
        move |source| match source.kind() {
            io::ErrorKind::PermissionDenied => Self::Forbidden(source),
            _ => Self::Refused { what, id, source },
        }
    }
}
