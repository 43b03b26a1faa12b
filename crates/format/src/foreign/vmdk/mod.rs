//! VMDK, VMware's format: one file with tables and its own descriptor, or a descriptor that names files, flat ones or
//! ones with tables.
//!
//! Source: "Virtual Disk Format 5.0" of VMware. Read: monolithicSparse, streamOptimized, monolithicFlat,
//! twoGbMaxExtentSparse and twoGbMaxExtentFlat, and descriptors that mix such extents with extents of zeros. Refused:
//! images with a parent, and the extents of ESX alone (VMFSSPARSE, SESPARSE, raw devices).
//!
//! A descriptor's files are opened by the caller and given as one storage, in which each has its range.

mod check;
mod descriptor;
pub(super) mod grain;
mod sparse;
mod sparse_header;

use blockhouse_core::{ByteRange, Error, ErrorKind, Result, Storage};

use super::piece::Piece;
use super::refusal::{corrupt, unsupported};
use super::tables::Tables;
use crate::aligned_read::read;
use descriptor::{Content, Descriptor, ExtentLine};
use sparse::SparseExtent;
use sparse_header::SparseHeader;

const DESCRIPTOR_SIGNATURE: &[u8] = b"# Disk DescriptorFile";
/// The sparse extents of old ESX servers.
const ESX_MAGIC: &[u8] = b"COWD";

/// The mapping of an image.
pub(super) struct Vmdk {
    /// In their order, without gaps.
    extents: Vec<Extent>,
    /// Names of the files that extents are in, each once; empty where the image is one file.
    files: Vec<Vec<u8>>,
    size: u64,
}

/// A part of the disk.
struct Extent {
    /// Its bytes of the disk.
    range: ByteRange,
    source: Source,
}

/// Where the bytes of a part are.
enum Source {
    Zero,
    /// In a file that was not opened yet, by its number.
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
    /// `Corrupt` or `Unsupported`, with an offset; or what the storage answers.
    pub(super) async fn open<S: Storage>(storage: &S) -> Result<Self> {
        let first = read(storage, 0, DESCRIPTOR_SIGNATURE.len()).await?;
        if first.starts_with(ESX_MAGIC) {
            return Err(unsupported("the sparse extents of old ESX servers (COWD)", 0));
        }
        if first != DESCRIPTOR_SIGNATURE {
            return Self::open_sparse(storage).await;
        }
        if storage.size() > descriptor::MAX_LENGTH as u64 {
            let what = format!("a descriptor of {} bytes", storage.size());
            return Err(corrupt(what, 0));
        }
        let text = read(storage, 0, storage.size() as usize).await?;
        Self::of_descriptor(Descriptor::parse(&text, 0)?)
    }

    /// An image that is one file with tables.
    async fn open_sparse<S: Storage>(storage: &S) -> Result<Self> {
        let file = ByteRange::between(0, storage.size());
        let header = SparseHeader::read(storage, file).await?;
        if let Some(range) = header.descriptor {
            let text = read(storage, range.offset(), range.length() as usize).await?;
            // The one extent that it names is this file. An image with a parent is refused.
            Descriptor::parse(&text, range.offset())?;
        }
        let (size, range) = (header.capacity, ByteRange::between(0, header.capacity));
        let source = Source::Sparse(Box::new(SparseExtent { header, file }));
        Ok(Self { extents: vec![Extent { range, source }], files: Vec::new(), size })
    }

    /// An image whose files are not opened yet.
    fn of_descriptor(descriptor: Descriptor) -> Result<Self> {
        let mut image = Self { extents: Vec::new(), files: Vec::new(), size: 0 };
        for line in descriptor.extents {
            let range = ByteRange::between(image.size, image.size + line.length);
            image.size = range.end();
            let source = match &line.content {
                Content::Zero => Source::Zero,
                Content::Flat { name, .. } | Content::Sparse { name } => {
                    Source::Unopened { file: image.file_number(name), line }
                }
            };
            image.extents.push(Extent { range, source });
        }
        match image.extents.is_empty() {
            true => Err(corrupt("its descriptor names no extents", 0)),
            false => Ok(image),
        }
    }

    fn file_number(&mut self, name: &[u8]) -> usize {
        let found = self.files.iter().position(|file| file == name);
        found.unwrap_or_else(|| {
            self.files.push(name.to_owned());
            self.files.len() - 1
        })
    }

    /// The names of the files that hold the disk, as bytes of the host's file system.
    pub(super) fn files(&self) -> &[Vec<u8>] {
        &self.files
    }

    /// Finds its extents in `data`, where each of its files has a range.
    ///
    /// # Errors
    /// `Corrupt` or `Unsupported`, with an offset in `data`; or what the storage answers.
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

    /// Bytes of the disk.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Bytes of a grain; `None` where no extent has grains, or none is open.
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

    /// What the disk has from `at` on, at most up to the end of the extent.
    ///
    /// # Errors
    /// `Corrupt` with an offset; `Unsupported` before the files are open; or what the storage answers.
    pub(super) async fn piece<S: Storage>(&self, tables: &Tables<'_, S>, at: u64) -> Result<Piece> {
        let index = self.extents.partition_point(|extent| extent.range.end() <= at);
        let extent = &self.extents[index];
        let (start, left) = (extent.range.offset(), extent.range.end() - at);
        let piece = match &extent.source {
            Source::Zero => Piece::zero(left),
            Source::Flat { host } => Piece::mapped(host + (at - start), left),
            Source::Sparse(sparse) => sparse.piece(tables, start, at - start).await?,
            Source::Unopened { .. } => {
                let what = "the files of the image's extents are not open";
                return Err(Error::new(ErrorKind::Unsupported, what).at(at));
            }
        };
        Ok(Piece { length: piece.length.min(left), ..piece })
    }
}
