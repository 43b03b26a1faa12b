//! Several files, one after the other, as one read-only storage. Used for an image whose extents
//! are in several files. Also a part of one file as a storage, which can be written.
//!
//! Guarantees: each file has a range of the storage. The range starts at a multiple of [`GAP`], and
//! a gap separates it from the previous range, so no extent of an image continues in the next file.
//! Gaps read as zeros. Only a storage that is a part of one file can be written, and a write never
//! changes a byte of the file outside of that part. A read past the end of the part returns zeros.

use blockhouse_core::{
    Alignment, Allocation, ByteRange, Capabilities, Durability, Error, ErrorKind, IoVector,
    Offload, Result, Storage, SyncMode, Unmap,
};

/// The range of each file starts at a multiple of this size, which is larger than any alignment.
const GAP: u64 = 1 << 20;

/// Several files, or a part of one file, as one storage; the module's text has the guarantees.
pub struct Concat<S> {
    name: String,
    /// The files with their ranges, sorted by range.
    files: Vec<(ByteRange, S)>,
    /// Offset of the part in its file; 0 if there are several files.
    skip: u64,
    /// Whether the storage is a part of one file.
    is_part: bool,
}

impl<S: Storage> Concat<S> {
    /// A storage of this name with these files, at least one.
    ///
    /// # Errors
    /// `InvalidInput` if `files` is empty, or if the files together exceed the largest offset.
    pub fn new(name: String, files: Vec<S>) -> Result<Self> {
        let mut placed: Vec<(ByteRange, S)> = Vec::with_capacity(files.len());
        for file in files {
            let start = placed.last().map_or(Some(0), |(range, _)| range.end().checked_add(1));
            let range = start.and_then(|start| start.checked_next_multiple_of(GAP));
            match range.and_then(|start| ByteRange::new(start, file.size())) {
                Some(range) => placed.push((range, file)),
                None => {
                    let what = "its files are too long for one disk";
                    return Err(Error::new(ErrorKind::InvalidInput, what).on(&name));
                }
            }
        }
        if placed.is_empty() {
            let what = "a storage of no files";
            return Err(Error::new(ErrorKind::InvalidInput, what).on(&name));
        }
        Ok(Self { name, files: placed, skip: 0, is_part: false })
    }

    /// The storage of a part of one file; `range` is inside of the file.
    pub fn part(file: S, range: ByteRange) -> Self {
        let name = file.name().to_owned();
        let files = vec![(ByteRange::between(0, range.length()), file)];
        Self { name, files, skip: range.offset(), is_part: true }
    }

    /// The range of each file.
    pub fn ranges(&self) -> Vec<ByteRange> {
        self.files.iter().map(|(range, _)| *range).collect()
    }

    /// The files.
    pub fn files(&self) -> impl Iterator<Item = &S> {
        self.files.iter().map(|(_, file)| file)
    }

    /// The name of the file that has `offset`, and the offset in that file.
    pub fn locate(&self, offset: u64) -> (&str, u64) {
        let (range, file, _) = self.find(offset);
        (file.name(), offset - range.offset() + self.skip)
    }

    /// The file that has `offset` (in a gap: the file before the gap), with its range, and the
    /// number of bytes from `offset` to the next file's range.
    fn find(&self, offset: u64) -> (ByteRange, &S, u64) {
        let next = self.files.partition_point(|(range, _)| range.offset() <= offset);
        let (range, file) = &self.files[next.saturating_sub(1)];
        let limit = self.files.get(next).map_or(u64::MAX, |(range, _)| range.offset());
        (*range, file, limit - offset)
    }

    /// For a change of `range`: the file of the part, and the range in that file.
    fn changed(&self, range: ByteRange) -> Result<(&S, ByteRange)> {
        if !self.is_part {
            return self.read_only();
        }
        let (place, file) = &self.files[0];
        if range.end() > place.end() {
            let what = format!("this part of the file has {} bytes", place.end());
            return Err(Error::new(ErrorKind::NoSpace, what).on(&self.name).at(range.offset()));
        }
        let start = range.offset() + self.skip;
        Ok((file, ByteRange::between(start, start + range.length())))
    }

    fn read_only<T>(&self) -> Result<T> {
        let what = "the files of this image are only read";
        Err(Error::new(ErrorKind::ReadOnly, what).on(&self.name))
    }
}

impl<S: Storage> Storage for Concat<S> {
    fn name(&self) -> &str {
        &self.name
    }

    /// The capabilities of the first file. With several files, the alignment is the largest of all
    /// files, and there are no offloads.
    fn capabilities(&self) -> Capabilities {
        if self.is_part {
            let own = self.files[0].1.capabilities();
            return Capabilities { prepare_zeroes: Offload::Unavailable, ..own };
        }
        let mut alignment = Alignment::BYTE;
        for file in self.files() {
            let one = file.capabilities().alignment;
            alignment.offset = alignment.offset.max(one.offset);
            alignment.memory = alignment.memory.max(one.memory);
        }
        Capabilities {
            alignment,
            write_zeroes: Offload::Unavailable,
            prepare_zeroes: Offload::Unavailable,
            discard: Offload::Unavailable,
            ..self.files[0].1.capabilities()
        }
    }

    fn size(&self) -> u64 {
        self.files.last().map_or(0, |(range, _)| range.end())
    }

    async fn read(&self, offset: u64, mut into: IoVector) -> Result<()> {
        let inside = self.size().saturating_sub(offset);
        // The disk may end up to a sector after the part, where the file has other data.
        if self.is_part && inside < into.len() as u64 {
            into.split_off(inside as usize).fill(0);
        }
        let mut at = offset;
        while !into.is_empty() {
            let (range, file, length) = self.find(at);
            let length = length.min(into.len() as u64) as usize;
            let rest = into.split_off(length);
            file.read(at - range.offset() + self.skip, std::mem::replace(&mut into, rest)).await?;
            at += length as u64;
        }
        Ok(())
    }

    async fn write(&self, offset: u64, from: IoVector, durability: Durability) -> Result<()> {
        let range = ByteRange::between(offset, offset.saturating_add(from.len() as u64));
        let (file, range) = self.changed(range)?;
        file.write(range.offset(), from, durability).await
    }

    async fn write_zeroes(&self, range: ByteRange, unmap: Unmap) -> Result<()> {
        let (file, range) = self.changed(range)?;
        file.write_zeroes(range, unmap).await
    }

    async fn discard(&self, range: ByteRange) -> Result<()> {
        let (file, range) = self.changed(range)?;
        file.discard(range).await
    }

    /// Several files are never written, so there is nothing to flush.
    async fn flush(&self, sync: SyncMode) -> Result<()> {
        if self.is_part { self.files[0].1.flush(sync).await } else { Ok(()) }
    }

    fn check_size(&self, size: u64) -> Result<()> {
        if size == self.size() { Ok(()) } else { self.read_only() }
    }

    async fn resize(&self, size: u64) -> Result<()> {
        self.check_size(size)
    }

    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)> {
        let (place, file, limit) = self.find(range.offset());
        let inside = place.end().saturating_sub(range.offset());
        if inside == 0 {
            return Ok((Allocation::Hole, limit.min(range.length())));
        }
        let start = range.offset() - place.offset() + self.skip;
        file.block_status(ByteRange::between(start, start + inside.min(range.length()))).await
    }

    async fn prefetch(&self, range: ByteRange) -> Result<()> {
        let (place, file, _) = self.find(range.offset());
        let inside = place.end().saturating_sub(range.offset()).min(range.length());
        let start = range.offset().saturating_sub(place.offset()) + self.skip;
        match inside {
            0 => Ok(()),
            _ => file.prefetch(ByteRange::between(start, start + inside)).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use blockhouse_core::Buffer;
    use blockhouse_engine::{EngineChoice, EventLoop, HostFile, OpenMode, PageCache};

    use super::*;

    #[test]
    fn a_read_past_the_end_of_a_part_returns_zeros() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [7; 4096]).unwrap();
        EventLoop::new(EngineChoice::Auto).unwrap().block_on(async {
            let file = HostFile::open(file.path(), OpenMode::ReadOnly, PageCache::Used).unwrap();
            let part = Concat::part(file, ByteRange::between(512, 1512));
            for (offset, inside) in [(0, 1000), (512, 488), (1000, 0), (1024, 0)] {
                let mut buffer = Buffer::new(1024);
                buffer.bytes_mut().fill(1);
                part.read(offset, buffer.lend()).await.unwrap();
                assert!(buffer.bytes()[..inside].iter().all(|&byte| byte == 7), "{offset}");
                assert!(buffer.bytes()[inside..].iter().all(|&byte| byte == 0), "{offset}");
            }
        });
    }
}
