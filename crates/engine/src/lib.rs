//! The host (layer 1): event loops that do I/O, host files, sockets and guests' memory.
//!
//! - [`EventLoop`] runs futures on the thread that created it. It does their I/O by io_uring, Linux AIO or
//!   worker threads: the best that the host allows, or what [`EngineChoice`] names.
//! - [`LoopThread`] is a loop with a thread of its own. Other threads submit to a loop through its [`Handle`].
//! - [`HostFile`] is a file or block device, and implements [`Storage`](blockhouse_core::Storage). [`Stream`] and
//!   [`Listener`] are sockets. Each uses the loop of the thread that polls it.
//! - [`UblkDevice`] takes the requests of a block device of the kernel's.
//! - [`GuestMemory`] maps memory that another process shares. If it vanishes, its owner's connection ends, not
//!   this process.
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
//! Guarantees: no request waits for a sleeping loop; the kernel never holds memory without an owner, also when a
//! future is dropped; a file slot in a ring is reused only after the last operation on it completed.

#[cfg(not(target_os = "linux"))]
compile_error!("Blockhouse serves disks on Linux only");

mod adaptive_poll;
#[cfg(debug_assertions)]
pub mod attempts;
mod broken_wait;
mod byte_lock;
mod confinement;
mod descriptors;
mod detached_syncs;
mod device_user;
mod driver;
mod engine;
mod epoll;
mod event_loop;
mod event_signal;
mod file;
mod fixed_file_probe;
mod fixed_files;
mod guest_memory;
mod host_file;
mod io_poll;
mod linux_aio;
mod local;
mod local_time;
mod locked;
mod loop_shared;
mod loop_thread;
mod mailbox;
mod mapping;
mod operation;
mod probe;
mod queued_flag;
mod registered_buffer_count;
mod registered_buffers;
mod registrations;
mod request_queue;
mod ring_restrictions;
mod signal_rings;
mod sleep;
mod socket;
mod socket_option;
mod spawn;
mod submit;
mod system_call;
mod task;
mod thread_pool;
mod timer;
mod ublk;
mod uring;
mod user;
mod wait_queue;
mod wait_released;
mod watch;
mod watches;

pub use adaptive_poll::DEFAULT_POLLING;
pub use byte_lock::{is_byte_locked, lock_byte_shared, unlock_byte};
pub use descriptors::{
    DESCRIPTORS_HINT, ShortageLog, is_out_of_descriptors, is_shortage,
    keep_descriptors_from_children, raise_descriptor_limit,
};
pub use device_user::{device_folder, device_user, is_in_use};
pub use engine::{Engine, EngineChoice, EngineReport};
pub use event_loop::{EventLoop, Handle, Submission};
pub use event_signal::{EventSignal, is_eventfd};
pub use fixed_file_probe::probe_fixed_file;
pub use fixed_files::FixedFiles;
pub use guest_memory::{
    GuestMemory, GuestRange, GuestRegion, MemoryKind, SharedMemory, VolatileSlice,
};
pub use host_file::{DeviceWrites, HostFile, NewFile, OpenFiles, OpenMode, PageCache};
pub use io_poll::{IoPoll, check_io_poll};
pub use local_time::{DateTime, local_time};
pub use locked::{Locked, LockedBytes};
pub use loop_thread::LoopThread;
pub use mapping::{Fault, FaultDomain};
pub use probe::FileKind;
pub use registered_buffer_count::count_registered_buffers;
pub use ring_restrictions::DeviceCommands;
pub use signal_rings::reserve_signal_rings;
pub use sleep::{Sleep, has_timers, sleep, timeout};
pub use socket::{Listener, Stream, is_stopped};
pub use socket_option::{peer_process, unsent_bytes};
pub use spawn::{Task, current_party, spawn, spawn_detached};
pub use ublk::{
    UblkCommand, UblkControl, UblkDescriptor, UblkDevice, UblkInfo, ublk_flag, ublk_state,
};
pub use wait_released::wait_until_released;
// From core, because it works on any executor.
pub use blockhouse_core::yield_now;
pub use confinement::{Confinement, confine};
pub use user::become_user;
pub use watch::Watch;
pub use watches::PollSource;
