//! VMDK, VMware's format: one file with tables and its own descriptor, or a descriptor that names
//! other files (flat files, or files with tables).
//!
//! Source: "Virtual Disk Format 5.0" of VMware. Supported: monolithicSparse, streamOptimized,
//! monolithicFlat, twoGbMaxExtentSparse, twoGbMaxExtentFlat and vmfsSparse, and descriptors that
//! mix such extents with extents of zeros. Refused: the other extents of ESX (SESPARSE, raw
//! devices).
//!
//! The caller opens a descriptor's files and passes them as one storage, in which each file has a
//! range. Unallocated data of an image with a parent is read from the parent, which the caller
//! opens, too.

mod check;
mod create;
mod create_stream;
pub(super) mod descriptor;
mod facts;
pub(super) mod grain;
mod new_files;
mod sparse;
mod sparse_header;

use blockhouse_core::{ByteRange, Error, ErrorKind, ExtentState, Result, Storage};

use super::fields::SECTOR;
use super::piece::Piece;
use super::refusal::corrupt;
use super::tables::Tables;
use crate::Backing;
use crate::aligned_read::read;
pub use create::NewSparse;
pub use create_stream::NewStream;
use descriptor::{Content, Descriptor, ExtentLine};
pub use facts::{VmdkExtent, VmdkFacts};
pub use new_files::{NewVmdkFile, vmdk_descriptor, vmdk_files};
use sparse::SparseExtent;
use sparse_header::{ESX_MAGIC, MAGIC, SparseHeader};

/// The mapping of an image.
pub(super) struct Vmdk {
    cid: u32,
    parent_cid: u32,
    create_type: Option<String>,
    parent: Option<Backing>,
    /// In the order of the disk, without gaps.
    extents: Vec<Extent>,
    /// Names of the files that have the extents, each once; empty if the image is one file.
    files: Vec<Vec<u8>>,
    size: u64,
}

/// A part of the disk.
struct Extent {
    /// The range of the disk.
    range: ByteRange,
    /// The keyword of its type in the descriptor; empty for the only extent of an image that is one
    /// file.
    kind: &'static str,
    /// The index of its file in `Vmdk::files`, if it has one.
    file: Option<usize>,
    source: Source,
}

/// The location of the bytes of a part.
enum Source {
    Zero,
    /// In a file that is not opened yet; `file` is its index.
    Unopened {
        file: usize,
        line: ExtentLine,
    },
    /// In the storage, from an offset on.
    Flat {
        host: u64,
    },
    Sparse(Box<SparseExtent>),
}

impl Vmdk {
    /// # Errors
    /// `Corrupt` or `Unsupported`, with an offset; or errors of the storage.
    pub(super) async fn open<S: Storage>(storage: &S) -> Result<Self> {
        let length = storage.size().min(SECTOR) as usize;
        let first = read(storage, 0, length.max(MAGIC.len())).await?;
        let is_text = !first.starts_with(MAGIC) && !first.starts_with(ESX_MAGIC);
        if is_text
            && (storage.size() <= descriptor::MAX_LENGTH as u64
                || descriptor::is_descriptor(&first))
        {
            return Self::open_text(storage).await;
        }
        Self::open_sparse(storage).await
    }

    /// Opens an image that is a descriptor.
    async fn open_text<S: Storage>(storage: &S) -> Result<Self> {
        if storage.size() > descriptor::MAX_LENGTH as u64 {
            let what = format!("a descriptor of {} bytes", storage.size());
            return Err(corrupt(what, 0));
        }
        let text = read(storage, 0, storage.size() as usize).await?;
        if !descriptor::is_descriptor(&text) && !has_create_type(&text) {
            return Self::open_sparse(storage).await;
        }
        let mut descriptor = Descriptor::parse(&text, 0)?;
        let lines = std::mem::take(&mut descriptor.extents);
        let mut image = Self::new(descriptor);
        for line in lines {
            image.add(line);
        }
        if image.extents.is_empty() {
            Err(corrupt("its descriptor names no extents", 0))
        } else {
            Ok(image)
        }
    }

    /// Opens an image that is one file with tables.
    async fn open_sparse<S: Storage>(storage: &S) -> Result<Self> {
        let file = ByteRange::between(0, storage.size());
        let header = SparseHeader::read(storage, file).await?;
        let text = match header.descriptor {
            Some(range) => read(storage, range.offset(), range.length() as usize).await?,
            None => Vec::new(),
        };
        // The only extent that the descriptor names is this file, so the list is not used.
        let offset = header.descriptor.map_or(0, |range| range.offset());
        let mut image = Self::new(Descriptor::parse(&text, offset)?);
        image.create_type.get_or_insert_with(|| header.create_type().to_owned());
        image.size = header.capacity;
        let range = ByteRange::between(0, header.capacity);
        let source = Source::Sparse(Box::new(SparseExtent { header, file }));
        image.extents.push(Extent { range, kind: "", file: None, source });
        Ok(image)
    }

    /// An image without extents.
    fn new(descriptor: Descriptor) -> Self {
        let Descriptor { cid, parent_cid, create_type, parent, .. } = descriptor;
        let parent = parent.map(|name| Backing { name, format: Some("vmdk".to_owned()) });
        let (extents, files, size) = (Vec::new(), Vec::new(), 0);
        Self { cid, parent_cid, create_type, parent, extents, files, size }
    }

    /// Adds an extent whose file is not opened yet.
    fn add(&mut self, line: ExtentLine) {
        let range = ByteRange::between(self.size, self.size + line.length);
        self.size = range.end();
        let file = match &line.content {
            Content::Zero => None,
            Content::Flat { name, .. } | Content::Sparse { name } => Some(self.file_number(name)),
        };
        let kind = line.kind;
        let source = file.map_or(Source::Zero, |file| Source::Unopened { file, line });
        self.extents.push(Extent { range, kind, file, source });
    }

    fn file_number(&mut self, name: &[u8]) -> usize {
        let found = self.files.iter().position(|file| file == name);
        found.unwrap_or_else(|| {
            self.files.push(name.to_owned());
            self.files.len() - 1
        })
    }

    /// The names of the files with the disk's data, as bytes of the host's file system.
    pub(super) fn files(&self) -> &[Vec<u8>] {
        &self.files
    }

    /// Opens the extents in `data`, in which each file of the image has its range of `ranges`.
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported`, with an offset in `data`; or errors of the storage.
    pub(super) async fn open_extents<S: Storage>(
        &mut self,
        data: &S,
        ranges: &[ByteRange],
    ) -> Result<()> {
        for extent in &mut self.extents {
            let Source::Unopened { file, line } = &extent.source else { continue };
            let Some(&file) = ranges.get(*file) else {
                let what = "a file of the image is missing";
                return Err(Error::new(ErrorKind::InvalidInput, what));
            };
            let (start, length) = (extent.range.offset(), extent.range.length());
            extent.source = match line.content {
                Content::Zero => Source::Zero,
                Content::Flat { offset, .. } if offset + length <= file.length() => {
                    Source::Flat { host: file.offset() + offset }
                }
                Content::Flat { offset, .. } => {
                    let what = format!(
                        "the extent of the disk's offset {start} has {length} bytes from {offset} on, and its \
                         file {}",
                        file.length()
                    );
                    return Err(corrupt(what, file.offset()));
                }
                Content::Sparse { .. } => {
                    let header = SparseHeader::read(data, file).await?;
                    if header.capacity < length {
                        let what = format!(
                            "the extent of the disk's offset {start} has {length} bytes, and its file {}",
                            header.capacity
                        );
                        return Err(corrupt(what, file.offset()));
                    }
                    Source::Sparse(Box::new(SparseExtent { header, file }))
                }
            };
        }
        Ok(())
    }

    /// The parent image, which has the data of the ranges that this image has not allocated.
    pub(super) fn parent(&self) -> Option<&Backing> {
        self.parent.as_ref()
    }

    /// Refuses a parent whose CID is not the recorded one: the parent was written to since this
    /// image was made, so the parent's data no longer fits this image.
    ///
    /// # Errors
    /// `Corrupt`; `InvalidInput` if the parent is not a VMDK image.
    pub(super) fn check_parent(&self, parent: Option<&Self>) -> Result<()> {
        let found = match parent {
            Some(parent) if parent.cid == self.parent_cid => return Ok(()),
            Some(parent) => parent.cid,
            None => return Err(Error::new(ErrorKind::InvalidInput, "its parent is no VMDK image")),
        };
        let what = format!(
            "its parent was changed since the image was made: it has the CID {found:08x} and not {:08x}",
            self.parent_cid
        );
        let hint = "restore the parent, or merge both with the program that made them";
        Err(Error::new(ErrorKind::Corrupt, what).hint(hint))
    }

    /// Bytes of the disk.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Bytes of the largest grain; `None` if no extent has grains, or none is open.
    pub(super) fn grain_size(&self) -> Option<u64> {
        self.sparse().map(|(_, extent)| extent.header.grain_size).max()
    }

    /// The extents with tables, each with its part of the disk.
    fn sparse(&self) -> impl Iterator<Item = (ByteRange, &SparseExtent)> {
        self.extents.iter().filter_map(|extent| match &extent.source {
            Source::Sparse(sparse) => Some((extent.range, &**sparse)),
            _ => None,
        })
    }

    /// The piece of the disk from `at` on, at most up to the end of the extent.
    ///
    /// # Errors
    /// `Corrupt` with an offset; `Unsupported` before the files are open; or errors of the storage.
    pub(super) async fn piece<S: Storage>(&self, tables: &Tables<'_, S>, at: u64) -> Result<Piece> {
        let index = self.extents.partition_point(|extent| extent.range.end() <= at);
        let extent = &self.extents[index];
        let (start, left) = (extent.range.offset(), extent.range.end() - at);
        let piece = match &extent.source {
            Source::Zero => Piece::zero(left),
            Source::Flat { host } => Piece::mapped(host + (at - start), left),
            Source::Sparse(sparse) => {
                let piece = sparse.piece(tables, start, at - start).await?;
                match piece.state {
                    ExtentState::Hole if self.parent.is_some() => piece.of_parent(),
                    _ => piece,
                }
            }
            Source::Unopened { .. } => {
                let what = "the files of the image's extents are not open";
                return Err(Error::new(ErrorKind::Unsupported, what).at(at));
            }
        };
        Ok(Piece { length: piece.length.min(left), ..piece })
    }
}

/// Whether a text has the key `createType`, by which other programs recognize a descriptor.
fn has_create_type(text: &[u8]) -> bool {
    const KEY: &[u8] = b"createtype";
    text.windows(KEY.len()).any(|word| word.eq_ignore_ascii_case(KEY))
}
