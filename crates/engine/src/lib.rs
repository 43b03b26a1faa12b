//! The host (layer 1): event loops that do I/O, host files, sockets and guests' memory.
//!
//! - [`EventLoop`] runs futures on the thread that created it. It does their I/O by io_uring, Linux
//!   AIO or worker threads: the best that the host allows, or the one named by [`EngineChoice`].
//! - [`LoopThread`] is a loop with a thread of its own. Other threads submit to a loop through its
//!   [`Handle`].
//! - [`HostFile`] is a file or block device, and implements [`Storage`](blockhouse_core::Storage).
//!   [`Stream`] and [`Listener`] are sockets. Each uses the loop of the thread that polls it.
//! - [`UblkDevice`] receives the requests of a kernel block device (ublk).
//! - [`GuestMemory`] maps memory that another process shares. If the memory vanishes, the
//!   connection of its owner ends, and this process continues.
//!
//! `event_loop` has tasks, timers and wake-ups; `driver` the three engines and their operations;
//! `mapping` memory that may vanish below a running loop; `process` what this process may do at its
//! host.
//!
//! ```
//! use blockhouse_core::{Buffer, Storage};
//! use blockhouse_engine::{EngineChoice, EventLoop, HostFile, OpenMode, PageCache};
//!
//! # let folder = tempfile::tempdir().unwrap();
//! # let path = folder.path().join("disk.img");
//! # std::fs::write(&path, [7; 8192]).unwrap();
//! let mut event_loop = EventLoop::new(EngineChoice::Auto).unwrap();
//! let bytes = event_loop.block_on(async {
//!     let file = HostFile::open(&path, OpenMode::ReadOnly, PageCache::Used)?;
//!     let mut buffer = Buffer::try_new(4096)?;
//!     file.read(4096, buffer.lend()).await?;
//!     Ok::<_, blockhouse_core::Error>(buffer.bytes().to_vec())
//! })?;
//! assert_eq!(bytes, [7; 4096]);
//! # Ok::<(), blockhouse_core::Error>(())
//! ```
//!
//! Guarantees: no request waits for a sleeping loop; the kernel never holds memory without an
//! owner, even if a future is dropped; a file slot in a ring is reused only after the last
//! operation on it completed.

#[cfg(not(target_os = "linux"))]
compile_error!("Blockhouse serves disks on Linux only");

mod driver;
mod event_loop;
mod host_file;
mod mapping;
mod memory;
mod process;
mod socket;
mod ublk;

pub use driver::adaptive_poll::DEFAULT_POLLING;
pub use driver::byte_lock::{is_byte_locked, lock_byte_shared, unlock_byte};
pub use driver::engine::{Engine, EngineChoice, EngineReport};
pub use driver::fixed_files::FixedFiles;
pub use driver::io_poll::{IoPoll, check_io_poll};
pub use driver::ring_restrictions::DeviceCommands;
pub use driver::ring_tables::{count_registered_buffers, count_registered_files};
pub use event_loop::clock::{Clock, ClockSleep, LoopClock};
pub use event_loop::event_signal::{EventSignal, is_eventfd};
pub use event_loop::loop_thread::LoopThread;
pub use event_loop::signal_rings::reserve_signal_rings;
pub use event_loop::sleep::{Sleep, has_timers, sleep, timeout};
pub use event_loop::spawn::{Task, current_party, spawn, spawn_detached};
pub use event_loop::wait_released::wait_until_released;
pub use event_loop::{EventLoop, Handle, Submission};
pub use host_file::fixed_file_probe::probe_fixed_file;
pub use host_file::page_cache::SYS_CACHESTAT;
pub use host_file::probe::FileKind;
pub use host_file::same_file::is_same_file;
pub use host_file::{DeviceWrites, HostFile, NewFile, OpenFiles, OpenMode, PageCache};
pub use mapping::{Fault, FaultDomain};
pub use memory::guest_memory::{
    GuestMemory, GuestRange, GuestRegion, MemoryKind, SharedMemory, VolatileSlice,
};
pub use memory::locked::{Locked, LockedBytes};
pub use process::descriptors::{
    DESCRIPTORS_HINT, ShortageLog, is_out_of_descriptors, is_shortage,
    keep_descriptors_from_children, raise_descriptor_limit, take_inherited_socket,
};
pub use process::device_user::{device_folder, device_user, hold_unused, is_in_use};
pub use process::local_time::{DateTime, local_time};
pub use socket::page_pipe::{PagePipes, Pages};
pub use socket::socket_option::{peer_process, unsent_bytes};
pub use socket::{Listener, Stream, is_stopped};
pub use ublk::{
    UblkCommand, UblkControl, UblkData, UblkDescriptor, UblkDevice, UblkInfo, UblkPages, ublk_flag,
    ublk_state,
};
// From core, because it works on any executor.
pub use blockhouse_core::yield_now;
pub use driver::watches::PollSource;
pub use event_loop::watch::Watch;
#[cfg(debug_assertions)]
pub use process::attempts;
pub use process::confinement::{Confinement, confine};
pub use process::user::become_user;
pub use process::wait_readable::wait_readable;
