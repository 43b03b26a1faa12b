//! Events while images are served, for subscribers.
//!
//! Guarantees: reporting an event never waits for a subscriber. A subscriber with `QUEUE` unread
//! events loses newer events, and then receives the number lost.

pub(crate) mod failures;
pub(crate) mod room_watch;

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use blockhouse_core::sync::Condvar;
use parking_lot::Mutex;
use serde::Serialize;

/// The maximum number of unread events of a subscriber.
const QUEUE: usize = 1024;

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, schemars::JsonSchema)]
#[serde(tag = "event", rename_all_fields = "kebab-case")]
pub enum Event {
    /// A disk was opened.
    #[serde(rename = "disk.opened")]
    DiskOpened {
        /// The name.
        disk: String,
    },
    /// A disk was closed.
    #[serde(rename = "disk.closed")]
    DiskClosed {
        /// The name.
        disk: String,
        /// The reason, if its last changes could not be made durable.
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    /// A disk continues in an overlay over its former image.
    #[serde(rename = "disk.forked")]
    DiskForked {
        /// The name.
        disk: String,
        /// The path of the former image.
        layer: String,
        /// The path of the overlay.
        overlay: String,
    },
    /// A disk was returned to the layer that its last fork left.
    #[serde(rename = "disk.rolled-back")]
    DiskRolledBack {
        /// The name.
        disk: String,
        /// The path of the layer, which is the disk's image again.
        layer: String,
        /// The path of the removed overlay.
        overlay: String,
    },
    /// A disk has another size.
    #[serde(rename = "disk.resized")]
    DiskResized {
        /// The name.
        disk: String,
        /// The size in bytes.
        size: u64,
    },
    /// Requests failed because of the host or the image. Reported at most once in ten seconds for
    /// each operation and errno.
    #[serde(rename = "disk.error")]
    DiskError {
        /// The name of the disk.
        disk: String,
        /// The request: read, write, write_fua, write_zeroes, discard, flush or prefetch, as in
        /// the metrics.
        operation: &'static str,
        /// The errno, as on Linux.
        errno: i32,
        /// The reason of the last failure, in one line.
        message: String,
        /// The number of these failures since the last such event.
        count: u64,
    },
    /// Requests failed with ENOSPC on the host. Reported in place of `disk.error`, as often.
    #[serde(rename = "disk.no-space")]
    NoSpace {
        /// The name of the disk.
        disk: String,
        /// The request.
        operation: &'static str,
        /// The reason of the last failure, in one line.
        message: String,
        /// The number of these failures since the last such event.
        count: u64,
    },
    /// The host has less free space for the guest's writes than the disk's threshold. Reported once
    /// for each crossing, before writes are held or fail.
    #[serde(rename = "disk.threshold")]
    DiskThreshold {
        /// The name of the disk.
        disk: String,
        /// The free bytes.
        left: u64,
        /// The threshold: bytes, or a percentage of all space (10%).
        threshold: String,
    },
    /// A qcow2 image uses more of its file or device than its write threshold. Reported once: the
    /// threshold is then unset.
    #[serde(rename = "disk.write-threshold")]
    WriteThreshold {
        /// The name of the disk.
        disk: String,
        /// The threshold in bytes.
        threshold: u64,
        /// The bytes that the image uses beyond the threshold.
        exceeded: u64,
    },
    /// Writes that got ENOSPC are held until the host has space. Reported once, however many writes
    /// are held.
    #[serde(rename = "disk.held")]
    DiskHeld {
        /// The name of the disk.
        disk: String,
        /// The reason of the first ENOSPC, in one line.
        message: String,
    },
    /// No write is held any longer. Reported after `disk.held`.
    #[serde(rename = "disk.released")]
    DiskReleased {
        /// The name of the disk.
        disk: String,
        /// The time for which writes were held, in milliseconds.
        held_ms: u64,
        /// The number of held writes that failed with ENOSPC, because the host had no space until
        /// their time limit or the close of the disk.
        failed: u64,
    },
    /// A flush failed: data that was written may be lost, and each later flush fails until the disk
    /// is opened again. Reported once.
    #[serde(rename = "disk.flush-failed")]
    FlushFailed {
        /// The name of the disk.
        disk: String,
        /// The errno, as on Linux.
        errno: i32,
        /// Why, in one line.
        message: String,
    },
    /// A bitmap became coarser, because there is no space for its bits: it marks more than the
    /// guest's changes. Reported once for each bitmap while the image is open.
    #[serde(rename = "bitmap.coarser")]
    BitmapCoarser {
        /// The name of the disk.
        disk: String,
        /// The bitmap's name.
        bitmap: String,
        /// Why, in one line.
        message: String,
    },
    /// A bitmap lacks changes that the guest has made, because its storage is full or fails. The
    /// bitmap can only be removed, and the next backup must be a full one.
    #[serde(rename = "bitmap.lost")]
    BitmapLost {
        /// The name of the disk.
        disk: String,
        /// The bitmap's name.
        bitmap: String,
        /// Why, in one line.
        message: String,
    },
    /// An export is served.
    #[serde(rename = "export.added")]
    ExportAdded {
        /// The export: its URI, or the path of its socket.
        export: String,
        /// The name of its disk.
        disk: String,
    },
    /// An export was removed.
    #[serde(rename = "export.removed")]
    ExportRemoved {
        /// The export: its URI, or the path of its socket or block device.
        export: String,
        /// The name of its disk.
        disk: String,
    },
    /// An NBD client chose an export, or a vhost-user front-end connected to it.
    #[serde(rename = "client.came")]
    ClientCame {
        /// The export: its URI, or the path of its socket.
        export: String,
        /// The client, as far as the kernel knows.
        peer: String,
    },
    /// A client's connection has ended.
    #[serde(rename = "client.left")]
    ClientLeft {
        /// The export: its URI, or the path of its socket.
        export: String,
        /// The client.
        peer: String,
    },
    /// A job began.
    #[serde(rename = "job.started")]
    JobStarted {
        /// The name.
        job: String,
        /// The name of its disk.
        disk: String,
        /// The kind: mirror, commit, stream or backup.
        kind: String,
    },
    /// A job keeps up with the guest and can be completed.
    #[serde(rename = "job.ready")]
    JobReady {
        /// The name.
        job: String,
        /// The name of its disk.
        disk: String,
    },
    /// A job cannot complete yet, as requested, because it would pause the guest for too long. The
    /// job continues, and the request can be repeated.
    #[serde(rename = "job.postponed")]
    JobPostponed {
        /// The name.
        job: String,
        /// The name of its disk.
        disk: String,
        /// Why, in one line.
        error: String,
    },
    /// A job completed or was cancelled.
    #[serde(rename = "job.ended")]
    JobEnded {
        /// The name.
        job: String,
        /// The name of its disk.
        disk: String,
        /// The outcome: completed or cancelled.
        outcome: String,
    },
    /// A job failed. Its disk stays in use.
    #[serde(rename = "job.failed")]
    JobFailed {
        /// The name.
        job: String,
        /// The name of its disk.
        disk: String,
        /// Why, in one line.
        error: String,
    },
    /// A backup began: the content of its disks at that moment can be served.
    #[serde(rename = "backup.began")]
    BackupBegan {
        /// The name.
        backup: String,
    },
    /// A backup ended on request.
    #[serde(rename = "backup.ended")]
    BackupEnded {
        /// The name.
        backup: String,
    },
    /// A backup failed: the disk's old content can no longer be read. The disk itself stays in use.
    #[serde(rename = "backup.failed")]
    BackupFailed {
        /// The name of the backup.
        backup: String,
        /// The name of the disk.
        disk: String,
        /// Why, in one line.
        error: String,
    },
    /// The subscriber was too slow.
    #[serde(rename = "event.lost")]
    Lost {
        /// The number of events that the subscriber did not receive.
        count: u64,
    },
}

impl Event {
    /// The names of all events.
    pub const NAMES: [&str; 27] = [
        "disk.opened",
        "disk.closed",
        "disk.resized",
        "disk.error",
        "disk.no-space",
        "disk.threshold",
        "disk.held",
        "disk.released",
        "disk.flush-failed",
        "bitmap.lost",
        "export.added",
        "export.removed",
        "client.came",
        "client.left",
        "job.started",
        "job.ready",
        "job.postponed",
        "job.ended",
        "job.failed",
        "backup.began",
        "backup.ended",
        "backup.failed",
        "event.lost",
        "disk.forked",
        "disk.rolled-back",
        "bitmap.coarser",
        "disk.write-threshold",
    ];

    /// The name.
    pub fn name(&self) -> &'static str {
        let index = match self {
            Self::DiskOpened { .. } => 0,
            Self::DiskClosed { .. } => 1,
            Self::DiskResized { .. } => 2,
            Self::DiskError { .. } => 3,
            Self::NoSpace { .. } => 4,
            Self::DiskThreshold { .. } => 5,
            Self::DiskHeld { .. } => 6,
            Self::DiskReleased { .. } => 7,
            Self::FlushFailed { .. } => 8,
            Self::BitmapLost { .. } => 9,
            Self::ExportAdded { .. } => 10,
            Self::ExportRemoved { .. } => 11,
            Self::ClientCame { .. } => 12,
            Self::ClientLeft { .. } => 13,
            Self::JobStarted { .. } => 14,
            Self::JobReady { .. } => 15,
            Self::JobPostponed { .. } => 16,
            Self::JobEnded { .. } => 17,
            Self::JobFailed { .. } => 18,
            Self::BackupBegan { .. } => 19,
            Self::BackupEnded { .. } => 20,
            Self::BackupFailed { .. } => 21,
            Self::Lost { .. } => 22,
            Self::DiskForked { .. } => 23,
            Self::DiskRolledBack { .. } => 24,
            Self::BitmapCoarser { .. } => 25,
            Self::WriteThreshold { .. } => 26,
        };
        Self::NAMES[index]
    }
}

/// The subscribers. Clones share them.
#[derive(Clone, Default)]
pub struct Events(Arc<Mutex<Vec<Weak<Queue>>>>);

#[derive(Default)]
struct Queue {
    state: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Default)]
struct Waiting {
    events: VecDeque<Event>,
    lost: u64,
}

/// The events for one subscriber, from its subscription on.
pub struct Subscription(Arc<Queue>);

impl Events {
    /// Sends an event to all subscribers.
    pub(crate) fn tell(&self, event: Event) {
        let mut queues = self.0.lock();
        queues.retain(|queue| {
            let Some(queue) = queue.upgrade() else { return false };
            queue.push(event.clone());
            true
        });
    }

    /// Subscribes to all events from now on.
    pub fn subscribe(&self) -> Subscription {
        let queue = Arc::new(Queue::default());
        self.0.lock().push(Arc::downgrade(&queue));
        Subscription(queue)
    }
}

impl Queue {
    fn push(&self, event: Event) {
        {
            let mut state = self.state.lock();
            if state.events.len() < QUEUE { state.events.push_back(event) } else { state.lost += 1 }
        }
        self.changed.notify_all();
    }

    fn pop(&self) -> Option<Event> {
        let mut state = self.state.lock();
        state.events.pop_front().or_else(|| {
            let count = std::mem::take(&mut state.lost);
            (count > 0).then_some(Event::Lost { count })
        })
    }
}

impl Subscription {
    /// Waits for the next event. Dropping this future loses no event.
    pub async fn next(&self) -> Event {
        self.0.changed.wait_until(|| self.0.pop()).await
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn a_subscriber_is_told_in_order_and_how_many_it_lost() {
        let events = Events::default();
        events.tell(Event::DiskOpened { disk: "before".into() });
        let subscription = events.subscribe();
        let told = |subscription: &Subscription| subscription.next().now_or_never();
        assert_eq!(told(&subscription), None);
        let resized = |size| Event::DiskResized { disk: "a".into(), size };
        (0..QUEUE as u64 + 3).for_each(|size| events.tell(resized(size)));
        (0..QUEUE as u64).for_each(|size| assert_eq!(told(&subscription), Some(resized(size))));
        assert_eq!(told(&subscription), Some(Event::Lost { count: 3 }));
        assert_eq!(told(&subscription), None);
        drop(subscription);
        events.tell(resized(1));
        assert!(events.0.lock().is_empty(), "who is gone is forgotten");
    }

    #[test]
    fn names_are_those_of_the_messages() {
        let event = Event::ClientLeft { export: "e".into(), peer: "p".into() };
        let json = serde_json::to_value(&event).expect("plain values");
        assert_eq!(json["event"], event.name());
    }
}
