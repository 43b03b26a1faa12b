//! Persistent dirty bitmaps: they record which parts of the disk changed since a bitmap was made or
//! cleared.
//!
//! A bitmap has a bit for each `granularity` bytes of the disk. Its bits are in clusters of the
//! image, to which its table refers; the header refers to the directory of all bitmaps
//! (`layout/bitmap_directory`). Transactions add and remove bitmaps (`transaction/bitmaps`). While
//! an image is open for writing, each change of the disk is recorded in all enabled bitmaps
//! (`live`) before the change is made (`tracker`).
//!
//! Locking: a tracker has its own lock, which is held for short times only, never during I/O, and
//! never while the image's lock is acquired.

mod bits;
mod live;
mod number_map;
mod page;
mod reader;
mod side_file;
mod status;
mod tracker;

pub(crate) use bits::{BitRuns, clear_bits, set_bits};
pub use live::{BitmapLoss, BitmapLossObserver};
pub(crate) use live::{LiveBitmaps, MAX_LIVE};
pub(crate) use reader::{Bits, BitsReader};
pub use status::BitmapExtent;
pub(crate) use status::extents_of;
