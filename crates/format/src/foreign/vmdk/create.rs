//! New VMDK sparse extents: images that are one file with tables (monolithicSparse), and the files
//! of split images. The header and the descriptor are made here for streams, too.
//!
//! The disk may be larger than the maximum size of the file, as in QEMU's images; its allocated
//! data may not.

use std::ops::Range;

use blockhouse_core::{Error, ErrorKind, Result};

use super::descriptor::NO_PARENT;
use super::sparse_header::{
    COMPRESSED, DEFLATE, LENGTH, MAGIC, MARKERS, NEWLINE_TEST, NEWLINES, ZERO_GRAINS,
};
use crate::foreign::fields::{SECTOR, le32_bytes, padded};
use crate::foreign::new_parts::{
    FilePiece, FilePieces, NewBlocks, NewForeignOptions, NewParent, geometry, refuse,
};

/// Bytes of a grain, and grains of a table.
pub(super) const GRAIN: u64 = 64 << 10;
pub(super) const TABLE_ENTRIES: u64 = 512;
/// Bytes of a table.
pub(super) const TABLE: u64 = TABLE_ENTRIES * 4;
/// Sectors before the first grain of a stream, and sectors of the descriptor, which follows the
/// header.
pub(super) const STREAM_OVERHEAD: u64 = 128;
const DESCRIPTOR_SECTORS: u64 = 20;
/// Flag: the file has a second (redundant) directory with tables of its own.
const SECOND_DIRECTORY: u32 = 2;
/// Bytes of tables that are written at once, a multiple of a table's size.
const PIECE: u64 = 1 << 20;

/// An image that is being filled.
pub struct NewSparse {
    grains: NewBlocks,
    head: Head,
    has_zero_grains: bool,
    /// Whether this is one of several files of an image, and so has no descriptor of its own.
    is_extent: bool,
}

impl NewSparse {
    pub(in crate::foreign) fn new(options: &NewForeignOptions) -> Result<Self> {
        let head = Head::new(options, "monolithicSparse")?;
        let grains = NewBlocks::new(options.size, GRAIN, false)?;
        let (has_zero_grains, is_extent) = (options.has_zero_grains, options.is_split);
        Ok(Self { grains, head, has_zero_grains, is_extent })
    }

    pub(in crate::foreign) fn overlay_unit(&self) -> Option<u64> {
        self.head.parent.as_ref().map(|_| GRAIN)
    }

    pub(in crate::foreign) fn place(&mut self, at: u64) -> Result<(u64, u64)> {
        let (number, inside) = self.grains.place(at)?;
        let start = self.first_grain() + number * GRAIN;
        if start + GRAIN > MAX_FILE {
            let what = format!(
                "the data of the disk is more than a VMDK file can have, which is {MAX_FILE} bytes"
            );
            return Err(Error::new(ErrorKind::NoSpace, what).at(at));
        }
        Ok((start + inside, GRAIN - inside))
    }

    pub(in crate::foreign) fn finish(self) -> (FilePieces, u64) {
        let start = self.first_grain();
        let end = start + self.grains.used() * GRAIN;
        let directories = self.directories();
        let (version, zero_grains) = if self.has_zero_grains { (2, ZERO_GRAINS) } else { (1, 0) };
        let header = self.head.header(&HeaderPlaces {
            flags: NEWLINE_TEST | SECOND_DIRECTORY | zero_grains,
            version,
            second_directory: directories[0] / SECTOR,
            directory: directories[1] / SECTOR,
            overhead: start / SECTOR,
            has_descriptor: !self.is_extent,
        });
        let descriptor = (!self.is_extent).then(|| (SECTOR, self.head.own_descriptor()));
        let of_directories = directories.map(|at| (at, self.directory(at)));
        let tables = directories.map(|at| at + self.directory_length());
        let length = self.tables() * TABLE;
        let grains = self.grains;
        let pieces = (0..length.div_ceil(PIECE)).flat_map(move |piece| {
            let first = piece * PIECE;
            let entries = first / 4..(first + PIECE).min(length) / 4;
            // Tables without grains stay holes of the file.
            let is_needed = grains.has_some(entries.clone());
            let bytes = is_needed.then(|| grain_tables(&grains, start, entries));
            bytes.into_iter().flat_map(move |bytes| tables.map(|at| (at + first, bytes.clone())))
        });
        let head: Vec<FilePiece> =
            of_directories.into_iter().chain(descriptor).chain([(0, header)]).collect();
        (Box::new(pieces.chain(head)), end)
    }

    /// How many tables there are.
    fn tables(&self) -> u64 {
        self.grains.count().div_ceil(TABLE_ENTRIES).max(1)
    }

    fn directory_length(&self) -> u64 {
        (self.tables() * 4).next_multiple_of(SECTOR)
    }

    /// The offsets of the second directory and of the first; each directory is followed by its
    /// tables.
    fn directories(&self) -> [u64; 2] {
        let second = (1 + DESCRIPTOR_SECTORS) * SECTOR;
        [second, second + self.directory_length() + self.tables() * TABLE]
    }

    fn first_grain(&self) -> u64 {
        let [second, first] = self.directories();
        (first + (first - second)).next_multiple_of(GRAIN)
    }

    /// The directory at this offset.
    fn directory(&self, at: u64) -> Vec<u8> {
        let tables = at + self.directory_length();
        let sector = |table: u64| ((tables + table * TABLE) / SECTOR) as u32;
        let entries: Vec<u32> = (0..self.tables()).map(sector).collect();
        padded(le32_bytes(&entries), SECTOR)
    }
}

/// The bytes of these entries of the grain tables; 0 is a grain without data.
fn grain_tables(grains: &NewBlocks, start: u64, entries: Range<u64>) -> Vec<u8> {
    let sector = |number: u64| ((start + number * GRAIN) / SECTOR) as u32;
    let entries: Vec<u32> = entries.map(|index| grains.number(index).map_or(0, sector)).collect();
    le32_bytes(&entries)
}

/// Maximum size of the file in bytes: grain tables have sector numbers of 32 bits.
pub(super) const MAX_FILE: u64 = u32::MAX as u64 * SECTOR;

/// The properties of an image that its header and descriptor state.
pub(super) struct Head {
    pub(super) size: u64,
    id: u32,
    create_type: &'static str,
    file_name: String,
    adapter: String,
    hardware_version: String,
    tools_version: String,
    parent: Option<NewParent>,
}

/// The fields of a header that differ between kinds of images.
pub(super) struct HeaderPlaces {
    pub(super) flags: u32,
    pub(super) version: u32,
    /// In sectors, like the next two fields.
    pub(super) second_directory: u64,
    pub(super) directory: u64,
    pub(super) overhead: u64,
    pub(super) has_descriptor: bool,
}

impl Head {
    pub(super) fn new(options: &NewForeignOptions, create_type: &'static str) -> Result<Self> {
        let file_name = options.file_name.clone();
        let parent = options.parent.clone();
        if options.size == 0 {
            return Err(refuse(
                "a VMDK image has at least one sector: no program opens an empty one",
            ));
        }
        let names = [Some(&file_name), parent.as_ref().map(|parent| &parent.name)];
        if names.into_iter().flatten().any(|name| name.contains(['"', '\n', '\0'])) {
            return Err(refuse("a VMDK image cannot state a file name with such characters"));
        }
        let [a, b, c, d, ..] = options.guid(0);
        Ok(Self {
            size: options.size,
            // The highest number means "no parent".
            id: u32::from_le_bytes([a, b, c, d]) & 0x7fff_ffff,
            create_type,
            file_name,
            adapter: options.adapter.clone(),
            hardware_version: options.hardware_version.clone(),
            tools_version: options.tools_version.clone(),
            parent,
        })
    }

    pub(super) fn header(&self, places: &HeaderPlaces) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(le32_bytes(&[places.version, places.flags]));
        let [at, sectors] = if places.has_descriptor { [1, DESCRIPTOR_SECTORS] } else { [0, 0] };
        let numbers = [self.size / SECTOR, GRAIN / SECTOR, at, sectors];
        bytes.extend(numbers.into_iter().flat_map(u64::to_le_bytes));
        bytes.extend((TABLE_ENTRIES as u32).to_le_bytes());
        let numbers = [places.second_directory, places.directory, places.overhead];
        bytes.extend(numbers.into_iter().flat_map(u64::to_le_bytes));
        // The field for an unclean shutdown: no.
        bytes.push(0);
        bytes.extend(NEWLINES);
        let compression = if places.flags & COMPRESSED != 0 { DEFLATE } else { 0 };
        bytes.extend(compression.to_le_bytes());
        padded(bytes, LENGTH as u64)
    }

    /// The descriptor of an image that is one file, padded to the space reserved for it.
    pub(super) fn own_descriptor(&self) -> Vec<u8> {
        let extent = format!("RW {} SPARSE \"{}\"\n", self.size / SECTOR, self.file_name);
        padded(self.descriptor(&extent).into_bytes(), DESCRIPTOR_SECTORS * SECTOR)
    }

    /// The descriptor of an image with these lines for its extents.
    pub(super) fn descriptor(&self, extents: &str) -> String {
        let Self { id, create_type, adapter, hardware_version, tools_version, .. } = self;
        let (heads, track) = if adapter == "ide" { (16, 63) } else { (255, 63) };
        let sectors = self.size / SECTOR;
        let cylinders = (sectors / (heads * track)).max(1);
        // A disk that is larger than any geometry gets the largest one.
        let cylinders = cylinders.min(geometry(u64::MAX).0.into());
        let (parent, hint) = match &self.parent {
            Some(NewParent { cid, name }) => (*cid, format!("parentFileNameHint=\"{name}\"\n")),
            None => (NO_PARENT, String::new()),
        };
        format!(
            "# Disk DescriptorFile\nversion=1\nCID={id:08x}\nparentCID={parent:08x}\ncreateType=\"{create_type}\"\n{hint}\n\
             # Extent description\n{extents}\n\
             # The Disk Data Base\n#DDB\n\n\
             ddb.virtualHWVersion = \"{hardware_version}\"\nddb.geometry.cylinders = \"{cylinders}\"\n\
             ddb.geometry.heads = \"{heads}\"\nddb.geometry.sectors = \"{track}\"\nddb.adapterType = \"{adapter}\"\n\
             ddb.toolsVersion = \"{tools_version}\"\n"
        )
    }
}

/// The flags of a stream.
pub(super) const STREAM_FLAGS: u32 = NEWLINE_TEST | COMPRESSED | MARKERS;
