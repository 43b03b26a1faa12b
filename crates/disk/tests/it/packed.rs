//! Compressed clusters among everything else that may happen to an image: they share host clusters,
//! are overwritten, discarded and compressed again, side by side. Afterwards the image reads as a
//! flat model says, nothing is leaked, and no crash on the way corrupts it.

use blockhouse_core::{
    Alignment, Buffer, ByteRange, Durability, Fallback, Request, Result, Storage, Unmap,
};
use blockhouse_disk::{BlockStatusCache, CompressResult, Disk, ImageFormat, MapEntryKind, Options};
use blockhouse_format::qcow2::{self, Compression, CreateOptions, Switch, Version};
use blockhouse_sim::{
    Config, Fault, ImageState, OperationKind, Report, Rng, Sim, SimDisk, for_seeds,
};
use futures_util::future::join_all;

use crate::crashed::jury::Jury;

/// The last cluster is cut by the disk's end.
const SIZE: u64 = (1 << 20) + 5 * 512;

/// The work on whole clusters.
#[derive(Clone, Copy, Debug)]
enum Verb {
    Compress,
    Write,
    Zero(Unmap),
    Discard,
}

/// Content that can be compressed more or less, or not at all.
fn content(length: usize, random: &mut Rng) -> Vec<u8> {
    let (noise, byte) = (random.usize(..=length), random.u8(1..));
    let noise = if random.u8(..6) == 0 { length } else { noise / random.usize(1..20) };
    let mut bytes = vec![byte; length];
    bytes[..noise].iter_mut().for_each(|byte| *byte = random.u8(..));
    bytes
}

/// Changes some clusters at the same time, and the model alike. On an error the model may be wrong.
async fn change<S: Storage>(disk: &Disk<S>, model: &mut [u8], random: &mut Rng) -> Result<()> {
    let size = disk.image().cluster_size().expect("qcow2");
    let mut clusters: Vec<u64> = (0..SIZE.div_ceil(size)).collect();
    random.shuffle(&mut clusters);
    let steps = clusters.into_iter().take(8).map(|cluster| {
        let range = ByteRange::between(cluster * size, ((cluster + 1) * size).min(SIZE));
        let verb = match random.u8(..10) {
            0 => Verb::Zero(Unmap::Allowed),
            1 => Verb::Zero(Unmap::Forbidden),
            2 => Verb::Discard,
            3 | 4 => Verb::Write,
            _ => Verb::Compress,
        };
        (range, verb, content(range.length() as usize, random))
    });
    let steps: Vec<_> = steps.collect();
    let requests = steps.iter().map(|(range, verb, bytes)| carry_out(disk, *range, *verb, bytes));
    let outcomes = join_all(requests).await;
    for (range, verb, bytes) in &steps {
        let part = &mut model[range.offset() as usize..range.end() as usize];
        match verb {
            Verb::Compress | Verb::Write => part.copy_from_slice(bytes),
            Verb::Zero(_) | Verb::Discard => part.fill(0),
        }
    }
    outcomes.into_iter().collect()
}

async fn carry_out<S: Storage>(
    disk: &Disk<S>,
    range: ByteRange,
    verb: Verb,
    bytes: &[u8],
) -> Result<()> {
    let durability = Durability::None;
    let request = match verb {
        Verb::Compress => match disk.write_compressed(range.offset(), bytes).await? {
            CompressResult::Compressed => return Ok(()),
            CompressResult::Incompressible => return write(disk, range.offset(), bytes).await,
        },
        Verb::Write => return write(disk, range.offset(), bytes).await,
        Verb::Zero(unmap) => {
            Request::WriteZeroes { range, unmap, fallback: Fallback::Allowed, durability }
        }
        Verb::Discard => Request::Discard { range, durability },
    };
    disk.submit(request).await
}

async fn write<S: Storage>(disk: &Disk<S>, offset: u64, bytes: &[u8]) -> Result<()> {
    let mut buffer = Buffer::new(bytes.len());
    buffer.bytes_mut().copy_from_slice(bytes);
    let durability = Durability::None;
    disk.submit(Request::Write { offset, from: buffer.lend(), durability }).await
}

/// Where the model and the bytes differ first.
fn difference(found: &[u8], model: &[u8]) -> Option<usize> {
    found.iter().zip(model).position(|(one, other)| one != other)
}

/// Options of an image for direct I/O with blocks of `block` bytes.
fn new_image(block: u32, random: &mut Rng) -> CreateOptions {
    let cluster_size = [512, 4096, 16 << 10, 64 << 10][random.usize(..4)].max(u64::from(block));
    let common = CreateOptions { cluster_size, ..CreateOptions::new(SIZE) };
    if random.u8(..8) == 0 {
        return CreateOptions { version: Version::V2, ..common };
    }
    let has_subclusters = cluster_size >= 16 << 10 && random.u8(..4) == 0;
    CreateOptions {
        refcount_bits: [1, 2, 16][random.usize(..3)],
        compression: [Compression::Zlib, Compression::Zstd][random.usize(..2)],
        extended_l2: if has_subclusters { Switch::On } else { Switch::Off },
        ..common
    }
}

#[test]
fn no_crash_and_no_failure_corrupts_what_was_packed() {
    static JURY: Jury = Jury::for_one_in(4);
    let test = "no_crash_and_no_failure_corrupts_what_was_packed";
    for_seeds(env!("CARGO_PKG_NAME"), test, 60, |seed| {
        let sim = Sim::new(seed);
        let mut random = sim.fork_prng();
        let block = [1, 512, 4096, 16 << 10, 64 << 10][random.usize(..5)];
        let alignment = Alignment { offset: block, memory: block.min(512) };
        let file = SimDisk::new(&sim, Config { alignment, ..Config::default() }, Vec::new());
        let inner = sim.clone();
        sim.block_on(async move {
            qcow2::create(&file, &new_image(block, &mut random)).await.expect("a new image");
            let disk = Disk::open(file.clone(), ImageFormat::Qcow2, Options::default())
                .await
                .expect("the image");
            let mut model = vec![0; SIZE as usize];
            for round in 0..12 {
                if random.u8(..4) == 0 {
                    // Only data: a lack of room for a table is another test's.
                    file.fail(Fault::nth(random.u64(..6), 28).of(OperationKind::Write));
                }
                let outcome = change(&disk, &mut model, &mut random).await;
                file.clear_faults();
                let is_known = outcome.is_ok();
                if random.bool() {
                    disk.flush().await.expect("there is room again");
                }
                let left = SimDisk::new(&inner, Config::default(), file.crash(&mut random));
                let again = Disk::open(left, ImageFormat::Qcow2, Options::default())
                    .await
                    .expect("an image");
                let report = again.image().check().await.expect("a check").expect("a qcow2 image");
                assert_eq!(report.corruptions, 0, "round {round}: {report:?}");
                if !is_known {
                    let mut buffer = Buffer::new(SIZE as usize);
                    let into = buffer.lend();
                    let read = disk.submit(Request::Read { offset: 0, into });
                    read.await.expect("nothing fails any more");
                    model.copy_from_slice(buffer.bytes());
                }
            }
            disk.close().await.expect("nothing fails any more");
            let image = file.content();
            let disk = Disk::open(file, ImageFormat::Qcow2, Options::default()).await;
            let disk = disk.expect("an image");
            let report = disk.image().check().await.expect("a check").expect("a qcow2 image");
            assert_eq!((report.corruptions, report.leaks), (0, 0), "{report:?}");
            let mut buffer = Buffer::new(SIZE as usize);
            let into = buffer.lend();
            disk.submit(Request::Read { offset: 0, into }).await.expect("nothing fails any more");
            assert_eq!(difference(buffer.bytes(), &model), None);
            if random.u32(..JURY.one_in()) == 0 {
                JURY.ask(&image, None, ImageState::Closed, &model)?;
            }
            Ok(Report::default())
        })
    });
}

#[test]
fn only_whole_clusters_of_a_format_that_can_are_compressed() {
    let sim = Sim::new(0);
    let file = SimDisk::new(&sim, Config::default(), Vec::new());
    let raw = SimDisk::new(&sim, Config::default(), vec![0; SIZE as usize]);
    sim.block_on(async move {
        qcow2::create(&file, &CreateOptions::new(SIZE)).await.expect("a new image");
        let disk =
            Disk::open(file, ImageFormat::Qcow2, Options::default()).await.expect("the image");
        let bytes = vec![1; 1 << 20];
        for (offset, length) in [(0, 4096), (512, 65_536), (0, 131_072), (1 << 20, 512), (0, 0)] {
            let outcome = disk.write_compressed(offset, &bytes[..length]).await;
            let error = outcome.expect_err("no whole cluster").to_string();
            assert!(error.contains("whole clusters"), "{error}");
        }
        assert_eq!(
            disk.write_compressed(1 << 20, &bytes[..2560]).await.unwrap(),
            CompressResult::Compressed
        );
        let raw = Disk::raw(raw, Options::default()).expect("a disk");
        let error = raw.write_compressed(0, &bytes[..65_536]).await.expect_err("raw").to_string();
        assert!(error.contains("no compressed clusters"), "{error}");
    });
}

#[test]
fn nothing_is_packed_into_a_cluster_that_has_another_owner() {
    let sim = Sim::new(0);
    let file = SimDisk::new(&sim, Config::default(), Vec::new());
    sim.block_on(async move {
        let options = CreateOptions { cluster_size: 4096, ..CreateOptions::new(SIZE) };
        qcow2::create(&file, &options).await.expect("a new image");
        let disk = Disk::open(file.clone(), ImageFormat::Qcow2, Options::default())
            .await
            .expect("the image");
        let place = |offset| {
            let range = ByteRange::between(offset, offset + 4096);
            let disk = &disk;
            async move {
                disk.map_entry(range, &mut BlockStatusCache::default()).await.expect("a place").kind
            }
        };
        // A table for the clusters below, and the first of them is packed.
        write(&disk, 0, &[1; 4096]).await.expect("room");
        assert_eq!(
            disk.write_compressed(4096, &[2; 4096]).await.unwrap(),
            CompressResult::Compressed
        );
        // It goes, and with it the last user of its host cluster, which is taken by data.
        let (range, durability) = (ByteRange::between(4096, 8192), Durability::None);
        disk.submit(Request::Discard { range, durability }).await.expect("no failure");
        disk.flush().await.expect("no failure");
        let before = disk.image().check().await.expect("a check").expect("qcow2").end;
        let data: Vec<u8> = (0..4096).map(|i| i as u8).collect();
        write(&disk, 8192, &data).await.expect("room");
        disk.flush().await.expect("no failure");
        let after = disk.image().check().await.expect("a check").expect("qcow2").end;
        assert_eq!(before, after, "the test is about a cluster that is used again");
        assert_eq!(
            disk.write_compressed(12_288, &[4; 4096]).await.unwrap(),
            CompressResult::Compressed
        );
        assert_eq!(place(12_288).await, MapEntryKind::Compressed);
        let mut buffer = Buffer::new(4096);
        let into = buffer.lend();
        disk.submit(Request::Read { offset: 8192, into }).await.expect("no failure");
        assert_eq!(difference(buffer.bytes(), &data), None);
        disk.close().await.expect("no failure");
        let disk = Disk::open(file, ImageFormat::Qcow2, Options::default()).await;
        let report =
            disk.expect("an image").image().check().await.expect("a check").expect("qcow2");
        assert_eq!((report.corruptions, report.leaks), (0, 0), "{report:?}");
    });
}
