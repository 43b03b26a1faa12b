//! From a guest's request to requests for the disk.

use std::sync::Arc;

use blockhouse_core::{ByteRange, Durability, Effort, Request, Unmap};
use blockhouse_engine::GuestMemory;
use virtio_bindings::bindings::virtio_blk::VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;

use crate::chain::{Chain, Command, SECTOR, Status, take_bytes};

/// The most ranges of one discard or zero write.
pub const MOST_RANGES: u32 = 32;

/// The most sectors of such a range: 2 GiB, as QEMU's devices have it.
pub const MOST_SECTORS: u32 = (1 << 22) - 1;

/// Bytes of a range: sector, count of sectors, flags (`struct virtio_blk_discard_write_zeroes`).
const RANGE: usize = 16;

/// What requests are carried out by.
pub struct Terms<'a> {
    /// How durable writes are.
    pub durability: Durability,
    /// The disk's serial, padded with zeros.
    pub serial: &'a [u8; 20],
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

/// Understands the request in `chain`, which was walked.
///
/// # Errors
/// What to answer at once.
pub fn plan(
    terms: &Terms<'_>,
    memory: &Arc<GuestMemory>,
    chain: &mut Chain,
) -> Result<Plan, Status> {
    let command = chain.take_command(memory).map_err(|(status, why)| {
        tracing::debug!("a guest's request is refused: {why}");
        status
    })?;
    let durability = terms.durability;
    Ok(match command {
        Command::Read { offset } => {
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
            many(memory, chain, |range, flags| match flags {
                // What is discarded is not needed any more, so it need not be gone durably.
                0 => Ok(Request::Discard { range, durability: Durability::None }),
                _ => Err(Status::Unsupported),
            })?
        }
        Command::WriteZeroes => many(memory, chain, |range, flags| {
            let unmap = match flags {
                0 => Unmap::Forbidden,
                VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP => Unmap::Allowed,
                _ => return Err(Status::Unsupported),
            };
            Ok(Request::WriteZeroes { range, unmap, effort: Effort::Any, durability })
        })?,
    })
}

fn identify(terms: &Terms<'_>, memory: &GuestMemory, chain: &Chain) -> Result<(), Status> {
    let mut rest = &terms.serial[..];
    for range in &chain.writable {
        let (here, after) = rest.split_at(rest.len().min(range.length as usize));
        if !memory.write(range.address, here) {
            return Err(Status::Failed);
        }
        rest = after;
    }
    Ok(())
}

/// One request for each range that the chain's data names.
fn many(
    memory: &GuestMemory,
    chain: &mut Chain,
    request: impl Fn(ByteRange, u32) -> Result<Request, Status>,
) -> Result<Plan, Status> {
    let length: u64 = chain.readable.iter().map(|range| u64::from(range.length)).sum();
    let count = length / RANGE as u64;
    if !length.is_multiple_of(RANGE as u64) || !(1..=u64::from(MOST_RANGES)).contains(&count) {
        return Err(Status::Failed);
    }
    let mut requests = Vec::with_capacity(count as usize);
    for _ in 0..count {
        let bytes: [u8; RANGE] = take_bytes(memory, &mut chain.readable).ok_or(Status::Failed)?;
        let number = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[at + byte]));
        let (low, high, sectors, flags) = (number(0), number(4), number(8), number(12));
        if sectors > MOST_SECTORS {
            return Err(Status::Failed);
        }
        let sector = u64::from(low) | u64::from(high) << 32;
        let offset = sector.checked_mul(SECTOR).ok_or(Status::Failed)?;
        let range = ByteRange::new(offset, u64::from(sectors) * SECTOR).ok_or(Status::Failed)?;
        requests.push(request(range, flags)?);
    }
    Ok(Plan::Many(requests))
}
