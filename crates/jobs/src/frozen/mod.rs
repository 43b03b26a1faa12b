//! Disks as they were at one moment, for backups, beside the disks that go on.
//!
//! Guarantees:
//! - Several disks are frozen at the same moment: no change of any is in flight then. What was
//!   answered before is in all of them, and what begins later in none.
//! - What is read of a [`FrozenDisk`] is what the disk held at its moment, or an error: never
//!   anything newer.
//! - A guest's change waits until what it touches first is read (`old_bytes`), never for a reader.
//!   What goes wrong with a backup is not the guest's.
//!
//! A reader keeps no change off: it reads the disk that goes on, and then looks whether a change
//! has begun meanwhile. Where one has, the old bytes are saved.
//!
//! From the bottom up: `region` and `index` say where the old bytes of each block are, `log` has
//! them, `old_bytes` copies them, `view` reads.

mod index;
mod log;
mod old_bytes;
mod region;
mod view;

use std::sync::Arc;
use std::time::{Duration, Instant};

use blockhouse_core::{Error, ErrorKind, Result, Storage};
use blockhouse_disk::{ChangeObserver, Disk, QuiescedDisk};
use blockhouse_engine::ClockSleep;
use futures_util::future::try_join_all;

use old_bytes::{OldBytes, Watch};
use region::BLOCK;

/// Receives the reason once when a backup has failed. Called by a guest's request: it must not
/// wait.
pub type FailureTeller = Box<dyn Fn(&str) + Send + Sync>;

/// Begins to wait for as long as a guest's change may be held off while none of its old bytes are
/// saved.
pub type CopyTimer = Box<dyn Fn() -> ClockSleep + Send + Sync>;

/// How a disk is frozen.
pub struct FreezeOptions {
    /// Bytes of the scratch disk that may be in use. With more, the backup fails, as with more
    /// than 8 TiB.
    pub scratch_limit: u64,
    /// Bytes of memory for data not yet on the scratch disk: from 128 KiB to 16 MiB. When it is
    /// full, changes wait.
    pub memory: u64,
    /// Bytes of memory for the locations of single blocks of 4 KiB on the scratch disk. When they
    /// are full, changed blocks are copied with those around them, up to 64 KiB.
    pub max_index_bytes: u64,
    /// When a change of which nothing is saved stops waiting, and the backup fails; `None`: never.
    pub timer: Option<CopyTimer>,
}

/// A disk as of the moment when it was [frozen](freeze), for reading. See the module's page. When
/// it is dropped, the disk continues without copies.
pub struct FrozenDisk<S: Storage> {
    old: Arc<OldBytes<S>>,
    observer: Arc<dyn ChangeObserver>,
}

impl<S: Storage + Send + Sync> FrozenDisk<S> {
    /// Prepares to freeze `source`. `scratch` gets the old bytes: it must be
    /// [`scratch_size`](Self::scratch_size) bytes long, and unused otherwise. Its content is of no
    /// use afterwards.
    ///
    /// # Errors
    /// `InvalidInput` for a scratch disk of another size; `Io` if the host has no memory for 16
    /// bytes for each 64 MiB.
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
    /// Bytes of the scratch disk for a disk of `size` bytes: as many, in whole blocks of 4 KiB.
    pub fn scratch_size(size: u64) -> u64 {
        size.next_multiple_of(BLOCK)
    }

    /// Writes old bytes to the scratch disk, until the disk is [thawed](Self::thaw) or the backup
    /// has failed. To be polled all that time, from before the disk is frozen on: otherwise
    /// changes wait when memory is full. Dropped before, the disk is thawed.
    pub fn write_behind(&self) -> impl Future<Output = ()> + use<S> {
        let writer = Writer(Arc::clone(&self.old));
        async move { writer.0.write_behind().await }
    }

    /// Bytes of the scratch disk in use, with those that are on their way there.
    pub fn scratch_used(&self) -> u64 {
        self.old.log().length()
    }

    /// Freezes the disk at this moment, in which no change of it is in flight.
    pub fn freeze_at(&self, quiesced: &QuiescedDisk<'_, S>) {
        quiesced.observe(Arc::clone(&self.observer));
    }

    /// Why the backup has failed, if it has: nothing can be read.
    pub fn failure(&self) -> Option<&str> {
        self.old.failure()
    }

    /// Ends the copies of old data: the disk continues alone, and this one cannot be read any
    /// longer.
    pub fn thaw(&self) {
        // First, so that nothing newer is read.
        self.old.end();
        self.old.source().jobs().stop_observing(&self.observer);
    }
}

/// Writes old bytes. If it is dropped while it writes, no other task writes them: changes must not
/// wait for that.
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

/// Freezes prepared disks, all at the same moment: during this call. Returns for how long their
/// changes were held off. A dropped future has frozen none, and changes continue.
///
/// # Errors
/// As [`Disk::quiesced`]: none is frozen, and changes continue.
pub async fn freeze<S: Storage>(disks: &[&FrozenDisk<S>]) -> Result<Duration> {
    let began = Instant::now();
    let quiesced = try_join_all(disks.iter().map(|disk| disk.old.source().quiesced())).await?;
    disks.iter().zip(&quiesced).for_each(|(disk, quiesced)| disk.freeze_at(quiesced));
    drop(quiesced);
    Ok(began.elapsed())
}
