//! The images of the committed corpus: seeds of `qcow2_open`, and what `qcow2_operations` damages
//! and works on. `cargo run --manifest-path fuzz/Cargo.toml --example make_corpus` makes them.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// The names. New ones go to the end, because inputs of `qcow2_operations` count them.
pub const NAMES: &[&str] = &[
    "qemu-plain",
    "qemu-version-2",
    "qemu-refcounts-1",
    "qemu-refcounts-64",
    "qemu-lazy-dirty",
    "qemu-zlib",
    "qemu-zstd",
    "qemu-subclusters",
    "qemu-snapshots",
    "qemu-bitmaps",
    "qemu-backed",
    "qemu-metadata",
    "ours-plain",
    "ours-4k",
    "ours-version-2",
    "ours-refcounts-2",
    "ours-lazy",
    "ours-subclusters",
    "ours-backed",
    "ours-metadata",
    "ours-grown",
    "ours-bitmaps",
    "ours-bitmaps-killed",
];

/// The folder of a target's committed inputs.
pub fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target)
}

/// The name of an image, by any number.
pub fn name(number: u8) -> &'static str {
    NAMES[usize::from(number) % NAMES.len()]
}

/// An image, by any number.
///
/// # Panics
/// When it is not in the corpus.
pub fn base(number: u8) -> &'static [u8] {
    static IMAGES: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
        let read = |name: &&str| {
            let path = corpus("qcow2_open").join(name);
            std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        };
        NAMES.iter().map(read).collect()
    });
    &IMAGES[usize::from(number) % IMAGES.len()]
}
