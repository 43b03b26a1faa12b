//! The system that is explored: anything that turns a guest's requests into operations on simulated
//! disks.

use std::future::Future;

use blockhouse_core::{Durability, Request, Result};
use fastrand::Rng;

use crate::SimDisk;

/// A system under test: it turns a guest's requests into operations on a simulated disk.
pub trait SystemUnderTest: 'static {
    /// Carries out one request.
    fn submit(&self, request: Request) -> impl Future<Output = Result<()>>;

    /// The size of the guest's disk in bytes.
    fn size(&self) -> u64;

    /// The durability that every change has, whatever its request says.
    fn min_durability(&self) -> Durability;

    /// Makes the disk longer; new bytes read as zeros. Durable when it returns.
    fn grow(&self, size: u64) -> impl Future<Output = Result<()>>;

    /// Changes the image as operators do with their tools, while guests use the disk. Guests must
    /// see no change.
    fn maintain(&self, _random: Rng) -> impl Future<Output = Result<()>> {
        async { Ok(()) }
    }

    /// Makes everything durable and closes the disk. No request is in flight.
    fn close(&self) -> impl Future<Output = Result<()>>;

    /// The other disks that it uses besides the one that it was built on. They crash at the same
    /// moment.
    fn others(&self) -> Vec<SimDisk>;

    /// The guest's bytes as found in `image`, which was left in `state`.
    fn recover(&self, image: Vec<u8>, state: ImageState) -> std::result::Result<Vec<u8>, String>;
}

/// How an image was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageState {
    /// As a crash leaves it.
    Crashed,
    /// Closed, after no request had failed or was cancelled.
    Closed,
}
