//! Requests whose bytes are in the kernel's pages.

use blockhouse_core::Storage;

use crate::image::Image;
use crate::options::DetectZeroes;

/// Whether an image usually moves a request's bytes without touching them, so that they can stay in
/// the kernel's pages ([`KernelPages`](blockhouse_core::KernelPages)). Any image carries out such
/// requests. With encryption, with detection of zeros, and without a local file, each of them costs
/// a copy.
pub fn takes_kernel_pages<S: Storage>(image: &Image<S>) -> bool {
    let layer = image.layer();
    image.options.detect_zeroes == DetectZeroes::Off
        && !layer.is_encrypted()
        && layer.data().takes_kernel_pages()
}
