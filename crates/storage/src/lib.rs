//! Storage (layer 2): the places other than local files that can hold an image.
//!
//! A [`Location`] is parsed from the name that a user gives; [`ImageStorage`] is the storage at
//! that location. [`NbdStorage`] is an export of an NBD server, [`RbdStorage`] an image in Ceph,
//! [`NullStorage`] a null device. Each is a [`Storage`](blockhouse_core::Storage), so a disk, a
//! format and every tool can use it.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use blockhouse_core::{Buffer, Storage};
//! use blockhouse_engine::{EngineChoice, EventLoop};
//! use blockhouse_storage::NbdStorage;
//!
//! let uri = "nbd://localhost/disk".parse()?;
//! let mut event_loop = EventLoop::new(EngineChoice::Auto)?;
//! event_loop.block_on(async {
//!     let disk = NbdStorage::connect(uri, Duration::from_secs(10)).await?;
//!     let mut buffer = Buffer::try_new(4096)?;
//!     disk.read(0, buffer.lend()).await
//! })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
// Unsafe code is allowed only for the calls of librados and librbd.
#![deny(unsafe_code)]

mod blocking;
mod concat;
mod detached;
mod image_storage;
mod location;
mod nbd;
mod null;
mod rbd;
mod view_storage;

pub use concat::Concat;
pub use image_storage::ImageStorage;
pub use location::Location;
pub use nbd::{ListedExport, NbdStorage, list_exports};
pub use null::{NullLocation, NullStorage};
pub use rbd::{
    RbdAccess, RbdLocation, RbdStorage, clone_rbd_image, create_rbd_image, remove_rbd_image,
    rename_rbd_image,
};
pub use view_storage::{StorageView, ViewStorage};
