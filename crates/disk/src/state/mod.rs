//! The state file of an image: memory of a server that outlives its process.
//!
//! The state file has the facts that the image lacks after a server is killed: acknowledged changes
//! of the mapping that no writeback has written to the disk (the format's redo log), and whether a
//! flush has failed. The next server reads them. A power loss erases both; docs/durability.md lists
//! the guarantees for this case.
//!
//! - [`StateDir`]: the directory of state files, in memory and of this user alone.
//! - [`StateFile`]: one mapped state file. Its first page is the [`StatePage`], the rest the redo
//!   log.
//! - [`StatePage`]: the image and the boot of the host that the file belongs to, and the record of
//!   writes and failed flushes.
//! - [`FlushRecord`]: the part of the page that a flush tracker reads and writes.
//! - [`ImageIdentity`], [`BootId`]: the identity of a file, and of a boot of the host.
//!
//! The holder of the image's lock owns the state file: a process takes the lock before it opens the
//! state file. So an image that is open without a lock has no state file.
//!
//! The code that opens images (`images/restore`) decides when a state file is made, replayed,
//! refused and removed.

mod dir;
mod file;
mod flush_record;
mod identity;
mod log_memory;
mod page;

pub use dir::StateDir;
pub use file::{FoundState, StateFile};
pub use flush_record::FlushRecord;
pub use identity::{BootId, ImageIdentity, fnv, is_on_fuse};
pub use page::{Owner, StatePage, TrackedFile};
