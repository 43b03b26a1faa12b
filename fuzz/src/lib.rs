//! The common parts of targets: storages in memory, the images that get damaged, the messages of
//! front-ends, and what every one of them must keep to.
#![forbid(unsafe_code)]

pub mod case;
pub mod foreign;
pub mod front_end;
pub mod images;
pub mod memory;
pub mod sparse_file;
pub mod walk;

use blockhouse_core::{Error, ErrorKind};

/// The most memory that working with a small image may take: the largest L1 table as bytes and as
/// words, a table of refcounts, and room for the rest.
const MAX_MEMORY: u64 = 128 << 20;

/// Runs `work`.
///
/// # Panics
/// When it needs more than [`MAX_MEMORY`] at a time.
pub fn in_bounded_memory(work: impl FnOnce()) {
    let used = allocation_counter::measure(work);
    assert!(used.bytes_max <= MAX_MEMORY, "{} bytes of memory at a time", used.bytes_max);
}

/// Damage of an image is reported with its place.
///
/// # Panics
/// When it is not.
pub fn assert_tells_the_place(error: &Error) {
    if matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Unsupported) {
        let text = error.to_string();
        let has_place = text.contains("offset") || text.contains("the file ends after");
        assert!(has_place, "no place in: {error:?}");
    }
}
