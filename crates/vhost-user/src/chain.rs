//! From a chain of descriptors to a block request (virtio 1.2, sections 2.7.5 and 5.2.6).
//!
//! The chain is a driver's word. It is walked once, with a bound on its length; what can be answered
//! is answered with an error status, and what cannot even be told its status is
//! [`Broken`]. Buffers are believed only as far as the guest's memory goes.

use blockhouse_engine::{GuestMemory, GuestRange, View};
use smallvec::SmallVec;
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES,
};

use crate::limits::RequestLimits;
use crate::ring::{Broken, DESCRIPTOR, Descriptor, INDIRECT, MAX_ENTRIES, NEXT, WRITE};

/// The most descriptors of a chain, in an indirect table too: a header, a status, and 4 MiB of single
/// pages.
pub const MAX_DESCRIPTORS: usize = MAX_ENTRIES as usize + 2;

/// Bytes of a request's header: type, reserved, sector.
const HEADER: usize = 16;

/// Bytes of a sector, the unit of offsets whatever the block size.
pub const SECTOR: u64 = 512;

/// Buffers of a chain.
pub type Ranges = SmallVec<[GuestRange; 4]>;

/// What the guest is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It is done.
    Ok,
    /// It failed, or made no sense.
    Failed,
    /// There is no such request.
    Unsupported,
}

impl Status {
    /// The byte of the protocol.
    pub fn byte(self) -> u8 {
        let value = match self {
            Self::Ok => VIRTIO_BLK_S_OK,
            Self::Failed => VIRTIO_BLK_S_IOERR,
            Self::Unsupported => VIRTIO_BLK_S_UNSUPP,
        };
        value as u8
    }
}

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Read into the chain's data.
    Read {
        /// The first byte of the disk.
        offset: u64,
    },
    /// Write the chain's data.
    Write {
        /// The first byte of the disk.
        offset: u64,
    },
    /// Make what was written durable.
    Flush,
    /// Tell the disk's serial.
    Identify,
    /// The data names ranges to discard.
    Discard,
    /// The data names ranges to zero.
    WriteZeroes,
}

/// A request as it came in. Kept and filled again, it allocates nothing.
#[derive(Debug, Default)]
pub struct Chain {
    /// What the device reads; without the header once [`take_command`](Self::take_command) was called.
    pub readable: Ranges,
    /// What the device writes, without the status.
    pub writable: Ranges,
    /// The guest's address of the status byte.
    pub status: u64,
    /// A reason to refuse it, found on the way.
    flaw: Option<&'static str>,
}

impl Chain {
    /// Walks the chain that begins with descriptor `head` of `table`.
    ///
    /// # Errors
    /// When nobody can be told the outcome, or virtio's rules for chains are broken.
    pub fn walk(&mut self, memory: &GuestMemory, table: &View, head: u16) -> Result<(), Broken> {
        self.readable.clear();
        self.writable.clear();
        self.flaw = None;
        let first = descriptor(table, head)?;
        if first.flags & INDIRECT == 0 {
            self.follow(memory, table, first, true)?;
        } else {
            let inner = indirect(memory, first)?;
            self.follow(memory, &inner, descriptor(&inner, 0)?, false)?;
        }
        self.find_status(memory)
    }

    /// Follows a chain in one table; `may_branch` to an indirect table at its end.
    fn follow(
        &mut self,
        memory: &GuestMemory,
        table: &View,
        mut current: Descriptor,
        may_branch: bool,
    ) -> Result<(), Broken> {
        for _ in 0..MAX_DESCRIPTORS {
            if current.flags & INDIRECT != 0 {
                if !may_branch {
                    return Err(Broken::Indirect(current.flags, current.length));
                }
                // Direct descriptors first, then a table: virtio allows that.
                let inner = indirect(memory, current)?;
                return self.follow(memory, &inner, descriptor(&inner, 0)?, false);
            }
            self.take(current);
            if current.flags & NEXT == 0 {
                return Ok(());
            }
            if self.readable.len() + self.writable.len() >= MAX_DESCRIPTORS {
                break;
            }
            current = descriptor(table, current.next)?;
        }
        Err(Broken::Endless(MAX_DESCRIPTORS))
    }

    fn take(&mut self, descriptor: Descriptor) {
        let Descriptor { address, length, flags, .. } = descriptor;
        if length == 0 {
            self.flaw = Some("an empty buffer");
        }
        let range = GuestRange { address, length };
        if flags & WRITE != 0 {
            self.writable.push(range);
        } else {
            if !self.writable.is_empty() {
                self.flaw = Some("a buffer to read behind one to write");
            }
            self.readable.push(range);
        }
    }

    /// Takes the last byte of the last writable buffer for the status.
    fn find_status(&mut self, memory: &GuestMemory) -> Result<(), Broken> {
        let last = self.writable.last_mut().ok_or(Broken::NoStatus)?;
        // Of an empty buffer, nothing is the last byte.
        let before = last.length.checked_sub(1).ok_or(Broken::NoStatus)?;
        let status = last.address.checked_add(before.into()).ok_or(Broken::NoStatus)?;
        if before == 0 {
            self.writable.pop();
        } else {
            last.length = before;
        }
        if memory.view(status, 1).is_none() {
            return Err(Broken::NoStatus);
        }
        self.status = status;
        Ok(())
    }

    /// Understands the header.
    ///
    /// # Errors
    /// What to answer instead, and why.
    pub fn take_command(
        &mut self,
        memory: &GuestMemory,
        limits: RequestLimits,
    ) -> Result<Command, (Status, &'static str)> {
        let failed = |why| (Status::Failed, why);
        if let Some(flaw) = self.flaw {
            return Err(failed(flaw));
        }
        let header = take_bytes::<HEADER>(memory, &mut self.readable)
            .ok_or(failed("no header in the guest's memory"))?;
        let [a, b, c, d, _, _, _, _, sector @ ..] = header;
        let offset = u64::from_le_bytes(sector).checked_mul(SECTOR);
        let offset = offset.ok_or(failed("a sector beyond all disks"));
        let data = |buffers: &Ranges, others: &Ranges| -> Result<u64, (Status, &'static str)> {
            let length = limits.check(buffers).map_err(failed)?;
            if length == 0 || !length.is_multiple_of(SECTOR) {
                return Err(failed("data that is no multiple of a sector"));
            }
            if !others.is_empty() {
                return Err(failed("data in the wrong direction"));
            }
            Ok(length)
        };
        match u32::from_le_bytes([a, b, c, d]) {
            VIRTIO_BLK_T_IN => {
                data(&self.writable, &self.readable)?;
                Ok(Command::Read { offset: offset? })
            }
            VIRTIO_BLK_T_OUT => {
                data(&self.readable, &self.writable)?;
                Ok(Command::Write { offset: offset? })
            }
            VIRTIO_BLK_T_FLUSH => Ok(Command::Flush),
            VIRTIO_BLK_T_GET_ID => Ok(Command::Identify),
            VIRTIO_BLK_T_DISCARD => Ok(Command::Discard),
            VIRTIO_BLK_T_WRITE_ZEROES => Ok(Command::WriteZeroes),
            _ => Err((Status::Unsupported, "an unknown type of request")),
        }
    }

    /// How many bytes of data the request moves, either way.
    pub fn length(&self) -> u64 {
        let both = self.readable.iter().chain(&self.writable);
        both.map(|range| u64::from(range.length)).sum()
    }

    /// How many bytes the device may write, the status included.
    pub fn writable_length(&self) -> u32 {
        let data: u64 = self.writable.iter().map(|range| u64::from(range.length)).sum();
        u32::try_from(data + 1).unwrap_or(u32::MAX)
    }
}

fn descriptor(table: &View, index: u16) -> Result<Descriptor, Broken> {
    let count = table.len() / DESCRIPTOR;
    if usize::from(index) >= count {
        return Err(Broken::NoSuchDescriptor(index, count));
    }
    Ok(Descriptor::read(table, index.into()))
}

/// The table that an indirect descriptor refers to.
fn indirect(memory: &GuestMemory, descriptor: Descriptor) -> Result<View, Broken> {
    let Descriptor { address, length, flags, .. } = descriptor;
    let entries = length as usize / DESCRIPTOR;
    let fits = (1..=MAX_DESCRIPTORS).contains(&entries) && length == (entries * DESCRIPTOR) as u32;
    if flags & (NEXT | WRITE) != 0 || !fits {
        return Err(Broken::Indirect(flags, length));
    }
    let view = memory.view(address, length as usize);
    view.ok_or(Broken::Misplaced("indirect table", address))
}

/// Takes the first `N` bytes out of buffers; `None` when they have fewer, or are not there.
pub fn take_bytes<const N: usize>(memory: &GuestMemory, buffers: &mut Ranges) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    let mut filled = 0;
    let mut whole = 0;
    while filled < N {
        let range = buffers.get_mut(whole)?;
        let here = (range.length as usize).min(N - filled);
        if !memory.read(range.address, &mut bytes[filled..filled + here]) {
            return None;
        }
        filled += here;
        if here == range.length as usize {
            whole += 1;
        } else {
            range.address += here as u64;
            range.length -= here as u32;
        }
    }
    buffers.drain(..whole);
    Some(bytes)
}
