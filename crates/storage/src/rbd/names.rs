//! Creates, clones, removes and renames images by name. No client may have them open.

use std::io;

use blockhouse_core::{Error, ErrorKind, Result};

use super::ffi::{CallError, Cluster};
use super::location::RbdLocation;
use super::open::{OPTIONS, TIMEOUTS, describe};
use crate::blocking::run_blocking;

/// Makes an image of `size` bytes, all holes, with the features in the cluster's configuration.
///
/// # Errors
/// The failure, with the location: there is an image of this name (errno 17), or no such pool.
pub async fn create_rbd_image(location: &RbdLocation, size: u64) -> Result<()> {
    check_no_snapshot(location)?;
    let name = location.image().to_owned();
    let made = call(location, "cannot create", move |pool| pool.create_image(&name, size)).await;
    made.map_err(with_hint)
}

/// Makes an image with the content of the snapshot `of`, which is in the same pool. The clone
/// shares each object with the snapshot until the clone writes to it. The snapshot may be deleted;
/// the cluster keeps the objects that the clone needs.
///
/// # Errors
/// The failure, with the location: there is an image of this name (errno 17), or no such snapshot.
pub async fn clone_rbd_image(of: &RbdLocation, location: &RbdLocation) -> Result<()> {
    check_no_snapshot(location)?;
    let (image, name) = (of.image().to_owned(), location.image().to_owned());
    let snapshot = of.snapshot().unwrap_or_default().to_owned();
    let clone = move |pool: &Cluster| pool.clone_image(&image, &snapshot, &name);
    call(location, "cannot clone", clone).await.map_err(with_hint)
}

fn with_hint(error: Error) -> Error {
    match error.errno() {
        17 /* EEXIST */ => error.hint("it is left alone: choose another name"),
        _ => error,
    }
}

/// Removes an image that no client has open.
///
/// # Errors
/// The failure, with the location: a client has the image open, or the image has snapshots.
pub async fn remove_rbd_image(location: &RbdLocation) -> Result<()> {
    check_no_snapshot(location)?;
    let name = location.image().to_owned();
    call(location, "cannot remove", move |pool| pool.remove_image(&name)).await
}

/// Gives an image the name of `new`, which is in the same pool.
///
/// # Errors
/// The failure, with the location: there is an image of the new name (errno 17).
pub async fn rename_rbd_image(location: &RbdLocation, new: &RbdLocation) -> Result<()> {
    check_no_snapshot(location)?;
    if location.with_image(new.image()) != *new {
        let what = "an image gets another name in its own pool only";
        return Err(Error::new(ErrorKind::InvalidInput, what).on(&new.to_string()));
    }
    let (name, new_name) = (location.image().to_owned(), new.image().to_owned());
    call(new, "cannot take this name", move |pool| pool.rename_image(&name, &new_name)).await
}

fn check_no_snapshot(location: &RbdLocation) -> Result<()> {
    match location.snapshot() {
        None => Ok(()),
        Some(_) => {
            let what = "a snapshot is named where an image has to be";
            Err(Error::new(ErrorKind::InvalidInput, what).on(&location.to_string()))
        }
    }
}

/// Makes a blocking call on a connection of its own.
async fn call(
    location: &RbdLocation,
    what: &'static str,
    call: impl FnOnce(&Cluster) -> io::Result<()> + Send + 'static,
) -> Result<()> {
    let place = location.clone();
    let called = run_blocking("blockhouse-rbd", move || {
        let cluster = Cluster::connect(&place, OPTIONS, TIMEOUTS)?;
        call(&cluster).map_err(|source| CallError { what, source })
    });
    let called = called.await.unwrap_or_else(|source| Err(CallError { what, source }));
    called.map_err(|error| describe(error, location))
}
