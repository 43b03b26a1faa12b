//! The current image of a disk, to which requests go, and its earlier images.
//!
//! An image can be replaced while its [`Disk`](super::Disk) is in use: users keep the same `Disk`.
//! A replaced image stays in memory and its files stay open until the disk is dropped, because
//! requests that read from it may still be in flight.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use blockhouse_core::Storage;

use crate::image::{Image, UseGuard};
use crate::layer::Layer;

/// All images of a disk, from the first to the current one, each with its base (`B`) if it has one.
/// Images are never removed from the list.
pub(crate) struct Images<S: Storage, B>(Link<S, B>);

/// An image of a disk, and the image that has replaced it.
pub(super) struct Link<S: Storage, B> {
    image: Arc<Image<S>>,
    /// Whether the image has the same file as the image before it: the file was opened again, or
    /// the recording of changes in a side file has begun or ended.
    is_same_file: bool,
    /// The disk of the image's backing file, if that file is open for writing.
    pub(super) base: OnceLock<B>,
    next: OnceLock<Box<Self>>,
}

impl<S: Storage, B> Link<S, B> {
    fn new(image: Arc<Image<S>>, is_same_file: bool) -> Self {
        Self { image, is_same_file, base: OnceLock::new(), next: OnceLock::new() }
    }

    pub(super) fn image(&self) -> &Arc<Image<S>> {
        &self.image
    }
}

impl<S: Storage, B> Images<S, B> {
    pub(super) fn new(image: Arc<Image<S>>) -> Self {
        image.layer().stands().enter_disk();
        Self(Link::new(image, false))
    }

    /// The image that the disk was opened with; its layer counts the disk's requests.
    pub(super) fn first(&self) -> &Image<S> {
        &self.0.image
    }

    /// The image that requests go to.
    pub(super) fn last(&self) -> &Link<S, B> {
        let mut link = &self.0;
        while let Some(next) = link.next.get() {
            link = next;
        }
        link
    }

    /// Sends requests to `image` from now on; returns the replaced image. No change of the disk may
    /// be in flight, and no other task may replace its image.
    pub(super) fn replace(&self, image: Arc<Image<S>>, is_same_file: bool) -> &Link<S, B> {
        let replaced = self.last();
        image.layer().stands().enter_disk();
        // The last image has no successor yet.
        let _ = replaced.next.set(Box::new(Link::new(image, is_same_file)));
        replaced.image.layer().stands().leave_disk();
        replaced
    }

    fn links(&self) -> impl Iterator<Item = &Link<S, B>> {
        std::iter::successors(Some(&self.0), |link| link.next.get().map(|next| &**next))
    }

    /// The number of replaced images.
    pub(crate) fn count_replaced(&self) -> usize {
        self.links().count() - 1
    }

    /// Whether an image with another file has replaced the first one.
    pub(super) fn is_replaced(&self) -> bool {
        self.links().skip(1).any(|link| !link.is_same_file)
    }

    /// The layers of all images, the last one included.
    pub(super) fn layers(&self) -> impl Iterator<Item = &Layer<S>> {
        self.links().map(|link| &**link.image.layer())
    }

    /// The layers of all images and each opening of the files behind them, also of those that were
    /// replaced. Each layer is listed once; layers are never removed.
    pub(super) fn all_openings(&self) -> Vec<&Layer<S>> {
        let mut found = Vec::new();
        self.layers().for_each(|layer| layer.opened().collect_openings(&mut found));
        found
    }

    /// Whether `image` is one of the disk's images.
    pub(super) fn contains(&self, image: &Arc<Image<S>>) -> bool {
        self.links().any(|link| Arc::ptr_eq(&link.image, image))
    }

    /// The layers of replaced images, and detached backing files, except layers that the disk uses
    /// now.
    pub(crate) fn former_layers(&self) -> impl Iterator<Item = &Layer<S>> {
        let now = self.last().image.layer();
        let is_used = |layer: &Layer<S>| now.layers().any(|one| std::ptr::eq(one, layer));
        self.layers().flat_map(|layer| layer.opened().all()).filter(move |layer| !is_used(layer))
    }

    /// Stops counting replaced images as users of their backing files, except images through which
    /// other images read.
    pub(crate) fn leave_replaced(&self) {
        self.layers().for_each(|layer| layer.opened().leave_unused());
    }

    /// As [`former_layers`](Self::former_layers), except layers that are backing files of another
    /// disk.
    pub(crate) fn left_layers(&self) -> impl Iterator<Item = &Layer<S>> {
        let is_shared = |layer: &Layer<S>| {
            // Another disk's overlay over a layer needs the layer's whole backing chain.
            self.layers().any(|top| {
                let all = top.opened().all_counted();
                let mut shared = all.skip_while(|(one, own)| one.stands().count() <= *own);
                shared.any(|(one, _)| std::ptr::eq(one, layer))
            })
        };
        self.former_layers().filter(move |layer| !is_shared(layer))
    }
}

impl<S: Storage, B> Drop for Images<S, B> {
    fn drop(&mut self) {
        self.last().image.layer().stands().leave_disk();
    }
}

/// The image that was a disk's current one when this guard was made. The image stays open until the
/// guard is dropped, even if another image replaces it.
pub(crate) struct ImageUse<'a, S: Storage> {
    pub(super) image: &'a Image<S>,
    pub(super) _guard: UseGuard<'a>,
}

impl<S: Storage> Deref for ImageUse<'_, S> {
    type Target = Image<S>;

    fn deref(&self) -> &Image<S> {
        self.image
    }
}
