//! A disk that is open, under its name.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockhouse_config::disk::DiskConfig;
use blockhouse_config::limits::LimitsConfig;
use blockhouse_config::threshold::Threshold;
use blockhouse_core::WriteCache;
use blockhouse_disk::{ImageDisk, ImageFormat, LayerInfo};
use blockhouse_engine::HostFile;
use blockhouse_images::CacheMode;
use blockhouse_nbd::ExportBitmap;
use parking_lot::Mutex;
use rustix::fs::OFlags;

use crate::events::room_watch::RoomWatch;

/// A disk that is open.
pub struct RunningDisk {
    /// The configuration with which it was opened.
    pub setup: DiskConfig,
    /// The canonical path of the image that it was opened with.
    pub(super) path: PathBuf,
    /// The image to which a mirror had moved the disk before the hand-over.
    pub(super) moved: Option<Moved>,
    /// The disk.
    pub disk: Arc<ImageDisk>,
    /// The bitmaps that its NBD clients may request.
    pub(super) bitmaps: Vec<ExportBitmap>,
    /// Watches its free space.
    pub(super) room: Arc<RoomWatch>,
    /// See [`configured`](Self::configured).
    pub(super) configured: Mutex<Option<DiskConfig>>,
    /// The name of the group whose limits it shares. Changed while the list is locked.
    pub(super) group: Mutex<Option<String>>,
}

impl RunningDisk {
    /// The name.
    pub fn name(&self) -> &str {
        self.setup.name()
    }

    /// The configuration that would open it in its present state, except its limits.
    pub(crate) fn setup_now(&self) -> DiskConfig {
        DiskConfig { threshold: self.threshold(), ..self.setup.clone() }
    }

    /// The options that the command line or the configuration has for the disk; `None` for one that
    /// a request has opened.
    pub(crate) fn configured(&self) -> Option<DiskConfig> {
        self.configured.lock().clone()
    }

    /// Records the options that the configuration has for the disk.
    pub(super) fn set_configured(&self, options: DiskConfig) {
        *self.configured.lock() = Some(options);
    }

    /// Whether the disk stays open if the configuration replaces its options `old` by `new`. Both
    /// must open it in the same way, but `new` may name the image that has replaced the disk's
    /// image.
    pub(super) fn stays_open(&self, old: &DiskConfig, new: &DiskConfig) -> bool {
        // A backing file that is left out would be missing at the next start.
        let is_whole = !new.without_backing && !new.no_references;
        let is_moved = |moved: Moved| {
            moved.is_in(&new.path)
                && new.format.is_none_or(|format| format == moved.format)
                && [old.cache, moved.cache].contains(&new.cache)
                && new.opens_like(&DiskConfig {
                    path: new.path.clone(),
                    format: new.format,
                    cache: new.cache,
                    data_file: None,
                    ..old.clone()
                })
        };
        old.opens_like(new) || (is_whole && self.moved().is_some_and(is_moved))
    }

    /// The image at a depth of the chain; `None` for an image without a name, which stands in for a
    /// backing file that is left out.
    pub fn layer_at(&self, depth: usize) -> Option<LayerInfo<'_>> {
        self.disk.image().layer_at(depth).filter(|layer| !layer.name.starts_with("/proc/self/fd/"))
    }

    /// Whether NBD clients may request the bitmap of this name.
    pub fn offers_bitmap(&self, name: &str) -> bool {
        self.setup.bitmaps.iter().any(|offered| offered == name)
    }

    /// The bitmaps, requested for an export, that the disk was not opened with: copies, which have
    /// any names, and own ones.
    pub(super) fn added_bitmaps(&self) -> Vec<String> {
        let is_added = |bitmap: &&ExportBitmap| match bitmap {
            ExportBitmap::Fixed { .. } => true,
            ExportBitmap::OfDisk(name) | ExportBitmap::OfChain(name) => !self.offers_bitmap(name),
        };
        self.bitmaps.iter().filter(is_added).map(|bitmap| bitmap.name().to_owned()).collect()
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

    /// The write threshold, in bytes: an event reports that the image uses its storage past this
    /// offset.
    pub fn write_threshold(&self) -> Option<u64> {
        self.room.write_threshold()
    }

    /// The canonical path of the image, or the path of the image that has replaced it.
    pub fn path(&self) -> PathBuf {
        self.moved().map_or_else(|| self.path.clone(), |moved| moved.path)
    }

    /// The image that has replaced the image that the disk was opened with.
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
            // A target that cannot be opened with O_DIRECT uses the page cache.
            cache: match self.setup.cache {
                CacheMode::None if is_cached => with_sync(CacheMode::Writeback),
                cache => with_sync(cache),
            },
        })
    }
}

/// An image that has replaced the image that a disk was opened with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Moved {
    /// The path of the image.
    pub(crate) path: PathBuf,
    /// The format.
    pub(crate) format: ImageFormat,
    /// The use of the host's page cache.
    pub(crate) cache: CacheMode,
}

impl Moved {
    /// Whether this path leads to the image.
    fn is_in(&self, path: &Path) -> bool {
        path == self.path || path.canonicalize().is_ok_and(|path| path == self.path)
    }
}

/// A disk that is going to run.
pub(crate) struct OpenedDisk {
    /// The configuration with which it was opened.
    pub(crate) setup: DiskConfig,
    /// The disk.
    pub(crate) disk: Arc<ImageDisk>,
    /// The state that the process before the hand-over had for it, if there was a hand-over.
    pub(crate) earlier: Option<EarlierLife>,
}

/// The state of a disk in the process that has handed it over.
#[derive(Clone, Debug)]
pub(crate) struct EarlierLife {
    /// The image that it was moved to, if it was.
    pub(crate) moved: Option<Moved>,
    /// The limits that it has.
    pub(crate) limits: LimitsConfig,
    /// The write threshold of its image, in bytes.
    pub(crate) write_threshold: Option<u64>,
}

fn uses_page_cache(file: &HostFile) -> bool {
    let flags = rustix::fs::fcntl_getfl(file.descriptor());
    flags.is_ok_and(|flags| !flags.contains(OFlags::DIRECT))
}
