//! The vhost-user-blk exports of `serve`.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result};
use blockhouse_disk::Disk;
use blockhouse_engine::{Handle, HostFile};
use blockhouse_nbd::uri::Address;
use blockhouse_nbd::{BoundSocket, SocketFile, bind};
use blockhouse_vhost_user::{Device, Export, RegisteredMemory, Server};

/// A device that is served at a socket.
pub struct ServedDevice {
    server: Server<HostFile>,
    /// Removed at the end.
    file: Option<SocketFile>,
}

/// Listens at all sockets.
pub fn listen(sockets: &[PathBuf]) -> Result<Vec<BoundSocket>> {
    sockets.iter().map(|path| Ok(bind(&Address::Unix(path.clone()))?)).collect()
}

/// Serves a disk at a socket, with this many queues on these loops, with guests' memory registered or not.
pub fn serve(
    bound: BoundSocket,
    disk: &Arc<Disk<HostFile>>,
    name: String,
    queues: u16,
    loops: Vec<Handle>,
    memory: RegisteredMemory,
) -> Result<ServedDevice> {
    let disk = Arc::clone(disk);
    let device = Device::new(Export { disk, name, queues, loops, memory });
    let server = Server::start(device, bound.socket).context("cannot serve the socket")?;
    Ok(ServedDevice { server, file: bound.file })
}

impl ServedDevice {
    /// The disk has another size.
    pub fn resized(&self) {
        self.server.device().resized();
    }

    /// Completes what is in flight and ends.
    pub fn stop(self) {
        let Self { server, file } = self;
        // While it still listens: see `SocketFile`.
        drop(file);
        server.stop();
    }
}
