//! Primitives of concurrency that all layers use, each written once.
//!
//! | primitive | what it does | known elsewhere as |
//! | --- | --- | --- |
//! | [`Condvar`] | waits until a predicate holds, on any thread | POSIX condition variable |
//! | [`LocalCondvar`] | the same for tasks of one thread, without an atomic operation | |
//! | [`WaitGroup`] | counts operations in flight, and waits until none is | Go `sync.WaitGroup` |
//! | [`Epochs`] | waits for the operations in flight now, not for later ones | Linux SRCU |
//! | [`Coalescer`] | one caller flushes for all | Go `singleflight`, PostgreSQL `XLogFlush` |
//! | [`ErrorLatch`] | remembers the first failure for good | |
//! | [`run_bounded`] | runs futures concurrently, a bounded number at a time | |
//!
//! All of them work on any executor. None holds a lock while it waits, and any of their futures may
//! be dropped at any time. Models check the primitives that threads share under every interleaving
//! (`loom_model` in each file, compiled in lab/models).

mod bounded;
mod coalescer;
mod condvar;
mod epochs;
mod error_latch;
mod local_condvar;
mod wait_group;

pub use bounded::{run_all, run_bounded};
pub use coalescer::{Coalescer, RunGuard, Turn};
pub use condvar::Condvar;
pub use epochs::{EpochGuard, Epochs};
pub use error_latch::ErrorLatch;
pub use local_condvar::LocalCondvar;
pub use wait_group::{WaitGroup, WaitGuard};

/// The types that the primitives are built from; models have loom's versions of them.
mod parts {
    pub(super) use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};

    pub(super) use event_listener::{Event, EventListener};
    pub(super) use parking_lot::Mutex;
}
