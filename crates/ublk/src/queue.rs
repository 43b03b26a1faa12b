//! The requests of one queue, on one loop: a task for each tag, with memory of its own.
//!
//! Guarantees: each request that was taken is answered once, with bytes of its own tag only. A
//! tag's memory belongs to the driver while the tag waits for a request, and to the request until
//! its answer. The tags bound the requests in flight: memory for all tags is allocated before the
//! first one is fetched.
//!
//! Where the driver can, data stays in the kernel's pages ([`KernelPages`]): a tag's memory is then
//! used only by requests that need their data there.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use blockhouse_core::{Buffer, Durability, Error, IoVector, KernelPages, PageUse, Storage, errno};
use blockhouse_disk::{Disk, ExportKind, takes_kernel_pages};
use blockhouse_engine::{UblkData, UblkDescriptor, UblkDevice, UblkPages, sleep, spawn, ublk_flag};

use crate::gate::Gate;
use crate::request::{Command, decode};

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

    /// The kernel's pages with the data of the tag's request; `None` if its memory has the data.
    fn pages(&self, tag: u16) -> Option<&Arc<KernelPages>>;

    /// Copies data into the pages of a tag's read, from the byte `start` on.
    fn store(&self, tag: u16, start: usize, bytes: &[u8]) -> io::Result<()>;
}

/// One of a device's queues.
pub(crate) struct DeviceQueue {
    device: Arc<UblkDevice>,
    index: u16,
    /// `None` if the driver copies data to the tags' memory.
    pages: Option<UblkPages>,
}

impl DeviceQueue {
    /// A queue of a device, for the calling thread's loop.
    pub(crate) fn new(device: Arc<UblkDevice>, index: u16) -> Self {
        let has_pages = device.info().flags & ublk_flag::PAGES != 0;
        let pages = has_pages.then(|| UblkPages::new(&device, index));
        Self { device, index, pages }
    }

    /// The location of the data of the tag's next request. `memory` is not used if data stays in
    /// the kernel's pages.
    fn data(&self, tag: u16, memory: IoVector) -> UblkData {
        match &self.pages {
            Some(pages) => pages.data(tag),
            None => UblkData::Memory(memory),
        }
    }
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
        self.device.fetch(self.index, tag, self.data(tag, memory)).await
    }

    async fn commit(&self, tag: u16, result: i32, memory: IoVector) -> io::Result<()> {
        self.device.commit(self.index, tag, result, self.data(tag, memory)).await
    }

    fn pages(&self, tag: u16) -> Option<&Arc<KernelPages>> {
        self.pages.as_ref().map(|pages| pages.of(tag))
    }

    fn store(&self, tag: u16, start: usize, bytes: &[u8]) -> io::Result<()> {
        self.pages.as_ref().map_or(Ok(()), |pages| pages.store(tag, start, bytes))
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
        let mut is_intact = true;
        let (request, count) = command.into_request(|length| {
            let vector = memory.lend_range(0, length);
            let Some(pages) = self.tags.pages(tag) else { return vector };
            let is_read = matches!(command, Command::Read { .. });
            let page_use = if is_read { PageUse::Filled } else { PageUse::Stored };
            let vector = vector.in_pages(pages, page_use);
            // The data is copied here, so that a failed copy fails the request before the disk gets
            // it.
            let is_registered = descriptor.operation & UblkDescriptor::NOT_REGISTERED == 0;
            if !is_registered || !takes_kernel_pages(self.served.disk.image()) {
                vector.leave_pages();
            }
            is_intact = vector.is_intact();
            vector
        });
        if !is_intact {
            return -errno::EFAULT;
        }
        match self.served.disk.submit_from(ExportKind::Ublk, request).await {
            Ok(()) => match command {
                Command::Read { length, .. } => self.store(tag, &memory.bytes()[..length]),
                _ => count,
            },
            Err(error) => {
                self.log_failure(&error);
                -error.errno()
            }
        }
    }

    /// Copies the data of a read into the kernel's pages, as far as it is in memory. Returns the
    /// answer.
    fn store(&self, tag: u16, bytes: &[u8]) -> i32 {
        let filled = self.tags.pages(tag).and_then(|pages| pages.filled());
        let Some(start) = filled.filter(|start| *start < bytes.len()) else {
            return bytes.len() as i32;
        };
        match self.tags.store(tag, start, &bytes[start..]) {
            Ok(()) => bytes.len() as i32,
            Err(error) => {
                let disk = self.served.disk.name();
                tracing::warn!(disk, "cannot hand the data of a read to the kernel: {error}");
                -errno::EIO
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
