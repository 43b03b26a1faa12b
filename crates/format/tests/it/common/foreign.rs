//! Images of other programs' formats, on a simulated storage.

use blockhouse_core::{Alignment, Result};
use blockhouse_format::{
    Access, BitmapActivity, Discard, ForeignKind, Format, ImageFormat, OpenOptions,
};
use blockhouse_sim::{Config, Sim, SimDisk};

/// A storage that holds `bytes`, and is read by sectors.
pub fn storage(sim: &Sim, bytes: Vec<u8>) -> SimDisk {
    let alignment = Alignment { offset: 512, memory: 1 };
    SimDisk::new(sim, Config { alignment, ..Config::default() }, bytes)
}

/// Opens an image of this kind.
pub async fn open(sim: &Sim, kind: ForeignKind, bytes: Vec<u8>) -> Result<Format<SimDisk>> {
    let options = OpenOptions {
        access: Access::ReadOnly,
        discard: Discard::Unmap,
        bitmap_activity: BitmapActivity::DEFAULT,
    };
    Format::open(storage(sim, bytes), ImageFormat::Foreign(kind), options).await
}
