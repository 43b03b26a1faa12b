//! VM state as a stream into an image, and back.
//!
//! Producers send small writes, many below 100 bytes. The writer collects them in aligned *windows*
//! of 1 MiB, or of a cluster if a cluster is larger. A full window is written while the next one
//! fills; at most 8 writes are in flight. Clusters are allocated in runs. Clusters of zeros take no
//! space if the format can mark them as zeros. Offsets may be written in any order: before a stored
//! window is changed, the writer waits for the write of this window and reads its bytes back, so
//! that overlapping writes take effect in order. The image does not refer to the stored state until
//! [`VmStateWriter::finish`] takes the snapshot, in one step.
//!
//! After the first error, the writer waits for the operations in flight and frees all space, and
//! each later call fails with the same error. Memory is bounded: it holds the windows, and 8 or 16
//! bytes for each cluster of the state.

mod compressed_batch;
mod reader;
mod store;
mod window;

use std::collections::VecDeque;

use blockhouse_core::{Buffer, ByteRange, Error, ErrorKind, Result, Storage, rare, yield_now};
use blockhouse_format::{Compression, Snapshot, VmStateCluster, VmStateTables};
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};

use crate::disk::Disk;
use compressed_batch::CompressedBatch;
pub use reader::VmStateReader;
use store::WriteResult;
use window::Window;

/// Minimum size of a window in bytes, a multiple of every alignment.
const MIN_WINDOW: u64 = 1 << 20;
/// Maximum number of writes in flight, and of chunks that are read ahead.
const MAX_WRITES: usize = 8;
/// Maximum number of windows that are filled at the same time. More than one is open only if the
/// offsets of writes jump.
const MAX_OPEN: usize = 4;

/// Writes a machine's state into an image. See the module's page.
pub struct VmStateWriter<'a, S: Storage> {
    disk: &'a Disk<S>,
    window_size: u64,
    /// The compression of clusters; `None` if they are stored uncompressed.
    compression: Option<Compression>,
    tables: VmStateTables,
    /// The open windows; the most recently used one is last.
    open: VecDeque<Window>,
    compressed: CompressedBatch,
    in_flight: FuturesUnordered<LocalBoxFuture<'a, WriteResult>>,
    /// Windows with operations in flight. A window may be listed several times.
    in_flight_windows: Vec<u64>,
    spare: Vec<Buffer>,
    stage: Stage,
}

enum Stage {
    Storing,
    Failed(Error),
    Finished,
}

impl<'a, S: Storage> VmStateWriter<'a, S> {
    /// Begins to store a machine's state, for a snapshot that is taken at the end. An uncompressed
    /// state is stored as fast as the disk allows. With `compression`, which must be the image's
    /// compression type, the state is stored in compressed clusters.
    ///
    /// # Errors
    /// `ReadOnly`; `Unsupported` for a format without snapshots, an image with a data file, or a
    /// compression that is not the image's.
    pub fn new(disk: &'a Disk<S>, compression: Option<Compression>) -> Result<Self> {
        disk.check_writable()?;
        let states = disk.format().vm_states()?;
        disk.format().snapshots()?.check_possible()?;
        if let Some(kind) = compression
            && let Some(own) = disk.image().compression()
            && kind != own
        {
            let what = format!("its compressed clusters are {own:?}, not {kind:?}");
            return Err(Error::new(ErrorKind::Unsupported, what).on(disk.name()).hint(
                "make the image with -o compression_type=..., or leave the state uncompressed",
            ));
        }
        Ok(Self {
            disk,
            window_size: MIN_WINDOW.max(states.cluster_size()),
            compression,
            tables: states.new_tables(),
            open: VecDeque::new(),
            compressed: CompressedBatch::default(),
            in_flight: FuturesUnordered::new(),
            in_flight_windows: Vec::new(),
            spare: Vec::new(),
            stage: Stage::Storing,
        })
    }

    /// The size of the state so far, in bytes.
    pub fn size(&self) -> u64 {
        self.tables.size()
    }

    /// Stores `bytes` at `offset` of the state, replacing earlier bytes there. When the call
    /// returns, the bytes are accepted, but may not be on the disk yet.
    ///
    /// # Errors
    /// `NoSpace`, or a storage error, of this or an earlier write. Every later call fails with the
    /// same error.
    pub async fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.check()?;
        match rare(self.try_write(offset, bytes)).await {
            Ok(()) => Ok(()),
            Err(error) => Err(self.fail(error).await),
        }
    }

    /// Waits until all bytes so far are stored. They are durable only after
    /// [`finish`](Self::finish).
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub async fn flush(&mut self) -> Result<()> {
        self.check()?;
        match rare(self.try_flush()).await {
            Ok(()) => Ok(()),
            Err(error) => Err(self.fail(error).await),
        }
    }

    /// Stores the rest and takes a snapshot of the disk with the state. Both are durable when the
    /// call returns.
    ///
    /// # Errors
    /// As [`write`](Self::write) and [`DiskSnapshots::create`](crate::DiskSnapshots::create). After
    /// an error there is no such snapshot, and the space is freed.
    pub async fn finish(&mut self, name: &str) -> Result<Snapshot> {
        self.flush().await?;
        match rare(self.try_finish(name)).await {
            Ok(snapshot) => {
                self.stage = Stage::Finished;
                Ok(snapshot)
            }
            Err(error) => Err(self.fail(error).await),
        }
    }

    /// Ends without a snapshot, and frees the space of the state.
    pub async fn abandon(mut self) {
        if let Stage::Storing = self.stage {
            let what = "storing the state was abandoned";
            self.fail(Error::new(ErrorKind::Io, what)).await;
        }
    }

    fn check(&self) -> Result<()> {
        match &self.stage {
            Stage::Storing => Ok(()),
            Stage::Failed(error) => Err(error.duplicate()),
            Stage::Finished => {
                let what = "the state is stored: nothing can be added to it";
                Err(Error::new(ErrorKind::InvalidInput, what).on(self.disk.name()))
            }
        }
    }

    async fn try_write(&mut self, offset: u64, mut bytes: &[u8]) -> Result<()> {
        let Some(range) = ByteRange::new(offset, bytes.len() as u64) else {
            let what = "a state cannot reach beyond 64 bits";
            return Err(Error::new(ErrorKind::InvalidInput, what).on(self.disk.name()).at(offset));
        };
        self.tables.extend(range.end())?;
        let mut at = offset;
        while !bytes.is_empty() {
            let (index, start) = (at / self.window_size, (at % self.window_size) as usize);
            let room = self.window_size as usize - start;
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.window(index).await?.put(start, now);
            if start + now.len() == self.window_size as usize
                && let Some(full) = self.open.pop_back()
            {
                self.send(full).await?;
            }
            at += now.len() as u64;
            bytes = later;
        }
        Ok(())
    }

    /// The window with this number, to be filled. Makes it the last of the open windows.
    async fn window(&mut self, index: u64) -> Result<&mut Window> {
        let place = self.open.iter().position(|window| window.index() == index);
        let window = match place.and_then(|place| self.open.remove(place)) {
            Some(window) => window,
            None => self.open_window(index).await?,
        };
        Ok(self.open.push_back_mut(window))
    }

    /// Opens a window with its stored bytes.
    async fn open_window(&mut self, index: u64) -> Result<Window> {
        if self.open.len() >= MAX_OPEN
            && let Some(oldest) = self.open.pop_front()
        {
            self.send(oldest).await?;
        }
        if self.compressed.holds(index) {
            self.submit_batch().await?;
        }
        while self.in_flight_windows.contains(&index) {
            self.reap_one().await?;
        }
        let buffer = self.buffer();
        let clusters = self.clusters_of(index);
        let first = clusters.start;
        let stored: Vec<_> = clusters.map(|cluster| self.tables.get(cluster)).collect();
        if stored.iter().all(Option::is_none) {
            return Ok(Window::new(index, buffer));
        }
        let buffer = store::read_back(self.disk, &stored, first, buffer).await?;
        Ok(Window::filled(index, buffer))
    }

    fn clusters_of(&self, index: u64) -> std::ops::Range<u64> {
        let in_window = self.window_size / self.cluster_size();
        index * in_window..(index + 1) * in_window
    }

    fn cluster_size(&self) -> u64 {
        // Formats without clusters have no VM states.
        self.disk.image().cluster_size().unwrap_or(self.window_size)
    }

    fn buffer(&mut self) -> Buffer {
        self.spare.pop().unwrap_or_else(|| Buffer::new(self.window_size as usize))
    }

    /// Starts to write a window.
    async fn send(&mut self, mut window: Window) -> Result<()> {
        let cluster_size = self.cluster_size();
        let first = self.clusters_of(window.index()).start;
        let mut plain = Vec::new();
        let count = window.close(cluster_size as usize);
        for number in 0..count as u64 {
            let (cluster, bytes) = (first + number, window.cluster(number, cluster_size));
            if self.tables.has_zero_encoding() && window::is_zero(bytes) {
                self.tables.set(cluster, VmStateCluster::Zero);
                continue;
            }
            match self.compressed.add(window.index(), cluster, self.compress(bytes)) {
                compressed_batch::AddResult::Added => {}
                compressed_batch::AddResult::Incompressible => {
                    plain.push((number, self.place_of(cluster)))
                }
            }
        }
        let index = window.index();
        if plain.is_empty() {
            self.recycle(window.into_buffer());
        } else {
            let storing = store::store_plain(self.disk, index, first, plain, window.into_buffer());
            self.submit(storing.boxed_local(), &[index]).await?;
        }
        if self.compressed.length() >= self.window_size {
            self.submit_batch().await?;
        }
        Ok(())
    }

    /// The compressed form of a cluster, if requested and shorter.
    fn compress(&self, bytes: &[u8]) -> Option<Vec<u8>> {
        self.compression.and_then(|_| self.disk.format().compressed().compress(bytes))
    }

    /// The location of a cluster that can be overwritten; `None` if new space is needed.
    fn place_of(&self, cluster: u64) -> Option<u64> {
        match self.tables.get(cluster)? {
            VmStateCluster::Data(host) => Some(host),
            VmStateCluster::Zero | VmStateCluster::Compressed(_) => None,
        }
    }

    async fn submit_batch(&mut self) -> Result<()> {
        let CompressedBatch { clusters, windows, .. } = std::mem::take(&mut self.compressed);
        if clusters.is_empty() {
            return Ok(());
        }
        let storing = store::store_compressed(self.disk, clusters, windows.clone(), self.buffer());
        self.submit(storing.boxed_local(), &windows).await
    }

    async fn submit(
        &mut self,
        storing: LocalBoxFuture<'a, WriteResult>,
        windows: &[u64],
    ) -> Result<()> {
        while self.in_flight.len() >= MAX_WRITES {
            self.reap_one().await?;
        }
        self.in_flight_windows.extend(windows);
        self.in_flight.push(storing);
        // Starts the write, and lets the loop submit it to the kernel.
        if let Some(Some(written)) = self.in_flight.next().now_or_never() {
            self.record(written)?;
        }
        yield_now().await;
        Ok(())
    }

    /// Waits for one of the writes in flight.
    async fn reap_one(&mut self) -> Result<()> {
        match self.in_flight.next().await {
            Some(written) => self.record(written),
            None => Ok(()),
        }
    }

    fn record(&mut self, written: WriteResult) -> Result<()> {
        for window in &written.windows {
            if let Some(place) =
                self.in_flight_windows.iter().position(|in_flight| in_flight == window)
            {
                self.in_flight_windows.swap_remove(place);
            }
        }
        written.taken.iter().for_each(|&place| self.tables.reserve(place));
        self.recycle(written.buffer);
        for (cluster, place) in written.outcome? {
            self.tables.set(cluster, place);
        }
        Ok(())
    }

    fn recycle(&mut self, buffer: Buffer) {
        if self.spare.len() < MAX_OPEN {
            self.spare.push(buffer);
        }
    }

    async fn try_flush(&mut self) -> Result<()> {
        while let Some(window) = self.open.pop_front() {
            self.send(window).await?;
        }
        self.submit_batch().await?;
        while !self.in_flight.is_empty() {
            self.reap_one().await?;
        }
        Ok(())
    }

    async fn try_finish(&mut self, name: &str) -> Result<Snapshot> {
        if !self.tables.has_zero_encoding() {
            self.fill_gaps().await?;
        }
        self.disk.snapshots().create_with_state(name, &self.tables).await
    }

    /// Stores zeros where nothing was stored.
    async fn fill_gaps(&mut self) -> Result<()> {
        for index in 0..self.tables.size().div_ceil(self.window_size) {
            if self.clusters_of(index).any(|cluster| self.tables.get(cluster).is_none()) {
                let mut window = self.open_window(index).await?;
                window.fill();
                self.send(window).await?;
            }
        }
        self.try_flush().await
    }

    /// Ends the writer after an error. Waits for operations in flight, so that their space can be
    /// freed.
    async fn fail(&mut self, error: Error) -> Error {
        self.stage = Stage::Failed(error.duplicate());
        self.open.clear();
        self.compressed = CompressedBatch::default();
        while let Some(written) = self.in_flight.next().await {
            // The caller gets the first error.
            let _ = self.record(written);
        }
        self.spare.clear();
        self.give_all_back();
        error
    }

    fn give_all_back(&mut self) {
        if let Ok(states) = self.disk.format().vm_states() {
            for range in self.tables.release_all() {
                states.free_clusters(range);
            }
        }
    }
}

impl<S: Storage> Drop for VmStateWriter<'_, S> {
    /// Frees the state's space if no write is in flight. If a write is in flight, it could still
    /// modify the clusters, so they leak until the image is repaired.
    fn drop(&mut self) {
        if let (Stage::Storing, true) = (&self.stage, self.in_flight.is_empty()) {
            self.give_all_back();
        }
    }
}
