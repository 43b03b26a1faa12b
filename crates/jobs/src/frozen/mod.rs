//! Frozen disks: the content of disks at one moment, for backups, while the disks stay in use.
//!
//! Guarantees:
//! - Several disks are frozen at the same moment, at which no change of them is in flight. The
//!   frozen disks have all changes that were answered before, and none that begins later.
//! - A read of a [`FrozenDisk`] returns the disk's content at that moment, or an error, but never
//!   newer data.
//! - A guest's change waits until the old bytes of its blocks are saved (`old_bytes`), never for a
//!   reader of the backup. A failure of the backup fails no request of the guest.
//!
//! A reader holds no change off: it reads the disk in use, and then checks whether a change has
//! begun meanwhile. If so, the old bytes were saved before that change, and the reader takes them.
//!
//! Modules from the bottom up: `region` and `index` have the locations of the old bytes, `log` has
//! the bytes, `old_bytes` copies them to the log, `view` reads them.

mod index;
mod log;
mod old_bytes;
mod region;
mod view;

use std::sync::Arc;
use std::time::{Duration, Instant};

use blockhouse_core::{Error, ErrorKind, Result, Storage, rare};
use blockhouse_disk::{ChangeObserver, Disk, QuiescedDisk};
use blockhouse_engine::ClockSleep;
use futures_util::future::try_join_all;

use old_bytes::{OldBytes, Watch};
use region::BLOCK;

/// Receives the reason once when a backup has failed. A guest's request may call it, so it must not
/// wait.
pub type FailureTeller = Box<dyn Fn(&str) + Send + Sync>;

/// Starts a timer: how long a guest's change may be held off while none of its old bytes are saved.
pub type CopyTimer = Box<dyn Fn() -> ClockSleep + Send + Sync>;

/// The options of a frozen disk.
pub struct FreezeOptions {
    /// Maximum bytes of the scratch disk in use. More than `MAX_LOG` (8 TiB less 12 KiB) counts as
    /// `MAX_LOG`. If more bytes are needed, the backup fails.
    pub scratch_limit: u64,
    /// Bytes of memory for data not yet on the scratch disk: from 128 KiB to 16 MiB. When this
    /// memory is full, changes wait.
    pub memory: u64,
    /// Bytes of memory for the locations of single blocks of 4 KiB on the scratch disk. When they
    /// are used up, a changed block is copied with the blocks around it, up to 64 KiB.
    pub max_index_bytes: u64,
    /// The time after which a change stops waiting if nothing of it was saved meanwhile; then the
    /// backup fails. `None`: no limit.
    pub timer: Option<CopyTimer>,
}

/// A disk as of the moment when it was [frozen](freeze), for reading. See the module's page. When
/// this is dropped, the disk continues, and its old bytes are no longer copied.
pub struct FrozenDisk<S: Storage> {
    old: Arc<OldBytes<S>>,
    observer: Arc<dyn ChangeObserver>,
}

impl<S: Storage + Send + Sync> FrozenDisk<S> {
    /// Prepares to freeze `source`. `scratch` gets the old bytes: it must be
    /// [`scratch_size`](Self::scratch_size) bytes long, and unused otherwise. Its content is
    /// undefined afterwards.
    ///
    /// # Errors
    /// `InvalidInput` for a scratch disk of another size; `Io` if the host has no memory for 16
    /// bytes for each 64 MiB.
    // Not inlined, so that `blockhouse-instances` compiles the observer of the guest's changes.
    #[inline(never)]
    pub fn new(
        source: Arc<Disk<S>>,
        scratch: Disk<S>,
        options: FreezeOptions,
        teller: FailureTeller,
    ) -> Result<Self> {
        let size = Self::scratch_size(source.size());
        if scratch.size() != size {
            let what = format!("has {} bytes, and is to have {size}", scratch.size());
            return Err(Error::new(ErrorKind::InvalidInput, what).on(scratch.name()));
        }
        let old = Arc::new(OldBytes::new(source, scratch, options, teller)?);
        let observer = Arc::new(Watch(Arc::clone(&old)));
        Ok(Self { old, observer })
    }
}

impl<S: Storage> FrozenDisk<S> {
    /// Bytes of the scratch disk for a disk of `size` bytes: `size`, rounded up to blocks of 4 KiB.
    pub fn scratch_size(size: u64) -> u64 {
        size.next_multiple_of(BLOCK)
    }

    /// Writes old bytes to the scratch disk, until the disk is [thawed](Self::thaw) or the backup
    /// has failed. The caller polls the future all that time, beginning before the disk is frozen:
    /// otherwise changes wait when memory is full. If the future is dropped earlier, the backup
    /// ends.
    pub fn write_behind(&self) -> impl Future<Output = ()> + use<S> {
        let writer = Writer(Arc::clone(&self.old));
        async move { rare(writer.0.write_behind()).await }
    }

    /// Bytes of the scratch disk in use, including bytes that are still in memory.
    pub fn scratch_used(&self) -> u64 {
        self.old.log().length()
    }

    /// Freezes the disk at this moment. `quiesced` shows that no change of the disk is in flight.
    pub fn freeze_at(&self, quiesced: &QuiescedDisk<'_, S>) {
        quiesced.observe(Arc::clone(&self.observer));
    }

    /// The reason why the backup has failed, if it has; then all reads fail.
    pub fn failure(&self) -> Option<&str> {
        self.old.failure()
    }

    /// Ends the copying of old data: the disk continues alone, and reads of the frozen disk fail.
    pub fn thaw(&self) {
        // Reads fail before changes are no longer observed, so that no read returns newer data.
        self.old.end();
        self.old.source().jobs().stop_observing(&self.observer);
    }
}

/// The task that writes old bytes to the scratch disk. Its drop ends the backup. Reason: no other
/// task writes them, so a change that waits for a write would wait forever.
struct Writer<S: Storage>(Arc<OldBytes<S>>);

impl<S: Storage> Drop for Writer<S> {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl<S: Storage> Drop for FrozenDisk<S> {
    fn drop(&mut self) {
        self.thaw();
    }
}

/// Freezes prepared disks, all at the same moment during this call. Returns the time for which
/// their changes were held off. If the future is dropped, no disk is frozen, and changes continue.
///
/// # Errors
/// As [`Disk::quiesced`]; then no disk is frozen, and changes continue.
pub async fn freeze<S: Storage>(disks: &[&FrozenDisk<S>]) -> Result<Duration> {
    let began = Instant::now();
    let quiesced = try_join_all(disks.iter().map(|disk| disk.old.source().quiesced())).await?;
    disks.iter().zip(&quiesced).for_each(|(disk, quiesced)| disk.freeze_at(quiesced));
    drop(quiesced);
    Ok(began.elapsed())
}
