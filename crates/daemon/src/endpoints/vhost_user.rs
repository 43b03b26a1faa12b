//! The vhost-user-blk exports of `serve`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use blockhouse_config::setup::Setup;
use blockhouse_disk::Access;
use blockhouse_engine::{Engine, EngineReport};
use blockhouse_nbd::uri::Address;
use blockhouse_nbd::{BoundSocket, SocketFile};
use blockhouse_storage::ImageStorage;
use blockhouse_vhost_user::{Device, PreparedFrontend, RegisteredMemory, Server};

use crate::process::kept_sockets;

/// A listening socket of front-ends.
pub struct DeviceSocket {
    /// The socket.
    pub bound: BoundSocket,
    /// The front-end that another process has paused and handed over.
    pub frontend: Option<PreparedFrontend>,
    /// The access of guests; the disk's own access may be less.
    pub access: Access,
}

/// A listening socket of front-ends, and the index of its disk.
pub type DeviceOfDisk = (DeviceSocket, usize);

/// A device that is served at a socket.
pub struct ServedDevice {
    server: Server<ImageStorage>,
    path: PathBuf,
    /// The socket's file, removed at the end.
    file: Option<SocketFile>,
}

/// Listens at all sockets.
pub fn listen(setup: &Setup) -> Result<Vec<DeviceOfDisk>> {
    let listen = |(path, disk): &(PathBuf, usize)| {
        let bound = kept_sockets::bind(&Address::Unix(path.clone()), setup.server.permissions())?;
        Ok((DeviceSocket { bound, frontend: None, access: Access::ReadWrite }, *disk))
    };
    setup.devices.iter().map(listen).collect()
}

/// Whether guests' memory is registered with the kernel: only io_uring can do that.
pub fn registered_memory(report: &EngineReport, setup: &Setup) -> RegisteredMemory {
    match report.engine {
        Engine::IoUring => setup.server.registered_memory(),
        Engine::LinuxAio | Engine::Threads => RegisteredMemory::Off,
    }
}

/// Serves a disk at a socket.
pub fn serve(socket: DeviceSocket, device: Device<ImageStorage>) -> Result<ServedDevice> {
    let BoundSocket { socket: listener, address, file } = socket.bound;
    let Address::Unix(path) = address else { bail!("a device needs a Unix socket") };
    let server = Server::restore(device, listener, socket.frontend);
    Ok(ServedDevice { server: server.context("cannot serve the socket")?, path, file })
}

impl ServedDevice {
    /// The server of its front-ends.
    pub fn server(&self) -> &Server<ImageStorage> {
        &self.server
    }

    /// The path of its socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The socket's file, if this process must remove it.
    pub fn file(&self) -> Option<&SocketFile> {
        self.file.as_ref()
    }

    /// Tells the front-ends that the disk has a new size.
    pub fn resized(&self) {
        self.server.device().resized();
    }

    /// Stops accepting front-ends and requests: the first part of [`stop`](Self::stop).
    pub fn begin_stop(&mut self) {
        // The file is removed while the socket still listens: see `SocketFile`.
        self.file = None;
        self.server.begin_stop();
    }

    /// Completes the requests in flight, and ends.
    pub fn stop(mut self) {
        self.begin_stop();
        self.server.stop();
    }
}
