//! Durability: the decision about it, and the operations that it takes.
//!
//! - [`decide`] is the decision, two pure functions: one for the writes of a request, one for a
//!   single write that reaches the storage.
//! - [`request_sync`] has the facts at hand, asks for the decision and collects the sync that a
//!   request needs at its end.
//! - [`flush_tracker`] wraps each storage: it skips and merges flushes, and remembers the first
//!   failure.

mod decide;
mod flush_tracker;
mod request_sync;

#[cfg(test)]
pub(crate) use decide::RequiredSync;
pub(crate) use decide::{DurabilityPlan, Writes};
pub(crate) use flush_tracker::FlushTracker;
pub(crate) use request_sync::RequestSync;
