//! Limits on rates: how many requests and bytes a second a disk, or a group of disks, carries out.
//!
//! Guarantees:
//! - [`Bucket`](bucket): in any time `t` a limit of `r` admits at most `r·t`, plus a twentieth of a
//!   second's worth, plus what a burst allows, plus one request. A request that is larger than the
//!   bucket is admitted and paid off by those after it.
//! - Flushes never wait here. Among one party's requests, reads take turns with writes, and among
//!   its writes durable ones take turns with others. So a durable write waits for one write and two
//!   reads of its party at most, however many wait; and reads and writes that wait for limits of
//!   their own do not wait for each other.
//! - Disks of a group get equal shares of the limits by the cost of their requests, and so do the
//!   parties of a disk, as long as they request that much ([`FairQueue`](fair_queue)). Each request
//!   that waits is admitted after finitely many others.
//! - A request that waits holds no lock, no claim and no memory but its own, and uses no processor:
//!   on each event loop one of those that wait has a timer, for all of them. A request that is
//!   dropped returns its turn and its cost.
//! - An event loop that is blocked delays requests of other loops by some 5 milliseconds at most.
//! - Limits can be changed at any time, also while requests wait.
//!
//! From the bottom up: `limits` (the configured rates), `bucket` and `buckets` (when a request is
//! admitted), `fair_queue` (which key is next), `queue` (the waiting requests), `group` (all of it
//! behind one lock), `admission` (the future of a request that waits), `membership` (the group of a
//! disk).

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
