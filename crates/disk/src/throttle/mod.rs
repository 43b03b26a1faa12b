//! Limits on rates: how many requests and bytes a second a disk, or a group of disks, carries out.
//!
//! Guarantees:
//! - [`Bucket`](bucket): in any time `t` a limit of `r` lets go at most `r·t`, plus a twentieth of
//!   a second's worth, plus what a burst allows, plus one request. A request that is larger than
//!   the bucket is admitted and paid off by those after it.
//! - Flushes never wait here. Of one party's requests the reads take turns with the writes, and the
//!   durable ones of these with the others. So a durable write waits for one write and two reads of
//!   its party at most, however many wait; and reads and writes that wait for limits of their own
//!   do not wait for each other.
//! - Disks of a group have equal shares of what their requests cost, and so have the parties of a
//!   disk, as long as they ask for that much ([`FairQueue`](fair_queue)). Each request that waits
//!   is admitted after finitely many others.
//! - A request that waits holds no lock, no claim and no memory but its own, and uses no processor:
//!   on each event loop one of those that wait has a timer, for all of them. One that is dropped
//!   returns its turn, and its cost.
//! - An event loop that is held up delays requests of other loops by some 5 milliseconds at most.
//! - Limits can be changed at any time, also while requests wait.
//!
//! From the bottom up: `limits` (what is asked for), `bucket` and `buckets` (when), `fair_queue`
//! (who is next), `queue` (who waits), `group` (all of it behind one lock), `admission` (the future
//! of a request that waits), `membership` (the disk's part).

mod admission;
mod bucket;
mod buckets;
mod fair_queue;
mod group;
mod limits;
mod membership;
mod queue;
#[cfg(test)]
mod tests;

pub use group::ThrottleGroup;
pub use limits::{Burst, MAX_RATE, RateLimits};
pub(crate) use membership::RequestCost;
pub use membership::{LiftGuard, Throttle, ThrottleStats};
