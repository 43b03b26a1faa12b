//! The primitives of `blockhouse_core::sync` that threads share.

#[path = "../../../../crates/core/src/sync/coalescer.rs"]
mod coalescer;
#[path = "../../../../crates/core/src/sync/condvar.rs"]
mod condvar;
#[path = "../../../../crates/core/src/sync/epochs.rs"]
mod epochs;
mod loom_support;
#[path = "../../../../crates/core/src/sync/wait_group.rs"]
mod wait_group;

use condvar::Condvar;

/// The types that the primitives are built from, as loom has them.
mod parts {
    pub(super) use loom::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};

    pub(super) use super::loom_support::{Event, EventListener, Mutex};
}
