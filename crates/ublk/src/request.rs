//! Decodes a descriptor into a request for the disk.
//!
//! Guarantee: for any content of a descriptor, the request needs no more memory than the tag has.
//! The disk checks range and access.

use blockhouse_core::{ByteRange, Durability, Fallback, IoVector, Request, Unmap, errno};
use blockhouse_engine::UblkDescriptor;

use crate::parameters::SECTOR;

/// `UBLK_IO_OP_`.
const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 2;
const DISCARD: u32 = 3;
const WRITE_ZEROES: u32 = 5;
/// The mask of the operation code.
const OPERATION: u32 = 0xff;
/// `UBLK_IO_F_FUA`, `UBLK_IO_F_NOUNMAP`.
const FUA: u32 = 1 << 13;
const NO_UNMAP: u32 = 1 << 15;

/// A decoded request without its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    /// Fill the tag's memory.
    Read { offset: u64, length: usize },
    /// Write the content of the tag's memory.
    Write { offset: u64, length: usize, durability: Durability },
    /// A flush.
    Flush,
    /// The range is no longer needed.
    Discard { range: ByteRange },
    /// The range shall read as zeros.
    WriteZeroes { range: ByteRange, unmap: Unmap, durability: Durability },
}

/// Decodes the descriptor of a tag with `memory` bytes. Writes have at least durability `least`.
///
/// # Errors
/// The errno of the reply: EOPNOTSUPP for an operation that the device does not offer, EINVAL for
/// an invalid range.
pub(crate) fn decode(
    descriptor: UblkDescriptor,
    memory: usize,
    least: Durability,
) -> Result<Command, i32> {
    let offset = descriptor.start_sector.checked_mul(SECTOR);
    let bytes = u64::from(descriptor.sectors) * SECTOR;
    let range = offset.and_then(|offset| ByteRange::new(offset, bytes)).ok_or(errno::EINVAL);
    let has = |flag: u32| descriptor.operation & flag != 0;
    let durability = if has(FUA) { least.max(Durability::Data) } else { least };
    let data = || {
        let range = range?;
        let length = usize::try_from(bytes).ok().filter(|length| *length <= memory);
        Ok((range.offset(), length.ok_or(errno::EINVAL)?))
    };
    match descriptor.operation & OPERATION {
        READ => data().map(|(offset, length)| Command::Read { offset, length }),
        WRITE => data().map(|(offset, length)| Command::Write { offset, length, durability }),
        FLUSH => Ok(Command::Flush),
        DISCARD => Ok(Command::Discard { range: range? }),
        WRITE_ZEROES => {
            let unmap = if has(NO_UNMAP) { Unmap::Forbidden } else { Unmap::Allowed };
            Ok(Command::WriteZeroes { range: range?, unmap, durability })
        }
        _ => Err(errno::EOPNOTSUPP),
    }
}

impl Command {
    /// The request for the disk, and the result on success: its number of data bytes. `lend(n)`
    /// lends the first `n` bytes of the tag's memory.
    pub(crate) fn into_request(self, lend: impl FnOnce(usize) -> IoVector) -> (Request, i32) {
        match self {
            Self::Read { offset, length } => {
                (Request::Read { offset, into: lend(length) }, length as i32)
            }
            Self::Write { offset, length, durability } => {
                (Request::Write { offset, from: lend(length), durability }, length as i32)
            }
            Self::Flush => (Request::Flush, 0),
            // A discard promises nothing about the data, so it need not be durable.
            Self::Discard { range } => {
                (Request::Discard { range, durability: Durability::None }, 0)
            }
            Self::WriteZeroes { range, unmap, durability } => {
                let fallback = Fallback::Allowed;
                (Request::WriteZeroes { range, unmap, fallback, durability }, 0)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MEMORY: usize = 512 << 10;

    fn of(operation: u32, start_sector: u64, sectors: u32) -> UblkDescriptor {
        UblkDescriptor { operation, sectors, start_sector }
    }

    fn range(offset: u64, length: u64) -> ByteRange {
        ByteRange::new(offset, length).expect("a range")
    }

    #[test]
    fn each_operation_has_its_request() {
        let (none, data) = (Durability::None, Durability::Data);
        let (unmap, keep) = (Unmap::Allowed, Unmap::Forbidden);
        // The other flags are hints of the kernel (fail fast, metadata, swap).
        let hints = 0x7 << 8 | 1 << 11 | 1 << 16;
        let rows = [
            (READ | hints, Command::Read { offset: 4096, length: 8192 }),
            (WRITE | hints, Command::Write { offset: 4096, length: 8192, durability: none }),
            (WRITE | FUA, Command::Write { offset: 4096, length: 8192, durability: data }),
            (FLUSH, Command::Flush),
            (DISCARD, Command::Discard { range: range(4096, 8192) }),
            (
                WRITE_ZEROES,
                Command::WriteZeroes { range: range(4096, 8192), unmap, durability: none },
            ),
            (
                WRITE_ZEROES | NO_UNMAP | FUA,
                Command::WriteZeroes { range: range(4096, 8192), unmap: keep, durability: data },
            ),
        ];
        for (operation, expected) in rows {
            assert_eq!(decode(of(operation, 8, 16), MEMORY, none), Ok(expected));
        }
        // WRITE_SAME, zone operations, and unknown operations.
        for operation in [4, 10, 13, 18, 255] {
            assert_eq!(decode(of(operation, 8, 16), MEMORY, none), Err(errno::EOPNOTSUPP));
        }
    }

    #[test]
    fn without_a_cache_each_change_is_durable() {
        let durability = Durability::Data;
        let write = decode(of(WRITE, 0, 1), MEMORY, durability);
        assert_eq!(write, Ok(Command::Write { offset: 0, length: 512, durability }));
    }

    proptest! {
        #[test]
        fn no_descriptor_asks_for_more_memory_than_there_is(
            operation in any::<u32>(), start in any::<u64>(), sectors in any::<u32>(),
        ) {
            match decode(of(operation, start, sectors), MEMORY, Durability::None) {
                Ok(Command::Read { offset, length } | Command::Write { offset, length, .. }) => {
                    prop_assert!(length <= MEMORY);
                    prop_assert_eq!(offset / SECTOR, start);
                }
                Ok(Command::Discard { range } | Command::WriteZeroes { range, .. }) => {
                    prop_assert_eq!(range.length(), u64::from(sectors) * SECTOR);
                }
                Ok(Command::Flush) | Err(_) => {}
            }
        }
    }
}
