//! Images that QEMU wrote are read right, and images made here are what QEMU takes them for.

use std::path::Path;

use blockhouse_core::{ByteRange, ErrorKind};
use blockhouse_format::Intent;
use blockhouse_format::qcow2::{
    Backing, Compression, CreateOptions, Preallocation, Switch, Version, create,
};
use futures_executor::block_on;

use crate::common::{FileStorage, has_qemu, open_for_reading, qemu_check, qemu_io, read, run};

/// A disk that no cluster size divides without a rest.
const SIZE: u64 = (3 << 20) + 512;

/// Writes a pattern through qemu-io, in pieces of all kinds, and into a model.
fn scribble(path: &Path, model: &mut [u8], has_zeroes: bool) {
    let mut commands = Vec::new();
    let pieces = [
        (0, 512, 1),
        (70_000 / 512 * 512, 200_704, 2),
        (1 << 20, 1 << 20, 3),
        ((1 << 20) + 65_536, 65_536, 0),
        (SIZE - 1024, 1024, 4),
        (2_500_096, 4096, 5),
    ];
    for (offset, length, value) in pieces {
        model[offset as usize..][..length as usize].fill(value);
        commands.push(if value == 0 && has_zeroes {
            format!("write -z {offset} {length}")
        } else {
            format!("write -P {value} {offset} {length}")
        });
    }
    qemu_io(path, &commands);
}

async fn expect_content(path: &Path, model: &[u8], behind: u8) {
    let image = open_for_reading(path).await.unwrap();
    assert_eq!(image.size(), model.len() as u64);
    let all = ByteRange::between(0, image.size());
    assert!(read(&image, all, behind).await.unwrap() == model, "{}", path.display());
    for offset in (0..image.size() - 3000).step_by(100_001) {
        let part = ByteRange::between(offset, offset + 3000);
        let expected = &model[offset as usize..][..3000];
        assert!(read(&image, part, behind).await.unwrap() == expected, "{part}");
    }
}

#[test]
fn images_that_qemu_wrote_are_read_right() {
    if !has_qemu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let options = [
        "compat=0.10",
        "compat=1.1",
        "cluster_size=512",
        "cluster_size=4096,refcount_bits=1",
        "cluster_size=2M,refcount_bits=64",
        "lazy_refcounts=on",
        "extended_l2=on,cluster_size=64k",
        "extended_l2=on,cluster_size=16k,preallocation=metadata",
        "preallocation=metadata,cluster_size=1k",
        "compression_type=zstd",
        "preallocation=falloc",
    ];
    for option in options {
        let path = folder.path().join("image.qcow2");
        let name = path.display().to_string();
        run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", option, &name, &SIZE.to_string()]);
        let mut model = vec![0; SIZE as usize];
        block_on(expect_content(&path, &model, 0));
        scribble(&path, &mut model, !option.contains("0.10"));
        block_on(expect_content(&path, &model, 0));
    }
}

#[test]
fn compressed_images_are_read_right() {
    if !has_qemu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let plain = folder.path().join("plain.qcow2");
    let size = SIZE.to_string();
    let plain_name = plain.display().to_string();
    run("qemu-img", &["create", "-q", "-f", "qcow2", &plain_name, &size]);
    let mut model = vec![0; SIZE as usize];
    scribble(&plain, &mut model, true);
    for option in [
        "compression_type=zlib",
        "compression_type=zstd",
        "compression_type=zlib,cluster_size=512",
        "compression_type=zstd,cluster_size=2M",
        "compression_type=zlib,extended_l2=on",
        "compat=0.10",
    ] {
        let packed = folder.path().join("packed.qcow2");
        let name = packed.display().to_string();
        run("qemu-img", &["convert", "-c", "-O", "qcow2", "-o", option, &plain_name, &name]);
        block_on(expect_content(&packed, &model, 0));
    }
}

#[test]
fn what_an_overlay_does_not_have_is_left_to_the_backing_file() {
    if !has_qemu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let base = folder.path().join("base.raw");
    std::fs::write(&base, vec![9; SIZE as usize]).unwrap();
    for option in ["cluster_size=64k", "extended_l2=on", "compat=0.10"] {
        let path = folder.path().join("overlay.qcow2");
        let name = path.display().to_string();
        let arguments = ["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "-o"];
        run("qemu-img", &[&arguments[..], &[option, &name]].concat());
        let mut model = vec![9; SIZE as usize];
        scribble(&path, &mut model, option != "compat=0.10");
        block_on(async {
            expect_content(&path, &model, 9).await;
            let image = open_for_reading(&path).await.unwrap();
            let backing = Backing { name: b"base.raw".to_vec(), format: Some("raw".into()) };
            assert_eq!(image.facts().backing.as_ref(), Some(&backing));
        });
    }
}

#[test]
fn new_images_are_what_qemu_takes_them_for() {
    if !has_qemu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let base = CreateOptions::new(SIZE);
    let backing = Backing { name: b"base.raw".to_vec(), format: Some("raw".into()) };
    std::fs::write(folder.path().join("base.raw"), vec![9; SIZE as usize]).unwrap();
    let cases = [
        base.clone(),
        CreateOptions { version: Version::V2, ..base.clone() },
        CreateOptions { cluster_size: 512, ..base.clone() },
        CreateOptions { cluster_size: 2 << 20, refcount_bits: 64, ..base.clone() },
        CreateOptions { cluster_size: 4096, refcount_bits: 1, ..base.clone() },
        CreateOptions { lazy_refcounts: Switch::On, ..base.clone() },
        CreateOptions { extended_l2: Switch::On, ..base.clone() },
        CreateOptions { compression: Compression::Zstd, ..base.clone() },
        CreateOptions { preallocation: Preallocation::Metadata, ..base.clone() },
        CreateOptions {
            preallocation: Preallocation::Metadata,
            cluster_size: 512,
            refcount_bits: 64,
            ..base.clone()
        },
        CreateOptions {
            preallocation: Preallocation::Metadata,
            extended_l2: Switch::On,
            ..base.clone()
        },
        CreateOptions { backing: Some(backing.clone()), ..base.clone() },
        CreateOptions { backing: Some(backing), version: Version::V2, ..base.clone() },
        CreateOptions::new(0),
        CreateOptions { cluster_size: 512, ..CreateOptions::new(64 << 30) },
    ];
    for options in cases {
        let path = folder.path().join("image.qcow2");
        eprintln!("{options:?}");
        block_on(create(&FileStorage::create(&path), &options)).unwrap();
        qemu_check(&path);
        expect_info(&path, &options);
        if options.size == SIZE {
            let mut model = vec![if options.backing.is_some() { 9 } else { 0 }; SIZE as usize];
            scribble(&path, &mut model, options.version == Version::V3);
            qemu_check(&path);
            block_on(expect_content(&path, &model, 9));
        }
    }
}

fn expect_info(path: &Path, options: &CreateOptions) {
    let name = path.display().to_string();
    let info = run("qemu-img", &["info", "--output=json", &name]);
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    let data = &info["format-specific"]["data"];
    assert_eq!(info["virtual-size"], options.size);
    assert_eq!(info["cluster-size"], options.cluster_size);
    assert_eq!(data["refcount-bits"], options.refcount_bits);
    let is_v3 = options.version == Version::V3;
    assert_eq!(data["compat"], if is_v3 { "1.1" } else { "0.10" });
    if is_v3 {
        assert_eq!(data["lazy-refcounts"], options.lazy_refcounts == Switch::On);
        assert_eq!(data["extended-l2"], options.extended_l2 == Switch::On);
        let is_zstd = options.compression == Compression::Zstd;
        assert_eq!(data["compression-type"], if is_zstd { "zstd" } else { "zlib" });
    }
    let backing = options.backing.as_ref();
    assert_eq!(info["backing-filename"].as_str(), backing.map(|_| "base.raw"));
    let format = backing.and_then(|backing| backing.format.as_deref());
    assert_eq!(info["backing-filename-format"].as_str(), format);
}

#[test]
fn contradictory_options_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let base = CreateOptions::new(SIZE);
    let cases = [
        CreateOptions { size: 100, ..base.clone() },
        CreateOptions { cluster_size: 256, ..base.clone() },
        CreateOptions { cluster_size: 4 << 20, ..base.clone() },
        CreateOptions { refcount_bits: 3, ..base.clone() },
        CreateOptions { refcount_bits: 128, ..base.clone() },
        CreateOptions { version: Version::V2, extended_l2: Switch::On, ..base.clone() },
        CreateOptions { extended_l2: Switch::On, cluster_size: 8192, ..base.clone() },
        CreateOptions { cluster_size: 512, ..CreateOptions::new(1 << 40) },
        CreateOptions {
            cluster_size: 512,
            backing: Some(Backing { name: vec![b'x'; 1000], format: None }),
            ..base
        },
    ];
    for options in cases {
        let storage = FileStorage::create(&folder.path().join("image.qcow2"));
        let error = block_on(create(&storage, &options)).expect_err(&format!("{options:?}"));
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }
}

#[test]
fn an_image_whose_data_file_is_not_open_maps_nothing() {
    if !has_qemu() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image.qcow2");
    let option = format!("data_file={}", folder.path().join("data").display());
    let name = path.display().to_string();
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &option, &name, "1M"]);
    let image = block_on(open_for_reading(&path)).expect("its tables");
    assert!(image.facts().data_file.as_ref().is_some_and(|file| file.name.ends_with(b"data")));
    let error = block_on(image.map(ByteRange::between(0, 512), Intent::Read)).expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("data file, which is not open"), "{error}");
}
