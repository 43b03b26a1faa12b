//! New VMDK images that are written as a stream (streamOptimized), as appliances (OVA) have them:
//! compressed grains in the order of the disk, each table after its grains, and a footer. Only the
//! footer has the offset of the grain directory.

use std::io::Write;

use blockhouse_core::{Error, Result};
use flate2::Compression;
use flate2::write::ZlibEncoder;

use super::create::{
    GRAIN, Head, HeaderPlaces, MAX_FILE, STREAM_FLAGS, STREAM_OVERHEAD, TABLE, TABLE_ENTRIES,
};
use super::sparse_header::{AT_END, FOOTER_MARKER};
use crate::foreign::fields::{SECTOR, le32_bytes, padded};
use crate::foreign::new_parts::{FilePiece, FilePieces, NewForeignOptions, refuse};

/// Kinds of markers: the end, a grain table and the grain directory.
const END_MARKER: u32 = 0;
const TABLE_MARKER: u32 = 1;
const DIRECTORY_MARKER: u32 = 2;

/// An image that is being filled.
pub struct NewStream {
    head: Head,
    /// Offset of the next write.
    end: u64,
    /// Sector numbers of the tables that were written; 0 for a table without grains.
    directory: Vec<u32>,
    /// The table that is not written yet, with its number.
    table: Option<(usize, Vec<u32>)>,
    /// Offset of the disk up to which data was appended.
    done: u64,
}

impl NewStream {
    /// The unit of appends in bytes.
    pub(in crate::foreign) const GRAIN: u64 = GRAIN;

    pub(in crate::foreign) fn new(options: &NewForeignOptions) -> Result<Self> {
        let tables = options.size.div_ceil(GRAIN * TABLE_ENTRIES).max(1);
        let head = Head::new(options, "streamOptimized")?;
        let end = STREAM_OVERHEAD * SECTOR;
        if options.size > MAX_FILE {
            return Err(refuse(format!("a disk of a VMDK stream has {MAX_FILE} bytes at most")));
        }
        Ok(Self { head, end, directory: vec![0; tables as usize], table: None, done: 0 })
    }

    pub(in crate::foreign) fn append(&mut self, at: u64, bytes: &[u8]) -> Result<FilePiece> {
        if at < self.done || !at.is_multiple_of(GRAIN) || bytes.len() as u64 > GRAIN {
            return Err(refuse("the grains of a VMDK stream are written in their order"));
        }
        let (start, mut out) = (self.end, Vec::new());
        let index = at / GRAIN;
        let (table, entry) = ((index / TABLE_ENTRIES) as usize, (index % TABLE_ENTRIES) as usize);
        if self.table.as_ref().is_some_and(|(open, _)| *open != table) {
            out = self.end_table();
        }
        let place = start + out.len() as u64;
        if place + 2 * GRAIN > MAX_FILE {
            return Err(refuse(format!("a VMDK image has {MAX_FILE} bytes at most")));
        }
        out.extend(grain(at / SECTOR, bytes)?);
        let entries = || (table, vec![0; TABLE_ENTRIES as usize]);
        self.table.get_or_insert_with(entries).1[entry] = (place / SECTOR) as u32;
        self.end = start + out.len() as u64;
        self.done = at + GRAIN;
        Ok((start, out))
    }

    /// Ends the current table, and returns its bytes, to be appended at [`end`](Self::end).
    fn end_table(&mut self) -> Vec<u8> {
        let Some((index, entries)) = self.table.take() else { return Vec::new() };
        self.directory[index] = ((self.end + SECTOR) / SECTOR) as u32;
        let mut bytes = marker(TABLE / SECTOR, TABLE_MARKER);
        bytes.extend(le32_bytes(&entries));
        bytes
    }

    pub(in crate::foreign) fn finish(mut self) -> (FilePieces, u64) {
        let start = self.end;
        let mut tail = self.end_table();
        let directory = padded(le32_bytes(&self.directory), SECTOR);
        tail.extend(marker(directory.len() as u64 / SECTOR, DIRECTORY_MARKER));
        let place = (start + tail.len() as u64) / SECTOR;
        tail.extend(directory);
        tail.extend(marker(1, FOOTER_MARKER));
        tail.extend(self.header(place));
        tail.extend(marker(0, END_MARKER));
        let end = start + tail.len() as u64;
        // The header says that the footer has the place of the directory, because readers that find
        // the place in the header expect no footer.
        let head = [(SECTOR, self.head.own_descriptor()), (0, self.header(AT_END))];
        (Box::new([(start, tail)].into_iter().chain(head)), end)
    }

    fn header(&self, directory: u64) -> Vec<u8> {
        self.head.header(&HeaderPlaces {
            flags: STREAM_FLAGS,
            version: 3,
            second_directory: 0,
            directory,
            overhead: STREAM_OVERHEAD,
            has_descriptor: true,
        })
    }
}

/// A marker: a sector that states the kind and number of the next sectors.
fn marker(sectors: u64, kind: u32) -> Vec<u8> {
    let mut bytes = sectors.to_le_bytes().to_vec();
    bytes.extend(le32_bytes(&[0, kind]));
    padded(bytes, SECTOR)
}

/// The marker and the compressed data of the grain at this sector of the disk.
fn grain(sector: u64, bytes: &[u8]) -> Result<Vec<u8>> {
    // The marker; its field for the length is filled in below.
    let mut out = sector.to_le_bytes().to_vec();
    out.extend([0; 4]);
    let marker = out.len();
    let mut encoder = ZlibEncoder::new(out, Compression::default());
    let rest = GRAIN as usize - bytes.len();
    let packed = encoder.write_all(bytes).and_then(|()| encoder.write_all(&vec![0; rest]));
    let packed = packed.and_then(|()| encoder.finish());
    let mut out = packed.map_err(|error| Error::host("cannot compress a grain", error))?;
    let length = (out.len() - marker) as u32;
    out[8..marker].copy_from_slice(&length.to_le_bytes());
    Ok(padded(out, SECTOR))
}
