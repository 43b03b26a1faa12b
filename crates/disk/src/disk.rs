//! The disk as exports see it, and the one choke point of all requests.
//!
//! Every request is checked here against the size and the access of the disk, whatever the export
//! checked before; then it gets its claim, goes its way, and pays for its durability.

use std::sync::Arc;

use blockhouse_core::{
    Alignment, ByteRange, Capabilities, Durability, Error, ErrorKind, Fallback, IoVector, Offload,
    Request, Result, Storage, SyncMode, Unmap, WorkBudget, WriteCache,
};
use blockhouse_format::qcow2::{self, Backing, CheckReport, DataFile, Features, Qcow2};
use blockhouse_format::{Format, Raw};

use crate::clusters::ClusterBuffers;
use crate::durable::Debt;
use crate::gate::Gate;
use crate::generations::Generations;
use crate::limits::BounceBuffers;
use crate::stats::{Counters, Stats};
use crate::tracker::{Claim, Tracker};
use crate::unpacked::UnpackedClusters;
use crate::zero::Zeroing;

/// Whether a disk may be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reads only; everything else is refused with EPERM.
    ReadOnly,
    /// Reads and writes.
    ReadWrite,
}

/// What becomes of a guest's discards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Discard {
    /// The host gets the space back.
    Unmap,
    /// They are acknowledged and nothing happens, and zero writes keep their space.
    Ignore,
}

/// What becomes of writes whose bytes are all zero, as QEMU's `detect-zeroes`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DetectZeroes {
    /// They are written.
    #[default]
    Off,
    /// They become zero writes that keep their space.
    On,
    /// They become zero writes that may give their space back, as far as discards do.
    Unmap,
}

/// What becomes of flushes and durable writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushPolicy {
    /// They are kept.
    Obey,
    /// They are acknowledged and nothing is flushed: a crash of the host loses data. For disks that
    /// nobody needs afterwards (`--cache unsafe`).
    Ignore,
}

/// How a disk is opened.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Whether it may be changed.
    pub access: Access,
    /// The least durability of each write; `Data` is what cache modes call writethrough.
    pub durability: Durability,
    /// Whether flushes are kept.
    pub flush: FlushPolicy,
    /// Whether discards are passed on.
    pub discard: Discard,
    /// Whether writes of zeros are made zero writes.
    pub detect_zeroes: DetectZeroes,
}

impl Default for Options {
    /// Read and write, a volatile write cache, flushes kept, discards passed on, zeros written.
    fn default() -> Self {
        Self {
            access: Access::ReadWrite,
            durability: Durability::None,
            flush: FlushPolicy::Obey,
            discard: Discard::Unmap,
            detect_zeroes: DetectZeroes::Off,
        }
    }
}

/// A guest's disk. Shared by reference among all exports and threads.
pub struct Disk<S: Storage> {
    pub(crate) format: Format<Generations<S>>,
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
        let storage = Generations::new(storage, options.flush);
        Ok(Self::new(Format::Raw(Raw::open(storage)?), options))
    }

    /// A disk over a qcow2 image. One that names a [`backing_file`](Self::backing_file) is not
    /// complete before [`over`](Self::over), one with a [`data_file`](Self::data_file) before
    /// [`with_data`](Self::with_data).
    ///
    /// # Errors
    /// What [`Qcow2::open`] answers.
    pub async fn qcow2(storage: S, options: Options) -> Result<Self> {
        let storage = Generations::new(storage, options.flush);
        let image = Qcow2::open(storage, Self::tables_options(options)).await?;
        Ok(Self::new(Format::Qcow2(Box::new(image)), options))
    }

    /// As [`qcow2`](Self::qcow2), as the disk was when a snapshot was taken; for reading only.
    ///
    /// # Errors
    /// What [`Qcow2::open_snapshot`] answers.
    pub async fn qcow2_snapshot(storage: S, options: Options, name: &str) -> Result<Self> {
        let options = Options { access: Access::ReadOnly, ..options };
        let storage = Generations::new(storage, options.flush);
        let image = Qcow2::open_snapshot(storage, Self::tables_options(options), name).await?;
        Ok(Self::new(Format::Qcow2(Box::new(image)), options))
    }

    fn tables_options(options: Options) -> qcow2::OpenOptions {
        qcow2::OpenOptions {
            access: match options.access {
                Access::ReadOnly => qcow2::Access::ReadOnly,
                Access::ReadWrite => qcow2::Access::ReadWrite,
            },
            discard: match options.discard {
                Discard::Unmap => qcow2::Discard::Punch,
                Discard::Ignore => qcow2::Discard::Keep,
            },
            ..Default::default()
        }
    }

    fn new(format: Format<Generations<S>>, options: Options) -> Self {
        let alignment = format.data().capabilities().alignment;
        let cluster_size = match &format {
            Format::Raw(_) => u64::from(alignment.offset),
            Format::Qcow2(image) => image.cluster_size(),
        };
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
        let format = match self.format {
            Format::Qcow2(image) => {
                let data = Generations::new(data, options.flush);
                Format::Qcow2(Box::new(image.with_data(data)?))
            }
            Format::Raw(raw) => {
                let what = "raw images have no data file";
                let name = raw.storage().name();
                return Err(Error::new(ErrorKind::InvalidInput, what).on(name));
            }
        };
        Ok(Self::new(format, options))
    }

    /// The same disk with `backing` behind it: what the image does not have is read from there, and
    /// past its end as zeros.
    #[must_use]
    pub fn over(self, backing: Arc<Self>) -> Self {
        if let Format::Qcow2(image) = &self.format {
            image.set_backing_size(backing.size());
        }
        Self { backing: Some(backing), ..self }
    }

    /// What the image says of the file behind it.
    pub fn backing_file(&self) -> Option<&Backing> {
        match &self.format {
            Format::Raw(_) => None,
            Format::Qcow2(image) => image.backing(),
        }
    }

    /// What the image says of the file that holds the guest's data, if that is another one.
    pub fn data_file(&self) -> Option<&DataFile> {
        match &self.format {
            Format::Raw(_) => None,
            Format::Qcow2(image) => image.data_file(),
        }
    }

    /// The name of the image's format, as on the command line.
    pub fn format_name(&self) -> &'static str {
        self.format.name()
    }

    /// Bytes of a cluster; `None` where the format has none.
    pub fn cluster_size(&self) -> Option<u64> {
        match &self.format {
            Format::Raw(_) => None,
            Format::Qcow2(image) => Some(image.cluster_size()),
        }
    }

    /// What a qcow2 image says of itself.
    pub fn qcow2_features(&self) -> Option<Features> {
        match &self.format {
            Format::Raw(_) => None,
            Format::Qcow2(image) => Some(image.features()),
        }
    }

    /// The bytes that space is given out in: a write of fewer takes as many. A power of two.
    pub fn allocation_unit(&self) -> u64 {
        match &self.format {
            Format::Raw(_) => u64::from(self.alignment.offset),
            Format::Qcow2(image) => image.subcluster_size(),
        }
    }

    /// The least durability of each write.
    pub(crate) fn least_durability(&self) -> Durability {
        self.options.durability
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
        if let Format::Qcow2(_) = self.format {
            // Tables are written when a flush asks for it, and clusters can always be given back.
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
            return self.stats.read(&[&image.stats]);
        }
        self.stats.read(&[&image.stats, &data.stats])
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
        let debt = match request {
            Request::Read { offset, into } => self.submit_read(offset, into).await?,
            Request::Write { offset, from, durability } => {
                let _pass = self.gate.enter().await;
                self.submit_write(offset, from, durability).await?
            }
            Request::WriteZeroes { range, unmap, fallback, durability } => {
                let _pass = self.gate.enter().await;
                self.submit_zeroes(range, Zeroing { unmap, fallback, durability }).await?
            }
            Request::Discard { range, durability } => {
                let _pass = self.gate.enter().await;
                self.submit_discard(range, durability).await?
            }
            Request::Flush => return self.format.flush(SyncMode::Data).await,
            Request::Prefetch { range } => {
                self.check_inside(range)?;
                self.prefetch(range).await?;
                Debt::Nothing
            }
        };
        self.pay(debt).await
    }

    // What is not aligned, zero writes and discards are boxed below, so that the future of the common
    // way stays small.

    pub(crate) async fn submit_read(&self, offset: u64, into: IoVector) -> Result<Debt> {
        let range = self.check_end(offset, into.len() as u64, ErrorKind::InvalidInput)?;
        if range.is_empty() {
            return Ok(Debt::Nothing);
        }
        if self.alignment.admits(offset, &into) {
            self.read(range, into).await?;
        } else {
            let _claim = self.hold_end(range).await;
            Box::pin(self.read_bounced(range, into)).await?;
        }
        Ok(Debt::Nothing)
    }

    async fn submit_write(
        &self,
        offset: u64,
        from: IoVector,
        durability: Durability,
    ) -> Result<Debt> {
        self.check_access(offset)?;
        let range = self.check_end(offset, from.len() as u64, ErrorKind::PastEnd)?;
        if range.is_empty() {
            return Ok(Debt::Nothing);
        }
        if let Some(how) = self.zeroing(durability) {
            let is_zero = is_zero(&from).await;
            // Zeros in the place of a guest's lost memory are not to be stored.
            from.check_intact()?;
            if is_zero {
                return Box::pin(self.submit_zeroes(range, how)).await;
            }
        }
        let durability = durability.max(self.options.durability);
        let claim = self.claim(range).await;
        if self.alignment.admits(offset, &from) {
            self.write(range, from, durability).await
        } else {
            Box::pin(self.write_bounced(range, from, durability, &claim)).await
        }
    }

    /// How a write of zeros is made a zero write, if it is to be one.
    fn zeroing(&self, durability: Durability) -> Option<Zeroing> {
        let unmap = match self.options.detect_zeroes {
            DetectZeroes::Off => return None,
            DetectZeroes::On => Unmap::Forbidden,
            DetectZeroes::Unmap => Unmap::Allowed,
        };
        Some(Zeroing { unmap, fallback: Fallback::Allowed, durability })
    }

    async fn submit_zeroes(&self, range: ByteRange, mut how: Zeroing) -> Result<Debt> {
        self.check_access(range.offset())?;
        self.check_end(range.offset(), range.length(), ErrorKind::PastEnd)?;
        if range.is_empty() {
            return Ok(Debt::Nothing);
        }
        let quick = self.capabilities().write_zeroes;
        if how.fallback == Fallback::Forbidden && quick == Offload::Unavailable {
            return Err(self.no_fast_zeroes(range.offset()));
        }
        if self.options.discard == Discard::Ignore {
            how.unmap = Unmap::Forbidden;
        }
        how.durability = how.durability.max(self.options.durability);
        let claim = self.claim(range).await;
        Box::pin(self.write_zeroes(range, how, &claim)).await
    }

    async fn submit_discard(&self, range: ByteRange, durability: Durability) -> Result<Debt> {
        self.check_access(range.offset())?;
        self.check_inside(range)?;
        // Blocks that the range covers only in part stay as they are, but for the disk's last one.
        let block = u64::from(self.alignment.offset);
        let start = range.offset().next_multiple_of(block);
        let is_to_end = range.end() == self.size();
        let end = if is_to_end { range.end() } else { range.end() & !(block - 1) };
        if start >= end || self.capabilities().discard != Offload::Available {
            return Ok(Debt::Nothing);
        }
        let whole = ByteRange::between(start, end);
        let _claim = self.claim(whole).await;
        Box::pin(self.discard(whole, durability.max(self.options.durability))).await
    }

    /// All writes completed so far become durable. As [`Request::Flush`].
    pub async fn flush(&self) -> Result<()> {
        self.submit(Request::Flush).await
    }

    /// Looks for errors in the image, which nobody changes meanwhile and whose changes are flushed;
    /// `None` where the format has nothing to check.
    ///
    /// # Errors
    /// Only what the storage answers: what is wrong with the image is in the report.
    pub async fn check(&self) -> Result<Option<CheckReport>> {
        match &self.format {
            Format::Raw(_) => Ok(None),
            Format::Qcow2(image) => qcow2::check(image).await.map(Some),
        }
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
