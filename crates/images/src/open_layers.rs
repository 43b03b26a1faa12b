//! The backing files that this process has open for its disks. Disks share an open backing file,
//! with one set of descriptors, locks, metadata and buffers.
//!
//! Guarantees: a disk shares an open layer only if opening the layer anew with the disk's options
//! would open the same chain, and only if no writer is about to get the layer's locks.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock, Weak};

use blockhouse_core::Storage;
use blockhouse_disk::{Access, Layer, StoredImage};
use blockhouse_engine::HostFile;
use blockhouse_format::ImageFormat;
use blockhouse_storage::ImageStorage;
use parking_lot::Mutex;

use crate::chain::Chain;
use crate::handed_over::SharedLayer;
use crate::image_options::{CacheMode, ImageOptions, Locking, Purpose};
use crate::open_location::{Identity, identity_of};

/// A new entry removes the entries of closed layers only if there are fewer entries than this, or
/// their number is a power of two.
const FEW: usize = 64;

/// The open layers, by the identity of the image's file.
static OPEN: LazyLock<Mutex<HashMap<Identity, Vec<OpenLayer>>>> = LazyLock::new(Mutex::default);

/// A layer, and how it was opened.
struct OpenLayer {
    layer: Weak<Layer<ImageStorage>>,
    /// The folder from which the names in the image were looked up.
    folder: Identity,
    terms: Terms,
}

/// The options of a disk that decide how its backing files are opened.
#[derive(Clone, PartialEq)]
struct Terms {
    access: Access,
    cache: CacheMode,
    allowed_paths: Vec<PathBuf>,
    /// The directory that is searched for the state files of killed servers.
    state: Option<PathBuf>,
}

impl Terms {
    /// `None` if a disk with these options shares no layers.
    fn of(options: &ImageOptions) -> Option<Self> {
        let is_shared = options.purpose == Purpose::Disk
            && options.locking == Locking::Held
            && !options.allowed_paths.are_only();
        is_shared.then(|| Self {
            access: options.access,
            cache: options.cache,
            allowed_paths: options.allowed_paths.paths().map(Path::to_owned).collect(),
            state: options.state.directory().map(|dir| dir.path().to_owned()),
        })
    }
}

/// The layer of the last file of `chain`, if it is open already in the way in which a disk with
/// these options would open it.
pub(crate) fn find(
    chain: &Chain,
    format: Option<ImageFormat>,
    options: &ImageOptions,
) -> Option<SharedLayer> {
    let (terms, folder) = (Terms::of(options)?, folder_of(chain.last_path())?);
    let open = OPEN.lock();
    let mut layers = open.get(&chain.files().last()?.1?)?.iter();
    layers.find_map(|open| {
        let layer = open.layer.upgrade()?;
        let is_same = open.folder == folder && open.terms == terms;
        let has_format = layer.format().name().parse().ok() == format;
        let has_room = layer.opened().now().count() <= chain.room();
        let fits = is_same && has_format && has_room && has_its_files(&layer);
        if fits { SharedLayer::of(layer) } else { None }
    })
}

/// Whether the names of a layer's backing files still lead to the same files.
fn has_its_files(layer: &Layer<ImageStorage>) -> bool {
    layer.opened().now().all(|layer| {
        let file = layer.format().storage().storage().as_file();
        let is_it = |file: &HostFile| identity_at(Path::new(file.name())) == identity_of(file).ok();
        file.is_some_and(is_it)
    })
}

/// Records the backing files of an image that was opened with these options, so that other disks
/// can share them. Only the first `count` backing files of `chain` were opened for this image.
pub(crate) fn note(image: &StoredImage, chain: &Chain, count: usize, options: &ImageOptions) {
    let Some(terms) = Terms::of(options) else { return };
    let mut open = OPEN.lock();
    let files = chain.files().skip(1).take(count);
    for (layer, (path, identity)) in image.layer().opened().now().zip(files) {
        let folder = folder_of(path);
        let (Some(identity), Some(folder)) = (identity, folder) else { continue };
        // Encrypted layers are not shared: a key belongs to one disk.
        if layer.layers().any(|one| one.format().is_encrypted()) {
            continue;
        }
        if open.len() < FEW || open.len().is_power_of_two() {
            open.retain(|_, layers| layers.iter().any(|one| one.layer.strong_count() > 0));
        }
        let layers = open.entry(identity).or_default();
        layers.retain(|one| one.layer.strong_count() > 0);
        layers.push(OpenLayer { layer: Arc::downgrade(layer), folder, terms: terms.clone() });
    }
}

fn folder_of(path: &Path) -> Option<Identity> {
    let parent = path.parent()?;
    identity_at(if parent.as_os_str().is_empty() { Path::new(".") } else { parent })
}

fn identity_at(path: &Path) -> Option<Identity> {
    let found = std::fs::metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}
