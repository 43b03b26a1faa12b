//! The clusters of persistent bitmaps: nothing else is known of them here.
//!
//! They count only while the image says that they are in step with the guest's disk (an autoclear
//! bit); without it QEMU takes their space for leaked, and so does a check.

use blockhouse_core::{ByteRange, Result, Storage};

use crate::qcow2::layout::header::Header;
use crate::qcow2::layout::limits::{
    MAX_BITMAP_DIRECTORY, MAX_BITMAP_TABLE, MAX_BITMAPS, MAX_OFFSET,
};
use crate::qcow2::layout::sparse_reader::SparseReader;
use crate::qcow2::layout::words::{self, be32, be64};
use crate::qcow2::layout::{extensions, table_io};

use crate::qcow2::layout::cluster_ranges::ClusterRanges;

/// Autoclear feature bit: the bitmaps are in step with the disk.
pub(crate) const BITMAPS_CONSISTENT: u64 = 1;

/// What a directory's entry is made of besides its extra data and name.
const FIXED: usize = 24;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// Tells `add` everything that bitmaps take of the file: what, offset, length. Answers why that may not
/// be all, in words.
///
/// # Errors
/// Only what the storage and `add` answer.
pub(crate) async fn walk<S: Storage>(
    storage: &S,
    header: &Header,
    mut add: impl FnMut(&str, u64, u64) -> Result<()>,
) -> Result<Option<String>> {
    let extension = extensions::find(&header.extensions, extensions::BITMAPS);
    let Some(extension) = extension.filter(|_| header.autoclear & BITMAPS_CONSISTENT != 0) else {
        return Ok(None);
    };
    if extension.len() < FIXED {
        return Ok(Some("the header extension of bitmaps is too short".into()));
    }
    let count = be32(extension, 0);
    let (length, start) = (be64(extension, 8), be64(extension, 16));
    let is_possible = |offset| offset <= MAX_OFFSET && header.geometry.is_cluster_aligned(offset);
    if length > MAX_BITMAP_DIRECTORY || !is_possible(start) {
        return Ok(Some(format!("the directory of bitmaps has the invalid offset {start}")));
    }
    if count > MAX_BITMAPS {
        return Ok(Some(format!("{count} bitmaps are more than {MAX_BITMAPS}")));
    }
    add("the directory of bitmaps", start, length)?;
    let mut reader = SparseReader::new(storage, header.geometry);
    let mut tables = ClusterRanges::default();
    let directory = table_io::read(storage, start, length as usize).await?;
    let mut at = 0;
    for number in 0..count {
        let Some(entry) = directory.get(at..).filter(|entry| entry.len() >= FIXED) else {
            return Ok(Some(format!("the directory of bitmaps ends before entry {number}")));
        };
        let (table, bytes) = (be64(entry, 0), u64::from(be32(entry, 8)) * 8);
        if bytes > MAX_BITMAP_TABLE || !is_possible(table) {
            return Ok(Some(format!("a bitmap's table has the invalid offset {table}")));
        }
        let clusters =
            header.geometry.cluster_of(table)..header.geometry.clusters_for(table + bytes);
        if tables.overlaps(&clusters) {
            return Ok(Some(format!(
                "the table of a bitmap at offset {table} overlaps another one"
            )));
        }
        tables.insert(clusters);
        add("a bitmap's table", table, bytes)?;
        let mut rest = ByteRange::between(table, table + bytes);
        while let Some((_, words)) = reader.read(&mut rest).await? {
            for word in words::words_of(&words) {
                if word & OFFSET != 0 {
                    add("a bitmap's data", word & OFFSET, header.geometry.cluster_size())?;
                }
            }
        }
        let name = be32(entry, 16) as usize & 0xffff;
        at += (FIXED + name + be32(entry, 20) as usize).next_multiple_of(8);
    }
    Ok(None)
}
