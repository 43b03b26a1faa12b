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
    /// The front-end that has paused in another process.
    pub frontend: Option<PreparedFrontend>,
    /// The access of guests; that of the disk may be less.
    pub access: Access,
}

/// A listening socket of front-ends, and the place of its disk.
pub type DeviceOfDisk = (DeviceSocket, usize);

/// A device that is served at a socket.
pub struct ServedDevice {
    server: Server<ImageStorage>,
    path: PathBuf,
    /// Removed at the end.
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

/// Whether guests' memory is registered: only rings have a place for it.
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

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its file, if this process is to remove that.
    pub fn file(&self) -> Option<&SocketFile> {
        self.file.as_ref()
    }

    /// The disk has another size.
    pub fn resized(&self) {
        self.server.device().resized();
    }

    /// Takes nothing more: the beginning of [`stop`](Self::stop).
    pub fn begin_stop(&mut self) {
        // While it still listens: see `SocketFile`.
        self.file = None;
        self.server.begin_stop();
    }

    /// Completes what is in flight and ends.
    pub fn stop(mut self) {
        self.begin_stop();
        self.server.stop();
    }
}
