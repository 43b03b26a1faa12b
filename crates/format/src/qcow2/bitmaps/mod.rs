//! Persistent dirty bitmaps: which parts of the disk changed since the bitmap was made or cleared.
//!
//! A bitmap has a bit for each `granularity` bytes of the disk. Its bits are in clusters of the
//! image, which its table names; the directory of all bitmaps is a cluster that the header names
//! (`layout/bitmap_directory`). Bitmaps come and go by transactions (`transaction/bitmaps`). While
//! an image is open for writing, changes of the disk are recorded in its enabled bitmaps (`live`),
//! in each before the change is made (`tracker`).
//!
//! Locking: a tracker has a short lock of its own, which is not held over I/O, nor while the
//! image's lock is taken.

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
