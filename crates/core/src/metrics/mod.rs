//! The measurement of a running server: a clock, counters, and histograms of durations.
//!
//! Guarantees: recording takes no lock, writes to no cache line that another thread writes to, and
//! makes no system call. Each thread records into a block of its own ([`PerThread`]) with plain
//! loads and stores; a reading adds the blocks of all threads up. A reading is exact when nothing
//! is recorded meanwhile.

pub mod clock;
mod counter;
mod histogram;
mod per_thread;

pub use clock::Timestamp;
pub use counter::Counter;
pub use histogram::{BUCKETS, Histogram, HistogramReading, bucket_of, upper_bound};
pub use per_thread::PerThread;
