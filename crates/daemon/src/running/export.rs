//! Exports that are served, and the sockets and devices at which they are served.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blockhouse_config::export_address::ExportAddress;
use blockhouse_config::offers::ExportOptions;
use blockhouse_disk::Access;
use blockhouse_engine::Listener;
use blockhouse_nbd::uri::{Address, Security};
use blockhouse_nbd::{Exports, SocketFile};
use blockhouse_storage::ImageStorage;
use blockhouse_ublk::Server;
use parking_lot::Mutex;

use crate::endpoints::sockets::AddedSocket;
use crate::endpoints::vhost_user::ServedDevice;

/// An export that is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningExport {
    /// The address at which it is served.
    pub address: ExportAddress,
    /// The name of its disk.
    pub disk: String,
    /// Its options.
    pub options: ExportOptions,
    /// The bitmaps, copied or live, that it offers besides those that the disk was opened with.
    pub(crate) added_bitmaps: Vec<String>,
}

/// A listening socket of NBD clients.
pub(crate) struct ServedSocket {
    /// The socket's file. Dropped first, while the task that accepts clients still listens: see
    /// `SocketFile`.
    pub(super) file: Option<SocketFile>,
    pub(super) listener: Listener,
    pub(super) address: Address,
    /// How many sockets were served before it. The server of NBD clients numbers sockets the same
    /// way.
    pub(super) number: usize,
    /// Whether its clients must use TLS.
    pub(super) security: Security,
    /// The exports of this socket only: clients of other sockets do not find them.
    pub(super) exports: Exports<ImageStorage>,
    /// Whether the socket listens while it has no exports.
    pub(super) is_kept: AtomicBool,
}

impl ServedSocket {
    /// The number at the server of clients.
    pub(crate) fn number(&self) -> usize {
        self.number
    }

    /// Whether its clients must use TLS.
    pub(crate) fn security(&self) -> Security {
        self.security
    }

    /// The socket.
    pub(crate) fn listener(&self) -> &Listener {
        &self.listener
    }

    /// The address at which it listens.
    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    /// The socket's file, if this process must remove it.
    pub(crate) fn file(&self) -> Option<&SocketFile> {
        self.file.as_ref()
    }

    /// The options of `socket.add`, if control has added the socket.
    pub(crate) fn added(&self) -> Option<AddedSocket> {
        let max_connections = self.exports.max_connections();
        self.is_kept.load(Ordering::SeqCst).then_some(AddedSocket { max_connections })
    }
}

/// The names of the connected front-ends.
pub(super) type Frontends = Arc<Mutex<Vec<String>>>;

/// A vhost-user-blk device that is served.
pub(crate) struct RunningDevice {
    pub(super) disk: String,
    pub(super) access: Access,
    pub(super) served: ServedDevice,
    pub(super) frontends: Frontends,
}

impl RunningDevice {
    /// The name of its disk.
    pub(crate) fn disk(&self) -> &str {
        &self.disk
    }

    /// The access of guests. The disk itself may be read-only.
    pub(crate) fn access(&self) -> Access {
        self.access
    }

    /// Stops the device. The guests' requests in flight complete.
    pub(crate) fn stop(self) {
        self.served.stop();
    }

    /// The names of the connected front-ends.
    pub(crate) fn frontends(&self) -> Vec<String> {
        self.frontends.lock().clone()
    }

    /// The socket and its server.
    pub(crate) fn served(&self) -> &ServedDevice {
        &self.served
    }
}

/// A block device of this host that is served.
pub(crate) struct RunningUblk {
    pub(super) disk: String,
    pub(super) server: Server<ImageStorage>,
}

impl RunningUblk {
    /// The name of its disk.
    pub(crate) fn disk(&self) -> &str {
        &self.disk
    }

    /// The server.
    pub(crate) fn server(&self) -> &Server<ImageStorage> {
        &self.server
    }
}
