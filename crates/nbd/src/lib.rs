//! NBD (layer 4): the protocol, and a server for disks.
//!
//! A [`Server`] accepts clients at any number of sockets. Each socket has [`Exports`] of its own,
//! and its clients see only these. [`Limits`] bounds their resource use. [`Server::drain`] stops
//! the server after every request in flight has got its reply.
//!
//! ```
//! use std::io::Read;
//! use std::os::unix::net::UnixStream;
//! use std::sync::Arc;
//!
//! use blockhouse_disk::{Access, ImageFormat};
//! use blockhouse_images::{ImageOptions, create, open};
//! use blockhouse_engine::{EngineChoice, Listener, LoopThread};
//! use blockhouse_nbd::{Export, Exports, Limits, Server, bind_private};
//!
//! # let folder = tempfile::tempdir()?;
//! # let (image, path) = (folder.path().join("disk.img"), folder.path().join("nbd.sock"));
//! let nbd_loop = LoopThread::start("nbd".into(), EngineChoice::Auto, |_| ())?;
//! let disk = Arc::new(nbd_loop.run(move || async move {
//!     create(&image, 1 << 20, ImageFormat::Raw).await?;
//!     open(&image, ImageOptions::default()).await
//! })?);
//!
//! let exports = Exports::new();
//! let (name, description) = ("disk".to_owned(), String::new());
//! let (disk_of_export, bitmaps) = (Arc::clone(&disk), Vec::new());
//! let (access, has_depth) = (Access::ReadWrite, true);
//! exports.add(Export { name, description, disk: disk_of_export, bitmaps, access, has_depth })?;
//! let bound = bind_private(&path)?;
//! let listener = Listener::new(bound.socket)?;
//! let server = Server::new(Limits::default());
//! let (accepting, loops) = (server.clone(), [nbd_loop.handle().clone()]);
//! let accepting = nbd_loop
//!     .handle()
//!     .spawn(move || async move { accepting.serve(&listener, &exports, &loops).await });
//!
//! let mut client = UnixStream::connect(&path)?;
//! let mut greeting = [0; 8];
//! client.read_exact(&mut greeting)?;
//! assert_eq!(&greeting, b"NBDMAGIC");
//! drop(client);
//!
//! nbd_loop.run(move || async move { server.drain().await });
//! accepting.wait().expect("the loop runs until it is stopped")?;
//! nbd_loop.run(move || async move { disk.close().await })?;
//! nbd_loop.stop();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`proto`], [`handshake`], [`command`], [`status_payload`] and [`uri`] parse and encode bytes,
//! and do no I/O. The [`Server`] and the transmission phase use these modules, and turn commands
//! into requests for a [`Disk`](blockhouse_disk::Disk). So this crate knows no image format, and of
//! the engine only sockets and event loops.
#![forbid(unsafe_code)]

mod bitmap;
pub mod command;
pub mod handshake;
mod server;
mod session;
pub mod status_payload;
mod tls;

pub use bitmap::ExportBitmap;
pub use blockhouse_nbd_protocol as proto;
pub use blockhouse_nbd_protocol::uri;
pub use server::{
    BACKLOG, BoundSocket, ClientEvent, ClientObserver, Export, ExportError, Exports, Limits,
    MAX_EXPORT_BITMAPS, PausedConnection, PausedSession, Server, SocketFile, SocketPermissions,
    bind, bind_for, bind_private,
};
pub use tls::{ClientIdentity, SocketTls, TlsError, TlsFiles, TlsMode, TlsServer};
