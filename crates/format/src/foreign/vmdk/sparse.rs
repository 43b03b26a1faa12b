//! A sparse extent: the grain directory points to grain tables, whose entries point to the grains.

use blockhouse_core::{ByteRange, ExtentState, Result, Storage};

use super::grain;
use super::sparse_header::SparseHeader;
use crate::foreign::fields::SECTOR;
use crate::foreign::piece::Piece;
use crate::foreign::refusal::corrupt;
use crate::foreign::tables::Tables;

/// Grain table entry for zeros, if the header has the flag `ZERO_GRAINS`.
const ZERO_GRAIN: u32 = 1;
/// Bytes of an entry of a grain table or the grain directory.
pub(super) const ENTRY_SIZE: u64 = 4;

/// A sparse extent in its file.
#[derive(Debug)]
pub(super) struct SparseExtent {
    pub(super) header: SparseHeader,
    /// The file's range in the storage.
    pub(super) file: ByteRange,
}

/// The value of an entry of a grain table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Grain {
    Hole,
    Zero,
    /// The grain begins at this offset of the storage.
    At(u64),
}

impl SparseExtent {
    /// The piece of the extent from `at` on, at most up to the end of the grain, or of the range
    /// of a missing grain table. The extent begins at `start` of the disk.
    ///
    /// # Errors
    /// `Corrupt` with the offset of the entry or grain; or errors of the storage.
    pub(super) async fn piece<S: Storage>(
        &self,
        tables: &Tables<'_, S>,
        start: u64,
        at: u64,
    ) -> Result<Piece> {
        let header = &self.header;
        let index = at / header.grain_size;
        let Some(table) = self.table(tables, index / header.table_entries).await? else {
            let covered = header.grain_size * header.table_entries;
            return Ok(Piece::hole(covered - at % covered));
        };
        let inside = at % header.grain_size;
        let length = header.grain_size - inside;
        Ok(match self.grain(tables, table, index).await? {
            Grain::Hole => Piece::hole(length),
            Grain::Zero => Piece::zero(length),
            Grain::At(host) if header.is_compressed => {
                let first = start + at - inside;
                let last = (first + header.grain_size).min(start + header.capacity);
                self.compressed(host, ByteRange::between(first, last), inside)?
            }
            Grain::At(host) => {
                let left = self.file.end().saturating_sub(host + inside);
                if left < length.min(header.capacity - at) {
                    let what = format!(
                        "a grain of {} bytes ends past the end of the file",
                        header.grain_size
                    );
                    return Err(corrupt(what, host));
                }
                Piece::mapped(host + inside, length)
            }
        })
    }

    async fn table<S: Storage>(&self, tables: &Tables<'_, S>, index: u64) -> Result<Option<u64>> {
        self.table_of(index, tables.entry(self.directory_offset(index)).await?)
    }

    /// The offset in the storage of an entry of the grain directory.
    pub(super) fn directory_offset(&self, index: u64) -> u64 {
        self.file.offset() + self.header.directory + index * ENTRY_SIZE
    }

    /// The offset in the storage of grain table `index`, from its directory entry; `None` if the
    /// table is not allocated.
    ///
    /// # Errors
    /// `Corrupt`, with the offset of the entry.
    pub(super) fn table_of(&self, index: u64, entry: [u8; 4]) -> Result<Option<u64>> {
        let table = u64::from(u32::from_le_bytes(entry)) * SECTOR;
        if table == 0 {
            return Ok(None);
        }
        if table + self.table_length() > self.file.length() {
            let what = format!("grain table {index} at {table} ends past the end of the file");
            return Err(corrupt(what, self.directory_offset(index)));
        }
        Ok(Some(self.file.offset() + table))
    }

    /// Bytes of a grain table.
    pub(super) fn table_length(&self) -> u64 {
        self.header.table_entries * ENTRY_SIZE
    }

    /// The entry of grain `index` of the extent, in the table at offset `table` of the storage.
    async fn grain<S: Storage>(
        &self,
        tables: &Tables<'_, S>,
        table: u64,
        index: u64,
    ) -> Result<Grain> {
        let entry = tables.entry(self.grain_offset(table, index)).await?;
        self.grain_of(table, index, entry)
    }

    /// The offset in the storage of the entry of a grain.
    fn grain_offset(&self, table: u64, index: u64) -> u64 {
        table + index % self.header.table_entries * ENTRY_SIZE
    }

    /// The value of the entry of grain `index`, in the table at offset `table` of the storage.
    ///
    /// # Errors
    /// `Corrupt`, with the offset of the entry.
    pub(super) fn grain_of(&self, table: u64, index: u64, entry: [u8; 4]) -> Result<Grain> {
        match u32::from_le_bytes(entry) {
            0 => Ok(Grain::Hole),
            ZERO_GRAIN if self.header.has_zero_grains => Ok(Grain::Zero),
            sector => {
                let host = u64::from(sector) * SECTOR;
                if host >= self.file.length() {
                    let what = format!("grain {index} at {host} lies past the end of the file");
                    return Err(corrupt(what, self.grain_offset(table, index)));
                }
                Ok(Grain::At(self.file.offset() + host))
            }
        }
    }

    /// The bytes of grain `index` that the file must have: those within the extent, at least one.
    /// For a compressed grain always one, because its length is only in its marker.
    pub(super) fn needed_of(&self, index: u64) -> u64 {
        let grain_size = self.header.grain_size;
        let left = self.header.capacity.saturating_sub(index * grain_size);
        if self.header.is_compressed { 1 } else { left.clamp(1, grain_size) }
    }

    /// The piece of a compressed grain from `inside` on. The grain's marker is at `host`, and its
    /// guest range is `unit`.
    fn compressed(&self, host: u64, unit: ByteRange, inside: u64) -> Result<Piece> {
        let left = self.file.end() - host;
        let length = grain::max_length(self.header.grain_size).min(left);
        if unit.length() <= inside {
            return Err(corrupt("a grain past the end of its extent", host));
        }
        let state = ExtentState::Compressed { host, length };
        Ok(Piece { state, length: unit.length() - inside, unit: Some(unit) })
    }
}
