//! The log of changed pages that a live migration keeps: one bit for each 4096 bytes of the guest's
//! addresses (`VHOST_LOG_PAGE` of `<linux/vhost_types.h>`).

use blockhouse_engine::View;

/// Bytes that one bit stands for.
const PAGE: u64 = 4096;

/// The log, in memory of the front-end's. Clones are the same log.
#[derive(Clone, Debug)]
pub struct DirtyLog(View);

impl DirtyLog {
    /// A log in this memory.
    pub fn new(view: View) -> Self {
        Self(view)
    }

    /// Notes that bytes were changed. Pages that the log has no bit for are not noted.
    pub fn mark(&self, address: u64, length: u64) {
        let Some(last) = length.checked_sub(1).and_then(|more| address.checked_add(more)) else {
            return;
        };
        let pages = 8 * self.0.len() as u64;
        let mut page = address / PAGE;
        let end = (last / PAGE + 1).min(pages);
        while page < end {
            self.0.set_bits_u8((page / 8) as usize, 1 << (page % 8));
            page += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use blockhouse_engine::SharedMemory;

    use super::*;

    #[test]
    fn every_page_that_is_touched_is_marked_and_no_other() {
        let file = rustix::fs::memfd_create("log", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4).unwrap();
        let memory = Arc::new(SharedMemory::map(&file, 0, 4).unwrap());
        let view = View::new(memory, 0, 4).unwrap();
        let log = DirtyLog::new(view.clone());
        log.mark(4095, 2);
        log.mark(PAGE * 9, PAGE);
        log.mark(PAGE * 17, 0);
        log.mark(PAGE * 31, PAGE * 5);
        log.mark(u64::MAX, 5);
        let bytes: Vec<u8> = (0..4).map(|offset| view.load_u8(offset)).collect();
        assert_eq!(bytes, [0b11, 0b10, 0, 0b1000_0000]);
    }
}
