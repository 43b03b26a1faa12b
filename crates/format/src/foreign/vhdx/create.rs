//! Creates VHDX images (\[MS-VHDX\]), dynamic or fixed, with an empty log.

use blockhouse_core::Result;

use super::bat::{self, BITMAP_SECTORS, ENTRY_SIZE};
use super::guid::{Guid, MIB, NIL};
use super::{header, metadata, regions};
use crate::foreign::fields::{le32_bytes, padded, put};
use crate::foreign::new_parts::{FilePieces, NewBlocks, NewForeignOptions, Subformat, refuse};

const LOG: u64 = MIB;
/// Offset of the checksum in headers and region tables.
const CHECKSUM: usize = 4;
/// Bytes of a physical sector, an alignment hint for the guest.
const PHYSICAL_SECTOR: u32 = 4096;
/// Bytes of the file type identifier.
const FILE_TYPE: u64 = 64 << 10;

/// A new image before its metadata is written.
pub struct NewVhdx {
    size: u64,
    blocks: NewBlocks,
    block_size: u64,
    log_size: u64,
    sector_size: u32,
    is_fixed: bool,
    ids: [Guid; 3],
}

impl NewVhdx {
    pub(in crate::foreign) fn new(options: &NewForeignOptions) -> Result<Self> {
        let NewForeignOptions { size, log_size, sector_size, .. } = *options;
        let block_size = options.block_size.unwrap_or_else(|| usual_block_size(size));
        let sizes =
            u64::from(*metadata::BLOCK_SIZES.start())..=(*metadata::BLOCK_SIZES.end()).into();
        if !sizes.contains(&block_size) || !block_size.is_power_of_two() {
            return Err(refuse("blocks of VHDX images have 1 MiB to 256 MiB, a power of two"));
        }
        if size > metadata::MAX_SIZE || !size.is_multiple_of(sector_size.into()) {
            return Err(refuse("a VHDX image has whole sectors, and 64 TiB at most"));
        }
        if log_size < MIB || !log_size.is_multiple_of(MIB) || log_size > u32::MAX.into() {
            return Err(refuse("the log of a VHDX image has whole MiB, and at least one"));
        }
        let is_fixed = options.subformat == Subformat::Fixed;
        let blocks = NewBlocks::new(size, block_size, is_fixed)?;
        let ids = [0, 1, 2].map(|index| options.guid(index));
        Ok(Self { size, blocks, block_size, log_size, sector_size, is_fixed, ids })
    }

    pub(in crate::foreign) fn place(&mut self, at: u64) -> Result<(u64, u64)> {
        let start = self.data();
        let (number, inside) = self.blocks.place(at)?;
        Ok((start + number * self.block_size + inside, self.block_size - inside))
    }

    pub(in crate::foreign) fn finish(self) -> (FilePieces, u64) {
        let end = self.data() + self.blocks.used() * self.block_size;
        let creator = "Blockhouse".encode_utf16().flat_map(u16::to_le_bytes);
        let file_type = header::FILE_SIGNATURE.iter().copied().chain(creator).collect();
        let file_type = padded(file_type, FILE_TYPE);
        let table = self.regions();
        let mut pieces = vec![(self.metadata(), self.items())];
        pieces.extend(regions::OFFSETS.map(|offset| (offset, table.clone())));
        // The second header is current: its sequence number is higher.
        let headers = header::OFFSETS.into_iter().zip(1..);
        pieces.extend(headers.map(|(offset, sequence)| (offset, self.header(sequence))));
        pieces.push((0, file_type));
        // The table of the largest disk has 512 MiB, so it is made in parts.
        let table = (0..self.bat_length())
            .step_by(MIB as usize)
            .filter_map(move |offset| Some((self.bat() + offset, self.block_table(offset)?)));
        (Box::new(table.chain(pieces)), end)
    }

    fn metadata(&self) -> u64 {
        LOG + self.log_size
    }

    fn bat(&self) -> u64 {
        self.metadata() + MIB
    }

    /// The chunk ratio: block entries between two sector bitmap entries.
    fn chunk_ratio(&self) -> u64 {
        BITMAP_SECTORS * u64::from(self.sector_size) / self.block_size
    }

    fn bat_length(&self) -> u64 {
        let blocks = self.blocks.count();
        let entries = blocks + blocks.saturating_sub(1) / self.chunk_ratio();
        (entries.max(1) * ENTRY_SIZE).next_multiple_of(MIB)
    }

    /// Offset of the first block.
    fn data(&self) -> u64 {
        self.bat() + self.bat_length()
    }

    fn header(&self, sequence: u64) -> Vec<u8> {
        let mut bytes = header::SIGNATURE.to_vec();
        bytes.extend([0; 4]);
        bytes.extend(sequence.to_le_bytes());
        bytes.extend(self.ids[0]);
        bytes.extend(self.ids[1]);
        // A nil LogGuid: the log is empty.
        bytes.extend(NIL);
        bytes.extend(header::LOG_VERSION.to_le_bytes());
        bytes.extend(header::VERSION.to_le_bytes());
        bytes.extend((self.log_size as u32).to_le_bytes());
        bytes.extend(LOG.to_le_bytes());
        seal(padded(bytes, header::LENGTH as u64))
    }

    fn regions(&self) -> Vec<u8> {
        let mut bytes = regions::SIGNATURE.to_vec();
        bytes.extend([0; 4]);
        let regions = [
            (regions::BAT, self.bat(), self.bat_length()),
            (regions::METADATA, self.metadata(), MIB),
        ];
        bytes.extend((regions.len() as u32).to_le_bytes());
        bytes.extend([0; 4]);
        for (guid, start, length) in regions {
            bytes.extend(guid);
            bytes.extend(start.to_le_bytes());
            bytes.extend((length as u32).to_le_bytes());
            bytes.extend(regions::REQUIRED.to_le_bytes());
        }
        seal(padded(bytes, regions::LENGTH as u64))
    }

    /// The metadata table, followed by its items.
    fn items(&self) -> Vec<u8> {
        let parameters = self.block_size | (u64::from(self.is_fixed) << 32);
        let of_disk = metadata::IS_DISK | metadata::IS_REQUIRED;
        let items: [(Guid, u32, Vec<u8>); 5] = [
            (metadata::FILE_PARAMETERS, metadata::IS_REQUIRED, parameters.to_le_bytes().into()),
            (metadata::DISK_SIZE, of_disk, self.size.to_le_bytes().into()),
            (metadata::DISK_ID, of_disk, self.ids[2].into()),
            (metadata::LOGICAL_SECTOR, of_disk, self.sector_size.to_le_bytes().into()),
            (metadata::PHYSICAL_SECTOR, of_disk, PHYSICAL_SECTOR.to_le_bytes().into()),
        ];
        let mut table = metadata::SIGNATURE.to_vec();
        table.extend([0; 2]);
        table.extend((items.len() as u16).to_le_bytes());
        let mut table = padded(table, metadata::ENTRY as u64);
        let mut values = Vec::new();
        for (guid, flags, value) in items {
            let offset = metadata::TABLE + values.len();
            table.extend(guid);
            table.extend(le32_bytes(&[offset as u32, value.len() as u32, flags, 0]));
            values.extend(value);
        }
        let mut bytes = padded(table, metadata::TABLE as u64);
        bytes.extend(values);
        padded(bytes, MIB)
    }

    /// The MiB of the block table from `offset` on; `None` if it names no blocks, and stays a hole
    /// of the file.
    fn block_table(&self, offset: u64) -> Option<Vec<u8>> {
        let (start, chunk) = (self.data(), self.chunk_ratio() + 1);
        let numbers = offset / ENTRY_SIZE..(offset + MIB) / ENTRY_SIZE;
        let index = |number: u64| number - number / chunk;
        let entry = |number: u64| match self.blocks.number(index(number)) {
            // The last entry of a chunk is a sector bitmap, not present: the image has no parent.
            Some(block) if number % chunk != chunk - 1 => {
                (start + block * self.block_size) | bat::state::FULLY_PRESENT
            }
            _ => bat::state::NOT_PRESENT,
        };
        let is_used = self.blocks.has_some(index(numbers.start)..index(numbers.end));
        is_used.then(|| numbers.flat_map(|number| entry(number).to_le_bytes()).collect())
    }
}

/// QEMU's default block size, which grows with the disk to keep the BAT small.
fn usual_block_size(size: u64) -> u64 {
    match size {
        _ if size > 32 << 40 => 64 * MIB,
        _ if size > 100 << 30 => 32 * MIB,
        _ if size > 1 << 30 => 16 * MIB,
        _ => 8 * MIB,
    }
}

/// Stores the CRC-32C of all bytes in the checksum field, which must be zero before.
fn seal(mut bytes: Vec<u8>) -> Vec<u8> {
    let sum = crc32c::crc32c(&bytes);
    put(&mut bytes, CHECKSUM, sum.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_block_table_is_written_in_parts() {
        let mut options = NewForeignOptions::new(64 << 40);
        options.block_size = Some(MIB);
        let mut image = NewVhdx::new(&options).unwrap();
        let places: Vec<u64> =
            [0, 5 << 30, options.size - 1].map(|at| image.place(at).unwrap().0).into();
        let (bat, table) = (image.bat(), image.bat_length());
        let (pieces, _) = image.finish();
        let mut found = Vec::new();
        for (offset, bytes) in pieces.filter(|(at, _)| (bat..bat + table).contains(at)) {
            assert_eq!(bytes.len() as u64, MIB);
            for (index, entry) in bytes.as_chunks::<8>().0.iter().enumerate() {
                let number = (offset - bat) / ENTRY_SIZE + index as u64;
                let entry = u64::from_le_bytes(*entry);
                if entry != 0 {
                    found.push((number, entry));
                }
            }
        }
        // A bitmap follows each 4096 blocks.
        let numbers = [0, 5120 + 1, (64 << 20) - 1 + (16 << 10) - 1];
        let block = |place: u64| (place / MIB * MIB) | bat::state::FULLY_PRESENT;
        let expected: Vec<_> = numbers.into_iter().zip(places.into_iter().map(block)).collect();
        assert_eq!(found, expected);
    }
}
