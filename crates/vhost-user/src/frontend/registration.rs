//! Registers a guest's memory with the rings that serve it, so that the kernel need not find and
//! pin its pages for each request.
//!
//! Registration affects only speed. Memory that cannot be registered still works; this is logged
//! once for each front-end.

use std::io;

use blockhouse_engine::{GuestMemory, Handle, SharedMemory};

use crate::device::RegisteredMemory;

/// Registers the memory of one front-end.
pub struct Registration {
    wanted: RegisteredMemory,
    /// Whether it was logged that the kernel refused.
    has_logged: bool,
}

impl Registration {
    /// A registration that does nothing unless it is `wanted`.
    pub fn new(wanted: RegisteredMemory) -> Self {
        Self { wanted, has_logged: false }
    }

    /// Populates new memory that will be registered: its pages are allocated now, on this thread,
    /// which may block. On a loop's thread this would delay all guests of the loop.
    pub fn prepare(&self, memory: &SharedMemory) {
        if self.wanted == RegisteredMemory::On {
            memory.populate();
        }
    }

    /// Registers the memory with the ring of `event_loop`, if that is wanted, and waits until it is
    /// registered. Regions that are registered already stay registered; removed regions are
    /// unregistered automatically.
    pub fn register(&mut self, memory: &GuestMemory, event_loop: &Handle, disk: &str) {
        if self.wanted == RegisteredMemory::Off {
            return;
        }
        let memory = memory.clone();
        let registered = event_loop.spawn(move || async move { memory.register() }).wait();
        // There is no outcome if the server is ending.
        if let Some(Err(error)) = registered
            && !std::mem::replace(&mut self.has_logged, true)
        {
            let advice = advice(&error);
            tracing::warn!(
                disk,
                "guest memory is used without being registered: {error}; {advice}"
            );
        }
    }
}

/// The hint for a person.
fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::OutOfMemory => {
            "RLIMIT_MEMLOCK (ulimit -l) must allow the guest's memory once for each worker"
        }
        _ => {
            "it takes Linux 5.19 or later, and a guest with memory from a memfd, tmpfs or huge pages"
        }
    }
}
