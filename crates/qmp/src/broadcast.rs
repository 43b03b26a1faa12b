//! The clients that receive events.
//!
//! Guarantees: sending an event waits for no client. A client that falls `QUEUE` events behind is
//! disconnected after these, because QMP cannot report lost events.

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
    /// The jobs whose end was reported without the server's event, which may still come.
    ended_early: RefCell<BTreeSet<String>>,
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
        self.clients.borrow_mut().retain_mut(|client| match client.try_send(event.clone()) {
            Ok(()) => true,
            Err(error) => {
                if error.is_full() {
                    tracing::warn!(
                        "a client of QMP is disconnected: it has not read {QUEUE} events"
                    );
                }
                false
            }
        });
    }

    /// Reports the new status of a job.
    pub(super) fn tell_status(&self, job: &str, status: &str) {
        self.tell("JOB_STATUS_CHANGE", json!({ "id": job, "status": status }));
    }

    /// Reports that a job runs, unless this was reported before.
    pub(super) fn tell_begin(&self, job: &str) {
        if self.begun.borrow_mut().insert(job.to_owned()) {
            self.ended_early.borrow_mut().remove(job);
            self.tell_status(job, "created");
            self.tell_status(job, "running");
        }
    }

    /// Whether the start of a job was reported, and not its end.
    pub(super) fn has_begun(&self, job: &str) -> bool {
        self.begun.borrow().contains(job)
    }

    /// Records the jobs whose end was reported without the server's event.
    pub(super) fn set_ended_early(&self, jobs: BTreeSet<String>) {
        *self.ended_early.borrow_mut() = jobs;
    }

    /// Whether the end of a job, whose event has come, was reported before.
    pub(super) fn ended_early(&self, job: &str) -> bool {
        self.ended_early.borrow_mut().remove(job)
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

    #[test]
    fn a_client_that_is_too_slow_receives_what_is_queued_and_then_the_end() {
        let broadcast = Broadcast::default();
        let mut slow = broadcast.subscribe();
        (0..2 * QUEUE).for_each(|_| broadcast.tell_status("j", "running"));
        broadcast.tell_status("j", "concluded");
        assert!(broadcast.clients.borrow().is_empty());
        let queued = std::iter::from_fn(|| slow.try_recv().ok());
        assert!(queued.count() >= QUEUE);
        assert!(slow.try_recv().is_err_and(|error| error.is_closed()));
    }
}
