//! The requests of one queue, on one loop: a task for each tag, with memory of its own.
//!
//! Guarantees: each request that was taken is answered once, with bytes of its own tag only. A
//! tag's memory belongs to the driver while the tag waits for a request, and to the request until
//! its answer. The tags bound the requests in flight: memory for all tags is allocated before the
//! first one is fetched.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use blockhouse_core::{Buffer, Durability, Error, IoVector, Storage, errno};
use blockhouse_disk::{Disk, ExportKind};
use blockhouse_engine::{UblkDescriptor, UblkDevice, sleep, spawn};

use crate::gate::Gate;
use crate::request::decode;

/// After this time all tags are treated as fetched. The driver refuses a tag only at submission,
/// which the loop does before a timer fires.
const SUBMITTED: Duration = Duration::from_millis(1);

/// A queue of the driver.
pub(crate) trait Tags {
    /// The number of tags.
    fn depth(&self) -> u16;

    /// Bytes of memory for each tag.
    fn max_io_bytes(&self) -> usize;

    /// The descriptor of the request that a tag has.
    fn descriptor(&self, tag: u16) -> UblkDescriptor;

    /// Waits for the first request of a tag.
    async fn fetch(&self, tag: u16, memory: IoVector) -> io::Result<()>;

    /// Answers the request of a tag, and waits for the next.
    async fn commit(&self, tag: u16, result: i32, memory: IoVector) -> io::Result<()>;
}

/// One of a device's queues.
pub(crate) struct DeviceQueue {
    pub(crate) device: Arc<UblkDevice>,
    pub(crate) index: u16,
}

impl Tags for DeviceQueue {
    fn depth(&self) -> u16 {
        self.device.info().depth
    }

    fn max_io_bytes(&self) -> usize {
        self.device.info().max_io_bytes as usize
    }

    fn descriptor(&self, tag: u16) -> UblkDescriptor {
        self.device.descriptor(self.index, tag)
    }

    async fn fetch(&self, tag: u16, memory: IoVector) -> io::Result<()> {
        self.device.fetch(self.index, tag, memory).await
    }

    async fn commit(&self, tag: u16, result: i32, memory: IoVector) -> io::Result<()> {
        self.device.commit(self.index, tag, result, memory).await
    }
}

/// The disk and the rules that a queue serves its tags with.
pub(crate) struct Served<S: Storage> {
    pub(crate) disk: Arc<Disk<S>>,
    /// The minimum durability of a change.
    pub(crate) durability: Durability,
    /// The gate that requests pass before they are carried out.
    pub(crate) gate: Arc<Gate>,
}

struct Queue<T, S: Storage> {
    tags: T,
    served: Served<S>,
    /// Why the driver has refused a tag.
    refusal: Cell<Option<io::Error>>,
    /// Whether a failure of the host was logged.
    has_logged_failure: Cell<bool>,
}

/// Serves the queue until its device is stopped. `fetched` is notified when the driver has taken
/// all tags.
pub(crate) async fn run<T: Tags + 'static, S: Storage>(
    tags: T,
    served: Served<S>,
    fetched: Sender<io::Result<()>>,
) {
    let memory = (0..tags.depth()).map(|_| Buffer::try_new(tags.max_io_bytes()));
    let memory = match memory.collect::<Result<Vec<_>, _>>() {
        Ok(memory) => memory,
        Err(error) => {
            let _ = fetched.send(Err(io::Error::from_raw_os_error(error.errno())));
            return;
        }
    };
    let (refusal, has_logged_failure) = (Cell::new(None), Cell::new(false));
    let queue = Rc::new(Queue { tags, served, refusal, has_logged_failure });
    let tasks: Vec<_> = (0..)
        .zip(memory)
        .map(|(tag, memory)| spawn(serve_tag(Rc::clone(&queue), tag, memory)))
        .collect();
    sleep(SUBMITTED).await;
    // The receiver may have been dropped.
    let _ = fetched.send(queue.refusal.take().map_or(Ok(()), Err));
    drop(fetched);
    for task in tasks {
        task.await;
    }
}

/// Serves the requests of a tag, one after the other.
async fn serve_tag<T: Tags, S: Storage>(queue: Rc<Queue<T, S>>, tag: u16, mut memory: Buffer) {
    let mut next = queue.tags.fetch(tag, memory.lend()).await;
    while next.is_ok() {
        let in_flight = queue.served.gate.enter().await;
        let result = queue.execute(tag, &mut memory).await;
        // If the process ends before the kernel has the answer, the kernel issues the request
        // again.
        drop(in_flight);
        next = queue.tags.commit(tag, result, memory.lend()).await;
    }
    let Err(error) = next else { return };
    if error.raw_os_error() != Some(errno::ENODEV) {
        let disk = queue.served.disk.name();
        tracing::error!(disk, "tag {tag} of a ublk device is lost: {error}");
        queue.refusal.set(Some(error));
    }
}

impl<T: Tags, S: Storage> Queue<T, S> {
    /// Carries out the request of a tag. Returns the answer: a count of bytes, or a negative errno.
    async fn execute(&self, tag: u16, memory: &mut Buffer) -> i32 {
        let descriptor = self.tags.descriptor(tag);
        let command = match decode(descriptor, memory.len(), self.served.durability) {
            Ok(command) => command,
            Err(code) => return -code,
        };
        let (request, count) = command.into_request(|length| memory.lend_range(0, length));
        match self.served.disk.submit_from(ExportKind::Ublk, request).await {
            Ok(()) => count,
            Err(error) => {
                self.log_failure(&error);
                -error.errno()
            }
        }
    }

    /// Logs that the host failed a request, once for each queue: a broken disk fails every request.
    fn log_failure(&self, error: &Error) {
        if error.is_host_failure() && !self.has_logged_failure.replace(true) {
            let disk = self.served.disk.name();
            tracing::warn!(disk, "a request of the kernel failed: {error}");
        }
    }
}

#[cfg(test)]
mod tests;
