//! A disk that is open, under its name.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, bail};
use blockhouse_config::disk::DiskConfig;
use blockhouse_config::limits::LimitsConfig;
use blockhouse_config::threshold::Threshold;
use blockhouse_core::WriteCache;
use blockhouse_disk::{CacheMode, ImageDisk, ImageFormat, LayerInfo};
use blockhouse_engine::HostFile;
use blockhouse_nbd::ExportBitmap;
use parking_lot::Mutex;
use rustix::fs::OFlags;

use crate::events::room_watch::RoomWatch;

/// A disk that is open.
pub(crate) struct RunningDisk {
    /// How it was opened.
    pub(crate) setup: DiskConfig,
    /// The canonical path of the image that it was opened with.
    pub(super) path: PathBuf,
    /// The path to which a mirror had moved it before the hand-over.
    pub(super) moved: Option<Moved>,
    /// The disk.
    pub(crate) disk: Arc<ImageDisk>,
    /// The bitmaps that its NBD clients may request.
    pub(super) bitmaps: Vec<ExportBitmap>,
    /// Watches its free space.
    pub(super) room: Arc<RoomWatch>,
    /// The name of the group whose limits it shares. Changed while the list is locked.
    pub(super) group: Mutex<Option<String>>,
}

impl RunningDisk {
    /// Its name.
    pub(crate) fn name(&self) -> &str {
        self.setup.name()
    }

    /// The configuration that would open it in its present state, except its limits.
    pub(crate) fn setup_now(&self) -> DiskConfig {
        DiskConfig { threshold: self.threshold(), ..self.setup.clone() }
    }

    /// The image at a depth of the chain, but none in the place of a backing file that is left out:
    /// that has no name.
    pub(crate) fn layer_at(&self, depth: usize) -> Option<LayerInfo<'_>> {
        self.disk.image().layer_at(depth).filter(|layer| !layer.name.starts_with("/proc/self/fd/"))
    }

    /// Whether NBD clients may request the bitmap of this name.
    pub(crate) fn offers_bitmap(&self, name: &str) -> bool {
        self.setup.bitmaps.iter().any(|offered| offered == name)
    }

    /// Refuses to remove a bitmap that NBD clients may request.
    pub(crate) fn check_bitmap_unused(&self, name: &str) -> Result<()> {
        if self.offers_bitmap(name) {
            bail!(
                "the disk {:?} offers the bitmap {name:?} to NBD clients; open the disk without it first",
                self.name()
            );
        }
        Ok(())
    }

    /// The limits that apply.
    pub(crate) fn limits(&self) -> LimitsConfig {
        let group = self.group.lock().clone();
        match self.disk.throttle().group() {
            Some(throttle) => LimitsConfig::of(group, throttle.limits()),
            None => LimitsConfig::default(),
        }
    }

    /// The free space on the host below which an event is reported.
    pub(crate) fn threshold(&self) -> Option<Threshold> {
        self.room.threshold()
    }

    /// The end of the image's use of its storage, in bytes, past which an event reports it.
    pub(crate) fn write_threshold(&self) -> Option<u64> {
        self.room.write_threshold()
    }

    /// The canonical path of the image, or of the one that it has moved to.
    pub(crate) fn path(&self) -> PathBuf {
        self.moved().map_or_else(|| self.path.clone(), |moved| moved.path)
    }

    /// The image that has replaced the one that it was opened with.
    pub(crate) fn moved(&self) -> Option<Moved> {
        if !self.disk.is_replaced() {
            return self.moved.clone();
        }
        let is_cached = self.disk.image().file().is_some_and(uses_page_cache);
        // An overlay of a device without a write cache makes every write durable.
        let is_durable = self.disk.capabilities().write_cache == WriteCache::None;
        let is_overlay = is_durable && self.disk.image().backing_file().is_some();
        let with_sync = |cache: CacheMode| if is_overlay { cache.write_through() } else { cache };
        Some(Moved {
            path: PathBuf::from(self.disk.image().image_name()),
            format: self.disk.image().image_format_name().parse().ok()?,
            // A target that cannot be opened around the page cache goes through it.
            cache: match self.setup.cache {
                CacheMode::None if is_cached => with_sync(CacheMode::Writeback),
                cache => with_sync(cache),
            },
        })
    }
}

/// An image that has replaced the one that a disk was opened with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Moved {
    /// Where it is.
    pub(crate) path: PathBuf,
    /// Its format.
    pub(crate) format: ImageFormat,
    /// The host's cache.
    pub(crate) cache: CacheMode,
}

/// A disk that is going to run.
pub(crate) struct OpenedDisk {
    /// How it was opened.
    pub(crate) setup: DiskConfig,
    /// The disk.
    pub(crate) disk: Arc<ImageDisk>,
    /// Its past in the process that has handed it over.
    pub(crate) earlier: Option<EarlierLife>,
}

/// The past of a disk in another process.
#[derive(Clone, Debug)]
pub(crate) struct EarlierLife {
    /// Where it was moved.
    pub(crate) moved: Option<Moved>,
    /// The limits that it has.
    pub(crate) limits: LimitsConfig,
    /// The use of its image's storage above which an event reports it.
    pub(crate) write_threshold: Option<u64>,
}

fn uses_page_cache(file: &HostFile) -> bool {
    let flags = rustix::fs::fcntl_getfl(file.descriptor());
    flags.is_ok_and(|flags| !flags.contains(OFlags::DIRECT))
}
