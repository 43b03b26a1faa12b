//! The disk as exports see it, and the one choke point of all requests.
//!
//! Every request is checked here against the size and the access of the disk, whatever the export
//! checked before; then it gets its claim, goes its way, and pays for its durability.

use std::sync::Arc;

use blockhouse_core::{
    Alignment, ByteRange, Capabilities, Durability, Error, ErrorKind, Fallback, IoVector, Offload,
    Request, Result, Storage, SyncMode, Unmap, WorkBudget, WriteCache,
};
use blockhouse_format::{Backing, CheckReport, DataFile, Features, Format, ImageFormat};

use crate::clusters::ClusterBuffers;
use crate::durability::{FlushTracker, RequestSync};
use crate::gate::Gate;
use crate::limits::BounceBuffers;
use crate::options::{Access, DetectZeroes, Discard, Options};
use crate::stats::{Counters, Stats};
use crate::tracker::{Claim, Tracker};
use crate::unpacked::UnpackedClusters;
use crate::zero::ZeroOptions;

/// A guest's disk. Shared by reference among all exports and threads. The [crate's page](crate) has an example.
pub struct Disk<S: Storage> {
    pub(crate) format: Format<FlushTracker<S>>,
    pub(crate) alignment: Alignment,
    pub(crate) bounce_buffers: BounceBuffers,
    pub(crate) clusters: ClusterBuffers,
    pub(crate) unpacked: UnpackedClusters,
    /// Where the image's unallocated clusters are read from.
    pub(crate) backing: Option<Arc<Disk<S>>>,
    pub(crate) stats: Stats,
    /// What changes the disk passes it.
    pub(crate) gate: Gate,
    options: Options,
    pub(crate) tracker: Arc<Tracker>,
}

impl<S: Storage> Disk<S> {
    /// A disk over a raw image.
    ///
    /// # Errors
    /// `InvalidInput` when the storage is too long for a file.
    pub fn raw(storage: S, options: Options) -> Result<Self> {
        let storage = FlushTracker::new(storage, options.flush);
        Ok(Self::new(Format::raw(storage)?, options))
    }

    /// A disk over an image of the format. One that names a [`backing_file`](Self::backing_file) is
    /// not complete before [`with_backing`](Self::with_backing), one with a
    /// [`data_file`](Self::data_file) before [`with_data`](Self::with_data).
    ///
    /// # Errors
    /// What [`Format::open`] answers.
    pub async fn open(storage: S, format: ImageFormat, options: Options) -> Result<Self> {
        let storage = FlushTracker::new(storage, options.flush);
        Ok(Self::new(Format::open(storage, format, options.of_format()).await?, options))
    }

    /// As [`open`](Self::open), as the disk was when the snapshot of this name (or id) was taken; for
    /// reading only.
    ///
    /// # Errors
    /// What [`Format::open_snapshot`] answers.
    pub async fn open_snapshot(
        storage: S,
        format: ImageFormat,
        options: Options,
        name: &str,
    ) -> Result<Self> {
        let options = Options { access: Access::ReadOnly, ..options };
        let storage = FlushTracker::new(storage, options.flush);
        let image = Format::open_snapshot(storage, format, options.of_format(), name).await?;
        Ok(Self::new(image, options))
    }

    fn new(format: Format<FlushTracker<S>>, options: Options) -> Self {
        let alignment = format.data().capabilities().alignment;
        let cluster_size = format.cluster_size().unwrap_or(u64::from(alignment.offset));
        Self {
            format,
            alignment,
            bounce_buffers: BounceBuffers::new(),
            clusters: ClusterBuffers::new(cluster_size),
            unpacked: UnpackedClusters::new(cluster_size),
            backing: None,
            stats: Stats::default(),
            gate: Gate::default(),
            options,
            tracker: Arc::default(),
        }
    }

    /// The same disk with its data file, before anything is read or written.
    ///
    /// # Errors
    /// `InvalidInput` where it has none; `Unsupported` when its clusters are smaller than the blocks of
    /// `data`.
    pub fn with_data(self, data: S) -> Result<Self> {
        let options = self.options;
        let data = FlushTracker::new(data, options.flush);
        Ok(Self::new(self.format.with_data(data)?, options))
    }

    /// The same disk over `backing`, the disk of its backing file: what the image does not have is read
    /// from there, and past its end as zeros.
    #[must_use]
    pub fn with_backing(self, backing: Arc<Self>) -> Self {
        self.format.set_backing_size(backing.size());
        Self { backing: Some(backing), ..self }
    }

    /// The backing file that the image names.
    pub fn backing_file(&self) -> Option<&Backing> {
        self.format.backing_file()
    }

    /// The file that the image names as the one with the guest's data, if that is another one.
    pub fn data_file(&self) -> Option<&DataFile> {
        self.format.data_file()
    }

    /// The name of the image's format, as on the command line.
    pub fn format_name(&self) -> &'static str {
        self.format.name()
    }

    /// Bytes of a cluster; `None` where the format has none.
    pub fn cluster_size(&self) -> Option<u64> {
        self.format.cluster_size()
    }

    /// The properties that the image's header states; `None` where the format has no header.
    pub fn features(&self) -> Option<Features> {
        self.format.features()
    }

    /// Bytes of the unit in which space is allocated, a power of two: a write of fewer takes as many.
    pub fn allocation_unit(&self) -> u64 {
        self.format.allocation_unit()
    }

    /// How people call it: the path of the image, mostly.
    pub fn name(&self) -> &str {
        self.format.storage().name()
    }

    /// How people call the file that holds the guest's data.
    pub fn data_name(&self) -> &str {
        self.format.data().name()
    }

    /// The size in bytes, a multiple of 512.
    pub fn size(&self) -> u64 {
        self.format.size()
    }

    /// Whether it may be changed.
    pub fn access(&self) -> Access {
        self.options.access
    }

    /// What requests should be aligned to in order to go down as they are. Others are served too.
    pub fn alignment(&self) -> Alignment {
        self.alignment
    }

    /// What an export may advertise: the storage's capabilities as changed by the options. Zero
    /// writes always work; the capability says whether they are quick.
    pub fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.storage().capabilities();
        if self.format.has_metadata() {
            // Metadata is written when a flush asks for it, and clusters can always be given back.
            capabilities.write_cache = WriteCache::Volatile;
            capabilities.discard = Offload::Available;
        }
        if self.options.durability >= Durability::Data {
            capabilities.write_cache = WriteCache::None;
        }
        if self.options.discard == Discard::Ignore {
            capabilities.discard = Offload::Unavailable;
        }
        capabilities
    }

    /// The counters.
    pub fn stats(&self) -> Counters {
        let (image, data) = (self.format.storage(), self.format.data());
        if std::ptr::eq(image, data) {
            return self.stats.read(&[image.stats()]);
        }
        self.stats.read(&[image.stats(), data.stats()])
    }

    /// Carries out one request.
    ///
    /// The future is to be polled until it is ready: requests wait for each other where they
    /// overlap, and where they need the same tables written. One that is dropped loses nothing that
    /// was acknowledged, but what it began may take effect at any later time, also after newer writes
    /// to the same bytes, or be undone; so an export that loses its client lets the requests in
    /// flight come to their end.
    ///
    /// # Errors
    /// `ReadOnly` for a change of a read-only disk, `PastEnd` for a write or zero write past the
    /// end, `InvalidInput` for anything else past the end, `Unsupported` for a
    /// [`FastOnly`](Fallback::Forbidden) zero write that would be slow; or what the storage answered.
    /// After a failed flush every flush and durable write fails until the disk is opened anew.
    pub async fn submit(&self, request: Request) -> Result<()> {
        let _counted = self.stats.begin(&request);
        let sync = match request {
            Request::Read { offset, into } => return self.submit_read(offset, into).await,
            Request::Write { offset, from, durability } => {
                let (_pass, sync) = (self.gate.enter().await, self.begin_sync(durability));
                self.submit_write(offset, from, &sync).await?;
                sync
            }
            Request::WriteZeroes { range, unmap, fallback, durability } => {
                let (_pass, sync) = (self.gate.enter().await, self.begin_sync(durability));
                self.submit_zeroes(range, ZeroOptions { unmap, fallback }, &sync).await?;
                sync
            }
            Request::Discard { range, durability } => {
                let (_pass, sync) = (self.gate.enter().await, self.begin_sync(durability));
                self.submit_discard(range, &sync).await?;
                sync
            }
            Request::Flush => return self.format.flush(SyncMode::Data).await,
            Request::Prefetch { range } => {
                self.check_inside(range)?;
                return self.prefetch(range).await;
            }
        };
        sync.complete().await
    }

    /// What a request's writes and its end need to make it as durable as it asks, and at least as durable
    /// as the disk's options ask.
    pub(crate) fn begin_sync(&self, asked: Durability) -> RequestSync<'_, S> {
        RequestSync::new(&self.format, asked.max(self.options.durability))
    }

    // What is not aligned, zero writes and discards are boxed below, so that the future of the common
    // way stays small.

    pub(crate) async fn submit_read(&self, offset: u64, into: IoVector) -> Result<()> {
        let range = self.check_end(offset, into.len() as u64, ErrorKind::InvalidInput)?;
        if range.is_empty() {
            return Ok(());
        }
        if self.alignment.admits(offset, &into) {
            return self.read(range, into).await;
        }
        let _claim = self.hold_end(range).await;
        Box::pin(self.read_bounced(range, into)).await
    }

    async fn submit_write(
        &self,
        offset: u64,
        from: IoVector,
        sync: &RequestSync<'_, S>,
    ) -> Result<()> {
        self.check_access(offset)?;
        let range = self.check_end(offset, from.len() as u64, ErrorKind::PastEnd)?;
        if range.is_empty() {
            return Ok(());
        }
        if let Some(how) = self.zero_options() {
            let is_zero = is_zero(&from).await;
            // Zeros in the place of a guest's lost memory are not to be stored.
            from.check_intact()?;
            if is_zero {
                return Box::pin(self.submit_zeroes(range, how, sync)).await;
            }
        }
        let claim = self.claim(range).await;
        if self.alignment.admits(offset, &from) {
            self.write(range, from, sync).await
        } else {
            Box::pin(self.write_bounced(range, from, sync, &claim)).await
        }
    }

    /// How a write of zeros is made a zero write, if it is to be one.
    fn zero_options(&self) -> Option<ZeroOptions> {
        let unmap = match self.options.detect_zeroes {
            DetectZeroes::Off => return None,
            DetectZeroes::On => Unmap::Forbidden,
            DetectZeroes::Unmap => Unmap::Allowed,
        };
        Some(ZeroOptions { unmap, fallback: Fallback::Allowed })
    }

    async fn submit_zeroes(
        &self,
        range: ByteRange,
        mut how: ZeroOptions,
        sync: &RequestSync<'_, S>,
    ) -> Result<()> {
        self.check_access(range.offset())?;
        self.check_end(range.offset(), range.length(), ErrorKind::PastEnd)?;
        if range.is_empty() {
            return Ok(());
        }
        let quick = self.capabilities().write_zeroes;
        if how.fallback == Fallback::Forbidden && quick == Offload::Unavailable {
            return Err(self.no_fast_zeroes(range.offset()));
        }
        if self.options.discard == Discard::Ignore {
            how.unmap = Unmap::Forbidden;
        }
        let claim = self.claim(range).await;
        Box::pin(self.write_zeroes(range, how, sync, &claim)).await
    }

    async fn submit_discard(&self, range: ByteRange, sync: &RequestSync<'_, S>) -> Result<()> {
        self.check_access(range.offset())?;
        self.check_inside(range)?;
        // Blocks that the range covers only in part stay as they are, but for the disk's last one.
        let block = u64::from(self.alignment.offset);
        let start = range.offset().next_multiple_of(block);
        let is_to_end = range.end() == self.size();
        let end = if is_to_end { range.end() } else { range.end() & !(block - 1) };
        if start >= end || self.capabilities().discard != Offload::Available {
            return Ok(());
        }
        let whole = ByteRange::between(start, end);
        let _claim = self.claim(whole).await;
        Box::pin(self.discard(whole, sync)).await
    }

    /// All writes completed so far become durable. As [`Request::Flush`].
    pub async fn flush(&self) -> Result<()> {
        self.submit(Request::Flush).await
    }

    /// Looks for errors in the image, whose changes are flushed and which must not change meanwhile; `None`
    /// where the format has nothing to check.
    ///
    /// # Errors
    /// Only what the storage answers: what is wrong with the image is in the report.
    pub async fn check(&self) -> Result<Option<CheckReport>> {
        self.format.check().await
    }

    /// Makes everything durable, before the disk is dropped.
    pub async fn close(&self) -> Result<()> {
        self.format.close().await
    }

    /// The right to write to `range`: alone where blocks are changed in part, else with others.
    pub(crate) async fn claim(&self, range: ByteRange) -> Claim<'_> {
        if self.alignment.offset == 1 {
            return Claim::Untracked;
        }
        loop {
            let blocks = self.blocks_of(range);
            let claim = if blocks == range {
                self.tracker.share(range).await
            } else {
                self.tracker.exclude(blocks).await
            };
            // The disk may have grown meanwhile, and with it its last block.
            if self.blocks_of(range) == blocks {
                return claim;
            }
        }
    }

    /// Keeps a disk that ends inside a block from growing while `range` is read.
    async fn hold_end(&self, range: ByteRange) -> Option<Claim<'_>> {
        if self.format.end().is_multiple_of(u64::from(self.alignment.offset)) {
            return None;
        }
        Some(self.tracker.share(range).await)
    }

    pub(crate) fn check_inside(&self, range: ByteRange) -> Result<()> {
        self.check_end(range.offset(), range.length(), ErrorKind::InvalidInput).map(|_| ())
    }

    pub(crate) fn check_access(&self, offset: u64) -> Result<()> {
        match self.options.access {
            Access::ReadWrite => Ok(()),
            Access::ReadOnly => {
                let error = Error::new(ErrorKind::ReadOnly, "the disk is open for reading only");
                Err(error.on(self.name()).at(offset))
            }
        }
    }

    /// The range, if all of it is on the disk; otherwise an error of this kind.
    pub(crate) fn check_end(&self, offset: u64, length: u64, kind: ErrorKind) -> Result<ByteRange> {
        let size = self.size();
        match ByteRange::new(offset, length) {
            Some(range) if range.end() <= size => Ok(range),
            _ => {
                let what = format!("{length} bytes reach past the end of {size} bytes");
                Err(Error::new(kind, what).on(self.name()).at(offset))
            }
        }
    }
}

/// Whether every byte is zero. Long memory that is, is looked at in steps.
async fn is_zero(memory: &IoVector) -> bool {
    const STEP: usize = WorkBudget::QUANTUM as usize;
    if memory.len() <= STEP {
        return memory.is_zero();
    }
    Box::pin(async {
        let budget = WorkBudget::new();
        for start in (0..memory.len()).step_by(STEP) {
            if !memory.is_zero_at(start, STEP) {
                return false;
            }
            budget.spend(WorkBudget::QUANTUM).await;
        }
        true
    })
    .await
}
