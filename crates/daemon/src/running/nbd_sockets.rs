//! Listening sockets of NBD clients. A socket listens as long as it has exports, and from
//! `socket.add` to `socket.remove` even without any.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::{Context, Result, bail};
use blockhouse_config::export_address::ExportAddress;
use blockhouse_config::offers::ExportOptions;
use blockhouse_core::rare;
use blockhouse_engine::{Listener, Stream};
use blockhouse_nbd::uri::{Address, NbdUri, Security};
use blockhouse_nbd::{BoundSocket, ClientEvent, Export, Exports, PausedSession, SocketTls};
use blockhouse_storage::ImageStorage;
use signal_hook::consts::SIGTERM;

use super::disk::RunningDisk;
use super::export::{RunningExport, ServedSocket};
use super::export_list::{ExportList, State};
use crate::endpoints::sockets::{AddedSocket, security};
use crate::endpoints::tls::Tls;
use crate::events::Event;
use crate::process::blocking;
use crate::process::kept_sockets;

/// An export of a disk. Its description is empty unless a user has set one. Reason: clients need
/// not know the path of the image.
fn export(name: String, disk: &RunningDisk, options: ExportOptions) -> Export<ImageStorage> {
    let ExportOptions { access, has_depth, description } = options;
    let bitmaps = disk.bitmaps.clone();
    Export { name, description, disk: Arc::clone(&disk.disk), bitmaps, access, has_depth }
}

/// A disk that a socket offers.
pub(crate) struct SocketOffer {
    /// The name of the export.
    pub(crate) name: String,
    pub(crate) disk: Arc<RunningDisk>,
    /// The options of the export.
    pub(crate) options: ExportOptions,
}

/// Whether a socket's clients must use TLS.
fn security_of(tls: Option<&SocketTls>) -> Security {
    security(tls.map(|tls| tls.mode))
}

impl State {
    fn socket(&self, address: &Address) -> Option<Arc<ServedSocket>> {
        self.sockets.iter().find(|socket| socket.address == *address).cloned()
    }
}

impl ExportList {
    /// The listening sockets, in the order in which they were first served.
    pub(crate) fn sockets(&self) -> Vec<Arc<ServedSocket>> {
        self.state.lock().sockets.clone()
    }

    /// The exports at a socket, with their names.
    pub(crate) fn exports_at(&self, socket: &ServedSocket) -> Vec<(String, RunningExport)> {
        let list = self.state.lock();
        let at_socket = list.exports.iter().filter_map(|export| match &export.address {
            ExportAddress::Nbd(uri) if uri.address == socket.address => {
                Some((uri.export.clone(), export.clone()))
            }
            _ => None,
        });
        at_socket.collect()
    }

    /// Serves disks at a socket, and resumes its connections that another process has paused. With
    /// [`Security::Tls`] its clients must use TLS; otherwise the setup decides.
    ///
    /// # Errors
    /// Duplicate names, or names that the protocol cannot carry; a socket that cannot be used; TLS
    /// that is not set up.
    pub(crate) fn serve_socket(
        &self,
        bound: BoundSocket,
        security: Security,
        offers: Vec<SocketOffer>,
        connections: Vec<(Stream, PausedSession)>,
    ) -> Result<()> {
        let BoundSocket { socket, address, file } = bound;
        let tls = Tls::at(self.tls.as_ref(), &address, security)?;
        let security = security_of(tls.as_ref());
        let exports = self.observed_exports(&address, security);
        if let Some(tls) = tls {
            exports.set_tls(tls);
        }
        self.max_connections.into_iter().for_each(|max| exports.limit_connections(max));
        for SocketOffer { name, disk, options } in &offers {
            exports.add(export(name.clone(), disk, options.clone()))?;
        }
        let listener = Listener::new(socket).context("cannot use the socket")?;
        // The server numbers sockets in the order in which their tasks are spawned. The lock makes
        // `number` follow the same order.
        let mut list = self.state.lock();
        self.accept(listener.clone(), exports.clone(), connections);
        for SocketOffer { name, disk, options } in offers {
            let address = NbdUri { security, address: address.clone(), export: name };
            list.exports.push(RunningExport {
                address: ExportAddress::Nbd(address),
                disk: disk.name().to_owned(),
                options,
                added_bitmaps: disk.added_bitmaps(),
            });
        }
        let number = list.served_sockets;
        list.served_sockets += 1;
        let is_kept = AtomicBool::new(false);
        let socket = ServedSocket { file, listener, address, number, security, exports, is_kept };
        list.sockets.push(Arc::new(socket));
        Ok(())
    }

    /// The URI under which an export is listed if `uri` is requested: its security says whether
    /// clients must use TLS.
    pub(super) fn known_as(&self, uri: NbdUri) -> NbdUri {
        match Tls::at(self.tls.as_ref(), &uri.address, uri.security) {
            Ok(tls) => NbdUri { security: security_of(tls.as_ref()), ..uri },
            // The attempt to serve it fails, and reports the error.
            Err(_) => uri,
        }
    }

    /// An empty set of exports that report their clients as events.
    fn observed_exports(&self, address: &Address, security: Security) -> Exports<ImageStorage> {
        let (events, address) = (self.events.clone(), address.clone());
        let clients = self.clients.clone();
        Exports::observed(Box::new(move |name, peer, what| {
            let uri = NbdUri { security, address: address.clone(), export: name.into() };
            let (export, peer) = (uri.to_string(), peer.to_owned());
            if let Some(clients) = &clients {
                end_with_the_last(clients, what);
            }
            events.tell(match what {
                ClientEvent::Came => Event::ClientCame { export, peer },
                ClientEvent::Left => Event::ClientLeft { export, peer },
            });
        }))
    }

    fn accept(
        &self,
        listener: Listener,
        exports: Exports<ImageStorage>,
        connections: Vec<(Stream, PausedSession)>,
    ) {
        let (server, loops) = (self.server.clone(), self.loops.clone());
        drop(self.loops[0].spawn(move || async move {
            let serving = rare(server.serve_with(&listener, &exports, &loops, connections));
            if let Err(error) = serving.await {
                tracing::error!("stopped accepting connections: {error}");
            }
        }));
    }

    /// Serves a disk to NBD clients. The caller has claimed the names of disk and export. Returns
    /// the URI, with the real port if port 0 was requested.
    pub(super) async fn add_nbd(
        &self,
        uri: NbdUri,
        disk: Arc<RunningDisk>,
        options: ExportOptions,
    ) -> Result<NbdUri> {
        {
            let mut list = self.state.lock();
            if let Some(socket) = list.socket(&uri.address) {
                if uri.security == Security::Tls && socket.security == Security::Plain {
                    bail!(
                        "{uri}: its socket serves clients without TLS already; use another socket"
                    );
                }
                let uri = NbdUri { security: socket.security, ..uri };
                socket.exports.add(export(uri.export.clone(), &disk, options.clone()))?;
                let (address, name) = (ExportAddress::Nbd(uri.clone()), disk.name().to_owned());
                let added_bitmaps = disk.added_bitmaps();
                list.exports.push(RunningExport { address, disk: name, options, added_bitmaps });
                return Ok(uri);
            }
        }
        let NbdUri { security, address, export } = uri;
        // Checked before the socket exists.
        let tls = Tls::at(self.tls.as_ref(), &address, security)?;
        let permissions = self.permissions;
        let bound = blocking::run(move || kept_sockets::bind(&address, permissions)).await??;
        let uri = NbdUri {
            security: security_of(tls.as_ref()),
            address: bound.address.clone(),
            export: export.clone(),
        };
        let offer = SocketOffer { name: export, disk, options };
        kept_sockets::serve_or_give_up(bound, |bound| {
            self.serve_socket(bound, security, vec![offer], Vec::new())
        })?;
        Ok(uri)
    }

    /// Removes an export: its clients are disconnected when their requests have completed. The
    /// socket is closed with its last export, unless it is kept.
    pub(super) async fn remove_nbd(&self, uri: &NbdUri) {
        let Some(socket) = self.state.lock().socket(&uri.address) else { return };
        let exports = socket.exports.clone();
        drop(socket);
        self.server.remove(&exports, &uri.export).await;
        let mut list = self.state.lock();
        list.exports.retain(|export| export.address != ExportAddress::Nbd(uri.clone()));
        let is_kept = |socket: Arc<ServedSocket>| socket.is_kept.load(Ordering::SeqCst);
        if exports.is_empty() && !list.socket(&uri.address).is_some_and(is_kept) {
            self.close_socket(&mut list, &uri.address, &exports);
        }
    }

    /// Closes a socket that has no exports.
    fn close_socket(&self, list: &mut State, address: &Address, exports: &Exports<ImageStorage>) {
        if let Some(socket) = list.socket(address) {
            kept_sockets::give_up(&socket.address, socket.file.as_ref());
        }
        list.sockets.retain(|socket| socket.address != *address);
        self.server.close(exports);
    }

    /// Listens at a socket even while it has no exports. The caller has claimed the address.
    /// Returns the URI, with the real port if port 0 was requested.
    ///
    /// # Errors
    /// The address is in use or cannot be bound.
    pub(super) async fn add_socket(
        &self,
        uri: NbdUri,
        max_connections: Option<NonZeroUsize>,
    ) -> Result<NbdUri> {
        if self.state.lock().socket(&uri.address).is_some() {
            bail!("{uri}: Address already in use");
        }
        let NbdUri { security, address, export } = uri;
        let tls = Tls::at(self.tls.as_ref(), &address, security)?;
        let permissions = self.permissions;
        let bound = blocking::run(move || kept_sockets::bind(&address, permissions)).await??;
        let (address, security) = (bound.address.clone(), security_of(tls.as_ref()));
        kept_sockets::serve_or_give_up(bound, |bound| {
            self.serve_socket(bound, security, Vec::new(), Vec::new())
        })?;
        self.keep_socket(&address, AddedSocket { max_connections });
        Ok(NbdUri { security, address, export })
    }

    /// Makes a socket listen even without exports, and limits its connections.
    pub(crate) fn keep_socket(&self, address: &Address, added: AddedSocket) {
        let socket = self.state.lock().socket(address);
        if let Some(socket) = socket {
            socket.is_kept.store(true, Ordering::SeqCst);
            let max = added.max_connections.into_iter();
            max.for_each(|max| socket.exports.limit_connections(max));
        }
    }

    /// Undoes [`add_socket`](Self::add_socket): the socket is closed when it has no exports. The
    /// caller has claimed the address.
    ///
    /// # Errors
    /// No socket was added at this URI.
    pub(super) fn remove_socket(&self, uri: &NbdUri) -> Result<()> {
        let mut list = self.state.lock();
        let socket = list.socket(&uri.address);
        let Some(socket) = socket.filter(|socket| socket.is_kept.swap(false, Ordering::SeqCst))
        else {
            bail!("{uri}: no such socket was added");
        };
        let (address, exports) = (socket.address.clone(), socket.exports.clone());
        drop(socket);
        if exports.is_empty() {
            self.close_socket(&mut list, &address, &exports);
        }
        Ok(())
    }

    /// Removes the files of all sockets, except of sockets that the service manager keeps. The
    /// tasks that accept clients run until the server ends.
    pub(crate) fn forget_sockets(&self) {
        let sockets = std::mem::take(&mut self.state.lock().sockets);
        drop(sockets);
    }

    /// The names of an export's clients.
    pub(super) fn nbd_peers(&self, uri: &NbdUri) -> Vec<String> {
        let socket = self.state.lock().socket(&uri.address);
        socket.map_or_else(Vec::new, |socket| self.server.peers(&socket.exports, &uri.export))
    }
}

/// Counts the clients, and ends the server by SIGTERM when the last one has left.
fn end_with_the_last(clients: &AtomicUsize, what: ClientEvent) {
    let is_last = match what {
        ClientEvent::Came => {
            clients.fetch_add(1, Ordering::Relaxed);
            false
        }
        ClientEvent::Left => clients.fetch_sub(1, Ordering::Relaxed) == 1,
    };
    if is_last && let Err(error) = signal_hook::low_level::raise(SIGTERM) {
        tracing::warn!("cannot end with the last client: {error}");
    }
}
