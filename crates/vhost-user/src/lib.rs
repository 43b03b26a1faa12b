//! vhost-user-blk (layer 4): a disk as a device for a guest's virtio-blk driver.
//!
//! A front-end (a virtual machine monitor) connects to a socket and shares the guest's memory. From
//! then on the guest's driver and this crate communicate through rings in that memory, and the data
//! is not copied. A [`Device`] is a disk with the loops that serve its queues; a [`Server`] serves
//! the device to one front-end after the other.
//!
//! ```
//! use std::os::unix::net::UnixListener;
//! use std::sync::Arc;
//!
//! use blockhouse_disk::{Access, ImageFormat};
//! use blockhouse_images::{ImageOptions, create, open};
//! use blockhouse_engine::{EngineChoice, LoopThread};
//! use blockhouse_vhost_user::{Device, Export, RegisteredMemory, Server};
//!
//! # let folder = tempfile::tempdir()?;
//! # let (image, socket) = (folder.path().join("disk.img"), folder.path().join("vu.sock"));
//! let queue_loop = LoopThread::start("queue-0".into(), EngineChoice::Auto, |_| ())?;
//! let disk = Arc::new(queue_loop.run(move || async move {
//!     create(&image, 1 << 20, ImageFormat::Raw).await?;
//!     open(&image, ImageOptions::default()).await
//! })?);
//!
//! let device = Device::new(Export {
//!     disk: Arc::clone(&disk),
//!     name: "disk-0".into(),
//!     queues: 1,
//!     loops: vec![queue_loop.handle().clone()],
//!     memory: RegisteredMemory::Off,
//!     access: Access::ReadWrite,
//! });
//! let server = Server::start(device, UnixListener::bind(&socket)?.into())?;
//! // Now a virtual machine can be started with a vhost-user-blk device at this socket.
//!
//! server.stop();
//! queue_loop.run(move || async move { disk.close().await })?;
//! queue_loop.stop();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! This crate does not depend on an image format or an I/O engine, because it translates requests
//! into requests for a [`Disk`](blockhouse_disk::Disk).
//!
//! The modules, each based on those before it: [`ring`] (rings and chains), [`block`] (block
//! requests), `queue` (one queue on one loop), `protocol` (messages as bytes), `frontend` (their
//! effects), and [`Server`]. A program that accepts connections itself calls [`serve_frontend`]
//! instead.
//!
//! Another process can continue a device without the front-end noticing: [`Server::pause`] returns
//! a [`PausedFrontend`], the other process makes a [`PreparedFrontend`] of it, and calls
//! [`Server::restore`].
#![forbid(unsafe_code)]

pub mod block;
mod device;
#[cfg(feature = "driver")]
pub mod driver;
mod frontend;
mod pauses;
mod protocol;
mod queue;
pub mod ring;
mod server;
mod session;

pub use device::{Device, Export, FrontendEvent, FrontendObserver, RegisteredMemory};
pub use frontend::{PauseError, PausedFrontend, PausedVring, PausedWriteCache, PreparedFrontend};
pub use pauses::PendingPause;
pub use protocol::{InflightDescription, LogDescription, MemoryRegion, UserAddresses};
pub use queue::Kick;
pub use server::Server;
pub use session::serve_frontend;
