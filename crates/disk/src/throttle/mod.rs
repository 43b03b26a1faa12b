//! Limits on rates: how many requests and bytes a second a disk, or a group of disks, carries out.
//!
//! Guarantees:
//! - [`Bucket`](bucket): in any time `t`, a limit of rate `r` admits at most `r·t`, plus the tokens
//!   of 50 milliseconds, plus the credit of a burst, plus one request. A request that is larger
//!   than the bucket is admitted, and later requests wait until it is paid off.
//! - Flushes never wait for limits. The reads of a party take turns with its writes, and its
//!   durable writes take turns with its other writes. So a durable write waits for at most one
//!   write and two reads of its party, however many requests wait. Reads and writes that wait for
//!   separate limits do not wait for each other.
//! - Disks of a group get equal shares of the limits by the cost of their requests, as long as they
//!   request that much ([`FairQueue`](fair_queue)). The parties of a disk get equal shares in the
//!   same way. Each request that waits is admitted after finitely many others.
//! - A request that waits holds no lock, no claim and no memory except its own, and uses no CPU
//!   time: on each event loop, one waiting request has a timer for all of them. A request that is
//!   dropped gives its turn and its cost back.
//! - An event loop that is blocked delays requests of other loops by about 5 milliseconds at most.
//! - Limits can be changed at any time, also while requests wait.
//!
//! From the bottom up: `limits` (the configured rates), `bucket` and `buckets` (when a request is
//! admitted), `fair_queue` (which key is next), `queue` (the waiting requests), `group` (the queue
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
