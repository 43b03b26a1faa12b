//! Descriptors: the entries of a queue's table, and of indirect tables.

use std::sync::atomic::Ordering::Relaxed;

use blockhouse_engine::{GuestRange, VolatileSlice};
use smallvec::SmallVec;

/// Maximum number of entries of a queue (virtio 1.2, section 2.7).
pub const MAX_ENTRIES: u16 = 1 << 15;

/// Maximum number of descriptors of a chain, also in an indirect table: a header, a status, and 4
/// MiB of single pages.
pub const MAX_CHAIN: usize = 1024 + 2;

/// Flag: another descriptor follows (`VRING_DESC_F_NEXT`).
pub const NEXT: u16 = 1;
/// Flag: the device writes to the buffer (`VRING_DESC_F_WRITE`).
pub const WRITE: u16 = 2;
/// Flag: the buffer is a table of descriptors (`VRING_DESC_F_INDIRECT`).
pub const INDIRECT: u16 = 4;

/// Bytes of a descriptor.
pub const DESCRIPTOR_BYTES: usize = 16;

/// The buffers of a chain in one direction.
pub type Buffers = SmallVec<[GuestRange; 4]>;

/// One descriptor, read once.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor {
    /// The guest's address of the buffer.
    pub address: u64,
    /// Bytes of the buffer.
    pub length: u32,
    /// [`NEXT`], [`WRITE`], [`INDIRECT`].
    pub flags: u16,
    /// The index of the next descriptor, if [`NEXT`] is set.
    pub next: u16,
}

impl Descriptor {
    /// Reads the descriptor at `index`, which is inside of the table.
    pub fn read(table: &VolatileSlice, index: usize) -> Self {
        let at = index * DESCRIPTOR_BYTES;
        let (address, rest) = if table.is_aligned(8) {
            (table.load_u64(at, Relaxed), table.load_u64(at + 8, Relaxed))
        } else {
            // An indirect table may be unaligned.
            let half = |at| {
                let mut bytes = [0; 8];
                table.read(at, &mut bytes);
                u64::from_le_bytes(bytes)
            };
            (half(at), half(at + 8))
        };
        let (length, flags, next) = (rest as u32, (rest >> 32) as u16, (rest >> 48) as u16);
        Self { address, length, flags, next }
    }
}
