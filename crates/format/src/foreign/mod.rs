//! Formats of other programs: what is stored elsewhere can be served, compared and converted, and
//! a disk can be stored in a new image for elsewhere.
//!
//! Guarantees: nothing is ever written to an image that is there. Every field of a header is
//! checked before it is used, and metadata is read page by page when it is needed, so an image
//! takes no more memory than [`tables`] allows, whatever its header states. Guest data that the
//! file does not have, because it was truncated, is an error and never zeros.
//!
//! - [`image`]: the one type that the rest of the crate knows, [`Foreign`]; it asks the format by
//!   one `match`.
//! - A folder for each format: its header, and where the bytes of the disk are ([`piece`]).
//! - [`new_parts`], [`new_image`]: images that are made, each by the `create` of its format.
//! - [`tables`]: pages of metadata in memory, as [`patches`] of a log that was not replayed change
//!   them. [`overlap`]: which blocks a check finds twice.

mod fields;
mod image;
mod new_image;
mod new_parts;
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
pub use image::{Foreign, ForeignKind, replay_vhdx_log};
pub use new_image::NewForeign;
pub use new_parts::{FilePiece, FilePieces, NewForeignOptions, NewParent, Subformat};
pub(crate) use vmdk::descriptor::is_descriptor as is_vmdk_descriptor;
pub use vmdk::{NewVmdkFile, VmdkExtent, VmdkFacts, vmdk_descriptor, vmdk_files};
