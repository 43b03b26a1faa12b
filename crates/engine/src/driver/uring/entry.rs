//! Submission queue entries for transfers between memory and a file, and for commands.

use std::os::fd::AsRawFd;
use std::ptr;

use blockhouse_core::Segment;
use io_uring::types::Fd;
use io_uring::{opcode, squeue};

use crate::driver::operation::{CommandData, DeviceCommand, Transfer};

/// The entry for a read; it points into the transfer. `slot` is the registered buffer with all of
/// the transfer's memory, if there is one.
pub(super) fn read(file: Fd, transfer: &Transfer, slot: Option<u16>) -> squeue::Entry {
    match (transfer.vector.segments(), slot) {
        ([Segment { address, length }], Some(slot)) => {
            opcode::ReadFixed::new(file, address.as_ptr(), bounded(*length), slot)
                .offset(transfer.offset)
                .build()
        }
        ([Segment { address, length }], None) => {
            opcode::Read::new(file, address.as_ptr(), bounded(*length))
                .offset(transfer.offset)
                .build()
        }
        (many, Some(slot)) => {
            let (first, count) = array(many);
            opcode::ReadvFixed::new(file, first, count, slot).offset(transfer.offset).build()
        }
        (many, None) => {
            let (first, count) = array(many);
            opcode::Readv::new(file, first, count).offset(transfer.offset).build()
        }
    }
}

/// The entry for a write, with `RWF_` flags; otherwise as [`read`].
pub(super) fn write(file: Fd, transfer: &Transfer, slot: Option<u16>, flags: i32) -> squeue::Entry {
    match (transfer.vector.segments(), slot) {
        ([Segment { address, length }], Some(slot)) => {
            opcode::WriteFixed::new(file, address.as_ptr(), bounded(*length), slot)
                .offset(transfer.offset)
                .rw_flags(flags)
                .build()
        }
        ([Segment { address, length }], None) => {
            opcode::Write::new(file, address.as_ptr(), bounded(*length))
                .offset(transfer.offset)
                .rw_flags(flags)
                .build()
        }
        (many, Some(slot)) => {
            let (first, count) = array(many);
            opcode::WritevFixed::new(file, first, count, slot)
                .offset(transfer.offset)
                .rw_flags(flags)
                .build()
        }
        (many, None) => {
            let (first, count) = array(many);
            opcode::Writev::new(file, first, count).offset(transfer.offset).rw_flags(flags).build()
        }
    }
}

/// The entry for a read into the kernel's pages in a slot. The address is an offset in them.
pub(super) fn read_to_pages(file: Fd, transfer: &Transfer, slot: u16) -> squeue::Entry {
    opcode::ReadFixed::new(file, ptr::null_mut(), bounded(transfer.vector.len()), slot)
        .offset(transfer.offset)
        .build()
}

/// The entry for a write from the kernel's pages, otherwise as [`read_to_pages`].
pub(super) fn write_from_pages(
    file: Fd,
    transfer: &Transfer,
    slot: u16,
    flags: i32,
) -> squeue::Entry {
    opcode::WriteFixed::new(file, ptr::null(), bounded(transfer.vector.len()), slot)
        .offset(transfer.offset)
        .rw_flags(flags)
        .build()
}

/// The entry for a command. Its memory belongs to the command.
pub(super) fn command(command: &DeviceCommand) -> squeue::Entry {
    let DeviceCommand { file, code, argument, data } = command;
    let (memory, address) = match data {
        CommandData::Memory(memory) => {
            let first = memory.segments().first();
            (first.map_or(0, |first| first.address.addr().get() as u64), None)
        }
        CommandData::Pages(address) => (0, Some(*address)),
    };
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(argument);
    bytes[8..].copy_from_slice(&memory.to_ne_bytes());
    let command = opcode::UringCmd16::new(Fd(file.as_raw_fd()), *code).cmd(bytes);
    command.addr(address).build()
}

/// A transfer's length, limited to the kernel's maximum (`MAX_RW_COUNT`, a multiple of a page).
fn bounded(length: usize) -> u32 {
    length.min(0x7fff_f000) as u32
}

/// A `Segment` is laid out as an `iovec`.
fn array(segments: &[Segment]) -> (*const libc::iovec, u32) {
    (segments.as_ptr().cast(), segments.len().min(libc::UIO_MAXIOV as usize) as u32)
}
