//! Limits on the size of one request, and on the requests and bytes that a queue has in flight.
//!
//! The descriptors of a chain may name the same memory many times, so neither the guest's memory
//! nor its disk bounds the size of one request. `size_max` and `seg_max` (virtio 1.2, section
//! 5.2.4) are announced and apply to drivers that accepted them; the limit of the whole request
//! applies to every driver. A longer request fails with an I/O error and has no other effect.
//!
//! The limits do not slow down any known driver. Linux sends at most 4 MiB in a request unless told
//! otherwise, and the largest request is longer than `size_max` and `seg_max` allow together.
//! EDK2's driver accepts neither feature and sends each request of its caller as one request, up to
//! 1 GiB in one buffer, for example a whole file. (QEMU's own device takes 2 GiB less a sector;
//! SPDK announces 128 KiB in each of 126 buffers.)

use blockhouse_core::InFlightLimits;
use virtio_bindings::bindings::virtio_blk::{VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX};

use crate::ring::{Buffers, MAX_CHAIN};

/// Bytes of one buffer of data (`size_max`): 126 of these are just less than the largest request.
pub const SIZE_MAX: u32 = 8 << 20;

/// Data buffers of one request (`seg_max`): with a header and a status they fill a queue of 128
/// entries, as QEMU's guests have.
pub const SEG_MAX: u32 = 126;

/// The limits of a queue's requests in flight, above which further requests wait in the ring. Data
/// moves from and to the guest's own memory, so bytes in flight cost no memory here.
pub const QUEUE_LIMITS: InFlightLimits =
    InFlightLimits { request_bytes: 1 << 30, requests: 1024, ..InFlightLimits::DEFAULT };

const _: () = assert!(SIZE_MAX as u64 * SEG_MAX as u64 <= QUEUE_LIMITS.request_bytes);

/// The limits of one request for a driver.
#[derive(Clone, Copy, Debug)]
pub struct RequestLimits {
    buffer_bytes: u32,
    buffers: usize,
}

impl RequestLimits {
    /// The limits of a driver that accepted these features.
    pub fn of(features: u64) -> Self {
        let has = |feature: u32| features & 1 << feature != 0;
        Self {
            buffer_bytes: if has(VIRTIO_BLK_F_SIZE_MAX) { SIZE_MAX } else { u32::MAX },
            buffers: if has(VIRTIO_BLK_F_SEG_MAX) { SEG_MAX as usize } else { MAX_CHAIN },
        }
    }

    /// Checks the data buffers of a read or a write. Returns the bytes of all.
    ///
    /// # Errors
    /// The reason why the request is refused.
    pub fn check(&self, buffers: &Buffers) -> Result<u64, &'static str> {
        if buffers.len() > self.buffers {
            return Err("more buffers of data than seg_max");
        }
        if buffers.iter().any(|buffer| buffer.length > self.buffer_bytes) {
            return Err("a buffer of data that is longer than size_max");
        }
        // The sum is at most MAX_CHAIN times 4 GiB, so it does not overflow.
        let length = buffers.iter().map(|buffer| u64::from(buffer.length)).sum();
        if length > QUEUE_LIMITS.request_bytes {
            return Err("more data than the largest request has");
        }
        Ok(length)
    }
}

#[cfg(test)]
mod tests {
    use blockhouse_engine::GuestRange;

    use super::*;

    const BOTH: u64 = 1 << VIRTIO_BLK_F_SIZE_MAX | 1 << VIRTIO_BLK_F_SEG_MAX;

    fn check(features: u64, count: usize, length: u32) -> Option<u64> {
        let buffers = (0..count).map(|_| GuestRange { address: 4096, length }).collect();
        RequestLimits::of(features).check(&buffers).ok()
    }

    #[test]
    fn announced_limits_hold_for_drivers_that_accepted_them() {
        let (size, count) = (SIZE_MAX, SEG_MAX as usize);
        assert_eq!(check(BOTH, count, size), Some(u64::from(size) * count as u64));
        assert_eq!(check(BOTH, count + 1, 512), None);
        assert_eq!(check(BOTH, 1, size + 512), None);
        assert_eq!(check(0, count + 1, 512), Some(127 * 512));
        assert_eq!(check(0, 1, 1 << 30), Some(1 << 30), "as EDK2 sends it");
    }

    #[test]
    fn the_same_memory_named_many_times_counts_as_often() {
        assert_eq!(check(0, MAX_CHAIN, u32::MAX), None);
        assert_eq!(check(0, 2, (1 << 29) + 512), None);
        assert_eq!(check(0, MAX_CHAIN, 1 << 20), None);
    }
}
