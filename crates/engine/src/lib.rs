//! The host side of Blockhouse, floor 1: an event loop per thread, three engines behind one trait,
//! host files and sockets.
//!
//! A program makes an [`EventLoop`] on each thread that does I/O and runs futures on it; files
//! ([`HostFile`]) and sockets ([`Stream`], [`Listener`]) use the loop of the thread that polls them.
//! Other threads submit through a [`Handle`].

#[cfg(not(target_os = "linux"))]
compile_error!("Blockhouse serves disks on Linux only");

mod afterlife;
mod broken_wait;
mod byte_lock;
mod descriptors;
mod driver;
mod engine;
mod epoll;
mod event_loop;
mod event_signal;
mod file;
mod fixed;
mod guest_memory;
mod host_file;
mod io_poll;
mod line;
mod linux_aio;
mod local;
mod loop_thread;
mod mailbox;
mod mapping;
mod membership;
mod named_by;
mod operation;
mod orphans;
mod poll;
mod probe;
mod queue;
mod queued;
mod registered;
mod remote;
mod sleep;
mod slots_seen;
mod socket;
mod socket_option;
mod spawn;
mod submit;
mod system_call;
mod task;
mod thread_pool;
mod timer;
mod uring;
mod watch;
mod watches;

pub use afterlife::outlast;
pub use byte_lock::{is_byte_locked, release_byte, share_byte};
pub use descriptors::{
    DESCRIPTORS_HINT, ShortageLog, is_out_of_descriptors, is_shortage, raise_descriptor_limit,
};
pub use engine::{Engine, EngineChoice, EngineReport};
pub use event_loop::{EventLoop, Handle, Submission};
pub use event_signal::{EventSignal, is_eventfd};
pub use fixed::FixedFiles;
pub use guest_memory::{GuestMemory, GuestRange, GuestRegion, MemoryKind, SharedMemory, View};
pub use host_file::{HostFile, OpenFor, PageCache};
pub use io_poll::{IoPoll, check_io_poll};
pub use loop_thread::LoopThread;
pub use mapping::{Fault, FaultDomain};
pub use named_by::file_named_by;
pub use poll::DEFAULT_POLLING;
pub use probe::FileKind;
pub use sleep::{Sleep, sleep};
pub use slots_seen::registered_slots;
pub use socket::{Listener, Stream};
pub use socket_option::{peer_process, unsent_bytes};
pub use spawn::{Task, spawn, spawn_detached};
// From the floor below, because it works on any executor.
pub use blockhouse_core::yield_now;
pub use watch::Watch;
pub use watches::Lookout;
