//! The images that a disk has had: requests go to the last one.
//!
//! A [`Disk`](super::Disk) stays what its users hold; another image can take the place of the one
//! below it. What was replaced stays in memory and its files stay open until the disk is dropped,
//! because requests that read from it may still be in flight.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use blockhouse_core::Storage;

use crate::image::{Image, UseGuard};
use crate::layer::Layer;

/// All images of a disk, the first one first, each with its base (`B`) if it has one. The list only
/// becomes longer.
pub(crate) struct Images<S: Storage, B>(Link<S, B>);

/// An image of a disk, and the one that has replaced it.
pub(super) struct Link<S: Storage, B> {
    image: Arc<Image<S>>,
    /// Whether it is over the same file as the one before: recording its changes beside the file
    /// has begun or ended.
    is_same_file: bool,
    /// The disk of its backing file, once that is open for writing.
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

    /// Sends requests to another image from now on; returns the replaced one. No change of the disk
    /// may be in flight, and no other task may replace its image.
    pub(super) fn replace(&self, image: Arc<Image<S>>, is_same_file: bool) -> &Link<S, B> {
        let replaced = self.last();
        // It is the last one.
        let _ = replaced.next.set(Box::new(Link::new(image, is_same_file)));
        replaced
    }

    fn links(&self) -> impl Iterator<Item = &Link<S, B>> {
        std::iter::successors(Some(&self.0), |link| link.next.get().map(|next| &**next))
    }

    /// How many images were replaced.
    pub(crate) fn count_replaced(&self) -> usize {
        self.links().count() - 1
    }

    /// Whether another image has taken the place of the first one.
    pub(super) fn is_replaced(&self) -> bool {
        self.links().skip(1).any(|link| !link.is_same_file)
    }

    /// The layers of all images, the last one included.
    pub(super) fn layers(&self) -> impl Iterator<Item = &Layer<S>> {
        self.links().map(|link| &**link.image.layer())
    }

    /// Whether it is one of them.
    pub(super) fn contains(&self, image: &Arc<Image<S>>) -> bool {
        self.links().any(|link| Arc::ptr_eq(&link.image, image))
    }

    /// The layers that the disk has left: those of images that were replaced, and backing files
    /// that were detached. Without those that it uses now.
    pub(crate) fn former_layers(&self) -> impl Iterator<Item = &Layer<S>> {
        let now = self.last().image.layer();
        let is_used = |layer: &Layer<S>| now.layers().any(|one| std::ptr::eq(one, layer));
        self.layers().flat_map(|layer| layer.opened().all()).filter(move |layer| !is_used(layer))
    }

    /// As [`former_layers`](Self::former_layers), without those that are backing files of another
    /// disk.
    pub(crate) fn left_layers(&self) -> impl Iterator<Item = &Layer<S>> {
        let is_shared = |layer: &Layer<S>| {
            // An overlay needs its whole backing chain.
            self.layers().any(|top| {
                let all = top.opened().all_counted();
                let mut shared = all.skip_while(|(one, own)| one.stands().count() <= *own);
                shared.any(|(one, _)| std::ptr::eq(one, layer))
            })
        };
        self.former_layers().filter(move |layer| !is_shared(layer))
    }
}

/// The image that a disk's requests go to, or went to when this was made: it stays open until this
/// is dropped.
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
