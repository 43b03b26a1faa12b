//! Counts of clients (connections and front-ends): clients that are connected now, and all so far.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::labels::ExportKind;
use super::reading::ClientMetrics;

/// The clients of one disk. All threads share the counters, because clients rarely connect and
/// disconnect.
#[derive(Debug, Default)]
pub(crate) struct Clients([Kind; ExportKind::ALL.len()]);

#[derive(Debug, Default)]
struct Kind {
    came: AtomicU64,
    /// Clients that another process counted before it handed them over.
    handed_over: AtomicU64,
    left: AtomicU64,
}

/// A client of a disk, counted until it is dropped.
#[must_use]
pub struct ClientGuard {
    clients: Arc<Clients>,
    export: ExportKind,
}

impl Clients {
    pub(crate) fn enter(self: &Arc<Self>, export: ExportKind) -> ClientGuard {
        self.0[export as usize].came.fetch_add(1, Ordering::Relaxed);
        ClientGuard { clients: Arc::clone(self), export }
    }

    /// As [`enter`](Self::enter), for a client that another process has handed over and counted.
    pub(crate) fn enter_again(self: &Arc<Self>, export: ExportKind) -> ClientGuard {
        self.0[export as usize].handed_over.fetch_add(1, Ordering::Relaxed);
        self.enter(export)
    }

    /// The metrics of each kind of export that had a client.
    pub(super) fn read(&self) -> Vec<ClientMetrics> {
        let read = |export: ExportKind| {
            let Kind { came, handed_over, left } = &self.0[export as usize];
            // `left` is read first, so that a client that leaves between the two loads counts as
            // connected.
            let left = left.load(Ordering::Relaxed);
            let came = came.load(Ordering::Relaxed);
            let connections = came.saturating_sub(handed_over.load(Ordering::Relaxed));
            ClientMetrics { export, connected: came.saturating_sub(left), connections }
        };
        let all = ExportKind::ALL.into_iter().map(read);
        all.filter(|one| one.connections + one.connected > 0).collect()
    }
}

impl Drop for ClientGuard {
    fn drop(&mut self) {
        self.clients.0[self.export as usize].left.fetch_add(1, Ordering::Relaxed);
    }
}
