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
//! (`loom_model` in each file, run by `cargo xtask loom`).

mod bounded;
mod coalescer;
mod condvar;
mod epochs;
mod error_latch;
mod local_condvar;
#[cfg(loom)]
mod loom_support;
mod wait_group;

pub use bounded::{run_all, run_bounded};
pub use coalescer::{Coalescer, RunGuard, Turn};
pub use condvar::Condvar;
pub use epochs::{EpochGuard, Epochs};
pub use error_latch::ErrorLatch;
pub use local_condvar::LocalCondvar;
pub use wait_group::{WaitGroup, WaitGuard};

/// The types that the primitives are built from; under `--cfg loom`, loom's versions of them.
mod parts {
    #[cfg(not(loom))]
    pub(super) use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};

    #[cfg(not(loom))]
    pub(super) use event_listener::{Event, EventListener};
    #[cfg(loom)]
    pub(super) use loom::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
    #[cfg(not(loom))]
    pub(super) use parking_lot::Mutex;

    #[cfg(loom)]
    pub(super) use super::loom_support::{Event, EventListener, Mutex};
}
