//! Formats of other programs: their images can be served, compared and converted, and a disk can be
//! stored in a new image for such a program.
//!
//! Guarantees: an existing image is never written to, except when a caller replays a VHDX log into
//! its file ([`replay_vhdx_log`]). Every field of a header is checked before it is used, and
//! metadata is read page by page when it is needed, so an image takes no more memory than
//! [`tables`] allows, whatever the header states. A read of guest data that is missing because the
//! file was truncated fails; it never returns zeros.
//!
//! - [`image`]: the only type that the rest of the crate uses, [`Foreign`]; it calls the format's
//!   code by a `match`.
//! - A folder for each format: its header, and the locations of the disk's bytes ([`piece`]).
//! - [`new_parts`], [`new_image`]: new images, each made by the `create` module of its format.
//! - [`tables`]: pages of metadata in memory, with the [`patches`] of a log that was not replayed
//!   applied. [`scan`]: whole tables. [`overlap`]: finds blocks that are used twice.

mod fields;
mod image;
mod new_image;
mod new_parts;
mod overlap;
mod patches;
mod piece;
mod refusal;
mod scan;
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
