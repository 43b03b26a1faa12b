//! Bitmaps of an image that is open for writing: requests that end early, and full storages.

use std::rc::Rc;

use blockhouse_core::{ByteRange, ErrorKind, ReadAfterDiscard, errno};
use blockhouse_format::qcow2::{
    BitmapAction, CreateOptions, InheritedBits, NewBitmap, OpenOptions, Qcow2, create,
};
use blockhouse_sim::{Config, Fault, OperationKind, Sim, SimDisk};

use crate::common::{read, write};

const SIZE: u64 = 8 << 20;
/// In the first cluster of bits, with a bit that a coarser bitmap does not have in the same place.
const FIRST: u64 = 5 * 512;
const SECOND: u64 = 5 << 20;

/// 512 bytes of the disk.
fn sector(offset: u64) -> ByteRange {
    ByteRange::between(offset, offset + 512)
}

async fn open(disk: &SimDisk) -> Qcow2<SimDisk> {
    Qcow2::open(disk.clone(), OpenOptions::default()).await.expect("a good image")
}

/// A simulated disk with this content, and its image.
fn opened(content: &[u8]) -> (Sim, SimDisk, Rc<Qcow2<SimDisk>>) {
    let sim = Sim::new(2);
    let disk = SimDisk::new(&sim, Config::default(), content.to_vec());
    let used = disk.clone();
    let image = Rc::new(sim.block_on(async move { open(&used).await }));
    (sim, disk, image)
}

/// An image with an enabled bitmap of several clusters, of which one is allocated.
fn image_with_one_cluster_of_bits() -> Vec<u8> {
    let sim = Sim::new(1);
    let disk = SimDisk::new(&sim, Config::default(), Vec::new());
    let used = disk.clone();
    sim.block_on(async move {
        let options = CreateOptions { cluster_size: 512, ..CreateOptions::new(SIZE) };
        create(&used, &options).await.unwrap();
        let image = open(&used).await;
        let (name, granularity) = ("changes".into(), Some(512));
        image.bitmaps().add(&NewBitmap { name, granularity, is_enabled: true }).await.unwrap();
        image.bitmaps().record(sector(FIRST)).await.unwrap();
        image.close().await.unwrap();
    });
    disk.content()
}

/// Whether the bitmap has a change; `None` if it is known to lack changes.
async fn is_dirty(image: &Qcow2<SimDisk>, range: ByteRange) -> Option<bool> {
    if image.bitmaps().list().await.unwrap()[0].is_inconsistent {
        return None;
    }
    Some(image.bitmaps().extents("changes", range, 1).await.unwrap()[0].is_dirty)
}

/// Whichever write finds no space, and whenever the request ends that makes the bitmap coarser.
#[test]
fn closing_after_a_dropped_coarsening_declares_no_wrong_bitmap_consistent() {
    let (content, mut lost, mut coarser) = (image_with_one_cluster_of_bits(), 0, 0);
    for n in 0..4 {
        for steps in 0.. {
            let (sim, disk, image) = opened(&content);
            disk.fail(Fault::nth(n, errno::ENOSPC).of(OperationKind::Write));
            let change = Rc::clone(&image);
            let task = sim.spawn(async move { change.bitmaps().record(sector(SECOND)).await });
            let is_ended = !(0..steps).all(|_| task.output().is_none() && sim.step());
            task.cancel();
            disk.clear_faults();
            let (is_first, granularity) = sim.block_on(async move {
                image.close().await.unwrap();
                let image = open(&disk).await;
                let granularity = image.bitmaps().list().await.unwrap()[0].granularity;
                (is_dirty(&image, sector(FIRST)).await, granularity)
            });
            assert_ne!(is_first, Some(false), "write {n}, {steps} steps: a change is missing");
            lost += u32::from(is_first.is_none());
            coarser += u32::from(granularity > 512);
            if is_ended {
                break;
            }
        }
    }
    assert!(lost > 0 && coarser > 0, "{lost} lost, {coarser} coarser");
}

/// An image with enabled bitmaps of these names.
async fn with_bitmaps(disk: &SimDisk, names: &[String]) -> Qcow2<SimDisk> {
    create(disk, &CreateOptions::new(SIZE)).await.unwrap();
    let image = open(disk).await;
    for name in names {
        let new = NewBitmap { name: name.clone(), granularity: None, is_enabled: true };
        image.bitmaps().add(&new).await.unwrap();
    }
    image
}

/// With more of them, no change of the disk could be made.
#[test]
fn no_more_enabled_bitmaps_are_inherited_than_can_be_enabled() {
    let sim = Sim::new(1);
    let [source, disk] = [(); 2].map(|()| SimDisk::new(&sim, Config::default(), Vec::new()));
    sim.block_on(async move {
        let names: Vec<String> = (0..64).map(|number| number.to_string()).collect();
        let source = with_bitmaps(&source, &names).await;
        let image = with_bitmaps(&disk, &["another".to_owned()]).await;
        let (bitmaps, source) = (image.bitmaps(), source.bitmaps());
        let error = bitmaps.inherit(&source, &names, InheritedBits::All).await;
        assert_eq!(error.expect_err("one too many").kind(), ErrorKind::InvalidInput);
        bitmaps.record(sector(FIRST)).await.unwrap();
        bitmaps.inherit(&source, &names[1..], InheritedBits::All).await.unwrap();
        bitmaps.record(sector(FIRST)).await.unwrap();
    });
}

/// The space may be missing for the write of the header itself.
#[test]
fn a_removal_that_fails_at_its_switch_reports_the_full_storage() {
    for kind in [OperationKind::Write, OperationKind::Flush] {
        for n in 0.. {
            let sim = Sim::new(1);
            let disk = SimDisk::new(&sim, Config::default(), Vec::new());
            let is_ended = sim.block_on(async move {
                let image = with_bitmaps(&disk, &["changes".to_owned()]).await;
                disk.fail(Fault::nth(n, errno::ENOSPC).of(kind));
                let outcome = image.bitmaps().change("changes", BitmapAction::Remove).await;
                let is_ended = !disk.has_failed();
                if let Err(error) = outcome {
                    assert_eq!(error.kind(), ErrorKind::NoSpace, "{kind:?} {n}: {error}");
                }
                is_ended
            });
            if is_ended {
                break;
            }
        }
    }
}

/// The bitmap is lost while it becomes coarser, and its bits are asked for at any step of that.
#[test]
fn the_extents_of_a_bitmap_that_is_being_lost_are_right_or_refused() {
    let (content, mut refused) = (image_with_one_cluster_of_bits(), 0);
    for (n, m) in (2..5).flat_map(|n| (n + 1..n + 8).map(move |m| (n, m))) {
        for steps in 0.. {
            let (sim, disk, image) = opened(&content);
            disk.fail(Fault::nth(n, errno::ENOSPC).of(OperationKind::Write));
            disk.fail(Fault::nth(m, errno::EIO).of(OperationKind::Write));
            let change = Rc::clone(&image);
            let task = sim.spawn(async move { change.bitmaps().record(sector(SECOND)).await });
            let is_ended = !(0..steps).all(|_| task.output().is_none() && sim.step());
            let asked = Rc::clone(&image);
            let asked = sim
                .spawn(async move { asked.bitmaps().extents("changes", sector(FIRST), 1).await });
            sim.run();
            match asked.output().expect("it never ends") {
                Ok(extents) => assert!(extents[0].is_dirty, "writes {n}, {m}, {steps} steps"),
                Err(_) => refused += 1,
            }
            if is_ended {
                break;
            }
        }
    }
    assert!(refused > 0);
}

fn word(image: &[u8], at: usize) -> usize {
    u64::from_be_bytes(image[at..at + 8].try_into().unwrap()) as usize
}

/// A damaged table of a bitmap refers to a cluster of the guest, whose refcount counts both.
#[test]
fn a_removal_without_space_punches_no_cluster_that_has_another_user() {
    const CLUSTER: usize = 4096;
    let sim = Sim::new(1);
    let disk = SimDisk::new(&sim, Config::default(), Vec::new());
    let used = disk.clone();
    sim.block_on(async move {
        let cluster_size = CLUSTER as u64;
        create(&used, &CreateOptions { cluster_size, ..CreateOptions::new(SIZE) }).await.unwrap();
        let image = open(&used).await;
        let new = NewBitmap { name: "changes".into(), granularity: None, is_enabled: true };
        image.bitmaps().add(&new).await.unwrap();
        write(&image, 0, &[7; CLUSTER], 0).await.unwrap();
        image.bitmaps().change("changes", BitmapAction::Disable).await.unwrap();
        image.close().await.unwrap();
    });
    let mut content = disk.content();
    let magic = 0x2385_2875_u32.to_be_bytes();
    let extension = content[..512].windows(4).position(|window| window == magic).unwrap();
    let table = word(&content, word(&content, extension + 24));
    let guest = content.chunks(CLUSTER).position(|cluster| cluster == [7; CLUSTER]).unwrap();
    content[table..table + 8].copy_from_slice(&((guest * CLUSTER) as u64).to_be_bytes());
    let block = word(&content, word(&content, 48));
    content[block + guest * 2 + 1] = 2;
    for n in 0.. {
        let sim = Sim::new(1);
        let zeros = Config { read_after_discard: ReadAfterDiscard::Zeros, ..Config::default() };
        let disk = SimDisk::new(&sim, zeros, content.clone());
        let is_ended = sim.block_on(async move {
            let image = open(&disk).await;
            disk.fail(Fault::nth(n, errno::ENOSPC).of(OperationKind::Write));
            let _ = image.bitmaps().change("changes", BitmapAction::Remove).await;
            let is_ended = !disk.has_failed();
            let found = read(&image, ByteRange::between(0, CLUSTER as u64), 0).await.unwrap();
            assert!(found == [7; CLUSTER], "write {n}");
            is_ended
        });
        if is_ended {
            break;
        }
    }
}
