//! The errors for faults of an image, with the offset and a hint. The caller adds the file's name.

use std::borrow::Cow;

use blockhouse_core::{Error, ErrorKind};

/// The image contradicts itself at `offset` of its file.
pub(super) fn corrupt(what: impl Into<Cow<'static, str>>, offset: u64) -> Error {
    let hint = "it is damaged, or was truncated: restore it from a copy";
    Error::new(ErrorKind::Corrupt, what).at(offset).hint(hint)
}

/// The signature of a `what` is missing at `offset`.
pub(super) fn other_signature(what: &str, offset: u64) -> Error {
    let hint = "say which format it has (--format, of a backing file -F), or restore it from a copy if that is its format";
    let what = format!("is no {what}: it has another signature");
    Error::new(ErrorKind::Corrupt, what).at(offset).hint(hint)
}

/// The field at `offset` requires an unsupported feature.
pub(super) fn unsupported(what: impl Into<Cow<'static, str>>, offset: u64) -> Error {
    let hint = "convert it, with the program that made it, to an image without this feature";
    Error::new(ErrorKind::Unsupported, what).at(offset).hint(hint)
}

/// The field at `offset` states that the image holds only the differences from another image.
pub(super) fn has_parent(offset: u64) -> Error {
    let what = "holds only what differs from a parent image, which is not supported";
    let hint = "merge it into its parent with the program that made it";
    Error::new(ErrorKind::Unsupported, what).at(offset).hint(hint)
}
