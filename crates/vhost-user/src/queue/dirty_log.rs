//! The log of changed pages that a live migration keeps: one bit for each 4096 bytes of the guest's
//! addresses (`VHOST_LOG_PAGE` of `<linux/vhost_types.h>`).

use blockhouse_engine::{GuestRange, VolatileSlice};

/// Bytes per bit.
const PAGE: u64 = 4096;

/// The log, in memory of the front-end. Clones share one log.
#[derive(Clone, Debug)]
pub struct DirtyLog(VolatileSlice);

impl DirtyLog {
    /// A log in this memory.
    pub fn new(view: VolatileSlice) -> Self {
        Self(view)
    }

    /// Marks the pages of bytes that were changed. Pages without a bit in the log are ignored.
    pub fn mark(&self, address: u64, length: u64) {
        let Some(last) = length.checked_sub(1).and_then(|more| address.checked_add(more)) else {
            return;
        };
        let (first, end) = (address / PAGE, (last / PAGE + 1).min(8 * self.0.len() as u64));
        let mut page = first;
        while page < end {
            // One store marks the pages of one byte of the log, or of eight aligned bytes: up to 64
            // pages.
            let byte = (page / 8) as usize;
            if page % 64 == 0 && end - page >= 64 && self.is_whole(byte) {
                self.0.set_bits_u64(byte, u64::MAX);
                page += 64;
                continue;
            }
            let here = (8 - page % 8).min(end - page);
            let bits = (0xff >> (8 - here)) << (page % 8);
            self.0.set_bits_u8(byte, bits);
            page += here;
        }
    }

    /// Whether eight bytes from `byte` on can be changed together.
    fn is_whole(&self, byte: usize) -> bool {
        byte + 8 <= self.0.len() && self.0.is_aligned(8)
    }

    /// Marks the pages of the first `length` bytes of the ranges, one after the other.
    pub fn mark_first(&self, ranges: &[GuestRange], mut length: u64) {
        for range in ranges {
            let here = length.min(range.length.into());
            self.mark(range.address, here);
            length -= here;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use blockhouse_engine::{FaultDomain, SharedMemory};

    use super::*;

    fn log(bytes: usize) -> (DirtyLog, VolatileSlice) {
        let file = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, bytes as u64).unwrap();
        let memory =
            Arc::new(SharedMemory::map(&file, 0, bytes, &FaultDomain::unconnected()).unwrap());
        let view = VolatileSlice::new(memory, 0, bytes).unwrap();
        (DirtyLog::new(view.clone()), view)
    }

    #[test]
    fn long_ranges_are_marked_page_by_page() {
        for (first, count) in [(0, 64), (3, 200), (63, 66), (64, 128), (1, 62), (250, 1000), (8, 8)]
        {
            let (log, view) = log(40);
            log.mark(first * PAGE, count * PAGE);
            for page in 0..320 {
                let is_marked = view.load_u8(page as usize / 8) >> (page % 8) & 1 == 1;
                let expected = (first..first + count).contains(&page);
                assert_eq!(is_marked, expected, "page {page} of {count} from {first} on");
            }
        }
    }

    #[test]
    fn only_so_many_bytes_are_marked() {
        let (log, view) = log(1);
        let page = |number: u64| GuestRange { address: number * PAGE, length: PAGE as u32 };
        log.mark_first(&[page(0), page(2), page(4)], PAGE + 1);
        assert_eq!(view.load_u8(0), 0b101);
    }

    #[test]
    fn every_page_that_is_touched_is_marked_and_no_other() {
        let (log, view) = log(4);
        log.mark(4095, 2);
        log.mark(PAGE * 9, PAGE);
        log.mark(PAGE * 17, 0);
        log.mark(PAGE * 31, PAGE * 5);
        log.mark(u64::MAX, 5);
        let bytes: Vec<u8> = (0..4).map(|offset| view.load_u8(offset)).collect();
        assert_eq!(bytes, [0b11, 0b10, 0, 0b1000_0000]);
    }
}
