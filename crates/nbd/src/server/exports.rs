//! The exports that clients of a socket can find, by name.
//!
//! Guarantee: with any option of the handshake, a client can list and open only the exports of its
//! own socket. Reason: a socket's permissions keep one guest from the disk of another guest.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use blockhouse_core::{BLOCK_ALIGNMENT, Storage};
use blockhouse_disk::{Access, Disk, is_inactive, preferred_block_size};
use parking_lot::RwLock;

use crate::bitmap::ExportBitmap;
use crate::handshake::{ExportInfo, ExportLookup};
use crate::proto::{MAX_PAYLOAD, MAX_STRING};
use crate::tls::{ClientIdentity, SocketTls};

/// Maximum number of bitmaps of an export. It bounds the size of a reply, which describes all
/// selected bitmaps.
pub const MAX_EXPORT_BITMAPS: usize = 64;

/// Maximum length of a bitmap's name in bytes, as in qcow2.
const MAX_BITMAP_NAME: usize = 1023;

/// A disk under a name.
pub struct Export<S: Storage> {
    /// The export's name for clients: at most 4096 bytes without NUL. May be empty.
    pub name: String,
    /// A description for users, on one line; may be empty.
    pub description: String,
    /// The disk.
    pub disk: Arc<Disk<S>>,
    /// The bitmaps that clients may request: at most [`MAX_EXPORT_BITMAPS`], with names of at most
    /// 1023 bytes.
    pub bitmaps: Vec<ExportBitmap>,
    /// The access of clients. If the disk is read-only, clients can only read in any case.
    pub access: Access,
    /// Whether clients may query which image of the disk's chain has the data
    /// (`qemu:allocation-depth`).
    pub has_depth: bool,
}

impl<S: Storage> Export<S> {
    /// Refuses names and numbers that the protocol does not allow.
    fn check(&self) -> Result<(), ExportError> {
        let unfit = |what, why| Err(ExportError::Unfit { what, why });
        for (what, text) in [("name", &self.name), ("description", &self.description)] {
            if text.len() > MAX_STRING {
                return unfit(what, "more than 4096 bytes");
            }
            if text.contains('\0') {
                return unfit(what, "a NUL character");
            }
        }
        if self.bitmaps.len() > MAX_EXPORT_BITMAPS {
            return unfit("list of bitmaps", "more than 64 names");
        }
        let is_unfit = |name: &str| name.len() > MAX_BITMAP_NAME || name.contains('\0');
        match self.bitmaps.iter().find(|bitmap| is_unfit(bitmap.name())) {
            Some(_) => unfit("list of bitmaps", "a name of more than 1023 bytes, or with NUL"),
            None => Ok(()),
        }
    }
}

impl<S: Storage> Clone for Export<S> {
    fn clone(&self) -> Self {
        let Self { name, description, disk, bitmaps, access, has_depth } = self;
        let (name, description) = (name.clone(), description.clone());
        let (disk, bitmaps) = (Arc::clone(disk), bitmaps.clone());
        let (access, has_depth) = (*access, *has_depth);
        Self { name, description, disk, bitmaps, access, has_depth }
    }
}

/// Why an export cannot be added.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExportError {
    /// There is already an export of this name.
    #[error("an export named \"{0}\" exists already; choose another name")]
    Exists(String),
    /// The protocol does not allow the value.
    #[error("the {what} of an export has {why}; choose another")]
    Unfit {
        /// The value: the name, the description or the list of bitmaps.
        what: &'static str,
        /// The fault.
        why: &'static str,
    },
}

/// A client of an export connected or disconnected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientEvent {
    /// The client has chosen the export.
    Came,
    /// The client's connection has ended.
    Left,
}

/// The observer of clients. Its arguments are the export's name, the client and the event. It is
/// called on event loops, so it must not block.
pub type ClientObserver = Box<dyn Fn(&str, &str, ClientEvent) + Send + Sync>;

/// The exports that one or several sockets offer, in the order of their addition. Clients request
/// the default export by the empty name: the export of that name, or else the first. Clones share
/// one set.
pub struct Exports<S: Storage>(Arc<Set<S>>);

struct Set<S: Storage> {
    entries: RwLock<Vec<Entry<S>>>,
    /// Whether the sockets of these exports accept no more clients.
    is_closed: AtomicBool,
    observer: Option<ClientObserver>,
    /// TLS at the sockets that offer these exports.
    tls: OnceLock<SocketTls>,
    max_connections: OnceLock<NonZeroUsize>,
}

/// An export and its number. Numbers are not reused in this process, so that a removed export and a
/// later export of the same name have different numbers.
struct Entry<S: Storage> {
    export: Export<S>,
    id: ExportId,
}

/// The number of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportId(u64);

#[cfg(test)]
impl ExportId {
    /// The number of no export.
    pub fn of_test() -> Self {
        Self(u64::MAX)
    }
}

impl<S: Storage> Clone for Exports<S> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S: Storage> Default for Exports<S> {
    fn default() -> Self {
        Self::new()
    }
}

impl<S: Storage> Exports<S> {
    /// An empty set.
    pub fn new() -> Self {
        Self::with_observer(None)
    }

    /// An empty set. The observer is notified of its clients.
    pub fn observed(observer: ClientObserver) -> Self {
        Self::with_observer(Some(observer))
    }

    fn with_observer(observer: Option<ClientObserver>) -> Self {
        let (entries, is_closed) = (RwLock::default(), AtomicBool::new(false));
        Self(Arc::new(Set {
            entries,
            is_closed,
            observer,
            tls: OnceLock::new(),
            max_connections: OnceLock::new(),
        }))
    }

    /// Sets the TLS of the sockets that offer these exports, required or optional. The caller does
    /// this before clients find the exports.
    ///
    /// # Panics
    /// When it is called a second time.
    pub fn set_tls(&self, tls: SocketTls) {
        assert!(self.0.tls.set(tls).is_ok(), "TLS is set once");
    }

    /// The TLS of the sockets that offer these exports.
    pub(super) fn tls(&self) -> Option<&SocketTls> {
        self.0.tls.get()
    }

    /// Whether a client may use an export: with TLS by its identity, or without TLS.
    pub(super) fn admits(&self, export: &str, client: Option<&ClientIdentity>) -> bool {
        self.tls().is_none_or(|tls| tls.server.admits(export, client))
    }

    /// Offers a disk.
    ///
    /// # Errors
    /// If there is an export of this name, or the protocol does not allow its name, description or
    /// bitmaps.
    pub fn add(&self, export: Export<S>) -> Result<(), ExportError> {
        export.check()?;
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut entries = self.0.entries.write();
        if entries.iter().any(|other| other.export.name == export.name) {
            return Err(ExportError::Exists(export.name));
        }
        entries.push(Entry { export, id: ExportId(NEXT.fetch_add(1, Ordering::Relaxed)) });
        Ok(())
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.entries.read().is_empty()
    }

    /// Stops offering a disk. Connections to it continue; [`Server::remove`](crate::Server::remove)
    /// ends them.
    pub fn remove(&self, name: &str) -> Option<Export<S>> {
        self.take(name).map(|(export, _)| export)
    }

    /// As [`remove`](Self::remove), with the export's number.
    pub(super) fn take(&self, name: &str) -> Option<(Export<S>, ExportId)> {
        let mut entries = self.0.entries.write();
        let index = entries.iter().position(|entry| entry.export.name == name)?;
        let Entry { export, id } = entries.remove(index);
        Some((export, id))
    }

    /// The export that a client means by this name.
    pub(super) fn get(&self, name: &str) -> Option<(Export<S>, ExportId)> {
        let entries = self.0.entries.read();
        let named = entries.iter().find(|entry| entry.export.name == name);
        let found = named.or_else(|| entries.first().filter(|_| name.is_empty()))?;
        Some((found.export.clone(), found.id))
    }

    /// Whether this export is still offered.
    pub(super) fn has(&self, id: ExportId) -> bool {
        self.0.entries.read().iter().any(|entry| entry.id == id)
    }

    /// Limits the connections of each socket that offers these exports to `max`, including those in
    /// their handshakes. Further clients wait until one ends. The first call decides.
    pub fn limit_connections(&self, max: NonZeroUsize) {
        // A later call has no effect.
        let _ = self.0.max_connections.set(max);
    }

    /// How many connections each socket has at most; `None`: any number.
    pub fn max_connections(&self) -> Option<NonZeroUsize> {
        self.0.max_connections.get().copied()
    }

    /// Makes all sockets that offer these exports stop accepting clients.
    pub(super) fn close(&self) {
        self.0.is_closed.store(true, Ordering::SeqCst);
    }

    /// Whether the sockets that offer these exports have stopped accepting clients.
    pub(super) fn is_closed(&self) -> bool {
        self.0.is_closed.load(Ordering::SeqCst)
    }

    /// Reports to the observer that a client connected, and when the guard is dropped that it
    /// disconnected.
    pub(super) fn observe(&self, name: &str, peer: String) -> ClientGuard<S> {
        let guard = ClientGuard { exports: self.clone(), name: name.into(), peer };
        guard.tell(ClientEvent::Came);
        guard
    }
}

/// A connected client of an export. The drop reports that the client has disconnected.
pub struct ClientGuard<S: Storage> {
    exports: Exports<S>,
    name: String,
    peer: String,
}

impl<S: Storage> ClientGuard<S> {
    fn tell(&self, event: ClientEvent) {
        if let Some(observer) = &self.exports.0.observer {
            observer(&self.name, &self.peer, event);
        }
    }
}

impl<S: Storage> Drop for ClientGuard<S> {
    fn drop(&mut self) {
        self.tell(ClientEvent::Left);
    }
}

impl<S: Storage> ExportLookup for Exports<S> {
    fn find(&self, name: &str) -> Option<ExportInfo> {
        self.get(name).map(|(export, _)| self.info_of(&export))
    }

    fn list(&self) -> Vec<ExportInfo> {
        self.0.entries.read().iter().map(|entry| self.info_of(&entry.export)).collect()
    }
}

impl<S: Storage> Exports<S> {
    fn info_of(&self, export: &Export<S>) -> ExportInfo {
        let disk = &export.disk;
        // Requests of any alignment are served, so no client needs to align them itself. But
        // clients that make a block device of the export use the smallest block as its sector, and
        // some refuse a size that is not a multiple of it.
        let sector = disk.logical_block_size();
        let has_sectors = sector > 512 && disk.size().is_multiple_of(sector);
        let preferred =
            preferred_block_size(disk).clamp(BLOCK_ALIGNMENT as u64, MAX_PAYLOAD.into());
        ExportInfo {
            name: export.name.clone(),
            description: export.description.clone(),
            size: export.disk.size(),
            access: match export.access {
                Access::ReadOnly => Access::ReadOnly,
                // Clients may connect before the disk becomes active.
                Access::ReadWrite if is_inactive(disk) => Access::ReadWrite,
                Access::ReadWrite => disk.access(),
            },
            smallest_block: if has_sectors { sector as u32 } else { 1 },
            preferred_block: preferred as u32,
            is_shared: self.max_connections().is_none_or(|max| max.get() > 1),
            has_depth: export.has_depth,
            bitmaps: export.bitmaps.iter().map(|bitmap| bitmap.name().to_owned()).collect(),
        }
    }
}
