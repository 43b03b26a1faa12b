//! The monotonic clock of a thread, read as seldom as measuring allows.
//!
//! Reading the clock costs about as much as everything else that is recorded of a request, although
//! it is no system call (vDSO). So on a thread with an event loop one reading serves several uses:
//! the loop calls [`renew`] when the kernel has returned, and after an operation that it did
//! inline, and at most [`MAX_USES`] uses share a reading. The time that a use gets is then too
//! early by the time that the thread has computed since the reading: some microseconds at most, and
//! only while the loop has several requests at a time. A lone request gets two readings of its own,
//! or one if the kernel is not called for it. On other threads each use reads the clock.
//!
//! The loop's own timers, waits and turns of tasks use the same readings. So requests that are
//! carried out inline, one after the other, take one reading each: the reading at the end of a
//! request also tells the loop the time, and is the start of the next request.

use std::cell::Cell;
use std::ops::Add;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// How many uses share a reading: four requests with four uses each.
pub const MAX_USES: u32 = 16;

/// A time of the monotonic clock, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp(u64);

impl Timestamp {
    /// Nanoseconds since `earlier`; 0 if `earlier` is later than `self`.
    pub fn nanoseconds_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// The time since `earlier`; zero if `earlier` is later than `self`.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.nanoseconds_since(earlier))
    }
}

impl Add<Duration> for Timestamp {
    type Output = Self;

    /// The time `time` later. Saturates at 2^64 ns, 584 years after the start of the machine.
    fn add(self, time: Duration) -> Self {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanoseconds))
    }
}

struct SharedReading {
    time: Cell<u64>,
    /// How many more uses get `time`.
    uses: Cell<u32>,
    /// Whether this thread shares readings.
    is_shared: Cell<bool>,
}

impl SharedReading {
    /// Reads the clock, for the uses that follow.
    fn renew(&self) -> Timestamp {
        self.time.set(read());
        self.uses.set(if self.is_shared.get() { MAX_USES } else { 0 });
        Timestamp(self.time.get())
    }
}

thread_local! {
    static READING: SharedReading = const {
        SharedReading { time: Cell::new(0), uses: Cell::new(0), is_shared: Cell::new(false) }
    };
}

/// The time now; on a thread that [shares](set_shared) its readings, the time of the last reading
/// (see the module's page). Never earlier than a time that this thread got before.
pub fn now() -> Timestamp {
    READING.with(|reading| {
        let uses = reading.uses.get();
        if uses > 0 {
            reading.uses.set(uses - 1);
            return Timestamp(reading.time.get());
        }
        let time = reading.renew();
        reading.uses.update(|uses| uses.saturating_sub(1));
        time
    })
}

/// A time later than `earlier`: the last reading if this thread has read the clock since `earlier`,
/// else a new reading. For a loop that reads the time after each step: after a step that has read
/// the clock itself, this is free, and the step's later work is counted as part of the next step.
pub fn later_than(earlier: Timestamp) -> Timestamp {
    READING.with(|reading| match Timestamp(reading.time.get()) {
        // A reading with no uses left is out of date.
        last if last > earlier && reading.uses.get() > 0 => last,
        _ => reading.renew(),
    })
}

/// Reads the clock; the next uses share the reading.
pub fn read_now() -> Timestamp {
    READING.with(SharedReading::renew)
}

/// Sets whether this thread's uses share readings. A thread that sets it must call [`renew`]
/// whenever time has passed.
pub fn set_shared(is_shared: bool) {
    READING.with(|reading| {
        reading.is_shared.set(is_shared);
        reading.uses.set(0);
    });
}

/// Discards the reading, because time has passed: the next use reads the clock.
pub fn renew() {
    READING.with(|reading| reading.uses.set(0));
}

fn read() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    // The clock counts from the start of the machine, so both parts are at least zero.
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
    fn a_time_that_was_read_since_is_not_read_again() {
        set_shared(true);
        let first = read_now();
        std::thread::sleep(Duration::from_millis(1));
        let second = later_than(first);
        assert!(second.since(first) >= Duration::from_millis(1));
        std::thread::sleep(Duration::from_millis(1));
        assert_eq!((later_than(first), now()), (second, second));
        assert!(later_than(second) > second);
        set_shared(false);
        let last = now();
        std::thread::sleep(Duration::from_millis(1));
        assert!(later_than(first) > last, "a thread without a loop reads the clock each time");
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
