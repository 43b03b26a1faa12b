//! The backing files that this process has open for its disks: each is open once, however many
//! disks are over it, with one set of descriptors, locks, tables and buffers.
//!
//! Guarantees: a disk gets a layer that is open already only if opening it anew by the disk's
//! options would open the same chain, and not once its locks are about to be given to a writer.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Weak};

use blockhouse_format::ImageFormat;
use blockhouse_storage::ImageStorage;
use parking_lot::Mutex;

use super::allowed_paths::AllowedPaths;
use super::handed_over::SharedLayer;
use super::image_disk::StoredImage;
use super::image_options::{CacheMode, ImageOptions, Locking, Purpose, RemoteBacking};
use super::open_location::Identity;
use crate::layer::Layer;
use crate::options::Access;

/// So many entries are looked through each time for those that are closed.
const FEW: usize = 64;

/// By the file of the image.
static OPEN: LazyLock<Mutex<HashMap<Identity, Vec<OpenLayer>>>> = LazyLock::new(Mutex::default);

/// A layer, and how it was opened.
struct OpenLayer {
    layer: Weak<Layer<ImageStorage>>,
    terms: Terms,
}

/// The options of a disk that decide how its backing files are opened.
#[derive(Clone, PartialEq)]
struct Terms {
    access: Access,
    cache: CacheMode,
    remote_backing: RemoteBacking,
    allowed_paths: AllowedPaths,
    /// Where state of a server that died is looked for.
    state: Option<PathBuf>,
}

impl Terms {
    /// `None` where nothing is shared.
    fn of(options: &ImageOptions) -> Option<Self> {
        let is_shared = options.purpose == Purpose::Disk && options.locking == Locking::Held;
        is_shared.then(|| Self {
            access: options.access,
            cache: options.cache,
            remote_backing: options.remote_backing,
            allowed_paths: options.allowed_paths.clone(),
            state: options.state.directory().map(|dir| dir.path().to_owned()),
        })
    }
}

/// The layer of a file that is open already, for a disk with these options, if no more than `room`
/// files are behind it.
pub(super) fn find(
    identity: Option<Identity>,
    format: Option<ImageFormat>,
    options: &ImageOptions,
    room: usize,
) -> Option<SharedLayer> {
    let terms = Terms::of(options)?;
    let open = OPEN.lock();
    let mut layers = open.get(&identity?)?.iter();
    layers.find_map(|open| {
        let layer = open.layer.upgrade().filter(|_| open.terms == terms)?;
        let has_format = layer.format().name().parse().ok() == format;
        let fits = has_format && layer.opened().now().count() <= room;
        if fits { SharedLayer::of(layer) } else { None }
    })
}

/// Notes the backing files of an image that was opened by these options, the nearest first, as far
/// as they were opened for it.
pub(super) fn note(
    image: &StoredImage,
    files: impl Iterator<Item = Option<Identity>>,
    options: &ImageOptions,
) {
    let Some(terms) = Terms::of(options) else { return };
    let mut open = OPEN.lock();
    for (layer, identity) in image.layer().opened().now().zip(files) {
        let Some(identity) = identity else { continue };
        // A key is of one disk.
        if layer.layers().any(|one| one.format().is_encrypted()) {
            continue;
        }
        if open.len() < FEW || open.len().is_power_of_two() {
            open.retain(|_, layers| layers.iter().any(|one| one.layer.strong_count() > 0));
        }
        let layers = open.entry(identity).or_default();
        layers.retain(|one| one.layer.strong_count() > 0);
        layers.push(OpenLayer { layer: Arc::downgrade(layer), terms: terms.clone() });
    }
}
