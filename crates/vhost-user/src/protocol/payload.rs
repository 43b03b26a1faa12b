//! Payloads of messages, field by field, and the file descriptors that belong to them.

use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

use super::refusal::{Result, refused};

/// The fields in the payload of a message with a ring's descriptor: the ring's number, and the bit
/// that means "no descriptor".
const RING_MASK: u64 = 0xff;
const NO_DESCRIPTOR: u64 = 1 << 8;

/// `VHOST_VRING_F_LOG`: changes of the used ring are logged.
const LOG_USED: u32 = 1;

/// A region of a front-end's memory.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryRegion {
    /// The guest's address of the first byte.
    pub guest: u64,
    /// Bytes.
    pub size: u64,
    /// The front-end's own address of the first byte.
    pub user: u64,
    /// The offset of the memory in the file.
    pub offset: u64,
}

/// Memory for in-flight tracking.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct InflightDescription {
    /// Bytes.
    pub size: u64,
    /// The offset of the memory in the file.
    pub offset: u64,
    /// Queues.
    pub queues: u16,
    /// Entries of each queue.
    pub entries: u16,
}

/// Memory for the log of changed pages.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LogDescription {
    /// Bytes.
    pub size: u64,
    /// The offset of the memory in the file.
    pub offset: u64,
}

/// The parts of a ring in the front-end's own address space.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct UserAddresses {
    /// The descriptor table.
    pub descriptors: u64,
    /// The available ring.
    pub available: u64,
    /// The used ring.
    pub used: u64,
    /// The guest's address of the used ring, if changes of it are logged.
    pub log: Option<u64>,
}

/// The part of a payload that was not read yet.
pub struct Payload<'a>(&'a [u8]);

impl<'a> Payload<'a> {
    /// A whole payload.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (field, rest) =
            self.0.split_first_chunk().ok_or_else(|| refused("a payload that is too short"))?;
        self.0 = rest;
        Ok(*field)
    }

    /// The next field, of 16 bits.
    pub fn u16(&mut self) -> Result<u16> {
        self.take().map(u16::from_ne_bytes)
    }

    /// The next field, of 32 bits.
    pub fn u32(&mut self) -> Result<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    /// The next field, of 64 bits.
    pub fn u64(&mut self) -> Result<u64> {
        self.take().map(u64::from_ne_bytes)
    }

    /// All bytes that are left.
    pub fn rest(self) -> &'a [u8] {
        self.0
    }

    /// Checks that nothing is left.
    pub fn end(self) -> Result<()> {
        match self.0 {
            [] => Ok(()),
            rest => Err(refused(format_args!("{} bytes too many in a payload", rest.len()))),
        }
    }

    /// A number that is the whole payload.
    pub fn only_u64(mut self) -> Result<u64> {
        let number = self.u64()?;
        self.end().map(|()| number)
    }

    /// The state of a ring: its number, and a value.
    pub fn ring_state(mut self) -> Result<(u32, u32)> {
        let state = (self.u32()?, self.u32()?);
        self.end().map(|()| state)
    }

    /// The number of a ring, and its addresses.
    pub fn ring_addresses(mut self) -> Result<(u32, UserAddresses)> {
        let (index, flags) = (self.u32()?, self.u32()?);
        let (descriptors, used) = (self.u64()?, self.u64()?);
        let (available, log) = (self.u64()?, self.u64()?);
        self.end()?;
        let log = (flags & LOG_USED != 0).then_some(log);
        Ok((index, UserAddresses { descriptors, available, used, log }))
    }

    /// The number of a ring and its descriptor, if it has one.
    pub fn ring_descriptor(self, descriptors: Vec<OwnedFd>) -> Result<(u32, Option<OwnedFd>)> {
        let number = self.only_u64()?;
        let descriptor = match number & NO_DESCRIPTOR {
            0 => Some(only_descriptor(descriptors)?),
            _ if descriptors.is_empty() => None,
            _ => return Err(refused("a descriptor that is said not to be there")),
        };
        Ok(((number & RING_MASK) as u32, descriptor))
    }

    fn region(&mut self) -> Result<MemoryRegion> {
        let (guest, size) = (self.u64()?, self.u64()?);
        Ok(MemoryRegion { guest, size, user: self.u64()?, offset: self.u64()? })
    }

    /// One region with padding before it.
    pub fn single_region(mut self) -> Result<MemoryRegion> {
        self.u64()?;
        let region = self.region()?;
        self.end().map(|()| region)
    }

    /// A table of regions, as many as there are `files`.
    pub fn region_table(mut self, files: usize) -> Result<Vec<MemoryRegion>> {
        let (count, _padding) = (self.u32()?, self.u32()?);
        if count as usize != files {
            return Err(refused(format_args!("{count} regions of memory by {files} files")));
        }
        let regions = (0..count).map(|_| self.region()).collect::<Result<_>>()?;
        self.end().map(|()| regions)
    }

    /// Memory for a log, which is all of the payload.
    pub fn log(mut self) -> Result<LogDescription> {
        let log = LogDescription { size: self.u64()?, offset: self.u64()? };
        self.end().map(|()| log)
    }

    /// The description of in-flight memory. Depending on the front-end's compiler, padding follows
    /// the description.
    pub fn inflight(&mut self) -> Result<InflightDescription> {
        let (size, offset) = (self.u64()?, self.u64()?);
        Ok(InflightDescription { size, offset, queues: self.u16()?, entries: self.u16()? })
    }
}

/// The one descriptor of a message.
pub fn only_descriptor(descriptors: Vec<OwnedFd>) -> Result<OwnedFd> {
    let count = descriptors.len();
    let [one]: [OwnedFd; 1] = descriptors
        .try_into()
        .map_err(|_| refused(format_args!("{count} descriptors, not one")))?;
    Ok(one)
}
