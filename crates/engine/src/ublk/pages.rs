//! The data of a queue's requests in the kernel's own pages.
//!
//! The driver registers the pages of each request in a slot of the ring that fetches the tag,
//! before the request arrives, and removes them at the answer. The ring moves data between them and
//! a file. Data that must be in memory is copied by reads and writes of the device's file.

use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use blockhouse_core::KernelPages;

use super::device::{UblkData, UblkDevice};
use super::wire::data_offset;
use crate::event_loop::local::{Local, current};

/// The pages of the tags of one queue. The slots are of the ring of the loop that made this value;
/// they return to it when the value is dropped.
pub struct UblkPages {
    file: Arc<OwnedFd>,
    queue: u16,
    local: Rc<Local>,
    /// One slot for each tag; none if the ring has too few.
    slots: Vec<u16>,
    tags: Vec<Arc<KernelPages>>,
}

impl UblkPages {
    /// The pages of a queue's tags, for the calling thread's loop. If its ring lacks slots, all
    /// data is copied.
    ///
    /// # Panics
    /// Outside of an event loop.
    pub fn new(device: &UblkDevice, queue: u16) -> Self {
        let (id, depth, file) = (device.info().id, device.info().depth, Arc::clone(&device.file));
        let local = current(Rc::clone);
        let reserved = local.reserve_slots(depth);
        match &reserved {
            Ok(_) => tracing::info!("queue {queue} of /dev/ublkb{id} moves data without a copy"),
            Err(error) => tracing::warn!(
                "queue {queue} of /dev/ublkb{id} copies data: the ring has no slots: {error}"
            ),
        }
        let (ring, slots) = reserved.unwrap_or_default();
        let pages = |tag: u16| {
            let file = Arc::clone(&file);
            let copy_out =
                move |memory: &mut [u8]| read_all(&file, memory, data_offset(queue, tag));
            Arc::new(KernelPages::new(
                slots.get(usize::from(tag)).map(|slot| (ring, *slot)),
                copy_out,
            ))
        };
        let tags = (0..depth).map(pages).collect();
        Self { file, queue, local, slots, tags }
    }

    /// The pages of a tag's request.
    ///
    /// # Panics
    /// If the queue has no such tag.
    pub fn of(&self, tag: u16) -> &Arc<KernelPages> {
        &self.tags[usize::from(tag)]
    }

    /// The slot in which the driver registers the pages of a tag's next request.
    pub fn data(&self, tag: u16) -> UblkData {
        // The driver's table has no slot of this number, so it registers nothing.
        UblkData::Pages(self.slots.get(usize::from(tag)).copied().unwrap_or(u16::MAX))
    }

    /// Copies `bytes` into the pages of a tag's read, from the byte `start` on.
    ///
    /// # Errors
    /// The driver's error: EINVAL if the tag's request has ended.
    pub fn store(&self, tag: u16, start: usize, bytes: &[u8]) -> io::Result<()> {
        let offset = data_offset(self.queue, tag) + start as u64;
        match rustix::io::pwrite(&self.file, bytes, offset)? {
            count if count == bytes.len() => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }
}

impl Drop for UblkPages {
    fn drop(&mut self) {
        self.local.release_slots(std::mem::take(&mut self.slots));
    }
}

/// Fills `memory` from the file. Returns whether the file had enough bytes.
fn read_all(file: &OwnedFd, memory: &mut [u8], offset: u64) -> bool {
    let length = memory.len();
    rustix::io::pread(file, memory, offset) == Ok(length)
}

#[cfg(test)]
mod tests {
    use blockhouse_core::{Buffer, Durability, PageUse, Storage};

    use super::*;
    use crate::driver::engine::{Engine, EngineChoice};
    use crate::event_loop::EventLoop;
    use crate::host_file::{HostFile, OpenMode, PageCache};

    #[test]
    fn slots_are_taken_until_there_are_none_and_come_back() {
        let choice = EngineChoice::Only(Engine::IoUring);
        let Ok(mut event_loop) = EventLoop::new(choice) else { return eprintln!("skipped") };
        event_loop.block_on(async {
            let local = current(Rc::clone);
            let (ring, first) = local.reserve_slots(4000).expect("a table");
            let (same, second) = local.reserve_slots(96).expect("the rest of the table");
            assert_eq!((ring, first.len(), second.len()), (same, 4000, 96));
            assert!(first.iter().all(|slot| !second.contains(slot)));
            let error = local.reserve_slots(1).expect_err("the table is full");
            assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
            local.release_slots(second);
            assert_eq!(local.reserve_slots(96).expect("they are free").1.len(), 96);
        });
        let threads = EventLoop::new(EngineChoice::Only(Engine::Threads));
        let reserved =
            threads.expect("threads").block_on(async { current(|local| local.reserve_slots(1)) });
        assert_eq!(reserved.expect_err("no table").kind(), io::ErrorKind::Unsupported);
    }

    /// A slot without pages stands for pages that the kernel refuses.
    #[test]
    fn transfers_that_the_kernel_refuses_for_their_pages_go_by_memory() {
        let choice = EngineChoice::Only(Engine::IoUring);
        let Ok(mut event_loop) = EventLoop::new(choice) else { return eprintln!("skipped") };
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("disk.img");
        std::fs::write(&path, [1; 8192]).expect("a file");
        event_loop.block_on(async {
            let (ring, slots) = current(|local| local.reserve_slots(1)).expect("a slot");
            let copy_out = |memory: &mut [u8]| {
                memory.fill(2);
                true
            };
            let pages = Arc::new(KernelPages::new(Some((ring, slots[0])), copy_out));
            let file = HostFile::open(&path, OpenMode::ReadWrite, PageCache::Used).expect("a file");
            for durability in [Durability::None, Durability::Data] {
                let mut buffer = Buffer::new(4096);
                let vector = buffer.lend().in_pages(&pages, PageUse::Stored);
                file.write(4096, vector, durability).await.expect("it is written from memory");
                assert_eq!(pages.filled(), Some(0));
                let vector = buffer.lend().in_pages(&pages, PageUse::Filled);
                file.read(0, vector).await.expect("it is read to memory");
                assert_eq!((pages.filled(), buffer.bytes()), (Some(0), &[1; 4096][..]));
            }
        });
        let stored = std::fs::read(&path).expect("the file");
        assert_eq!(stored, [[1; 4096], [2; 4096]].concat());
    }
}
