//! Persistent dirty bitmaps: which parts of the disk changed since the bitmap was made or cleared.
//!
//! A bitmap has a bit for each `granularity` bytes of the disk. Its bits are in clusters of the image, which its
//! table names; the directory of all bitmaps is a cluster that the header names (`layout/bitmap_directory`).
//! Bitmaps come and go by transactions (`transaction/bitmaps`).

mod bits;
mod reader;

pub(crate) use bits::{BitRuns, set_bits};
pub(crate) use reader::{Bits, BitsReader};
