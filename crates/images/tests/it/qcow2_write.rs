//! qcow2 images of QEMU's making, changed through a disk on a host file by requests side by side:
//! `qemu-img check` finds nothing, and QEMU reads the bytes of a flat model.

use std::path::Path;

use blockhouse_core::{Buffer, ByteRange, Durability, Fallback, Request, Unmap};
use blockhouse_disk::Access;
use blockhouse_images::{CacheMode, ImageOptions};
use blockhouse_sim::{Report, Rng, for_seeds};
use futures_util::future::join_all;

use crate::qemu::{Folder, block_on, convert, create, options, read_all, run, scribble};
use crate::require_qemu;

/// Not a multiple of most cluster sizes.
const SIZE: u64 = (3 << 20) + 5 * 512;

/// The options that images are made with; those with a backing file get one of this many bytes.
const KINDS: [(&str, Option<u64>); 9] = [
    ("cluster_size=64k", None),
    ("cluster_size=4k,refcount_bits=1", None),
    ("cluster_size=2M", None),
    ("compat=0.10", Some(SIZE)),
    ("lazy_refcounts=on", Some(1 << 20)),
    ("extended_l2=on", Some(SIZE + (1 << 20))),
    ("extended_l2=on,cluster_size=2M", Some(2 << 20)),
    ("preallocation=metadata", None),
    ("refcount_bits=64,cluster_size=8k", Some((2 << 20) - 512)),
];

fn writing(cache: CacheMode) -> ImageOptions {
    ImageOptions { access: Access::ReadWrite, ..options(cache) }
}

/// One request and its memory.
struct Step {
    range: ByteRange,
    verb: Verb,
    buffer: Buffer,
}

#[derive(Clone, Copy)]
enum Verb {
    Read,
    Write(u8),
    Zero(Unmap),
    Discard,
}

/// Steps that share clusters but no byte, in any order.
fn batch(random: &mut Rng) -> Vec<Step> {
    let unit = if random.bool() { 512 } else { 1 };
    let mut steps = Vec::new();
    let mut next = random.u64(..SIZE / 2 / unit) * unit;
    while steps.len() < 8 {
        let most = [40 << 10, 600 << 10][usize::from(random.u8(..4) == 0)];
        let start = next + random.u64(..3) * random.u64(..20_000) / unit * unit;
        let end = (start + random.u64(1..=most / unit) * unit).min(SIZE);
        if start >= end {
            break;
        }
        next = end;
        let verb = match random.u8(..10) {
            0 | 1 => Verb::Read,
            2 => Verb::Zero(Unmap::Allowed),
            3 => Verb::Zero(Unmap::Forbidden),
            4 => Verb::Discard,
            _ => Verb::Write(random.u8(1..)),
        };
        let range = ByteRange::between(start, end);
        steps.push(Step { range, verb, buffer: Buffer::new(range.length() as usize) });
    }
    random.shuffle(&mut steps);
    steps
}

fn request(step: &mut Step, random: &mut Rng) -> Request {
    let (range, offset) = (step.range, step.range.offset());
    let durability =
        [Durability::None, Durability::None, Durability::Data, Durability::Full][random.usize(..4)];
    match step.verb {
        Verb::Read => Request::Read { offset, into: step.buffer.lend() },
        Verb::Write(byte) => {
            step.buffer.bytes_mut().fill(byte);
            Request::Write { offset, from: step.buffer.lend(), durability }
        }
        Verb::Zero(unmap) => {
            Request::WriteZeroes { range, unmap, fallback: Fallback::Allowed, durability }
        }
        Verb::Discard => Request::Discard { range, durability },
    }
}

/// Changes the image and the model alike.
fn change(image: &Path, cache: CacheMode, model: &mut [u8], random: &mut Rng) {
    block_on(async {
        let disk = blockhouse_images::open(image, writing(cache)).await.unwrap();
        for _ in 0..10 {
            let mut steps = batch(random);
            let requests: Vec<_> = steps.iter_mut().map(|step| request(step, random)).collect();
            let outcomes = join_all(requests.into_iter().map(|one| disk.submit(one))).await;
            outcomes.into_iter().for_each(|outcome| outcome.expect("nothing fails here"));
            for Step { range, verb, buffer } in steps {
                let bytes = &mut model[range.offset() as usize..range.end() as usize];
                match verb {
                    Verb::Read => assert!(buffer.bytes() == bytes, "what {range} reads as"),
                    Verb::Write(byte) => bytes.fill(byte),
                    Verb::Zero(_) => bytes.fill(0),
                    Verb::Discard => {
                        let mut now = Buffer::new(bytes.len());
                        let read = Request::Read { offset: range.offset(), into: now.lend() };
                        disk.submit(read).await.unwrap();
                        bytes.copy_from_slice(now.bytes());
                    }
                }
            }
            if random.u8(..4) == 0 {
                disk.flush().await.unwrap();
            }
        }
        disk.close().await.unwrap();
    });
}

fn expect_clean_and_equal(image: &Path, model: &[u8]) -> Result<(), String> {
    run("qemu-img", &["check", "-q", "-f", "qcow2", image.to_str().unwrap()]);
    let raw = image.with_extension("found");
    convert(&["-O", "raw"], image, &raw);
    let found = std::fs::read(&raw).unwrap();
    match found.iter().zip(model).position(|(one, other)| one != other) {
        None if found.len() == model.len() => Ok(()),
        None => Err(format!("{} bytes instead of {}", found.len(), model.len())),
        Some(at) => Err(format!("byte {at} is {} and not {}", found[at], model[at])),
    }
}

#[test]
fn what_we_write_is_what_qemu_reads() {
    require_qemu!();
    let test = "what_we_write_is_what_qemu_reads";
    for_seeds(env!("CARGO_PKG_NAME"), test, 3 * KINDS.len() as u64, |seed| {
        let random = &mut Rng::with_seed(seed);
        let folder = Folder::new();
        let image = folder.path("disk.qcow2");
        let (kind, backing) = KINDS[seed as usize % KINDS.len()];
        let mut arguments = vec!["-o", kind];
        if let Some(length) = backing {
            std::fs::write(folder.path("base.raw"), vec![0xb5; length as usize]).unwrap();
            arguments.extend(["-b", "base.raw", "-F", "raw"]);
        }
        create(&image, &arguments, SIZE);
        scribble(&image, SIZE, seed, !kind.contains("0.10"));
        let cache = [CacheMode::None, CacheMode::Writeback][random.usize(..2)];
        let mut model = read_all(&image, cache);
        for _ in 0..2 {
            change(&image, cache, &mut model, random);
            expect_clean_and_equal(&image, &model).map_err(|words| format!("{kind}: {words}"))?;
        }
        Ok(Report::default())
    });
}

#[test]
fn a_disk_that_grows_does_not_show_what_is_behind_it() {
    require_qemu!();
    let folder = Folder::new();
    let image = folder.path("disk.qcow2");
    std::fs::write(folder.path("base.raw"), vec![0xb5; 2 << 20]).unwrap();
    for size in [(1 << 20) + 512, 1 << 20] {
        create(&image, &["-b", "base.raw", "-F", "raw"], size);
        block_on(async {
            let disk = blockhouse_images::open(&image, writing(CacheMode::None)).await.unwrap();
            disk.resize(3 << 20).await.unwrap();
            disk.close().await.unwrap();
        });
        let mut model = vec![0xb5; size as usize];
        model.resize(3 << 20, 0);
        expect_clean_and_equal(&image, &model).unwrap();
    }
}

#[test]
fn compressed_clusters_are_overwritten() {
    require_qemu!();
    let folder = Folder::new();
    let (plain, packed) = (folder.path("plain.qcow2"), folder.path("packed.qcow2"));
    create(&plain, &[], SIZE);
    scribble(&plain, SIZE, 7, true);
    for (seed, kind) in ["compression_type=zlib", "compression_type=zstd"].into_iter().enumerate() {
        convert(&["-c", "-O", "qcow2", "-o", kind], &plain, &packed);
        let mut model = read_all(&packed, CacheMode::None);
        change(&packed, CacheMode::None, &mut model, &mut Rng::with_seed(seed as u64));
        expect_clean_and_equal(&packed, &model).unwrap();
    }
}
