//! Durability: the decision, and the operations that it requires.
//!
//! - [`decide`] is the decision, two pure functions: one for the writes of a request, one for a
//!   single write to the storage.
//! - [`group_commit`] measures whether concurrent durable writes should share flushes.
//! - [`request_sync`] collects the inputs of the decision, and the sync that a request needs at
//!   its end.
//! - [`flush_tracker`] wraps each storage: it skips and merges flushes, and remembers the first
//!   failure.

mod decide;
mod flush_tracker;
mod group_commit;
mod request_sync;

#[cfg(test)]
pub(crate) use decide::RequiredSync;
pub(crate) use decide::{DurabilityPlan, Writes};
pub(crate) use flush_tracker::FlushTracker;
pub(crate) use request_sync::RequestSync;
