//! qcow2 images that QEMU's tools made, read through a disk: the same bytes as `qemu-img` reads.

use std::path::Path;

use blockhouse_core::{ByteRange, ErrorKind, Request};
use blockhouse_disk::{BlockStatus, BlockStatusCache};
use blockhouse_images::CacheMode;

use crate::qemu::{Folder, block_on, convert, create, options, qemu_io, read_all, run, scribble};
use crate::require_qemu;

const MIB: u64 = 1 << 20;
/// Not a multiple of most cluster sizes.
const SIZE: u64 = 5 * MIB + 3 * 512;

/// Expects that we read what `qemu-img convert` reads.
fn expect_equal(image: &Path, cache: CacheMode, what: &str) {
    let raw = image.with_extension("expected");
    convert(&["-O", "raw"], image, &raw);
    let expected = std::fs::read(&raw).unwrap();
    let content = read_all(image, cache);
    assert_eq!(content.len(), expected.len(), "{what}");
    if let Some(at) = content.iter().zip(&expected).position(|(one, other)| one != other) {
        panic!("{what}: byte {at} is {} and not {}", content[at], expected[at]);
    }
}

#[test]
fn all_kinds_of_images_are_read_right() {
    require_qemu!();
    let folder = Folder::new();
    let (image, sizes) = (folder.path("disk.qcow2"), [512, 4 << 10, 64 << 10, 2 << 20]);
    let mut kinds: Vec<String> = sizes.map(|size| format!("cluster_size={size}")).into();
    kinds.extend(sizes.map(|size| format!("compat=0.10,cluster_size={size}")));
    kinds.extend(
        [
            "extended_l2=on,cluster_size=16k",
            "extended_l2=on,cluster_size=64k",
            "extended_l2=on,cluster_size=2M",
            "lazy_refcounts=on",
            "refcount_bits=1",
            "refcount_bits=64",
            "preallocation=metadata",
            "preallocation=falloc",
        ]
        .map(str::to_owned),
    );
    for (seed, kind) in kinds.iter().enumerate() {
        create(&image, &["-o", kind], SIZE);
        scribble(&image, SIZE, seed as u64, !kind.contains("0.10"));
        expect_equal(&image, CacheMode::Writeback, kind);
        // Direct I/O needs clusters that are no smaller than a block.
        if !kind.ends_with("=512") {
            expect_equal(&image, CacheMode::None, kind);
        }
    }
}

#[test]
fn compressed_clusters_are_read_right() {
    require_qemu!();
    let folder = Folder::new();
    let (plain, packed) = (folder.path("plain.qcow2"), folder.path("packed.qcow2"));
    create(&plain, &[], SIZE);
    scribble(&plain, SIZE, 77, true);
    for kind in [
        "compression_type=zlib",
        "compression_type=zstd",
        "compression_type=zlib,cluster_size=512",
        "compression_type=zlib,cluster_size=2M",
        "compression_type=zstd,cluster_size=2M",
        "compression_type=zstd,extended_l2=on",
        "compat=0.10",
    ] {
        convert(&["-c", "-O", "qcow2", "-o", kind], &plain, &packed);
        expect_equal(&packed, CacheMode::Writeback, kind);
        if !kind.ends_with("=512") {
            expect_equal(&packed, CacheMode::None, kind);
        }
        // Between the compressed clusters some that are not.
        scribble(&packed, SIZE, 78, !kind.contains("0.10"));
        expect_equal(&packed, CacheMode::Writeback, kind);
    }
}

#[test]
fn chains_of_different_sizes_and_formats_are_read_right() {
    require_qemu!();
    let folder = Folder::new();
    std::fs::create_dir(folder.path("below")).unwrap();
    // 2 MiB less a sector of raw, 3 MiB compressed, 4 MiB small clusters, 5 MiB on top.
    let base = folder.path("below/base.raw");
    std::fs::write(&base, vec![0xb5; 2 * MIB as usize - 512]).unwrap();
    let first = folder.path("below/first.qcow2");
    create(&first, &["-b", "base.raw", "-F", "raw"], 3 * MIB);
    qemu_io(&first, &["write -c -P 17 64k 64k".into(), "write -P 18 2990k 20k".into()]);
    let second = folder.path("second.qcow2");
    let small = ["-b", "below/first.qcow2", "-F", "qcow2", "-o", "cluster_size=4k"];
    create(&second, &small, 4 * MIB);
    scribble(&second, 4 * MIB, 5, true);
    let top = folder.path("top.qcow2");
    create(&top, &["-b", "second.qcow2", "-F", "qcow2", "-o", "extended_l2=on"], SIZE);
    for round in 0..3 {
        for cache in [CacheMode::None, CacheMode::Writeback] {
            expect_equal(&top, cache, "the chain");
        }
        qemu_io(&top, &[format!("write -P {round} {}k 3k", 100 + round * 1000)]);
    }
}

#[test]
fn status_tells_holes_and_data_of_all_layers() {
    require_qemu!();
    let folder = Folder::new();
    let (base, top) = (folder.path("base.qcow2"), folder.path("top.qcow2"));
    create(&base, &[], MIB);
    qemu_io(&base, &["write -P 1 0 64k".into(), "write -z 64k 64k".into()]);
    create(&top, &["-b", "base.qcow2", "-F", "qcow2"], 2 * MIB);
    qemu_io(&top, &["write -P 2 256k 64k".into()]);
    let found = block_on(async {
        let disk = blockhouse_images::open(&top, options(CacheMode::Writeback)).await.unwrap();
        let mut rest = ByteRange::between(0, disk.size());
        let mut found: Vec<(BlockStatus, u64)> = Vec::new();
        let mut cache = BlockStatusCache::default();
        while !rest.is_empty() {
            let (status, length) = disk.block_status(rest, &mut cache).await.unwrap();
            assert!(length > 0 && length <= rest.length());
            rest = rest.skip(length);
            match found.last_mut() {
                Some((last, sum)) if *last == status => *sum += length,
                _ => found.push((status, length)),
            }
        }
        found
    });
    let expected = [
        (BlockStatus::Data, 64 << 10),
        (BlockStatus::Hole, 192 << 10),
        (BlockStatus::Data, 64 << 10),
        (BlockStatus::Hole, 2 * MIB - (320 << 10)),
    ];
    assert_eq!(found, expected);
}

/// The line that opening `image` for reading fails with.
fn refusal(image: &Path) -> String {
    let opened = block_on(blockhouse_images::open(image, options(CacheMode::Writeback)));
    opened.err().expect("it is refused").to_string()
}

#[test]
fn chains_that_cannot_be_trusted_are_refused() {
    require_qemu!();
    let folder = Folder::new();
    let (base, middle, top) =
        (folder.path("base.raw"), folder.path("middle.qcow2"), folder.path("top.qcow2"));
    std::fs::write(&base, vec![1; MIB as usize]).unwrap();
    create(&middle, &["-b", "base.raw", "-F", "raw"], MIB);
    create(&top, &["-b", "middle.qcow2", "-F", "qcow2"], MIB);
    let rebase = |image: &Path, arguments: &[&str]| {
        let image = image.to_str().unwrap();
        run("qemu-img", &[&["rebase", "-q", "-u", "-f", "qcow2"], arguments, &[image]].concat());
    };

    // A format that is not named is not guessed.
    crate::qemu::forget_backing_format(&top);
    let line = refusal(&top);
    assert!(line.contains("top.qcow2") && line.contains("rebase -u -F"), "{line}");

    // A chain back to its start.
    rebase(&top, &["-b", "middle.qcow2", "-F", "qcow2"]);
    rebase(&middle, &["-b", "top.qcow2", "-F", "qcow2"]);
    let line = refusal(&top);
    assert!(line.contains("loop") && line.contains("middle.qcow2 -> "), "{line}");

    // A thing that is no file.
    for (name, why) in
        [("nbd://localhost/disk", "--allow-remote"), ("json:{\"driver\":\"raw\"}", "file.filename")]
    {
        rebase(&middle, &["-b", name, "-F", "raw"]);
        let line = refusal(&top);
        assert!(line.contains("middle.qcow2") && line.contains(why), "{line}");
    }

    // A file that does not exist, with the way to it.
    rebase(&middle, &["-b", "gone.raw", "-F", "raw"]);
    let line = refusal(&top);
    for word in ["top.qcow2 -> ", "middle.qcow2: ", "gone.raw", "No such file"] {
        assert!(line.contains(word), "{word}: {line}");
    }

    // A file of another format than is said.
    rebase(&middle, &["-b", "base.raw", "-F", "qcow2"]);
    assert!(refusal(&top).contains("not a qcow2 image"));
}

#[test]
fn damaged_compressed_data_is_an_error_that_says_where() {
    require_qemu!();
    let folder = Folder::new();
    let (plain, packed) = (folder.path("plain.qcow2"), folder.path("packed.qcow2"));
    create(&plain, &[], MIB);
    qemu_io(&plain, &["write -P 3 0 1M".into()]);
    for kind in ["compression_type=zlib", "compression_type=zstd"] {
        convert(&["-c", "-O", "qcow2", "-o", kind], &plain, &packed);
        let line = block_on(async {
            let disk = blockhouse_images::open(&packed, options(CacheMode::None)).await.unwrap();
            let bytes = std::fs::read(&packed).unwrap();
            let at = crate::qemu::host_of_compressed(&packed);
            let mut damaged = bytes.clone();
            damaged[at..at + 64].fill(0xff);
            std::fs::write(&packed, damaged).unwrap();
            let mut buffer = blockhouse_core::Buffer::new(4096);
            let read = Request::Read { offset: 4096, into: buffer.lend() };
            let error = disk.submit(read).await.expect_err("it is damaged");
            assert_eq!(error.kind(), ErrorKind::Corrupt);
            assert!(error.to_string().contains(&format!("at offset {at}")), "{error} {at}");
            error.to_string()
        });
        assert!(line.contains("packed.qcow2"), "{line}");
    }
}
