//! From a guest's request to requests for the disk.

use std::sync::Arc;

use blockhouse_core::{ByteRange, Durability, Fallback, Request, Unmap};
use blockhouse_engine::{GuestMemory, GuestRange};
use virtio_bindings::bindings::virtio_blk::VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;

use crate::chain::{Chain, Command, Ranges, SECTOR, Status, take_bytes};
use crate::limits::RequestLimits;

/// The most ranges of one discard or zero write.
pub const MAX_RANGES: u32 = 32;

/// The most sectors of such a range: 2 GiB, as QEMU's devices have it.
pub const MAX_SECTORS: u32 = (1 << 22) - 1;

/// Bytes of a range: sector, count of sectors, flags (`struct virtio_blk_discard_write_zeroes`).
const RANGE: usize = 16;

/// Bytes of the disk's serial (`VIRTIO_BLK_ID_BYTES`).
pub const SERIAL: usize = 20;

/// What requests are carried out by.
pub struct Terms<'a> {
    /// How durable writes are.
    pub durability: Durability,
    /// The disk's serial, padded with zeros.
    pub serial: &'a [u8; SERIAL],
    /// Bytes of the disk.
    pub size: u64,
    /// How large a request may be.
    pub limits: RequestLimits,
}

/// What is to be done.
pub enum Plan {
    /// It is done already.
    Nothing,
    /// One request.
    One(Request),
    /// Several, one after the other.
    Many(Vec<Request>),
}

impl Plan {
    /// How many bytes of the chain's writable buffers, from the first one on, are changed at most. Also a
    /// request that fails may have changed them.
    pub fn written(&self) -> u64 {
        match self {
            Self::Nothing => SERIAL as u64,
            Self::One(Request::Read { .. }) => u64::MAX,
            Self::One(_) | Self::Many(_) => 0,
        }
    }
}

/// Understands the request in `chain`, which was walked.
///
/// # Errors
/// What to answer at once.
pub fn plan(
    terms: &Terms<'_>,
    memory: &Arc<GuestMemory>,
    chain: &mut Chain,
) -> Result<Plan, Status> {
    let command = chain.take_command(memory, terms.limits).map_err(|(status, why)| {
        tracing::debug!("a guest's request is refused: {why}");
        status
    })?;
    let durability = terms.durability;
    Ok(match command {
        Command::Read { offset } => {
            inside(terms, offset, chain.length())?;
            let into = memory.vector(&chain.writable).ok_or(Status::Failed)?;
            Plan::One(Request::Read { offset, into })
        }
        Command::Write { offset } => {
            let from = memory.vector(&chain.readable).ok_or(Status::Failed)?;
            Plan::One(Request::Write { offset, from, durability })
        }
        Command::Flush => Plan::One(Request::Flush),
        Command::Identify => {
            identify(terms, memory, chain)?;
            Plan::Nothing
        }
        Command::Discard => {
            many(terms, memory, chain, |range, flags| match flags {
                // What is discarded is not needed any more, so it need not be gone durably.
                0 => Ok(Request::Discard { range, durability: Durability::None }),
                _ => Err(Status::Unsupported),
            })?
        }
        Command::WriteZeroes => many(terms, memory, chain, |range, flags| {
            let unmap = match flags {
                0 => Unmap::Forbidden,
                VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP => Unmap::Allowed,
                _ => return Err(Status::Unsupported),
            };
            Ok(Request::WriteZeroes { range, unmap, fallback: Fallback::Allowed, durability })
        })?,
    })
}

/// The range, if the disk has it. [`Disk`](blockhouse_disk::Disk) checks that, too; here it is known before
/// anything is done.
fn inside(terms: &Terms<'_>, offset: u64, length: u64) -> Result<ByteRange, Status> {
    let range = ByteRange::new(offset, length).filter(|range| range.end() <= terms.size);
    range.ok_or(Status::Failed)
}

/// Writes the serial, or as much of it as the guest has room for; all of that, or nothing.
fn identify(terms: &Terms<'_>, memory: &Arc<GuestMemory>, chain: &Chain) -> Result<(), Status> {
    let mut left = terms.serial.len() as u32;
    let mut ranges = Ranges::new();
    for &GuestRange { address, length } in &chain.writable {
        let length = length.min(left);
        left -= length;
        if length > 0 {
            ranges.push(GuestRange { address, length });
        }
    }
    let mut place = memory.vector(&ranges).ok_or(Status::Failed)?;
    place.copy_from(&terms.serial[..place.len()]);
    Ok(())
}

/// One request for each range that the chain's data names. All ranges are checked before the first
/// request is carried out.
fn many(
    terms: &Terms<'_>,
    memory: &GuestMemory,
    chain: &mut Chain,
    request: impl Fn(ByteRange, u32) -> Result<Request, Status>,
) -> Result<Plan, Status> {
    let length: u64 = chain.readable.iter().map(|range| u64::from(range.length)).sum();
    let count = length / RANGE as u64;
    if !length.is_multiple_of(RANGE as u64) || !(1..=u64::from(MAX_RANGES)).contains(&count) {
        return Err(Status::Failed);
    }
    let mut requests = Vec::with_capacity(count as usize);
    for _ in 0..count {
        let bytes: [u8; RANGE] = take_bytes(memory, &mut chain.readable).ok_or(Status::Failed)?;
        let number = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[at + byte]));
        let (low, high, sectors, flags) = (number(0), number(4), number(8), number(12));
        if sectors > MAX_SECTORS {
            return Err(Status::Failed);
        }
        let sector = u64::from(low) | u64::from(high) << 32;
        let offset = sector.checked_mul(SECTOR).ok_or(Status::Failed)?;
        let range = inside(terms, offset, u64::from(sectors) * SECTOR)?;
        requests.push(request(range, flags)?);
    }
    Ok(Plan::Many(requests))
}
