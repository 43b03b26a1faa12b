//! Transfers between memory and a file, as a ring takes them.

use blockhouse_core::Segment;
use io_uring::types::Fd;
use io_uring::{opcode, squeue};

use crate::operation::Transfer;

/// The entry that reads; it points into the transfer.
pub(super) fn read(file: Fd, transfer: &Transfer) -> squeue::Entry {
    match transfer.vector.segments() {
        [Segment { address, length }] => {
            opcode::Read::new(file, address.as_ptr(), bounded(*length))
                .offset(transfer.offset)
                .build()
        }
        many => {
            let (first, count) = array(many);
            opcode::Readv::new(file, first, count).offset(transfer.offset).build()
        }
    }
}

/// The entry that writes, with `RWF_` flags; it points into the transfer.
pub(super) fn write(file: Fd, transfer: &Transfer, flags: i32) -> squeue::Entry {
    match transfer.vector.segments() {
        [Segment { address, length }] => {
            opcode::Write::new(file, address.as_ptr(), bounded(*length))
                .offset(transfer.offset)
                .rw_flags(flags)
                .build()
        }
        many => {
            let (first, count) = array(many);
            opcode::Writev::new(file, first, count).offset(transfer.offset).rw_flags(flags).build()
        }
    }
}

/// A transfer's length, cut to what the kernel does at once (`MAX_RW_COUNT`, a multiple of a page).
fn bounded(length: usize) -> u32 {
    length.min(0x7fff_f000) as u32
}

/// A `Segment` is laid out as an `iovec`.
fn array(segments: &[Segment]) -> (*const libc::iovec, u32) {
    (segments.as_ptr().cast(), segments.len().min(libc::UIO_MAXIOV as usize) as u32)
}
