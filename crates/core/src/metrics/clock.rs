//! The monotonic clock, read as seldom as measuring allows.
//!
//! Reading the clock costs about as much as everything else that is recorded of a request, although it is no system call
//! (vDSO). So on a thread with an event loop one reading serves several uses: the loop calls [`renew`] when the kernel
//! has returned, and after an operation that it did inline, and [`MAX_USES`] uses at most share a reading. What a
//! use gets is then late by what the thread computed since the reading, some microseconds at most, and only
//! while the loop has several requests at a time; a lone request gets two readings of its own. On other threads
//! each use is a reading.

use std::cell::Cell;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// How many uses share a reading: the four of a request times as many requests.
pub const MAX_USES: u32 = 16;

/// A time of the monotonic clock, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp(u64);

impl Timestamp {
    /// Nanoseconds since an earlier time; 0 where that is later.
    pub fn nanoseconds_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// The time since an earlier one; zero where that is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.nanoseconds_since(earlier))
    }
}

struct SharedReading {
    time: Cell<u64>,
    /// How many more uses get `time`.
    uses: Cell<u32>,
    /// Whether this thread shares readings.
    is_shared: Cell<bool>,
}

thread_local! {
    static READING: SharedReading = const {
        SharedReading { time: Cell::new(0), uses: Cell::new(0), is_shared: Cell::new(false) }
    };
}

/// The time, or on a thread that [shares](set_shared) its readings that of the last reading, see the module's page. Never
/// earlier than what this thread got before.
pub fn now() -> Timestamp {
    READING.with(|reading| {
        let uses = reading.uses.get();
        if uses > 0 {
            reading.uses.set(uses - 1);
            return Timestamp(reading.time.get());
        }
        reading.time.set(read());
        if reading.is_shared.get() {
            reading.uses.set(MAX_USES - 1);
        }
        Timestamp(reading.time.get())
    })
}

/// Says whether this thread calls [`renew`] whenever time has passed, so that several uses may share a reading.
pub fn set_shared(is_shared: bool) {
    READING.with(|reading| {
        reading.is_shared.set(is_shared);
        reading.uses.set(0);
    });
}

/// Time has passed on this thread: the next use reads the clock.
pub fn renew() {
    READING.with(|reading| reading.uses.set(0));
}

fn read() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    // The clock counts from the start of the machine: neither part is negative.
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_without_a_loop_reads_the_clock_each_time() {
        let first = now();
        std::thread::sleep(Duration::from_millis(2));
        assert!(now().since(first) >= Duration::from_millis(2));
    }

    #[test]
    fn uses_share_a_reading_until_it_is_renewed_or_used_up() {
        set_shared(true);
        let first = now();
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!(now(), first);
        renew();
        let second = now();
        assert!(second.since(first) >= Duration::from_millis(1));
        std::thread::sleep(Duration::from_millis(1));
        let same = (1..MAX_USES).all(|_| now() == second);
        assert!(same && now() > second);
        set_shared(false);
    }
}
