//! Opens an image: sets options, takes the lock, and finds out whether completed writes are
//! durable.

use std::ffi::CStr;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_engine::sleep;
use futures_util::future::{Either, select};

use super::connection::{Connection, Image};
use super::ffi::{CallError, LockHolder};
use super::location::RbdLocation;
use crate::blocking::run_blocking;

/// The options that are always set. With them a completed write is durable, waits for a hung
/// cluster are short, and librbd does not log to stderr.
pub(super) const OPTIONS: &[(&CStr, &CStr)] = &[
    (c"rbd_cache", c"false"),
    (c"client_mount_timeout", c"30"),
    (c"log_to_stderr", c"false"),
    (c"err_to_stderr", c"false"),
];

/// Timeouts in seconds that are set if the configuration has none, so that no request waits
/// forever.
pub(super) const TIMEOUTS: &[(&CStr, &CStr)] =
    &[(c"rados_osd_op_timeout", c"30"), (c"rados_mon_op_timeout", c"30")];

/// If the lock is not acquired within this time, its holder is taken to be hung: a warning is
/// logged, and the wait continues.
const LOCK_PATIENCE: Duration = Duration::from_secs(3);

/// How an image is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RbdAccess {
    /// For reading, while no other client writes. This is checked once, at the open.
    Read,
    /// For reading, also while another client writes. The data may be inconsistent: its parts may
    /// never have existed at the same time.
    ReadShared,
    /// For reading and writing, with the image's exclusive lock.
    Write,
}

/// An image that is open.
pub(super) struct Opened {
    pub(super) connection: Arc<Connection>,
    pub(super) size: u64,
    /// Whether librbd completes writes that are only in its own cache.
    pub(super) is_cached: bool,
}

/// Opens an image and locks it for this `access`.
pub(super) async fn open(location: RbdLocation, access: RbdAccess) -> Result<Opened> {
    let name = location.to_string();
    if access == RbdAccess::Write && location.snapshot().is_some() {
        let error = Error::new(ErrorKind::ReadOnly, "a snapshot is never written").on(&name);
        return Err(error.hint("open it for reading (--read-only), or clone it with 'rbd clone'"));
    }
    let host_error = |what, error| Error::host(what, error).on(&name);
    let (place, is_writable) = (location.clone(), access == RbdAccess::Write);
    let opening = run_blocking("blockhouse-rbd", move || {
        let image = Image::open(&place, is_writable, OPTIONS, TIMEOUTS)?;
        let failed = |source| CallError { what: "cannot examine the image", source };
        let is_cached = is_cached(&image).map_err(failed)?;
        Ok((image, is_cached))
    });
    let opened = opening.await.map_err(|error| host_error("cannot start a thread", error))?;
    let (image, is_cached) = opened.map_err(|error| describe(error, &location))?;
    let connection = Connection::new(name, image)?;
    let locked = match access {
        RbdAccess::Write => lock(&connection, &location).await,
        RbdAccess::Read if location.snapshot().is_none() => check_unlocked(&connection).await,
        RbdAccess::Read | RbdAccess::ReadShared => Ok(()),
    };
    // The size is that of the locked image: the previous holder of the lock may have changed it.
    let sized = match locked {
        Ok(()) => connection.run_blocking("cannot examine the image", Image::size).await,
        Err(error) => Err(error),
    };
    match sized {
        Ok(size) => Ok(Opened { connection, size, is_cached }),
        Err(error) => {
            // A drop of the open image would block the loop. The first error is the one to report.
            let _ = connection.close().await;
            Err(error)
        }
    }
}

/// Whether the image's own metadata, or its pool's, makes librbd complete writes before they are
/// durable.
fn is_cached(image: &Image) -> io::Result<bool> {
    let is_on = |value: Option<String>| {
        value.is_some_and(|value| !matches!(value.as_str(), "false" | "0" | "disabled"))
    };
    Ok(is_on(image.option("rbd_cache")?) || is_on(image.option("rbd_persistent_cache_mode")?))
}

/// The error of a failed call, with a hint.
pub(super) fn describe(error: CallError, location: &RbdLocation) -> Error {
    let CallError { what, source } = error;
    if source.kind() == io::ErrorKind::Unsupported && source.raw_os_error().is_none() {
        let what = format!("{what}: {source}");
        return Error::new(ErrorKind::Unsupported, what).on(&location.to_string());
    }
    let error = Error::host(what, source).on(&location.to_string());
    let (pool, image) = (location.pool(), location.image());
    const ENOENT: i32 = 2;
    const ETIMEDOUT: i32 = 110;
    match (what, error.errno()) {
        ("cannot open the image", ENOENT) => {
            error.hint(format!("see 'rbd ls {pool}', 'rbd snap ls {pool}/{image}'"))
        }
        ("cannot create" | "cannot clone", ETIMEDOUT) => {
            error.hint(format!("it may be there nevertheless: see 'rbd ls {pool}'"))
        }
        ("cannot use the pool", ENOENT) => error.hint("see 'ceph osd lspools'"),
        ("cannot read the configuration of Ceph", _) => {
            error.hint("name the cluster's configuration file: rbd:POOL/IMAGE?conf=FILE")
        }
        ("cannot connect to the cluster", ETIMEDOUT) => error
            .hint("its monitors do not answer: see 'ceph -s', and 'mon host' in its configuration"),
        ("cannot connect to the cluster", _) => {
            error.hint("see 'keyring' and 'mon host' in its configuration; the user is id=USER")
        }
        _ => error,
    }
}

/// Takes the exclusive lock.
async fn lock(connection: &Arc<Connection>, location: &RbdLocation) -> Result<()> {
    let locking = pin!(connection.run_blocking("cannot lock the image", Image::lock));
    let locked = match select(locking, sleep(LOCK_PATIENCE)).await {
        Either::Left((locked, _)) => locked,
        Either::Right(((), locking)) => {
            tracing::warn!(
                "{}: the client that holds the image's lock does not answer; waiting until the cluster finds that \
                 it is gone, half a minute mostly",
                connection.name()
            );
            locking.await
        }
    };
    let Err(error) = locked else { return Ok(()) };
    match error.errno() {
        blockhouse_core::errno::EINVAL => {
            let what = "the image has no exclusive lock, so that nothing would keep a second writer away";
            let (pool, image) = (location.pool(), location.image());
            let hint = format!("give it one: rbd feature enable {pool}/{image} exclusive-lock");
            Err(Error::new(ErrorKind::Unsupported, what).on(connection.name()).hint(hint))
        }
        30 /* EROFS */ => {
            let holder = holder(connection).await?.unwrap_or_else(|| "another client".into());
            Err(locked_by(connection, &holder))
        }
        _ => Err(error),
    }
}

/// Refuses an image whose lock is held by a live client.
async fn check_unlocked(connection: &Arc<Connection>) -> Result<()> {
    match holder(connection).await? {
        Some(holder) => Err(locked_by(connection, &holder)),
        None => Ok(()),
    }
}

fn locked_by(connection: &Connection, holder: &str) -> Error {
    let what = format!("the image is locked: {holder} has it open for writing");
    Error::new(ErrorKind::Locked, what)
        .on(connection.name())
        .hint("stop that program first, or read a snapshot of the image")
}

/// A description of the client that holds the lock and has the image open.
async fn holder(connection: &Connection) -> Result<Option<String>> {
    let asked = connection.run_blocking("cannot list the clients of the image", |image| {
        let Some(LockHolder { client, address }) = image.lock_holder()? else { return Ok(None) };
        let watches = image.watchers()?.iter().any(|number| client == format!("client.{number}"));
        Ok(watches.then(|| format!("{client} at {address}")))
    });
    asked.await
}
