//! Opening and closing disks, and operations on a disk while it is served.

use std::num::NonZeroUsize;
use std::sync::Arc;

use anyhow::{Result, bail};
use blockhouse_config::disk::DiskConfig;
use blockhouse_config::export_address::ExportAddress;
use blockhouse_config::limits::LimitsConfig;
use blockhouse_config::offers::ExportOptions;
use blockhouse_core::{ErrorKind, rare};
use blockhouse_disk::{Access, BitmapLoss, HoldChange, HoldObserver, ImageDisk};
use blockhouse_nbd::ExportBitmap;
use blockhouse_nbd::uri::NbdUri;
use parking_lot::Mutex;

use super::Running;
use super::backups::with_bitmaps;
use super::disk::{Moved, RunningDisk};
use super::recording::keep_vouching;
use super::room::watch_room;
use crate::events::failures::FailureTeller;
use crate::events::room_watch::RoomWatch;
use crate::events::{Event, Events};
use crate::jobs::begin_prefetch;
use crate::process::key_memory;
use crate::running::claims::{Claim, Name};
use crate::running::io_poll;
use crate::running::open::open_disk;

/// A disk that cannot be closed or changed by others until this is dropped.
pub(crate) struct ClaimedDisk<'a> {
    /// The disk.
    pub(crate) disk: Arc<RunningDisk>,
    _claim: Claim<'a>,
}

/// The outcome of a change of a disk's size.
pub(crate) struct Resized {
    /// Bytes before.
    pub(crate) old: u64,
    /// Bytes now.
    pub(crate) new: u64,
}

/// The result of a refresh of a disk's size.
pub(crate) struct Refreshed {
    /// The disk's bytes.
    pub(crate) size: u64,
    /// How many held requests are tried again.
    pub(crate) held: u64,
}

/// Reports that the disk's changes are held or released, in the log and to subscribers.
fn tell_of_holding(disk: &str, events: &Events, room: Arc<RoomWatch>) -> HoldObserver {
    let (disk, events) = (disk.to_owned(), events.clone());
    Box::new(move |change| {
        let disk = disk.clone();
        events.tell(match change {
            HoldChange::Held { message } => {
                room.note_full();
                tracing::warn!("{disk}: writes wait for room: {message}");
                Event::DiskHeld { disk, message }
            }
            HoldChange::Released { time, failed } => {
                let held_ms = time.as_millis() as u64;
                tracing::info!(
                    "{disk}: no write waits for room after {held_ms} ms, {failed} failed"
                );
                Event::DiskReleased { disk, held_ms, failed }
            }
        });
    })
}

impl Running {
    /// Lists an open disk, and observes its failures. Its name must be new.
    pub(crate) fn adopt(
        &self,
        setup: DiskConfig,
        disk: Arc<ImageDisk>,
        moved: Option<Moved>,
    ) -> Arc<RunningDisk> {
        let offered =
            if setup.bitmaps_behind { ExportBitmap::OfChain } else { ExportBitmap::OfDisk };
        let bitmaps = setup.bitmaps.iter().cloned().map(offered).collect();
        self.adopt_with(setup, disk, moved, bitmaps)
    }

    /// As [`adopt`](Self::adopt), with the bitmaps that its NBD clients may request.
    pub(super) fn adopt_with(
        &self,
        setup: DiskConfig,
        disk: Arc<ImageDisk>,
        moved: Option<Moved>,
        bitmaps: Vec<ExportBitmap>,
    ) -> Arc<RunningDisk> {
        // If the image is not a file, or its path is no longer found, the configured path is used.
        let canonical = disk.image().file().and_then(|_| setup.path.canonicalize().ok());
        let path = canonical.unwrap_or_else(|| setup.path.clone());
        let has_lost_flush = disk.image().flush_failures().iter().any(Option::is_some);
        let teller =
            FailureTeller::new(setup.name().to_owned(), self.events.clone(), has_lost_flush);
        let room = RoomWatch::new(setup.name(), &self.events);
        let watch = Arc::clone(&room);
        disk.observe_failures(Box::new(move |failed| {
            if failed.error.kind() == ErrorKind::NoSpace {
                watch.note_full();
            }
            teller.tell(failed);
        }));
        let (name, events) = (setup.name().to_owned(), self.events.clone());
        disk.observe_bitmap_losses(Arc::new(move |bitmap, loss, why| {
            let (disk, message) = (name.clone(), why.to_string());
            match loss {
                BitmapLoss::Precision => {
                    tracing::warn!(
                        "{name}: the bitmap {bitmap:?} is coarser from now on, because it has no room: {why}; increments get larger"
                    );
                    events.tell(Event::BitmapCoarser { disk, bitmap: bitmap.to_owned(), message });
                }
                BitmapLoss::Changes => {
                    tracing::error!(
                        "{name}: the bitmap {bitmap:?} lacks changes from now on, the guest goes on: {why}; make a full backup"
                    );
                    events.tell(Event::BitmapLost { disk, bitmap: bitmap.to_owned(), message });
                }
            }
        }));
        disk.hold().observe(tell_of_holding(setup.name(), &self.events, Arc::clone(&room)));
        keep_vouching(self, &disk);
        let (configured, group, threshold) = (Mutex::default(), Mutex::default(), setup.threshold);
        let disk = RunningDisk { setup, path, moved, disk, bitmaps, room, configured, group };
        let disk = Arc::new(disk);
        watch_room(self, &disk, threshold);
        self.disks.push(Arc::clone(&disk));
        disk
    }

    /// The disk of this name, claimed.
    pub(crate) async fn claim_disk(&self, name: &str) -> Result<ClaimedDisk<'_>> {
        let claim = self.claims.claim([Name::Disk(name.to_owned())]).await;
        Ok(ClaimedDisk { disk: self.disks.get(name)?, _claim: claim })
    }

    /// Opens a disk, and serves it at its addresses. If an address cannot be used, the disk is
    /// closed again. With read-only `access`, a writable disk is made read-only before it has
    /// clients, as by `set_access`, and no prefetch begins.
    ///
    /// # Errors
    /// There is a disk of its name, the image cannot be opened, there is no group of limits of the
    /// name, or an address is in use or cannot be bound.
    pub async fn open_and_serve(
        &self,
        setup: DiskConfig,
        access: Access,
    ) -> Result<Arc<RunningDisk>> {
        let disk = rare(self.open_claimed(setup, access)).await?;
        if access == Access::ReadWrite {
            rare(begin_prefetch(self, &disk)).await;
        }
        Ok(disk)
    }

    /// Claims the names of a disk while it is opened and served.
    async fn open_claimed(&self, setup: DiskConfig, access: Access) -> Result<Arc<RunningDisk>> {
        let name = setup.name().to_owned();
        let mut names: Vec<_> =
            setup.exports.iter().map(|address| Name::Socket(address.socket())).collect();
        names.push(Name::Disk(name.clone()));
        let _claim = self.claims.claim(names).await;
        if self.disks.find(&name).is_some() {
            bail!("a disk is called {name:?} already; choose another name");
        }
        if self.io_poll {
            io_poll::check_disk(&setup)?;
        }
        // The checks come before an image is made.
        self.disks.check_limits(&setup.limits)?;
        // Without these checks, opening a file there fails later, with an error of the kernel that
        // does not name the sandbox.
        setup
            .images()
            .chain(&setup.allow_paths)
            .try_for_each(|path| self.sandbox().check_image(path))?;
        let named = setup.bitmaps_in.iter().chain(&setup.key_files).chain(&setup.passphrase_files);
        let named = named.filter(|path| !key_memory::is_kept(path));
        named.into_iter().try_for_each(|path| self.sandbox().check(path))?;
        let state = self.state_use(&setup)?;
        let disk = open_disk(&setup, &state).await?;
        // From now on the open image says whether the disk is inactive; images that are opened for
        // the disk later are active.
        let setup = DiskConfig { is_inactive: false, ..setup };
        let disk = self.adopt(setup, Arc::new(disk), None);
        self.events.tell(Event::DiskOpened { disk: name.clone() });
        if let Err(error) = self.begin_serving(&disk, access).await {
            for export in self.exports.of_disk(&name) {
                self.exports.end(&export).await?;
            }
            // The first error is returned.
            let _ = self.forget(&disk).await;
            return Err(error);
        }
        Ok(disk)
    }

    /// Applies the limits and the access of a disk that was just opened, and serves it.
    async fn begin_serving(&self, disk: &Arc<RunningDisk>, access: Access) -> Result<()> {
        if access == Access::ReadOnly && !disk.setup.is_read_only() {
            disk.disk.set_access(access).await?;
            // `set_access` has no effect on an inactive disk, which may become active.
            disk.disk.protect_unused();
        }
        self.disks.limit(disk, &disk.setup.limits)?;
        for address in &disk.setup.exports {
            self.serve(disk, address.clone(), ExportOptions::default()).await?;
        }
        Ok(())
    }

    /// Flushes and closes a disk; with `force` its exports are removed first.
    ///
    /// # Errors
    /// No disk has this name, or the disk has exports and stays open. If the last changes cannot be
    /// made durable, the disk is closed nevertheless.
    pub(crate) async fn close(&self, name: &str, force: bool) -> Result<()> {
        let claimed = self.claim_disk(name).await?;
        self.check_unused(name)?;
        let exports = self.exports.of_disk(name);
        if let [first, ..] = &exports[..]
            && !force
        {
            bail!(
                "the disk {name:?} is served at {}; remove its exports first, or force it",
                first.address
            );
        }
        // Requests that the limits delay are admitted, so that closing does not wait for the
        // limits.
        let _lifted = claimed.disk.disk.throttle().lift();
        claimed.disk.disk.hold().end();
        for export in exports {
            let _claim = self.claims.claim([Name::Socket(export.address.socket())]).await;
            self.exports.end(&export).await?;
        }
        self.forget(&claimed.disk).await
    }

    /// Whether NBD clients may request a disk's bitmap.
    pub(crate) fn offers_bitmap(&self, disk: &RunningDisk, bitmap: &str) -> bool {
        let exports = self.exports.of_disk(disk.name());
        let mut added = exports.iter().flat_map(|export| &export.added_bitmaps);
        disk.offers_bitmap(bitmap) || added.any(|added| added == bitmap)
    }

    /// Refuses to remove a bitmap that NBD clients may request.
    pub(crate) fn check_bitmap_unused(&self, disk: &RunningDisk, bitmap: &str) -> Result<()> {
        if self.offers_bitmap(disk, bitmap) {
            bail!(
                "the disk {:?} offers the bitmap {bitmap:?} to NBD clients; remove the export that requests it, or open \
                 the disk without it, first",
                disk.name()
            );
        }
        Ok(())
    }

    /// Closes a disk without exports. The caller has claimed it.
    pub(super) async fn forget(&self, disk: &RunningDisk) -> Result<()> {
        let closed = disk.disk.close().await;
        if self.jobs.has_stuck_reader(disk) {
            disk.disk.jobs().unlock_closed();
        }
        self.disks.forget(disk.name());
        let error = closed.as_ref().err().map(ToString::to_string);
        self.events.tell(Event::DiskClosed { disk: disk.name().to_owned(), error });
        Ok(closed?)
    }

    /// Serves a disk at an address, with these options. `bitmaps` names the bitmaps that clients
    /// may request: of the disk, of the original of a disk frozen by a backup, or of another disk.
    /// Returns the address, with the real port if port 0 was requested.
    ///
    /// # Errors
    /// There is no such disk, or the address is in use or cannot be bound.
    pub(crate) async fn add_export(
        &self,
        disk: &str,
        address: ExportAddress,
        options: ExportOptions,
        bitmaps: (&[String], Option<&str>),
    ) -> Result<ExportAddress> {
        let names = [Name::Disk(disk.to_owned()), Name::Socket(address.socket())];
        let _claim = self.claims.claim(names).await;
        let served = match bitmaps {
            ([], _) => self.disks.get(disk)?,
            bitmaps => with_bitmaps(self, disk, bitmaps).await?,
        };
        self.serve(&served, address, options).await
    }

    /// Serves a disk. The caller has claimed the disk and the socket.
    pub(super) async fn serve(
        &self,
        disk: &Arc<RunningDisk>,
        address: ExportAddress,
        options: ExportOptions,
    ) -> Result<ExportAddress> {
        if let Some(socket) = address.unix_socket() {
            self.sandbox().check(socket)?;
        }
        self.jobs.check_not_written(disk.name())?;
        if matches!(address, ExportAddress::VhostUser(_)) {
            self.backups.check_not_frozen(disk.name())?;
        }
        self.exports.add(disk, address, options).await
    }

    /// Stops serving an export. Its clients' requests in flight complete.
    ///
    /// # Errors
    /// No export has this address.
    pub(crate) async fn remove_export(&self, address: &str) -> Result<()> {
        let find = || {
            let mut exports = self.exports.list().into_iter();
            exports.find(|export| export.address.to_string() == address)
        };
        let missing = || {
            anyhow::anyhow!(
                "nothing is served at {address}; 'export.list' tells what is served where"
            )
        };
        let disk = find().ok_or_else(missing)?.disk;
        let _disk = self.claims.claim([Name::Disk(disk)]).await;
        // The export may have been removed meanwhile.
        let export = find().ok_or_else(missing)?;
        let _socket = self.claims.claim([Name::Socket(export.address.socket())]).await;
        self.exports.end(&export).await
    }

    /// Listens at a socket of NBD clients even while it has no exports. Returns the URI, with the
    /// real port if port 0 was requested.
    ///
    /// # Errors
    /// The address is in use or cannot be bound.
    pub(crate) async fn add_socket(
        &self,
        uri: NbdUri,
        max_connections: Option<NonZeroUsize>,
    ) -> Result<NbdUri> {
        let address = ExportAddress::Nbd(uri.clone());
        let _claim = self.claims.claim([Name::Socket(address.socket())]).await;
        address.unix_socket().map_or(Ok(()), |path| self.sandbox.check(path))?;
        self.exports.add_socket(uri, max_connections).await
    }

    /// Undoes [`add_socket`](Self::add_socket): the socket is closed when it has no exports.
    ///
    /// # Errors
    /// No socket was added at this URI.
    pub(crate) async fn remove_socket(&self, uri: NbdUri) -> Result<()> {
        let name = Name::Socket(ExportAddress::Nbd(uri.clone()).socket());
        let _claim = self.claims.claim([name]).await;
        self.exports.remove_socket(&uri)
    }

    /// Gives a disk other limits, or none. Limits of a group apply to all its disks. If only a
    /// group is named, the disk joins it, and the group keeps its limits.
    ///
    /// # Errors
    /// There is no such disk, or no group to join.
    pub(crate) async fn limit(&self, name: &str, limits: &LimitsConfig) -> Result<()> {
        let claimed = self.claim_disk(name).await?;
        self.disks.limit(&claimed.disk, limits)
    }

    /// Resizes a disk. A smaller size requires `shrink` and a disk without exports, because the
    /// data past the new end is lost. Guests are notified of the new size; NBD clients see it when
    /// they connect again.
    ///
    /// # Errors
    /// There is no such disk, or it cannot have that size.
    pub(crate) async fn resize(&self, name: &str, size: u64, shrink: bool) -> Result<Resized> {
        let claimed = self.claim_disk(name).await?;
        self.check_free(name)?;
        let disk = &claimed.disk.disk;
        let old = disk.size();
        let outcome = match (size < old, shrink, self.exports.of_disk(name).first()) {
            (true, false, _) => bail!(
                "the disk {name:?} has {old} bytes, more than {size}: what lies beyond would be lost; if that is \
                 meant, say shrink"
            ),
            (true, true, Some(export)) => bail!(
                "the disk {name:?} cannot be made shorter while it is served at {}; remove its exports first",
                export.address
            ),
            (true, true, None) => disk.shrink(size).await,
            (false, ..) => disk.resize(size).await,
        };
        // The size may have changed although a later step failed.
        let new = disk.size();
        if new != old {
            self.tell_size(name, new);
        }
        outcome?;
        Ok(Resized { old, new })
    }

    /// Tells guests and subscribers a disk's new size.
    pub(super) fn tell_size(&self, name: &str, size: u64) {
        self.exports.tell_guests_of_size(name);
        self.events.tell(Event::DiskResized { disk: name.into(), size });
    }

    /// Updates the size of an image that another program made longer, notifies guests, and retries
    /// held changes.
    ///
    /// # Errors
    /// There is no such disk, its image became shorter, or a job works on the disk that would grow.
    pub(crate) async fn refresh(&self, name: &str) -> Result<Refreshed> {
        let claimed = self.claim_disk(name).await?;
        let disk = &claimed.disk.disk;
        let refreshed = disk.refresh_size(self.check_unused(name).is_err()).await;
        let held = disk.hold().count();
        disk.hold().release();
        if let Some(size) = refreshed? {
            tracing::info!("{name}: has {size} bytes now");
            self.events.tell(Event::DiskResized { disk: name.into(), size });
        }
        self.exports.tell_guests_of_size(name);
        Ok(Refreshed { size: disk.size(), held })
    }

    /// Makes a disk read-only while it is served, or writable again.
    ///
    /// # Errors
    /// There is no such disk, a job fills it, its changes cannot be made durable, or it was opened
    /// for reading only.
    pub(crate) async fn set_access(&self, name: &str, access: Access) -> Result<()> {
        let claimed = self.claim_disk(name).await?;
        self.check_active(name)?;
        if access == Access::ReadOnly {
            self.jobs().check_not_filled(name)?;
        }
        Ok(claimed.disk.disk.set_access(access).await?)
    }
}
