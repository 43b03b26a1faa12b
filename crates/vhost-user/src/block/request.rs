//! Translates a guest's request into requests for the disk.

use std::sync::Arc;

use blockhouse_core::{ByteRange, Durability, Fallback, Request, Unmap};
use blockhouse_engine::{GuestMemory, GuestRange};
use virtio_bindings::bindings::virtio_blk::VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;

use super::header::{Command, SECTOR, Status, decode_header};
use super::limits::RequestLimits;
use crate::ring::{Buffers, Chain};

/// Maximum ranges of one discard or zero write.
pub const MAX_RANGES: u32 = 32;

/// Maximum sectors of such a range: 2 GiB less a sector, as in QEMU's devices.
pub const MAX_SECTORS: u32 = (1 << 22) - 1;

/// Bytes of a range: sector, count of sectors, flags (`struct virtio_blk_discard_write_zeroes`).
const RANGE_BYTES: usize = 16;

/// Bytes of the disk's serial (`VIRTIO_BLK_ID_BYTES`).
pub const SERIAL_BYTES: usize = 20;

/// The facts that the decoding of a request depends on.
pub struct RequestContext<'a> {
    /// How durable writes are.
    pub durability: Durability,
    /// The disk's serial, padded with zeros.
    pub serial: &'a [u8; SERIAL_BYTES],
    /// Bytes of the disk.
    pub size: u64,
    /// The maximum size of a request.
    pub limits: RequestLimits,
}

/// The disk requests of a guest's request.
pub enum BlockRequests {
    /// No request: the guest's request is complete already.
    None,
    /// One request.
    One(Request),
    /// Several, one after the other.
    Many(Vec<Request>),
}

impl BlockRequests {
    /// The number of bytes of the chain's writable buffers, from the first one on, that may change
    /// even if the request fails.
    pub fn written(&self) -> u64 {
        match self {
            Self::None => SERIAL_BYTES as u64,
            Self::One(Request::Read { .. }) => u64::MAX,
            Self::One(_) | Self::Many(_) => 0,
        }
    }
}

/// Decodes the request in `chain`, which was walked.
///
/// # Errors
/// The status to reply with at once.
pub fn decode(
    context: &RequestContext<'_>,
    memory: &Arc<GuestMemory>,
    chain: &mut Chain,
) -> Result<BlockRequests, Status> {
    let command = decode_header(chain, memory, context.limits).map_err(|(status, why)| {
        tracing::debug!("a guest's request is refused: {why}");
        status
    })?;
    let durability = context.durability;
    Ok(match command {
        Command::Read { offset } => {
            inside(context, offset, chain.length())?;
            let into = memory.vector(chain.writable()).ok_or(Status::Failed)?;
            BlockRequests::One(Request::Read { offset, into })
        }
        Command::Write { offset } => {
            let from = memory.vector(chain.readable()).ok_or(Status::Failed)?;
            BlockRequests::One(Request::Write { offset, from, durability })
        }
        Command::Flush => BlockRequests::One(Request::Flush),
        Command::Identify => {
            identify(context, memory, chain)?;
            BlockRequests::None
        }
        Command::Discard => {
            decode_ranges(context, memory, chain, |range, flags| match flags {
                // A discard guarantees nothing about the data, so it need not be durable.
                0 => Ok(Request::Discard { range, durability: Durability::None }),
                _ => Err(Status::Unsupported),
            })?
        }
        Command::WriteZeroes => decode_ranges(context, memory, chain, |range, flags| {
            let unmap = match flags {
                0 => Unmap::Forbidden,
                VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP => Unmap::Allowed,
                _ => return Err(Status::Unsupported),
            };
            Ok(Request::WriteZeroes { range, unmap, fallback: Fallback::Allowed, durability })
        })?,
    })
}

/// The range, if it is inside of the disk. [`Disk`](blockhouse_disk::Disk) checks this too, but
/// only when it carries out each part. The check here refuses the guest's request before any part
/// is carried out.
fn inside(context: &RequestContext<'_>, offset: u64, length: u64) -> Result<ByteRange, Status> {
    let range = ByteRange::new(offset, length).filter(|range| range.end() <= context.size);
    range.ok_or(Status::Failed)
}

/// Writes the serial, or the part of it that fits into the guest's buffer. If the write fails,
/// nothing was written.
fn identify(
    context: &RequestContext<'_>,
    memory: &Arc<GuestMemory>,
    chain: &Chain,
) -> Result<(), Status> {
    let mut left = context.serial.len() as u32;
    let mut ranges = Buffers::new();
    for &GuestRange { address, length } in chain.writable() {
        let length = length.min(left);
        left -= length;
        if length > 0 {
            ranges.push(GuestRange { address, length });
        }
    }
    let mut into = memory.vector(&ranges).ok_or(Status::Failed)?;
    into.copy_from(&context.serial[..into.len()]);
    Ok(())
}

/// One request for each range in the chain's data. All ranges are checked before the first request
/// is carried out.
fn decode_ranges(
    context: &RequestContext<'_>,
    memory: &GuestMemory,
    chain: &mut Chain,
    request: impl Fn(ByteRange, u32) -> Result<Request, Status>,
) -> Result<BlockRequests, Status> {
    let length = chain.readable_length();
    let count = length / RANGE_BYTES as u64;
    if !length.is_multiple_of(RANGE_BYTES as u64) || !(1..=u64::from(MAX_RANGES)).contains(&count) {
        return Err(Status::Failed);
    }
    let mut requests = Vec::with_capacity(count as usize);
    for _ in 0..count {
        let bytes: [u8; RANGE_BYTES] = chain.take_bytes(memory).ok_or(Status::Failed)?;
        let number = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[at + byte]));
        let (low, high, sectors, flags) = (number(0), number(4), number(8), number(12));
        if sectors > MAX_SECTORS {
            return Err(Status::Failed);
        }
        let sector = u64::from(low) | u64::from(high) << 32;
        let offset = sector.checked_mul(SECTOR).ok_or(Status::Failed)?;
        let range = inside(context, offset, u64::from(sectors) * SECTOR)?;
        requests.push(request(range, flags)?);
    }
    Ok(BlockRequests::Many(requests))
}
