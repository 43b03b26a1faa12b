//! Reads tables only where the file has data.
//!
//! A file can be exabytes long and have almost no data. Tables in its holes are zeros, and are
//! skipped without a read: the storage says where its data is. So the cost of reading an image's
//! tables depends on the data in the file, not on the sizes in its header.

use blockhouse_core::{Allocation, ByteRange, Result, Storage};

use super::geometry::Geometry;
use super::table_io;

/// Maximum bytes that are read at a time.
const CHUNK_SIZE: u64 = 1 << 20;
/// For a file up to this length, in bytes, no holes are queried: reads of holes cost no more than
/// the queries.
const SMALL_FILE: u64 = 16 << 20;

/// Reads tables of an image. Reads in ascending order of the offsets need the fewest queries.
pub(crate) struct SparseReader<'a, S> {
    storage: &'a S,
    /// Reads start at multiples of this number of bytes, and end there or at the range's end.
    granularity: u64,
    /// The last block status that the storage returned.
    known: Option<(ByteRange, Allocation)>,
}

impl<'a, S: Storage> SparseReader<'a, S> {
    pub(crate) fn new(storage: &'a S, geometry: Geometry) -> Self {
        Self { storage, granularity: geometry.slice_size(), known: None }
    }

    /// The first part of `range` that may have other bytes than zeros, in whole slices and at most
    /// 1 MiB; `None` if the whole range is zeros. `range` must start at a cluster. Its start is
    /// advanced past the result. A storage that cannot report holes counts as a storage without
    /// holes.
    pub(crate) async fn next_data(&mut self, range: &mut ByteRange) -> Option<ByteRange> {
        let data = self.find_data(*range).await?;
        *range = ByteRange::between(data.end(), range.end());
        Some(data)
    }

    async fn find_data(&mut self, range: ByteRange) -> Option<ByteRange> {
        let mut rest = range.truncate(self.storage.size().saturating_sub(range.offset()));
        while !rest.is_empty() {
            let (status, end) = self.status_at(rest.offset()).await;
            let length = end - rest.offset();
            let is_zero =
                status == Allocation::Hole && (length >= self.granularity || end >= rest.end());
            if !is_zero {
                let length =
                    length.next_multiple_of(self.granularity).clamp(self.granularity, CHUNK_SIZE);
                let start = rest.offset();
                return Some(ByteRange::between(start, (start + length).min(range.end())));
            }
            rest = rest.skip(
                (length / self.granularity)
                    .max(1)
                    .saturating_mul(self.granularity)
                    .min(rest.length()),
            );
        }
        None
    }

    /// As [`next_data`](Self::next_data), with the bytes of the result.
    ///
    /// # Errors
    /// Errors of the storage.
    pub(crate) async fn read(
        &mut self,
        range: &mut ByteRange,
    ) -> Result<Option<(ByteRange, Vec<u8>)>> {
        let Some(data) = self.next_data(range).await else { return Ok(None) };
        let bytes = table_io::read(self.storage, data.offset(), data.length() as usize).await?;
        Ok(Some((data, bytes)))
    }

    /// The storage's status at `offset`, and the end of the range with this status.
    async fn status_at(&mut self, offset: u64) -> (Allocation, u64) {
        if let Some((range, status)) = self.known
            && (range.offset()..range.end()).contains(&offset)
        {
            return (status, range.end());
        }
        let rest = ByteRange::between(offset, self.storage.size());
        let all = (Allocation::Data, rest.length());
        let (status, length) = match self.storage.size() {
            0..=SMALL_FILE => all,
            _ => self.storage.block_status(rest).await.unwrap_or(all),
        };
        self.known = Some((rest.truncate(length), status));
        (status, offset + length)
    }
}
