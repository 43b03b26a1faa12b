//! A request's header: type, reserved, sector (`struct virtio_blk_req`), and its status.

use blockhouse_engine::GuestMemory;
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES,
};

use super::limits::RequestLimits;
use crate::ring::{Buffers, Chain};

/// Bytes of a request's header.
const HEADER_BYTES: usize = 16;

/// Bytes of a sector, the unit of offsets for any block size.
pub const SECTOR: u64 = 512;

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The request succeeded.
    Ok,
    /// The request failed, or was invalid.
    Failed,
    /// The device does not support the request.
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

/// The command of a request.
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
    /// Make earlier writes durable.
    Flush,
    /// Return the disk's serial.
    Identify,
    /// Discard the ranges that the data names.
    Discard,
    /// Zero the ranges that the data names.
    WriteZeroes,
}

/// Takes the header out of a chain and decodes it.
///
/// # Errors
/// The status to reply with, and the reason.
pub fn decode_header(
    chain: &mut Chain,
    memory: &GuestMemory,
    limits: RequestLimits,
) -> Result<Command, (Status, &'static str)> {
    let failed = |why| (Status::Failed, why);
    if let Some(reason) = chain.reject_reason() {
        return Err(failed(reason));
    }
    let header = chain.take_bytes::<HEADER_BYTES>(memory);
    let header = header.ok_or(failed("no header in the guest's memory"))?;
    let [a, b, c, d, _, _, _, _, sector @ ..] = header;
    let offset = u64::from_le_bytes(sector).checked_mul(SECTOR);
    let offset = offset.ok_or(failed("a sector beyond all disks"));
    match u32::from_le_bytes([a, b, c, d]) {
        VIRTIO_BLK_T_IN => {
            check_data(chain.writable(), chain.readable(), limits).map_err(failed)?;
            Ok(Command::Read { offset: offset? })
        }
        VIRTIO_BLK_T_OUT => {
            check_data(chain.readable(), chain.writable(), limits).map_err(failed)?;
            Ok(Command::Write { offset: offset? })
        }
        VIRTIO_BLK_T_FLUSH => Ok(Command::Flush),
        VIRTIO_BLK_T_GET_ID => Ok(Command::Identify),
        VIRTIO_BLK_T_DISCARD => Ok(Command::Discard),
        VIRTIO_BLK_T_WRITE_ZEROES => Ok(Command::WriteZeroes),
        _ => Err((Status::Unsupported, "an unknown type of request")),
    }
}

/// Checks the buffers of a read or a write, and that the chain has no buffers for the other
/// direction.
fn check_data(data: &Buffers, others: &Buffers, limits: RequestLimits) -> Result<(), &'static str> {
    let length = limits.check(data)?;
    if length == 0 || !length.is_multiple_of(SECTOR) {
        return Err("data that is no multiple of a sector");
    }
    if others.is_empty() { Ok(()) } else { Err("data in the wrong direction") }
}
