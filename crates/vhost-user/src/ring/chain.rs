//! Chains of descriptors (virtio 1.2, section 2.7.5), and the status byte at the end of a block
//! request's chain.
//!
//! The driver may be hostile. A chain is walked once, with a bound on its length. A request whose
//! buffers are invalid gets an error status. A chain that cannot be followed, or has no status
//! byte, breaks the queue ([`Broken`]). No buffer outside of the guest's memory is used.

use blockhouse_engine::{GuestMemory, GuestRange, VolatileSlice};

use super::broken::Broken;
use super::descriptor::{Buffers, DESCRIPTOR_BYTES, Descriptor, INDIRECT, MAX_CHAIN, NEXT, WRITE};

/// The chain of a request. Reused for the next request, so that walking allocates nothing.
#[derive(Debug, Default)]
pub struct Chain {
    readable: Buffers,
    writable: Buffers,
    status: u64,
    /// Why the request is rejected, if the walk found a reason.
    reject_reason: Option<&'static str>,
}

impl Chain {
    /// The buffers that the device reads, without the bytes that were [taken](Self::take_bytes).
    pub fn readable(&self) -> &Buffers {
        &self.readable
    }

    /// The buffers that the device writes, without the status.
    pub fn writable(&self) -> &Buffers {
        &self.writable
    }

    /// The guest's address of the status byte.
    pub fn status(&self) -> u64 {
        self.status
    }

    /// The reason to reject the request, if its chain has a status byte but breaks a rule.
    pub fn reject_reason(&self) -> Option<&'static str> {
        self.reject_reason
    }

    /// The number of bytes of data in both directions.
    pub fn length(&self) -> u64 {
        bytes_of(&self.readable) + bytes_of(&self.writable)
    }

    /// How many bytes of data the device reads.
    pub fn readable_length(&self) -> u64 {
        bytes_of(&self.readable)
    }

    /// How many bytes the device may write, the status included.
    pub fn writable_length(&self) -> u32 {
        u32::try_from(bytes_of(&self.writable) + 1).unwrap_or(u32::MAX)
    }

    /// Walks the chain that begins with descriptor `head` of `table`.
    ///
    /// # Errors
    /// If there is no byte for the status, or a rule that the queue depends on is broken.
    pub fn walk(
        &mut self,
        memory: &GuestMemory,
        table: &VolatileSlice,
        head: u16,
    ) -> Result<(), Broken> {
        self.readable.clear();
        self.writable.clear();
        self.reject_reason = None;
        let first = descriptor(table, head)?;
        if first.flags & INDIRECT == 0 {
            self.follow(memory, table, first, true)?;
        } else {
            let inner = indirect(memory, first)?;
            self.follow(memory, &inner, descriptor(&inner, 0)?, false)?;
        }
        self.locate_status(memory)
    }

    /// Follows a chain in one table; `may_branch` to an indirect table at its end.
    fn follow(
        &mut self,
        memory: &GuestMemory,
        table: &VolatileSlice,
        mut current: Descriptor,
        may_branch: bool,
    ) -> Result<(), Broken> {
        for _ in 0..MAX_CHAIN {
            if current.flags & INDIRECT != 0 {
                if !may_branch {
                    return Err(Broken::Indirect(current.flags, current.length));
                }
                // An indirect table may follow direct descriptors: virtio allows that.
                let inner = indirect(memory, current)?;
                return self.follow(memory, &inner, descriptor(&inner, 0)?, false);
            }
            self.add(current);
            if current.flags & NEXT == 0 {
                return Ok(());
            }
            if self.readable.len() + self.writable.len() >= MAX_CHAIN {
                break;
            }
            current = descriptor(table, current.next)?;
        }
        Err(Broken::Endless(MAX_CHAIN))
    }

    fn add(&mut self, descriptor: Descriptor) {
        let Descriptor { address, length, flags, .. } = descriptor;
        if length == 0 {
            self.reject_reason = Some("an empty buffer");
        }
        let range = GuestRange { address, length };
        if flags & WRITE != 0 {
            self.writable.push(range);
        } else {
            if !self.writable.is_empty() {
                self.reject_reason = Some("a buffer to read behind one to write");
            }
            self.readable.push(range);
        }
    }

    /// Locates the status: the last byte of the last writable buffer.
    fn locate_status(&mut self, memory: &GuestMemory) -> Result<(), Broken> {
        let last = self.writable.last_mut().ok_or(Broken::NoStatus)?;
        // An empty buffer has no last byte.
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

    /// Takes the first `N` bytes out of the readable buffers; `None` if they have fewer bytes, or
    /// are not in the guest's memory.
    pub fn take_bytes<const N: usize>(&mut self, memory: &GuestMemory) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        let mut filled = 0;
        let mut emptied = 0;
        while filled < N {
            let range = self.readable.get_mut(emptied)?;
            let here = (range.length as usize).min(N - filled);
            if !memory.read(range.address, &mut bytes[filled..filled + here]) {
                return None;
            }
            filled += here;
            if here == range.length as usize {
                emptied += 1;
            } else {
                range.address += here as u64;
                range.length -= here as u32;
            }
        }
        self.readable.drain(..emptied);
        Some(bytes)
    }
}

fn bytes_of(buffers: &Buffers) -> u64 {
    buffers.iter().map(|range| u64::from(range.length)).sum()
}

fn descriptor(table: &VolatileSlice, index: u16) -> Result<Descriptor, Broken> {
    let count = table.len() / DESCRIPTOR_BYTES;
    if usize::from(index) >= count {
        return Err(Broken::NoSuchDescriptor(index, count));
    }
    Ok(Descriptor::read(table, index.into()))
}

/// The table that an indirect descriptor refers to.
fn indirect(memory: &GuestMemory, descriptor: Descriptor) -> Result<VolatileSlice, Broken> {
    let Descriptor { address, length, flags, .. } = descriptor;
    let entries = length as usize / DESCRIPTOR_BYTES;
    let fits = (1..=MAX_CHAIN).contains(&entries) && length == (entries * DESCRIPTOR_BYTES) as u32;
    // The device ignores WRITE here (virtio 1.2, section 2.7.5.3.2).
    if flags & NEXT != 0 || !fits {
        return Err(Broken::Indirect(flags, length));
    }
    let view = memory.view(address, length as usize);
    view.ok_or(Broken::Misplaced("indirect table", address))
}

#[cfg(test)]
impl Chain {
    /// A chain with these buffers for the device to write, and no others.
    pub fn with_writable(writable: Buffers, status: u64) -> Self {
        Self { writable, status, ..Self::default() }
    }
}
