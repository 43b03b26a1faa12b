//! The state file of an image: memory of a server that outlives its process.
//!
//! After a server is killed, the next one finds in the state file what the image lacks:
//! acknowledged changes of the mapping that no writeback has brought to the disk (the format's redo
//! log), and whether a flush has failed. A loss of power voids both; docs/durability.md says what
//! holds then.
//!
//! - [`StateDir`]: where state files are, a directory in memory that belongs to this user alone.
//! - [`StateFile`]: one of them, mapped. Its first page is the [`StatePage`], the rest the redo
//!   log.
//! - [`StatePage`]: which image and which boot of the host the file belongs to, and what flushes
//!   need.
//! - [`FlushRecord`]: what of it a flush tracker reads and writes.
//! - [`ImageIdentity`], [`BootId`]: what makes a file the same one, and a boot the same one.
//!
//! The image's lock decides who holds a state file: it is taken before the state file is looked at.
//! So an image that is open without a lock has none.
//!
//! When a state file is made, replayed, refused and removed is decided where images are opened
//! (`open/restore`).

mod dir;
mod file;
mod flush_record;
mod identity;
mod log_memory;
mod page;

pub use dir::StateDir;
pub(crate) use file::{FoundState, StateFile};
pub(crate) use flush_record::FlushRecord;
pub(crate) use identity::BootId;
pub(crate) use identity::ImageIdentity;
pub(crate) use page::{Owner, StatePage, TrackedFile};
