//! The backing layers of an image: the layer that was opened with the image, and its replacements.
//!
//! Guarantees: a read returns the same bytes through each of these layers. Each stays open until
//! the image is dropped, because reads in flight may still use it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use blockhouse_core::{Error, ErrorKind, Result, Storage};
use blockhouse_format::Backing as BackingName;

use super::{Backing, Layer, Stands};
use crate::options::Access;

impl<S: Storage> Layer<S> {
    /// The name of the backing file in the image's header.
    pub fn backing_file(&self) -> Option<&BackingName> {
        let named = self.format.header().backing_file();
        match self.behind.0.get() {
            // No backing file was opened.
            None => named,
            Some(_) => self.behind.now().and_then(|backing| backing.name.as_ref().or(named)),
        }
    }

    /// The backing file of this layer, in the last opening of that file.
    pub fn backing_layer(&self) -> Option<&Arc<Self>> {
        self.behind.now().map(|backing| last(&backing.layer))
    }

    /// The backing file of this layer, for an unallocated cluster; without one, an error.
    pub(super) fn backing(&self) -> Result<&Arc<Self>> {
        self.backing_layer().ok_or_else(|| {
            let what = "the image needs its backing file, which was not opened with it";
            Error::new(ErrorKind::Unsupported, what).on(self.name())
        })
    }

    /// The backing files that were opened for this layer, including those that it no longer uses.
    pub fn opened(&self) -> OpenedLayers<'_, S> {
        OpenedLayers(self)
    }

    /// The images in this process that read through this layer.
    pub fn stands(&self) -> &Stands {
        &self.stands
    }

    /// This layer and its backing files, the nearest first.
    pub fn layers(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |layer| layer.backing_layer().map(|layer| &**layer))
    }
}

/// The last opening of a layer's file.
fn last<S: Storage>(opened: &Arc<Layer<S>>) -> &Arc<Layer<S>> {
    let mut layer = opened;
    while let Some(successor) = layer.successor.get() {
        layer = successor;
    }
    layer
}

/// The backing files that were opened for a layer.
pub struct OpenedLayers<'a, S: Storage>(&'a Layer<S>);

impl<S: Storage> Clone for OpenedLayers<'_, S> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Storage> Copy for OpenedLayers<'_, S> {}

impl<'a, S: Storage> OpenedLayers<'a, S> {
    /// Makes `layer`, which was opened with this `access`, the backing file. To be called once
    /// only.
    pub(crate) fn set(self, layer: Arc<Layer<S>>, access: Access) {
        self.0.format.set_backing_size(layer.size());
        // The chain of `layer` is a part of this layer's chain, so only this layer remembers it.
        layer.remembers_chain.store(false, Ordering::Release);
        layer.stands.enter();
        let next = OnceLock::new();
        // The first backing file stays: a second one would change data that was read already.
        let _ = self.0.behind.0.set(Backing {
            layer,
            access,
            name: None,
            is_counted: AtomicBool::new(true),
            next,
        });
    }

    /// Replaces the backing file by `backing`, another opening of the same file that may write to
    /// it. Reads in flight may use the older one.
    pub(crate) fn replace(self, backing: Arc<Layer<S>>) {
        // A read that begins before the reads in flight have ended may not see this store. The base
        // remembers its own chain.
        self.0.remembers_chain.store(false, Ordering::Release);
        match self.0.backing_layer() {
            // The last opening of the file has no successor yet.
            Some(older) => drop(older.successor.set(backing)),
            None => self.set(backing, Access::ReadWrite),
        }
    }

    /// Skips the layers above `depth`, of which the image needs no data: the layer at `depth`
    /// becomes the image's backing file, with this name. No read may be in flight that looked up a
    /// range before the image contained the range's data.
    pub(crate) fn pass_over(self, depth: usize, name: BackingName) {
        let mut above = self.0;
        for _ in 1..depth {
            let Some(layer) = above.backing_layer() else { return };
            above = layer;
        }
        let Some(backing) = above.behind.now() else { return };
        // A commit may have opened the file of the layer again.
        let (layer, access) = (Arc::clone(last(&backing.layer)), backing.access);
        self.0.format.set_backing_size(layer.size());
        self.0.remembers_chain.store(false, Ordering::Release);
        // A chain that was looked up earlier may have a layer that has been left out since.
        layer.remembers_chain.store(layer.chain.get().is_none(), Ordering::Release);
        // The layer does not count this image: it counts the layer directly above it, which stays
        // open as long as this image.
        let is_counted = AtomicBool::new(false);
        let next = OnceLock::new();
        self.0.behind.leave(Some(Backing { layer, access, name: Some(name), is_counted, next }));
    }

    /// Removes the backing file from this layer. No read may be in flight that looked up a range
    /// before the image contained the range's data.
    pub(crate) fn detach(self) {
        self.0.behind.leave(None);
    }

    /// Removes this image from the count of images over its backing file, if it was
    /// [detached](Self::detach) from that file.
    pub(crate) fn leave_detached(self) {
        if self.0.behind.now().is_none()
            && let Some(first) = self.0.behind.0.get()
        {
            first.leave();
            first.layer.opened().leave_unused();
        }
    }

    /// Removes this layer, if it is unused, from the count of images over its backing file. Then
    /// does the same for the backing file, and so on down the chain.
    pub(crate) fn leave_unused(self) {
        let mut layer = self.0;
        while layer.stands.is_unused()
            && let Some(first) = layer.behind.0.get()
        {
            first.leave();
            layer = &*first.layer;
        }
    }

    /// The current backing file, not its later openings, and its access.
    pub(super) fn first(self) -> Option<(&'a Arc<Layer<S>>, Access)> {
        self.0.behind.now().map(|backing| (&backing.layer, backing.access))
    }

    /// The layer that has these backing files.
    pub(super) fn layer(self) -> &'a Layer<S> {
        self.0
    }

    /// The layer's current backing files, the nearest first.
    pub fn now(self) -> impl Iterator<Item = &'a Arc<Layer<S>>> {
        std::iter::successors(self.0.backing_layer(), |layer| layer.backing_layer())
    }

    /// The layer itself, and all backing files that were opened for it.
    pub(crate) fn all(self) -> impl Iterator<Item = &'a Layer<S>> {
        std::iter::successors(Some(self.0), |layer| {
            layer.behind.0.get().map(|behind| &**last(&behind.layer))
        })
    }

    /// Adds to `found` the layers of [`all`](Self::all) and their former openings that it lacks.
    pub(crate) fn collect_openings(self, found: &mut Vec<&'a Layer<S>>) {
        let mut rest = vec![self.0];
        while let Some(layer) = rest.pop() {
            if !found.iter().any(|one| std::ptr::eq(*one, layer)) {
                found.push(layer);
                // A later backing file (`pass_over`) is in the chain of the first one.
                rest.extend(layer.behind.0.get().map(|behind| &*behind.layer));
                rest.extend(layer.successor.get().map(|successor| &**successor));
            }
        }
    }

    /// As [`all`](Self::all), each layer with the number of earlier layers of this list that it
    /// counts as overlays: 0 or 1. The first one has 1.
    pub(crate) fn all_counted(self) -> impl Iterator<Item = (&'a Layer<S>, usize)> {
        let first = self.0.behind.0.get();
        let behind = std::iter::successors(first, |one| last(&one.layer).behind.0.get());
        let behind = behind
            .map(|one| (&**last(&one.layer), usize::from(one.is_counted.load(Ordering::SeqCst))));
        std::iter::once((self.0, 1)).chain(behind)
    }

    /// The backing files that the layer no longer uses and that have no other image over them, the
    /// nearest first.
    pub(crate) fn left_alone(self) -> impl Iterator<Item = &'a Layer<S>> {
        let left = self.left().count();
        let all = self.all_counted().skip(1).take(left);
        all.take_while(|(layer, own)| layer.stands.count() <= *own).map(|(layer, _)| layer)
    }

    /// Makes all these layers look up unallocated ranges layer by layer from now on.
    pub(crate) fn forget_chains(self) {
        self.all().for_each(|layer| layer.remembers_chain.store(false, Ordering::Release));
    }

    /// The backing files that the layer no longer uses.
    pub(crate) fn left(self) -> impl Iterator<Item = &'a Layer<S>> {
        let now = self.0.backing_layer().map(Arc::as_ptr);
        self.all().skip(1).take_while(move |layer| now != Some(std::ptr::from_ref(*layer)))
    }

    /// Whether other images use this layer's backing file, or use a former backing file that reads
    /// through the current one.
    pub fn are_shared(self) -> bool {
        let behind = self.0.backing_layer().map(|layer| &**layer);
        self.left().chain(behind).any(|layer| layer.stands.count() > 1)
    }
}
