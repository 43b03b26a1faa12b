//! Requests to a disk over a damaged image: each ends, with success or an error that names the
//! place, and damage that is found by a change is marked in the image. Without damage nothing
//! fails, reads see what was written, and the image is clean in the end.
#![no_main]
#![allow(
    clippy::arc_with_non_send_sync,
    reason = "a disk stands behind another in an Arc; here all is one thread"
)]
#![forbid(unsafe_code)]

use std::sync::Arc;

use blockhouse_core::{
    Buffer, ByteRange, Durability, Error, ErrorKind, Fallback, Fua, Request, Result, Unmap,
};
use blockhouse_disk::{
    Access, BitmapAction, BlockStatusCache, Discard, Disk, Image, ImageFormat, NewBitmap, Options,
};
use blockhouse_format::qcow2::{self, Qcow2};
use blockhouse_fuzz::case::{Case, Step};
use blockhouse_fuzz::memory::Memory;
use blockhouse_fuzz::walk::read_bitmaps;
use blockhouse_fuzz::{assert_tells_the_place, images, in_bounded_memory};
use blockhouse_sim::{Sim, Task};
use libfuzzer_sys::fuzz_target;

/// Steps from this number on are about bitmaps.
const BITMAP_STEPS: u8 = 128;
/// The step, of 16, that makes the disk longer.
const RESIZE: u8 = 14;
/// How large a disk is made, and how much of it is touched.
const MAX_SIZE: u64 = 1 << 20;

fuzz_target!(|data: &[u8]| {
    let Some(case) = Case::of(data) else { return };
    in_bounded_memory(|| run(case));
});

fn run(case: Case) {
    let sim = Sim::new(case.seed.into());
    let fua = if case.storage & 1 == 0 { Fua::Native } else { Fua::Emulated };
    let block = if case.storage & 2 == 0 { 1 } else { 512 };
    let discard = if case.storage & 4 == 0 { Discard::Unmap } else { Discard::Ignore };
    let storage = Memory::new(&sim, block, fua, case.damaged_image());
    let base = Memory::new(&sim, 1, fua, vec![7; 70 << 10]);
    let options = Options { discard, ..Options::default() };
    let harness = Harness { sim: sim.clone(), storage: storage.clone(), base, options };
    let (is_whole, name) = (case.corruptions.is_empty(), images::name(case.image));
    let found = sim.block_on(async move { harness.work(&case).await });
    let content = storage.content();
    if let Detected::Corruption(error) = &found {
        let is_version_2 = content[4..8] == 2_u32.to_be_bytes();
        let is_marked = content[79] & 2 != 0;
        assert!(is_version_2 || is_marked, "damage is not marked: {error}");
    }
    if is_whole {
        assert_eq!(found, Detected::Nothing, "nothing is damaged");
        // Clusters that were allocated when its process was killed may leak.
        let may_leak = name == "ours-bitmaps-killed";
        let most_leaks = if may_leak { u64::MAX } else { 0 };
        sim.block_on(assert_clean(storage, most_leaks));
    }
}

/// Whether a change has come upon damage of the image.
#[derive(Debug, PartialEq, Eq)]
enum Detected {
    Nothing,
    /// With the error that told it.
    Corruption(String),
}

impl Detected {
    /// The meaning of a change's error. Data that cannot be unpacked is no damage of tables, and
    /// that of bitmaps none of the disk.
    fn by(error: &Error) -> Self {
        assert_tells_the_place(error);
        let text = error.to_string();
        let leaves_disk = ["cannot decompress", "bitmap"];
        match error.kind() {
            ErrorKind::Corrupt if !leaves_disk.iter().any(|part| text.contains(part)) => {
                Self::Corruption(text)
            }
            _ => Self::Nothing,
        }
    }

    fn or(self, other: Self) -> Self {
        if self == Self::Nothing { other } else { self }
    }
}

struct Harness {
    sim: Sim,
    storage: Memory,
    base: Memory,
    options: Options,
}

impl Harness {
    async fn open(&self) -> Result<Arc<Disk<Memory>>> {
        let mut image = Image::open(self.storage.clone(), ImageFormat::Qcow2, self.options).await?;
        if image.backing_file().is_some() {
            let behind = Options { access: Access::ReadOnly, ..Options::default() };
            image = image.with_backing(&Image::raw(self.base.clone(), behind)?);
        }
        Ok(Arc::new(Disk::new(image)))
    }

    async fn work(&self, case: &Case) -> Detected {
        let mut disk = match self.open().await {
            Ok(disk) => disk,
            Err(error) => {
                assert_tells_the_place(&error);
                assert!(!case.corruptions.is_empty(), "a whole image is refused: {error}");
                return Detected::Nothing;
            }
        };
        let mut found = Detected::Nothing;
        let mut running = Vec::new();
        for (number, &step) in case.steps.iter().enumerate() {
            let together = step.flags & 1 == 1 && running.len() < 8;
            if !together {
                found = found.or(join(&mut running).await);
            }
            if step.kind < BITMAP_STEPS && step.kind % 16 == 15 {
                found = found.or(join(&mut running).await);
                found = found.or(close(&disk).await);
                disk = match self.open().await {
                    Ok(disk) => disk,
                    Err(error) => {
                        assert_tells_the_place(&error);
                        assert!(!case.corruptions.is_empty(), "refused when opened again: {error}");
                        return found;
                    }
                };
                continue;
            }
            let (disk, number) = (Arc::clone(&disk), number as u8);
            let is_whole = case.corruptions.is_empty();
            running.push(self.sim.spawn(async move {
                if step.kind >= BITMAP_STEPS {
                    step_on_bitmaps(&disk, step, is_whole).await;
                    return Detected::Nothing;
                }
                match step_on(&disk, step, number, !together && is_whole).await {
                    Ok(()) => Detected::Nothing,
                    Err(error) => {
                        let is_expected = matches!(
                            error.kind(),
                            ErrorKind::NoSpace | ErrorKind::InvalidInput | ErrorKind::PastEnd
                        );
                        assert!(!is_whole || is_expected, "{step:?} of a whole image: {error}");
                        match step.kind % 16 {
                            // With bitmaps it is a transaction, which refuses before it changes
                            // anything.
                            RESIZE => Detected::Nothing,
                            _ => Detected::by(&error),
                        }
                    }
                }
            }));
            if !together {
                found = found.or(join(&mut running).await);
            }
        }
        found = found.or(join(&mut running).await);
        found.or(close(&disk).await)
    }
}

async fn join(running: &mut Vec<Task<Detected>>) -> Detected {
    let mut found = Detected::Nothing;
    for task in running.drain(..) {
        found = found.or(task.join().await);
    }
    found
}

async fn close(disk: &Disk<Memory>) -> Detected {
    match disk.close().await {
        Ok(()) => Detected::Nothing,
        Err(error) => Detected::by(&error),
    }
}

/// Changes or reads the bitmaps. What is damaged in them alone does not mark the image.
async fn step_on_bitmaps(disk: &Disk<Memory>, step: Step, is_whole: bool) {
    let bitmaps = disk.bitmaps();
    let name = |number: u16| ["changes", "two", "three"][usize::from(number) % 3];
    let (name, other) = (name(step.offset), name(step.length));
    let outcome = match step.kind % 8 {
        0 | 1 => {
            let granularity = Some(512 << (step.flags % 8));
            let is_enabled = step.flags & 8 == 0;
            bitmaps.add(&NewBitmap { name: name.into(), granularity, is_enabled }).await.map(|_| ())
        }
        2 => bitmaps.change(name, BitmapAction::Remove).await.map(|_| ()),
        3 => bitmaps.change(name, BitmapAction::Clear).await.map(|_| ()),
        4 => bitmaps.change(name, BitmapAction::Enable).await.map(|_| ()),
        5 => bitmaps.change(name, BitmapAction::Disable).await.map(|_| ()),
        6 => bitmaps.merge(name, disk, other).await.map(|_| ()),
        _ => {
            read_bitmaps(disk).await;
            Ok(())
        }
    };
    if let Err(error) = outcome {
        if error.kind() == ErrorKind::Corrupt {
            assert_tells_the_place(&error);
        }
        let is_expected = matches!(
            error.kind(),
            ErrorKind::NoSpace | ErrorKind::InvalidInput | ErrorKind::Unsupported
        );
        assert!(!is_whole || is_expected, "{step:?} of a whole image: {error}");
    }
}

/// The range that a step names: to the byte, the sector, or many clusters.
fn range_of(disk: &Disk<Memory>, step: Step) -> ByteRange {
    let size = disk.size().min(MAX_SIZE);
    let unit = match step.flags >> 1 & 3 {
        0 => 1,
        1 => disk.image().cluster_size().unwrap_or(512),
        _ => 512,
    };
    let start = u64::from(step.offset) * size / 65536 / unit * unit;
    let length = (u64::from(step.length) * 2).next_multiple_of(unit).min(size - start);
    ByteRange::between(start, start + length)
}

/// Carries one step out. `is_known`: nothing else runs at the same time, and no two places of the
/// disk are one, so that what was written can be seen.
async fn step_on(disk: &Disk<Memory>, step: Step, number: u8, is_known: bool) -> Result<()> {
    let range = range_of(disk, step);
    let durability = match step.flags >> 3 & 3 {
        0 | 1 => Durability::None,
        2 => Durability::Data,
        _ => Durability::Full,
    };
    let unmap = if step.flags & 32 == 0 { Unmap::Allowed } else { Unmap::Forbidden };
    match step.kind % 16 {
        0..=6 => {
            let mut buffer = Buffer::new(range.length() as usize);
            buffer.bytes_mut().fill(number.wrapping_add(1));
            let from = buffer.lend();
            disk.submit(Request::Write { offset: range.offset(), from, durability }).await?;
            if is_known {
                assert_holds(disk, range, number.wrapping_add(1)).await?;
            }
            Ok(())
        }
        7 | 8 => read(disk, range).await.map(|_| ()),
        9 | 10 => {
            let fallback = Fallback::Allowed;
            disk.submit(Request::WriteZeroes { range, unmap, fallback, durability }).await?;
            if is_known {
                assert_holds(disk, range, 0).await?;
            }
            Ok(())
        }
        11 => disk.submit(Request::Discard { range, durability }).await,
        12 => disk.flush().await,
        13 if !range.is_empty() => {
            disk.block_status(range, &mut BlockStatusCache::default()).await.map(|_| ())
        }
        RESIZE => disk.resize((disk.size() + range.length()).min(MAX_SIZE) & !511).await,
        _ => disk.submit(Request::Prefetch { range }).await,
    }
}

async fn read(disk: &Disk<Memory>, range: ByteRange) -> Result<Vec<u8>> {
    let mut buffer = Buffer::new(range.length() as usize);
    disk.submit(Request::Read { offset: range.offset(), into: buffer.lend() }).await?;
    Ok(buffer.bytes().to_vec())
}

/// Written bytes are read, whatever else is damaged.
async fn assert_holds(disk: &Disk<Memory>, range: ByteRange, byte: u8) -> Result<()> {
    let bytes = read(disk, range).await?;
    assert!(bytes.iter().all(|&one| one == byte), "{range} does not hold {byte}");
    Ok(())
}

async fn assert_clean(storage: Memory, most_leaks: u64) {
    let was_full = storage.was_full();
    let options = qcow2::OpenOptions { access: qcow2::Access::ReadOnly, ..Default::default() };
    let image = Qcow2::open(storage, options).await.expect("an image that was closed");
    let report = qcow2::check(&image).await.expect("a storage that reads");
    assert_eq!(report.corruptions, 0, "{:?}", report.problems);
    assert!(was_full || report.leaks <= most_leaks, "{} leaks", report.leaks);
}
