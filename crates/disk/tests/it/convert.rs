//! Copies on simulated storages: whatever the formats, the faults and the moment of a crash, a copy
//! that says it is complete is the source byte for byte, and one that is not can be resumed.

use std::sync::Arc;

use blockhouse_core::{Alignment, Buffer, ByteRange, Durability, Request, Result, ToolProgress};
use blockhouse_disk::{
    AfterCommit, CompareJob, Compress, CopyJob, CopyOptions, Disk, Image, ImageFormat, Options,
    STREAM_PIECE, StreamOptions, TargetContent, commit_overlay, copy_stream, prepare_rebase,
};
use blockhouse_format::qcow2::{
    self, Backing, Compression, CreateOptions, Preallocation, Switch, Version,
};
use blockhouse_sim::{
    Config, Fault, Operation, OperationKind, Report, Rng, Sim, SimDisk, for_seeds,
};
use futures_util::stream;

const ENOSPC: i32 = 28;
const EIO: i32 = 5;
/// Some pieces and a bit.
const MAX_SIZE: u64 = 5 << 20;

type Opened = Arc<Disk<SimDisk>>;

/// Stretches of one byte, of noise and of zeros.
fn content(random: &mut Rng) -> Vec<u8> {
    let size = random.u64(1..=MAX_SIZE / 512) * 512;
    let mut bytes = vec![0; size as usize];
    for _ in 0..random.usize(..12) {
        let start = random.usize(..bytes.len());
        let most = [2000, 40_000, 900_000][random.usize(..3)];
        let end = (start + random.usize(1..=most)).min(bytes.len());
        match random.u8(..3) {
            0 => bytes[start..end].iter_mut().for_each(|byte| *byte = random.u8(..)),
            1 => bytes[start..end].fill(random.u8(1..)),
            _ => bytes[start..end].fill(0),
        }
    }
    bytes
}

/// The kind of a new image; `None` is raw.
fn kind(size: u64, random: &mut Rng) -> Option<CreateOptions> {
    if random.u8(..4) == 0 {
        return None;
    }
    let is_old = random.u8(..5) == 0;
    let is_extended = !is_old && random.u8(..5) == 0;
    let sizes = if is_extended { [64 << 10, 2 << 20] } else { [4096, 64 << 10] };
    let zstd = !is_old && random.bool();
    Some(CreateOptions {
        cluster_size: [sizes[0], sizes[1], 2 << 20][random.usize(..3)],
        version: if is_old { Version::V2 } else { Version::V3 },
        refcount_bits: if is_old { 16 } else { [1, 2, 16, 64][random.usize(..4)] },
        extended_l2: if is_extended { Switch::On } else { Switch::Off },
        lazy_refcounts: if !is_old && random.u8(..5) == 0 { Switch::On } else { Switch::Off },
        compression: if zstd { Compression::Zstd } else { Compression::Zlib },
        ..CreateOptions::new(size)
    })
}

fn any_blocks(random: &mut Rng) -> Config {
    let block = [1, 512, 4096][random.usize(..3)];
    Config { alignment: Alignment { offset: block, memory: block.min(512) }, ..Config::default() }
}

async fn open(storage: SimDisk, kind: Option<&CreateOptions>) -> Result<Disk<SimDisk>> {
    match kind {
        None => Disk::raw(storage, Options::default()),
        Some(_) => Disk::open(storage, ImageFormat::Qcow2, Options::default()).await,
    }
}

/// A new image that reads as zeros.
async fn create(storage: &SimDisk, kind: Option<&CreateOptions>) -> Disk<SimDisk> {
    if let Some(options) = kind {
        qcow2::create(storage, options).await.expect("a new image");
    }
    open(storage.clone(), kind).await.expect("the new image")
}

/// A new image over another one.
async fn create_over(
    storage: &SimDisk,
    options: &CreateOptions,
    base: &Image<SimDisk>,
) -> Disk<SimDisk> {
    qcow2::create(storage, options).await.expect("a new image");
    let image = Image::open(storage.clone(), ImageFormat::Qcow2, Options::default()).await;
    Disk::new(image.expect("the new image").with_backing(base))
}

fn storage(sim: &Sim, config: Config, kind: Option<&CreateOptions>, size: u64) -> SimDisk {
    let length = if kind.is_some() { 0 } else { size };
    SimDisk::new(sim, config, vec![0; length as usize])
}

/// A disk with that content: raw, qcow2, or qcow2 over raw.
async fn source(sim: &Sim, bytes: &[u8], random: &mut Rng) -> Opened {
    let size = bytes.len() as u64;
    let raw =
        || Disk::raw(SimDisk::new(sim, Config::default(), bytes.to_vec()), Options::default());
    match random.u8(..3) {
        0 => Arc::new(raw().expect("a disk")),
        1 => {
            let options = CreateOptions::new(size);
            let file = storage(sim, Config::default(), Some(&options), 0);
            let disk = create(&file, Some(&options)).await;
            let mut buffer = Buffer::new(bytes.len());
            buffer.bytes_mut().copy_from_slice(bytes);
            let (from, durability) = (buffer.lend(), Durability::None);
            disk.submit(Request::Write { offset: 0, from, durability }).await.expect("room");
            Arc::new(disk)
        }
        _ => {
            let backing = Backing { name: b"base".to_vec(), format: Some("raw".into()) };
            let options = CreateOptions { backing: Some(backing), ..CreateOptions::new(size) };
            let top = storage(sim, Config::default(), Some(&options), 0);
            Arc::new(create_over(&top, &options, raw().expect("a disk").image()).await)
        }
    }
}

fn options(
    target_content: TargetContent,
    kind: Option<&CreateOptions>,
    random: &mut Rng,
) -> CopyOptions {
    let compress = kind.is_some() && random.bool();
    CopyOptions { target_content, compress, max_in_flight: random.usize(1..=4) }
}

/// Copies with as many workers as there may be threads.
async fn copy(
    sim: &Sim,
    from: &Opened,
    to: &Opened,
    how: CopyOptions,
    workers: usize,
) -> Result<u64> {
    let copying = Arc::new(CopyJob::new(Arc::clone(from), Arc::clone(to), how)?);
    let begin = |_| {
        let copying = Arc::clone(&copying);
        sim.spawn(async move { copying.work().await })
    };
    let mut outcome = Ok(());
    for worker in (0..workers).map(begin).collect::<Vec<_>>() {
        outcome = outcome.and(worker.join().await);
    }
    outcome?;
    let progress = copying.progress();
    assert_eq!(progress.done, progress.total);
    Ok(progress.written)
}

async fn difference(one: &Opened, other: &Opened) -> Option<u64> {
    let comparing = CompareJob::new(Arc::clone(one), Arc::clone(other), 3);
    comparing.work().await.expect("nothing fails here");
    comparing.difference()
}

/// Runs a check for many seeds, each in a simulation of its own.
fn simulate<F: Future<Output = ()> + 'static>(
    test: &str,
    seeds: u64,
    check: impl Fn(Sim, Rng) -> F + Sync,
) {
    for_seeds(env!("CARGO_PKG_NAME"), test, seeds, |seed| {
        let sim = Sim::new(seed);
        let random = sim.fork_prng();
        sim.block_on(check(sim.clone(), random));
        Ok(Report::default())
    });
}

#[test]
fn a_copy_is_durable_and_equal_and_a_changed_byte_is_found() {
    let test = "a_copy_is_durable_and_equal_and_a_changed_byte_is_found";
    simulate(test, 60, |sim, mut random| async move {
        let bytes = content(&mut random);
        let from = source(&sim, &bytes, &mut random).await;
        let kind = kind(from.size(), &mut random);
        let file = storage(&sim, any_blocks(&mut random), kind.as_ref(), from.size());
        let to = Arc::new(create(&file, kind.as_ref()).await);
        let how = options(TargetContent::Zero, kind.as_ref(), &mut random);
        copy(&sim, &from, &to, how, random.usize(1..=2)).await.expect("nothing fails here");
        to.close().await.expect("nothing fails here");
        drop(to);
        let left = SimDisk::new(&sim, Config::default(), file.crash(&mut random));
        let again = Arc::new(open(left, kind.as_ref()).await.expect("what was closed"));
        if let Some(report) = again.image().check().await.expect("a check") {
            assert_eq!((report.corruptions, report.leaks), (0, 0), "{report:?} {kind:?} {how:?}");
        }
        assert_eq!(difference(&from, &again).await, None, "{kind:?} {how:?}");
        let at = random.usize(..bytes.len());
        let mut byte = Buffer::new(1);
        byte.bytes_mut()[0] = bytes[at] ^ 1;
        let (from_byte, durability) = (byte.lend(), Durability::None);
        let change = Request::Write { offset: at as u64, from: from_byte, durability };
        again.submit(change).await.expect("nothing fails here");
        assert_eq!(difference(&again, &from).await, Some(at as u64));
    });
}

#[test]
fn a_part_is_copied_from_any_offset() {
    let test = "a_part_is_copied_from_any_offset";
    simulate(test, 60, |sim, mut random| async move {
        let bytes = content(&mut random);
        let from = source(&sim, &bytes, &mut random).await;
        let first = random.usize(..bytes.len());
        let length = random.usize(..=bytes.len() - first);
        let size = (length as u64).next_multiple_of(512).max(512);
        let kind = kind(size, &mut random);
        let file = storage(&sim, any_blocks(&mut random), kind.as_ref(), size);
        let to = Arc::new(create(&file, kind.as_ref()).await);
        let part = ByteRange::between(first as u64, (first + length) as u64);
        // The target's own content is compared with the part, too.
        let content = [TargetContent::Zero, TargetContent::Unknown][random.usize(..2)];
        let how = CopyOptions { target_content: content, compress: false, max_in_flight: 3 };
        let copying = CopyJob::of_parts(vec![(Arc::clone(&from), part)], Arc::clone(&to), how);
        let copying = copying.expect("it has room");
        copying.work().await.expect("nothing fails here");
        assert_eq!(copying.progress().done, length as u64);
        let mut read = Buffer::new(size as usize);
        let into = read.lend();
        to.submit(Request::Read { offset: 0, into }).await.expect("nothing fails here");
        let (copied, rest) = read.bytes().split_at(length);
        assert!(*copied == bytes[first..first + length], "{part:?} {kind:?} {how:?}");
        assert!(rest.iter().all(|&byte| byte == 0), "{part:?} {kind:?} {how:?}");
        let past = ByteRange::between(first as u64, bytes.len() as u64 + 1);
        assert!(CopyJob::of_parts(vec![(from, past)], to, how).is_err(), "past the end");
    });
}

#[test]
fn parts_of_several_disks_follow_each_other() {
    let test = "parts_of_several_disks_follow_each_other";
    simulate(test, 60, |sim, mut random| async move {
        let (mut expected, mut parts) = (Vec::new(), Vec::new());
        for _ in 0..random.usize(1..4) {
            let bytes = content(&mut random);
            let from = source(&sim, &bytes, &mut random).await;
            let first = random.usize(..bytes.len()) / 512 * 512;
            let end = first + random.usize(..=bytes.len() - first) / 512 * 512;
            expected.extend_from_slice(&bytes[first..end]);
            parts.push((from, ByteRange::between(first as u64, end as u64)));
        }
        let size = (expected.len() as u64).max(512);
        let kind = kind(size, &mut random);
        let file = storage(&sim, any_blocks(&mut random), kind.as_ref(), size);
        let to = Arc::new(create(&file, kind.as_ref()).await);
        let content = [TargetContent::Zero, TargetContent::Unknown][random.usize(..2)];
        let compress = to.image().compression().is_some() && random.bool();
        let how = CopyOptions { target_content: content, compress, max_in_flight: 3 };
        let copying = CopyJob::of_parts(parts, Arc::clone(&to), how).expect("it has room");
        copying.work().await.expect("nothing fails here");
        let progress = copying.progress();
        assert_eq!((progress.done, progress.total), (expected.len() as u64, expected.len() as u64));
        let mut read = Buffer::new(size as usize);
        let into = read.lend();
        to.submit(Request::Read { offset: 0, into }).await.expect("nothing fails here");
        assert!(read.bytes()[..expected.len()] == expected[..], "{kind:?} {how:?}");
    });
}

#[test]
fn a_copy_that_failed_is_gone_on_with() {
    let test = "a_copy_that_failed_is_gone_on_with";
    simulate(test, 60, |sim, mut random| async move {
        let bytes = content(&mut random);
        let from = source(&sim, &bytes, &mut random).await;
        let kind = kind(from.size(), &mut random);
        let config = any_blocks(&mut random);
        let file = storage(&sim, config.clone(), kind.as_ref(), from.size());
        let to = Arc::new(create(&file, kind.as_ref()).await);
        let how = options(TargetContent::Zero, kind.as_ref(), &mut random);
        let errno = [ENOSPC, EIO][random.usize(..2)];
        file.fail(Fault::nth(random.u64(..12), errno).of(OperationKind::Write));
        let outcome = copy(&sim, &from, &to, how, random.usize(1..=2)).await;
        if let Err(error) = &outcome {
            assert_eq!(error.errno(), errno, "{error}");
        }
        // May fail as well, and the program ends.
        let closed = to.close().await;
        drop(to);
        let is_complete = outcome.is_ok() && closed.is_ok();
        let left = SimDisk::new(&sim, config, file.content());
        let again = Arc::new(open(left, kind.as_ref()).await.expect("a part of a copy"));
        let report = again.image().check().await.expect("a check");
        assert!(report.is_none_or(|report| report.corruptions == 0), "{kind:?} {how:?}");
        let how = CopyOptions { target_content: TargetContent::Unknown, ..how };
        let written = copy(&sim, &from, &again, how, 2).await.expect("nothing fails any more");
        assert!(written == 0 || !is_complete, "what was right was written again");
        assert_eq!(difference(&from, &again).await, None, "{kind:?} {how:?}");
    });
}

#[test]
fn a_crash_in_the_middle_corrupts_nothing() {
    let test = "a_crash_in_the_middle_corrupts_nothing";
    simulate(test, 40, |sim, mut random| async move {
        let bytes = content(&mut random);
        let from = source(&sim, &bytes, &mut random).await;
        let kind = std::iter::repeat_with(|| kind(from.size(), &mut random)).flatten().next();
        let file = storage(&sim, any_blocks(&mut random), kind.as_ref(), 0);
        let to = Arc::new(create(&file, kind.as_ref()).await);
        to.flush().await.expect("nothing fails here");
        let how = options(TargetContent::Zero, kind.as_ref(), &mut random);
        let copying = Arc::new(CopyJob::new(Arc::clone(&from), Arc::clone(&to), how).unwrap());
        let copying = sim.spawn(async move { copying.work().await });
        while copying.output().is_none() {
            sim.sleep(std::time::Duration::from_micros(random.u64(1..2000))).await;
            if random.bool() {
                to.flush().await.expect("nothing fails here");
            }
            let left = SimDisk::new(&sim, Config::default(), file.crash(&mut random));
            let again = Arc::new(open(left, kind.as_ref()).await.expect("a part of a copy"));
            let report = again.image().check().await.expect("a check").expect("a qcow2 image");
            assert_eq!(report.corruptions, 0, "{report:?} {kind:?} {how:?}");
            if random.u8(..4) == 0 {
                let how = CopyOptions { target_content: TargetContent::Unknown, ..how };
                copy(&sim, &from, &again, how, 1).await.expect("nothing fails here");
                assert_eq!(difference(&from, &again).await, None, "{kind:?} {how:?}");
            }
        }
    });
}

#[test]
fn what_maps_show_as_zeros_is_neither_read_nor_written() {
    let sim = Sim::new(0);
    let (config, size) = (Config::default(), 64_u64 << 20);
    let options = CreateOptions::new(size);
    let one = SimDisk::new(&sim, config.clone(), Vec::new());
    let two = SimDisk::new(&sim, config, Vec::new());
    let (from_file, to_file) = (one.clone(), two.clone());
    let inner = sim.clone();
    sim.block_on(async move {
        let from = Arc::new(create(&one, Some(&options)).await);
        let mut buffer = Buffer::new(64 << 10);
        buffer.bytes_mut().fill(7);
        let (from_bytes, durability) = (buffer.lend(), Durability::None);
        let write = Request::Write { offset: 9 << 20, from: from_bytes, durability };
        from.submit(write).await.expect("nothing fails here");
        let to = Arc::new(create(&two, Some(&options)).await);
        one.take_log();
        two.take_log();
        let how =
            CopyOptions { target_content: TargetContent::Zero, compress: false, max_in_flight: 4 };
        copy(&inner, &from, &to, how, 2).await.expect("nothing fails here");
    });
    let bytes = |log: Vec<Operation>, kind| -> u64 {
        let wanted = log.into_iter().filter(|one| one.kind() == kind);
        wanted.filter_map(|one| one.range()).map(|range| range.length()).sum()
    };
    assert_eq!(bytes(from_file.take_log(), OperationKind::Read), 64 << 10);
    // The data, and the place of the one new table, which is got from the host before it is begun.
    assert_eq!(bytes(to_file.take_log(), OperationKind::Write), 128 << 10);
}

#[test]
fn zeros_that_are_written_like_data_take_space_whatever_the_target_had() {
    const SIZE: u64 = 4 << 20;
    for target_content in [TargetContent::Zero, TargetContent::Unknown] {
        for is_stream in [false, true] {
            let sim = Sim::new(0);
            let inner = sim.clone();
            sim.block_on(async move {
                let options = CreateOptions::new(SIZE);
                let new = || SimDisk::new(&inner, Config::default(), Vec::new());
                let to = Arc::new(create(&new(), Some(&options)).await);
                if is_stream {
                    let pieces = [STREAM_PIECE; 2].map(|length| Ok(Buffer::new(length)));
                    let how = StreamOptions {
                        target_content,
                        compress: false,
                        writes_zeros: true,
                        resize: false,
                    };
                    let pieces = Box::pin(stream::iter(pieces));
                    copy_stream(&to, pieces, how, &ToolProgress::default()).await.expect("room");
                } else {
                    let from = Arc::new(create(&new(), Some(&options)).await);
                    let how = CopyOptions { target_content, compress: false, max_in_flight: 4 };
                    let copying = CopyJob::new(from, Arc::clone(&to), how).expect("room");
                    let copying = copying.writing_zeros();
                    copying.work().await.expect("room");
                    assert_eq!(copying.progress().written, SIZE);
                }
                let mut rest = ByteRange::between(0, SIZE);
                while !rest.is_empty() {
                    let (depth, length) = to.allocation_depth(rest).await.expect("no failure");
                    assert_eq!(depth, 1, "{target_content:?}, {is_stream}: {rest:?}");
                    rest = rest.skip(length);
                }
            });
        }
    }
}

/// The bytes of a disk whose clusters all have a place.
const PREALLOCATED: u64 = 32 << 20;

/// A disk whose clusters all have a place; only the one at 9 MiB was written to.
async fn preallocated(sim: &Sim) -> (SimDisk, Opened) {
    let preallocation = Preallocation::Metadata;
    let options = CreateOptions { preallocation, ..CreateOptions::new(PREALLOCATED) };
    let file = SimDisk::new(sim, Config::default(), Vec::new());
    let disk = create(&file, Some(&options)).await;
    let mut buffer = Buffer::new(64 << 10);
    buffer.bytes_mut().fill(7);
    let (from, durability) = (buffer.lend(), Durability::None);
    disk.submit(Request::Write { offset: 9 << 20, from, durability }).await.expect("room");
    disk.flush().await.expect("no failure");
    file.take_log();
    (file, Arc::new(disk))
}

/// An overlay with nothing of its own.
async fn overlay(sim: &Sim, base: &Opened) -> Disk<SimDisk> {
    let backing = Backing { name: b"base".to_vec(), format: Some("qcow2".into()) };
    let options = CreateOptions { backing: Some(backing), ..CreateOptions::new(PREALLOCATED) };
    let file = SimDisk::new(sim, Config::default(), Vec::new());
    create_over(&file, &options, base.image()).await
}

/// The bytes of data that were read, without tables, and how often the host was asked for holes.
fn reads_and_questions(file: &SimDisk) -> (u64, usize) {
    let log = file.take_log();
    let of = |kind| log.iter().filter(move |one| one.kind() == kind);
    let long = of(OperationKind::Read).filter_map(|one| one.range()).map(|range| range.length());
    (long.filter(|&length| length > 4096).sum(), of(OperationKind::Status).count())
}

#[test]
fn holes_of_the_host_file_below_mapped_clusters_are_not_read() {
    let sim = Sim::new(0);
    let inner = sim.clone();
    sim.block_on(async move {
        let (one_file, one) = preallocated(&inner).await;
        let (other_file, other) = preallocated(&inner).await;
        let target = CreateOptions::new(PREALLOCATED);
        let target_file = SimDisk::new(&inner, Config::default(), Vec::new());
        let to = Arc::new(create(&target_file, Some(&target)).await);
        let how =
            CopyOptions { target_content: TargetContent::Zero, compress: false, max_in_flight: 4 };
        copy(&inner, &one, &to, how, 2).await.expect("nothing fails here");
        // One question for each run: hole, data, hole.
        assert_eq!(reads_and_questions(&one_file), (64 << 10, 3), "convert");

        assert_eq!(difference(&one, &other).await, None);
        assert_eq!(reads_and_questions(&one_file), (64 << 10, 3), "compare");
        assert_eq!(reads_and_questions(&other_file), (64 << 10, 3), "compare");

        let top = overlay(&inner, &one).await;
        prepare_rebase(&top, Some(&other), Compress::Nothing, &ToolProgress::default())
            .await
            .expect("nothing fails here");
        assert_eq!(reads_and_questions(&one_file), (64 << 10, 3), "rebase");
        assert_eq!(reads_and_questions(&other_file), (64 << 10, 3), "rebase");

        let raw = SimDisk::new(&inner, Config::default(), vec![1; PREALLOCATED as usize]);
        let base = Disk::raw(raw.clone(), Options::default()).expect("a disk");
        commit_overlay(&one, &base, AfterCommit::Empty, &ToolProgress::default())
            .await
            .expect("nothing fails here");
        assert_eq!(reads_and_questions(&one_file), (64 << 10, 3), "commit");
        let content = raw.content();
        let wanted = |at: usize| if at >> 16 == (9 << 20) >> 16 { 7 } else { 0 };
        let is_right = |at: usize| content[at] == wanted(at) && content[at + 4095] == wanted(at);
        assert!((0..PREALLOCATED as usize).step_by(4096).all(is_right));
    });
}

#[test]
fn copies_that_cannot_be_are_refused() {
    let sim = Sim::new(0);
    let raw = |size| {
        let file = SimDisk::new(&sim, Config::default(), vec![0; size]);
        Arc::new(Disk::raw(file, Options::default()).unwrap())
    };
    let how =
        CopyOptions { target_content: TargetContent::Zero, compress: false, max_in_flight: 1 };
    let error = CopyJob::new(raw(1024), raw(512), how).err().unwrap().to_string();
    assert!(error.contains("512") && error.contains("1024"), "{error}");
    let how = CopyOptions { compress: true, ..how };
    let error = CopyJob::new(raw(512), raw(512), how).err().unwrap().to_string();
    assert!(error.contains("raw"), "{error}");
}
