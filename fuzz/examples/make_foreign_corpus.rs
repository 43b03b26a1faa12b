//! Makes the committed corpus of the targets for other programs' formats: images by qemu-img (which must be installed)
//! cut to their first bytes and their last, which hold the metadata.
//!
//! `cargo run --manifest-path fuzz/Cargo.toml --example make_foreign_corpus`
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::Command;

use blockhouse_fuzz::images::corpus;

/// Target, name, what qemu-img makes, and how many bytes of the beginning and of the end are kept.
const SEEDS: &[(&str, &str, &[&str], usize, usize)] = &[
    ("vdi_open", "qemu-dynamic", &["vdi", "-o", "static=off"], 2048, 0),
    ("vdi_open", "qemu-static", &["vdi", "-o", "static=on"], 2048, 0),
    ("vmdk_open", "qemu-sparse", &["vmdk", "-o", "subformat=monolithicSparse"], 14 << 10, 0),
    ("vmdk_open", "qemu-stream", &["vmdk", "-o", "subformat=streamOptimized"], 70 << 10, 0),
    ("vmdk_open", "qemu-flat", &["vmdk", "-o", "subformat=monolithicFlat"], 4096, 0),
    ("vmdk_open", "qemu-split", &["vmdk", "-o", "subformat=twoGbMaxExtentSparse"], 4096, 0),
    ("vpc_open", "qemu-dynamic", &["vpc", "-o", "subformat=dynamic"], 4096, 512),
    ("vpc_open", "qemu-fixed", &["vpc", "-o", "subformat=fixed"], 512, 512),
    ("vpc_open", "qemu-size", &["vpc", "-o", "subformat=dynamic,force_size=on"], 4096, 512),
];

fn main() {
    vhdx();
    let scratch = tempfile::tempdir().expect("a folder");
    let disk = scratch.path().join("disk");
    let content: Vec<u8> = (0..3 << 20).map(|at: u32| (at / 5000 % 3) as u8).collect();
    std::fs::write(&disk, content).expect("a disk");
    for (target, name, options, first, last) in SEEDS {
        let bytes = image(&disk, &scratch.path().join("image"), options);
        let (start, end) = bytes.split_at(bytes.len() - last);
        let seed = [&start[..start.len().min(*first)], end].concat();
        println!("{target}/{name}: {} bytes", seed.len());
        let folder = corpus(target);
        std::fs::create_dir_all(&folder).expect("a folder");
        std::fs::write(folder.join(name), seed).expect("a seed");
    }
}

fn image(disk: &Path, image: &Path, options: &[&str]) -> Vec<u8> {
    let mut command = Command::new("qemu-img");
    command.args(["convert", "-f", "raw", "-O"]).args(options).args([disk, image]);
    assert!(command.status().expect("qemu-img").success(), "{command:?}");
    std::fs::read(image).expect("an image")
}

/// The structures of an image by qemu-img, as the target puts them together again; and a log entry that changes one.
fn vhdx() {
    let scratch = tempfile::tempdir().expect("a folder");
    let disk = scratch.path().join("disk");
    std::fs::write(&disk, vec![5; 3 << 20]).expect("a disk");
    let options = ["vhdx", "-o", "subformat=dynamic,block_size=1M"];
    let file = image(&disk, &scratch.path().join("image"), &options);
    let mut seed = Vec::new();
    for (length, place) in [
        (80, 64 << 10),
        (112, 192 << 10),
        (512, 2 << 20),
        (64, (2 << 20) + (64 << 10)),
        (128, 3 << 20),
    ] {
        seed.extend(&file[place..place + length]);
    }
    let folder = corpus("vhdx_open");
    std::fs::create_dir_all(&folder).expect("a folder");
    std::fs::write(folder.join("qemu-dynamic"), &seed).expect("a seed");
    let mut entry = vec![0; 8192];
    // The log's GUID is in the header of the image and in the entry.
    seed[48..64].fill(9);
    entry[32..48].fill(9);
    for (field, value) in [(8, 8192u32), (16, 1), (24, 2)] {
        entry[field..field + 4].copy_from_slice(&value.to_le_bytes());
    }
    entry[64..68].copy_from_slice(b"desc");
    entry[80..88].copy_from_slice(&(3u64 << 20).to_le_bytes());
    entry[88] = 1;
    entry[96..100].copy_from_slice(b"zero");
    entry[104..112].copy_from_slice(&4096u64.to_le_bytes());
    entry[112..120].copy_from_slice(&((3u64 << 20) + 8192).to_le_bytes());
    entry[120] = 1;
    entry[4096..4100].copy_from_slice(b"data");
    entry[8188] = 1;
    seed.extend(entry);
    std::fs::write(folder.join("log"), &seed).expect("a seed");
}
