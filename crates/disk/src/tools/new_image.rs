//! A new image of another program's format, while a copy fills it.
//!
//! Guarantees: only [`NewImage::finish`] writes a header, so a failed copy leaves no image.
//! `finish` makes the file durable if the caller requests that. Any number of threads may store
//! parts of the disk that share no 4 KiB block. A stream has one writer, which keeps the order of
//! the disk.

use std::ops::Range;

use blockhouse_core::sync::run_all;
use blockhouse_core::{Buffer, Durability, Result, Storage, SyncMode};
use blockhouse_format::NewForeign;
use parking_lot::Mutex;

use super::zeros::lend;
use super::zeros::units;
use crate::throttle::{RequestCost, Throttle};

/// Maximum number of requests of one chunk in flight.
const MAX_IN_FLIGHT: usize = 16;

/// A new image that is being filled. See the module's documentation.
pub struct NewImage<S: Storage> {
    storage: S,
    image: Mutex<NewForeign>,
    stream_unit: Option<u64>,
    overlay_unit: Option<u64>,
    size: u64,
    throttle: Throttle,
}

impl<S: Storage> NewImage<S> {
    /// An image with a disk of `size` bytes, in an empty file.
    pub fn new(storage: S, image: NewForeign, size: u64) -> Self {
        let (stream_unit, overlay_unit) = (image.stream_unit(), image.overlay_unit());
        let (image, throttle) = (Mutex::new(image), Throttle::default());
        Self { storage, image, stream_unit, overlay_unit, size, throttle }
    }

    /// The file's name.
    pub fn name(&self) -> &str {
        self.storage.name()
    }

    /// The disk's size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The number of bytes that are appended together in the order of the disk, if the image is a
    /// stream.
    pub fn stream_unit(&self) -> Option<u64> {
        self.stream_unit
    }

    /// Writes are multiples of this many bytes, if the image has a parent.
    pub fn overlay_unit(&self) -> Option<u64> {
        self.overlay_unit
    }

    /// The limits on writes of the disk's data. Tables and headers are not limited.
    pub fn throttle(&self) -> &Throttle {
        &self.throttle
    }

    /// Writes parts of the buffer, which holds the disk's bytes from `offset` on.
    pub(super) async fn store(
        &self,
        offset: u64,
        data: Vec<Range<usize>>,
        buffer: &mut Buffer,
    ) -> Result<()> {
        let bytes = data.iter().map(|run| run.len() as u64).sum();
        if let Some(admitted) = self.throttle.admit(|| Some(RequestCost::of_write(bytes))) {
            admitted.await;
        }
        match self.stream_unit {
            Some(unit) => {
                let grains = data.into_iter().flat_map(|run| units(run, offset, unit as usize));
                for grain in grains {
                    self.append(offset + grain.start as u64, &buffer.bytes()[grain]).await?;
                }
                Ok(())
            }
            None => self.store_in_places(offset, &data, buffer).await,
        }
    }

    async fn append(&self, at: u64, bytes: &[u8]) -> Result<()> {
        let appended = self.image.lock().append(at, bytes);
        let (host, bytes) = appended.map_err(|error| error.on(self.name()))?;
        write(&self.storage, host, &bytes).await
    }

    async fn store_in_places(
        &self,
        offset: u64,
        data: &[Range<usize>],
        buffer: &mut Buffer,
    ) -> Result<()> {
        let placed = self.places(offset, data).map_err(|error| error.on(self.name()));
        let (parts, places) = placed?;
        let writes = lend(buffer, &parts)
            .into_iter()
            .zip(places)
            .map(|(from, host)| self.storage.write(host, from, Durability::None));
        run_all(MAX_IN_FLIGHT, writes).await
    }

    /// The parts of the buffer that are written together, and their host offsets.
    fn places(&self, offset: u64, data: &[Range<usize>]) -> Result<(Vec<Range<usize>>, Vec<u64>)> {
        let (mut parts, mut places): (Vec<Range<usize>>, Vec<u64>) = (Vec::new(), Vec::new());
        let mut image = self.image.lock();
        for run in data {
            let mut start = run.start;
            while start < run.end {
                let (host, length) = image.place(offset + start as u64)?;
                let end = run.end.min(start.saturating_add(length as usize));
                match (parts.last_mut(), places.last()) {
                    (Some(last), Some(place))
                        if last.end == start && place + last.len() as u64 == host =>
                    {
                        last.end = end;
                    }
                    _ => {
                        parts.push(start..end);
                        places.push(host);
                    }
                }
                start = end;
            }
        }
        Ok((parts, places))
    }

    /// Writes the tables and the header; makes the file durable if `is_flushed` is set.
    ///
    /// # Errors
    /// Errors of the storage.
    pub async fn finish(self, is_flushed: bool) -> Result<()> {
        let Self { storage, image, .. } = self;
        let (pieces, length) = image.into_inner().finish();
        for (offset, bytes) in pieces {
            write(&storage, offset, &bytes).await?;
        }
        if storage.size() != length {
            storage.resize(length).await?;
        }
        if is_flushed {
            storage.flush(SyncMode::Full).await?;
        }
        storage.close().await
    }
}

async fn write<S: Storage>(storage: &S, offset: u64, bytes: &[u8]) -> Result<()> {
    let mut buffer = Buffer::try_new(bytes.len())?;
    buffer.bytes_mut().copy_from_slice(bytes);
    storage.write(offset, buffer.lend(), Durability::None).await
}
