//! The clients that receive events.
//!
//! Guarantees: sending an event waits for no client. A client that falls `QUEUE` events behind is
//! disconnected, because QMP cannot report lost events.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::time::{SystemTime, UNIX_EPOCH};

use futures_channel::mpsc;
use serde_json::{Value, json};

/// Maximum number of events in a client's queue.
const QUEUE: usize = 1024;

/// The clients that receive events.
#[derive(Default)]
pub(super) struct Broadcast {
    clients: RefCell<Vec<mpsc::Sender<Value>>>,
    /// The jobs whose start was reported.
    begun: RefCell<BTreeSet<String>>,
}

impl Broadcast {
    /// Subscribes a client to later events.
    pub(super) fn subscribe(&self) -> mpsc::Receiver<Value> {
        let (sender, receiver) = mpsc::channel(QUEUE);
        let mut clients = self.clients.borrow_mut();
        // Without events nothing else removes the clients that are gone.
        clients.retain(|client| !client.is_closed());
        clients.push(sender);
        receiver
    }

    /// Sends an event to all clients.
    pub(super) fn tell(&self, name: &str, data: Value) {
        let event = json!({ "event": name, "data": data, "timestamp": timestamp() });
        self.clients.borrow_mut().retain_mut(|client| client.try_send(event.clone()).is_ok());
    }

    /// Reports the new status of a job.
    pub(super) fn tell_status(&self, job: &str, status: &str) {
        self.tell("JOB_STATUS_CHANGE", json!({ "id": job, "status": status }));
    }

    /// Reports that a job runs, unless this was reported before.
    pub(super) fn tell_begin(&self, job: &str) {
        if self.begun.borrow_mut().insert(job.to_owned()) {
            self.tell_status(job, "created");
            self.tell_status(job, "running");
        }
    }

    /// Forgets an ended job, because a later job may have its name.
    pub(super) fn forget_job(&self, job: &str) {
        self.begun.borrow_mut().remove(job);
    }

    /// Disconnects all clients.
    pub(super) fn disconnect_all(&self) {
        self.clients.borrow_mut().clear();
    }
}

fn timestamp() -> Value {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    json!({ "seconds": now.as_secs(), "microseconds": now.subsec_micros() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_that_are_gone_are_not_kept_without_events() {
        let broadcast = Broadcast::default();
        let stays = broadcast.subscribe();
        (0..10).for_each(|_| drop(broadcast.subscribe()));
        assert!(broadcast.clients.borrow().len() <= 2);
        drop(stays);
    }
}
