//! Images of other programs' formats, on a simulated storage.

use blockhouse_core::{Alignment, ByteRange, ErrorKind, ExtentState, Result, ToolProgress};
use blockhouse_format::{
    Access, BitmapActivity, Discard, ForeignKind, Format, ImageFormat, Intent, OpenOptions,
};
use blockhouse_sim::{Config, Sim, SimDisk};

/// A table in which no entry of data comes twice: an image with such a table is refused.
pub fn distinct<T: Copy + PartialEq>(table: &[T], hole: T, is_data: impl Fn(T) -> bool) -> Vec<T> {
    let is_repeated =
        |index: usize| is_data(table[index]) && table[..index].contains(&table[index]);
    let entry = |index| if is_repeated(index) { hole } else { table[index] };
    (0..table.len()).map(entry).collect()
}

/// Asserts that a read of any data of an image, which begins with data, is refused, because two of
/// its blocks share data.
pub async fn assert_shared(format: &Format<SimDisk>) {
    for start in [0, format.size() - 512] {
        let range = ByteRange::between(start, start + 512);
        let error = match format.map(range, Intent::Read).await {
            Ok(extent) => {
                assert!(start > 0 && extent.state == ExtentState::Zero, "{extent:?}");
                continue;
            }
            Err(error) => error,
        };
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        let text = error.to_string();
        assert!(text.contains("share the data") || text.contains("overlap"), "{text}");
    }
}

/// Asserts that exactly `expected` blocks of an image reach past the end of its file, and that a
/// read of `range` is refused if there is one.
pub async fn assert_lacks(format: &Format<SimDisk>, range: ByteRange, expected: u64) {
    let read = format.map(range, Intent::Read).await;
    assert_eq!(read.is_err(), expected > 0, "{read:?}");
    let report = format.check(&ToolProgress::default()).await.unwrap().expect("a report");
    assert_eq!(report.corruptions, expected, "{:?}", report.problems);
    assert!(report.problems.iter().all(|problem| problem.contains("past the end of the file")));
}

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
