//! Formats of other programs, for reading only: what is stored elsewhere can be served, compared
//! and converted.
//!
//! Guarantees: nothing is ever written to such an image. Every field of a header is checked before
//! it is used, and metadata is read page by page when it is needed, so an image takes no more
//! memory than [`tables`] allows, whatever its header states. Guest data that the file does not
//! have, because it was truncated, is an error and never zeros.
//!
//! - [`image`]: the one type that the rest of the crate knows, [`Foreign`]; it asks the format by
//!   one `match`.
//! - A folder for each format: its header, and where the bytes of the disk are ([`piece`]).
//! - [`tables`]: pages of metadata in memory, as [`patches`] of a log that was not replayed change
//!   them. [`overlap`]: which blocks a check finds twice.

mod fields;
mod image;
mod overlap;
mod patches;
mod piece;
mod refusal;
mod tables;
mod vdi;
mod vhdx;
mod vmdk;
mod vpc;

pub(crate) use image::refuse_writing;
pub use image::{Foreign, ForeignKind};
pub(crate) use vmdk::descriptor::is_descriptor as is_vmdk_descriptor;
pub use vmdk::{VmdkExtent, VmdkFacts};
