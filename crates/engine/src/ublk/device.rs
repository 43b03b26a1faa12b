//! The file of a ublk device, through which its server fetches requests and commits their results.
//!
//! Guarantees: a command in flight owns the memory that the driver copies data from and to. The
//! memory is at least as long as the longest request of the device; the driver relies on that. This
//! process only reads descriptors: the driver writes a descriptor before it completes the command
//! for it.

use std::io;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use blockhouse_core::IoVector;
use rustix::fs::{Mode, OFlags};
use rustix::mm::{MapFlags, ProtFlags};

use super::control::UblkControl;
use super::wire::{
    COMMIT_AND_FETCH, DESCRIPTOR_BYTES, FETCH, MAX_DEPTH, UblkDescriptor, UblkInfo, queue_bytes,
    slot_address, ublk_flag,
};
use crate::driver::operation::{CommandData, DeviceCommand, Operation};
use crate::event_loop::submit::submit;

/// Flags of devices that transfer data otherwise than by copies from and to a command's memory, or
/// as [`ublk_flag::PAGES`] says.
const OTHER_WAYS: u64 = ublk_flag::SUPPORT_ZERO_COPY
    | ublk_flag::NEED_GET_DATA
    | ublk_flag::BATCH_IO
    | ublk_flag::SHMEM_ZC;

/// An open `/dev/ublkcN`. Only one process at a time can have it open. The owner stops the device
/// ([`UblkCommand::Stop`]) before the loops that wait for its requests end.
///
/// [`UblkCommand::Stop`]: super::UblkCommand::Stop
pub struct UblkDevice {
    pub(super) file: Arc<OwnedFd>,
    info: UblkInfo,
    /// The descriptors of each queue.
    descriptors: Vec<Descriptors>,
}

/// Where the data of a tag's next request is.
#[derive(Debug)]
pub enum UblkData {
    /// The driver copies it from and to this memory.
    Memory(IoVector),
    /// The driver registers its pages in this slot of the ring.
    Pages(u16),
}

/// The descriptors of a queue's requests: a mapping that the driver writes to.
struct Descriptors {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the object owns its mapping, which is not tied to a thread.
unsafe impl Send for Descriptors {}
// SAFETY: the mapping is only read, by volatile loads, because the driver writes to it.
unsafe impl Sync for Descriptors {}

impl Descriptors {
    fn map(file: &OwnedFd, queue: u16, depth: u16) -> io::Result<Self> {
        let page = rustix::param::page_size();
        let bytes = |depth: usize| (depth * DESCRIPTOR_BYTES).next_multiple_of(page);
        let (length, offset) = (bytes(depth.into()), usize::from(queue) * bytes(MAX_DEPTH));
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces no other mapping. Its
        // pages exist as long as the mapping: the mapping keeps the device's file open, and the
        // driver frees the pages only after the file is closed.
        let mapped = unsafe {
            rustix::mm::mmap(ptr::null_mut(), length, ProtFlags::READ, flags, file, offset as u64)?
        };
        let start = NonNull::new(mapped.cast()).expect("a mapping is nowhere near address 0");
        Ok(Self { start, length })
    }

    fn get(&self, tag: u16) -> UblkDescriptor {
        let offset = usize::from(tag) * DESCRIPTOR_BYTES;
        assert!(offset + DESCRIPTOR_BYTES <= self.length, "a tag of the queue");
        // SAFETY: the descriptor is inside of the mapping (just checked), and aligned: the mapping
        // starts at a page, and a descriptor has a multiple of 8 bytes. The loads are volatile
        // because the driver may write concurrently; every value is valid.
        unsafe {
            let start = self.start.add(offset);
            UblkDescriptor {
                operation: start.cast::<u32>().read_volatile(),
                sectors: start.add(4).cast::<u32>().read_volatile(),
                start_sector: start.add(8).cast::<u64>().read_volatile(),
            }
        }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's own, and no reference into it exists.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

impl UblkInfo {
    /// Refuses a device that [`UblkDevice::open`] does not open because of its flags.
    ///
    /// # Errors
    /// `Unsupported` for a device whose data is transferred neither by plain copies nor as
    /// [`ublk_flag::PAGES`] says.
    pub fn check_data_way(&self) -> io::Result<()> {
        let pages = self.flags & ublk_flag::PAGES;
        if self.flags & OTHER_WAYS != 0 || ![0, ublk_flag::PAGES].contains(&pages) {
            let text = "the device's data goes in a way that this server does not know";
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        Ok(())
    }
}

impl UblkDevice {
    /// Opens device `id`, which was added or whose recovery was started.
    ///
    /// # Errors
    /// The kernel's error: `NotFound` if the device's file did not appear, `ResourceBusy` if
    /// another process has it open; `Unsupported` for a device whose data is transferred neither by
    /// plain copies nor as [`ublk_flag::PAGES`] says.
    pub fn open(control: &mut UblkControl, id: u32) -> io::Result<Self> {
        let info = control.info(id)?;
        info.check_data_way()?;
        let path = format!("/dev/ublkc{id}");
        let file = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let queues = 0..info.queues;
        let descriptors = queues.map(|queue| Descriptors::map(&file, queue, info.depth));
        Ok(Self {
            descriptors: descriptors.collect::<io::Result<_>>()?,
            file: Arc::new(file),
            info,
        })
    }

    /// The device's description when it was opened: number, queues, limits and flags.
    pub fn info(&self) -> &UblkInfo {
        &self.info
    }

    /// The request of a tag: valid from the completion of a command for the tag until the next
    /// [`commit`](Self::commit).
    ///
    /// # Panics
    /// If the device has no such queue or tag.
    pub fn descriptor(&self, queue: u16, tag: u16) -> UblkDescriptor {
        self.descriptors[usize::from(queue)].get(tag)
    }

    /// Fetches the first request of a tag. On completion, memory has the data of a write; the data
    /// of a read must be stored there before [`commit`](Self::commit). The pages have the data of a
    /// write, and get the data of a read. The same thread must fetch all tags of a queue, and its
    /// loop must accept commands.
    ///
    /// # Errors
    /// ENODEV when the device was stopped; EACCES on a loop that does not accept commands,
    /// EOPNOTSUPP on a loop without io_uring; or the driver's error.
    ///
    /// # Panics
    /// When the data is in the other place than the device's flags say, or the memory is not one
    /// segment, or shorter than the longest request of the device.
    pub async fn fetch(&self, queue: u16, tag: u16, data: UblkData) -> io::Result<()> {
        self.command(FETCH, queue, tag, 0, data).await
    }

    /// Commits the result of a tag's request, and waits for the next request as
    /// [`fetch`](Self::fetch) does. `result` is a count of bytes, or a negative errno. Memory has
    /// the data of a read.
    ///
    /// # Errors
    /// The same as for [`fetch`](Self::fetch).
    ///
    /// # Panics
    /// The same as for [`fetch`](Self::fetch).
    pub async fn commit(
        &self,
        queue: u16,
        tag: u16,
        result: i32,
        data: UblkData,
    ) -> io::Result<()> {
        self.command(COMMIT_AND_FETCH, queue, tag, result, data).await
    }

    async fn command(
        &self,
        code: u32,
        queue: u16,
        tag: u16,
        result: i32,
        data: UblkData,
    ) -> io::Result<()> {
        let has_pages = self.info.flags & ublk_flag::PAGES != 0;
        assert_eq!(matches!(data, UblkData::Pages(_)), has_pages, "data in the other place");
        let data = match data {
            UblkData::Memory(memory) => {
                let [segment] = memory.segments() else { panic!("the driver takes one piece") };
                assert!(segment.length >= self.info.max_io_bytes as usize, "too little memory");
                CommandData::Memory(memory)
            }
            UblkData::Pages(slot) => CommandData::Pages(slot_address(slot)),
        };
        let argument = queue_bytes(queue, tag, result);
        let file = Arc::clone(&self.file);
        let command = DeviceCommand { file, code, argument, data };
        let (outcome, _) = submit(Operation::Command(command)).await;
        Ok(outcome.map(drop)?)
    }
}

#[cfg(test)]
mod tests {
    use blockhouse_core::Buffer;

    use super::*;
    use crate::driver::engine::{Engine, EngineChoice};
    use crate::driver::ring_restrictions::DeviceCommands;
    use crate::event_loop::EventLoop;

    /// The error of a command to a file that supports none, on a loop with this engine and setting;
    /// `None` if this host has no such loop.
    fn command_on(engine: Engine, commands: DeviceCommands) -> Option<io::Error> {
        let choice = EngineChoice::Only(engine);
        let mut event_loop = EventLoop::with_commands(choice, commands).ok()?;
        let error = event_loop.block_on(async {
            let (reader, _writer) = rustix::pipe::pipe().expect("a pipe");
            let mut memory = Buffer::new(4096);
            let file = Arc::new(reader);
            let (argument, data) = (queue_bytes(0, 0, 0), CommandData::Memory(memory.lend()));
            let command = DeviceCommand { file, code: FETCH, argument, data };
            submit(Operation::Command(command)).await.0.expect_err("a pipe takes none")
        });
        Some(error.into())
    }

    #[test]
    fn commands_are_for_loops_that_were_made_for_them() {
        let code = |engine, commands| command_on(engine, commands).and_then(|e| e.raw_os_error());
        let refused = code(Engine::IoUring, DeviceCommands::Refused);
        assert!(refused.is_none_or(|code| code == libc::EACCES), "{refused:?}");
        let allowed = code(Engine::IoUring, DeviceCommands::Allowed);
        assert!(allowed.is_none_or(|code| code == libc::EOPNOTSUPP), "{allowed:?}");
        for engine in [Engine::LinuxAio, Engine::Threads] {
            let without_ring = code(engine, DeviceCommands::Allowed);
            assert!(without_ring.is_none_or(|code| code == libc::EOPNOTSUPP), "{without_ring:?}");
        }
    }

    #[test]
    fn without_the_driver_there_is_no_control_device() {
        if std::path::Path::new("/dev/ublk-control").exists() {
            eprintln!("skipped: this kernel has the driver");
            return;
        }
        let error = UblkControl::open().err().expect("there is none");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
