//! The record that a flush tracker keeps in the state file.
//!
//! - The time of the last write to the image. If the file was modified later, another program
//!   changed the file, and the redo log no longer fits it. The data file has a time of its own,
//!   because the redo log belongs to the image alone, and the bitmaps of a raw disk belong to the
//!   data file (`images/side_file`).
//! - The number of sectors sent to a block device that is the data file, counted before they are
//!   sent. If the kernel counts more, another program wrote them. If the device refuses zeroing,
//!   the kernel counts both the refused zeroing and the zeros that are sent instead, until it knows
//!   that the device refuses. So each zeroing that begins before the first one has ended is counted
//!   twice.
//! - The first failed flush. The kernel reports it once, so the next process would not see it.
//!
//! A write costs two reads of the coarse clock, without a system call, and one store for each tick
//! of this clock.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use blockhouse_core::{ByteRange, Error};
use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};

use super::page::{StatePage, TrackedFile};

/// The record that a flush tracker reads and writes in a state file.
pub struct FlushRecord {
    /// Locked once for each tick of the clock, and for a failure.
    page: Mutex<StatePage>,
    file: TrackedFile,
    /// The last time that was stored, so that the page is written to once for each tick of the
    /// clock.
    stamped: AtomicU64,
    /// Whether sectors are counted.
    is_counting: AtomicBool,
    /// Whether a zeroing has ended. After that, the kernel knows whether the device refuses
    /// zeroing.
    has_zeroed: AtomicBool,
}

impl FlushRecord {
    /// The record of one of the files of an image, in `page`.
    pub fn new(page: StatePage, file: TrackedFile) -> Self {
        let is_counting = AtomicBool::new(Self::counts(&page, file));
        let (stamped, has_zeroed) = (AtomicU64::new(0), AtomicBool::new(false));
        Self { page: Mutex::new(page), file, stamped, is_counting, has_zeroed }
    }

    fn counts(page: &StatePage, file: TrackedFile) -> bool {
        file == TrackedFile::Data && page.device_writes() != 0
    }

    /// Moves the record to another state file.
    pub(crate) fn move_to(&self, page: StatePage) {
        let last = self.stamped.load(Ordering::Relaxed).max(page.last_write_to(self.file));
        page.set_last_write_to(self.file, last);
        self.is_counting.store(Self::counts(&page, self.file), Ordering::Relaxed);
        *self.page.lock() = page;
    }

    /// Records the time of a change that is about to begin or has just ended.
    pub(crate) fn stamp(&self) {
        let now = now();
        if self.stamped.load(Ordering::Relaxed) != now {
            self.stamped.store(now, Ordering::Relaxed);
            self.page.lock().set_last_write_to(self.file, now);
        }
    }

    /// Counts bytes that are about to be sent to the file, which has blocks of `block` bytes.
    pub fn count(&self, range: ByteRange, block: u64) {
        if self.is_counting.load(Ordering::Relaxed) {
            self.add(sectors_of(range, block));
        }
    }

    /// Counts bytes that are about to be zeroed without being sent.
    pub fn count_zeroing(&self, range: ByteRange, block: u64) {
        self.count(range, block);
        if !self.has_zeroed.load(Ordering::Acquire) {
            self.count(range, block);
        }
    }

    /// Notes that a zeroing has ended, successfully or not.
    pub fn note_zeroed(&self) {
        self.has_zeroed.store(true, Ordering::Release);
    }

    fn add(&self, sectors: u64) {
        let page = self.page.lock();
        page.set_device_writes(page.device_writes().wrapping_add(sectors));
    }

    /// Records the failure of a flush, unless one is recorded already.
    pub(crate) fn set_failure(&self, error: &Error) {
        self.page.lock().set_failure(self.file, error.errno());
    }

    /// The failure of a flush in an earlier process.
    pub(crate) fn failure(&self) -> Option<Error> {
        let errno = self.page.lock().failure(self.file)?;
        let what = "a flush failed before the server's process ended";
        Some(Error::host(what, std::io::Error::from_raw_os_error(errno)))
    }
}

/// Maximum number of sectors that the kernel counts when a range is written. Through its page cache
/// (blocks of one byte), the kernel writes whole pages.
fn sectors_of(range: ByteRange, block: u64) -> u64 {
    const SECTOR: u64 = 512;
    let block = if block < SECTOR { rustix::param::page_size() as u64 } else { block };
    let (start, end) = (range.offset() / block, range.end().div_ceil(block));
    (end - start) * block / SECTOR
}

/// The time by the clock of file systems, in nanoseconds since the Unix epoch.
fn now() -> u64 {
    let now = clock_gettime(ClockId::RealtimeCoarse);
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use blockhouse_core::{ErrorKind, errno};

    use super::super::page::tests::{memory, owner};
    use super::*;

    #[test]
    fn each_file_has_a_stamp_of_its_own() {
        let page = StatePage::create(memory(512), &owner());
        let is_recent = |nanoseconds| {
            let stamped = SystemTime::UNIX_EPOCH + Duration::from_nanos(nanoseconds);
            SystemTime::now().duration_since(stamped).expect("the past") < Duration::from_secs(60)
        };
        FlushRecord::new(page.clone(), TrackedFile::Data).stamp();
        assert_eq!(page.last_write(), 0);
        assert!(is_recent(page.last_data_write()));
        FlushRecord::new(page.clone(), TrackedFile::Image).stamp();
        assert!(is_recent(page.last_write()));
    }

    #[test]
    fn sectors_are_counted_where_a_count_began() {
        let page = StatePage::create(memory(512), &owner());
        let range = ByteRange::between(1000, 1024);
        FlushRecord::new(page.clone(), TrackedFile::Data).count(range, 1);
        assert_eq!(page.device_writes(), 0, "nothing is counted");
        page.set_device_writes(7 << 40);
        let [image, data] = [TrackedFile::Image, TrackedFile::Data]
            .map(|file| FlushRecord::new(page.clone(), file));
        image.count(range, 512);
        assert_eq!(page.device_writes(), 7 << 40, "the other file");
        let page_sectors = rustix::param::page_size() as u64 / 512;
        for (block, sectors) in [(512, 1), (1, page_sectors), (4096, 8)] {
            let before = page.device_writes();
            data.count(range, block);
            assert_eq!(page.device_writes() - before, sectors, "{block}");
        }
        let new = StatePage::create(memory(512), &owner());
        data.move_to(new.clone());
        data.count(range, 512);
        assert_eq!(new.device_writes(), 0, "the new one counts nothing");
    }

    #[test]
    fn another_page_goes_on_with_the_last_time() {
        let [old, new] = [(); 2].map(|()| StatePage::create(memory(512), &owner()));
        let record = FlushRecord::new(old.clone(), TrackedFile::Image);
        record.stamp();
        record.move_to(new.clone());
        assert_eq!(new.last_write(), old.last_write());
        let later = old.last_write() + 1;
        old.raise_last_write(later);
        record.move_to(old.clone());
        assert_eq!(old.last_write(), later, "it was opened after the last write");
    }

    #[test]
    fn a_failure_keeps_its_errno() {
        let page = StatePage::create(memory(512), &owner());
        let record = FlushRecord::new(page.clone(), TrackedFile::Image);
        assert!(record.failure().is_none());
        record.set_failure(&Error::new(ErrorKind::NoSpace, "no room"));
        let next = FlushRecord::new(page, TrackedFile::Image).failure().expect("it is kept");
        assert_eq!((next.kind(), next.errno()), (ErrorKind::NoSpace, errno::ENOSPC));
    }
}
