//! Makes the committed corpus of the targets for other programs' formats: images by qemu-img (which
//! must be installed) cut to their first bytes and their last, which hold the metadata.
//!
//! `cargo run --manifest-path fuzz/Cargo.toml --example make_foreign_corpus`
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::Command;

use blockhouse_fuzz::images::corpus;
use flate2::{Compress, Compression, FlushCompress};

const SECTOR: usize = 512;

type Seed = (&'static str, &'static str, u8, &'static [&'static str], usize, usize);

/// Target, name, the mode of the input, what qemu-img makes, and how many bytes of the beginning
/// and of the end are kept.
const SEEDS: &[Seed] = &[
    ("vdi_open", "qemu-dynamic", 3, &["vdi", "-o", "static=off"], 1040, 0),
    ("vdi_open", "qemu-static", 2, &["vdi", "-o", "static=on"], 1040, 0),
    ("vmdk_open", "qemu-sparse", 2, &["vmdk", "-o", "subformat=monolithicSparse"], 14 << 10, 0),
    ("vmdk_open", "qemu-flat", 3, &["vmdk", "-o", "subformat=monolithicFlat"], 4096, 0),
    ("vmdk_open", "qemu-split", 2, &["vmdk", "-o", "subformat=twoGbMaxExtentSparse"], 4096, 0),
    ("vpc_open", "qemu-dynamic", 6, &["vpc", "-o", "subformat=dynamic"], 1552, 512),
    ("vpc_open", "qemu-fixed", 7, &["vpc", "-o", "subformat=fixed"], 512, 512),
    ("vpc_open", "qemu-size", 7, &["vpc", "-o", "subformat=dynamic,force_size=on"], 1552, 512),
];

fn main() {
    vhdx();
    let scratch = tempfile::tempdir().expect("a folder");
    let disk = scratch.path().join("disk");
    let content: Vec<u8> = (0..3 << 20).map(|at: u32| (at / 5000 % 3) as u8).collect();
    std::fs::write(&disk, content).expect("a disk");
    for (target, name, mode, options, first, last) in SEEDS {
        let bytes = image(&disk, &scratch.path().join("image"), options);
        let (start, end) = bytes.split_at(bytes.len() - last);
        let seed = [&start[..start.len().min(*first)], end].concat();
        write(target, name, *mode, &seed);
        if *name == "qemu-dynamic" && *target == "vdi_open" {
            // With the smallest blocks, which lie in the file.
            let mut small = seed;
            for (field, value) in [(0x170, 3 << 12), (0x178, 1 << 12)] {
                small[field..field + 4].copy_from_slice(&u32::to_le_bytes(value));
            }
            write(target, "small", *mode, &small);
        }
    }
    write("vmdk_open", "sparse", 3, &sparse());
    let descriptor = b"# Disk DescriptorFile\nRW 8 ZERO\nRW 64 SPARSE \"a\"\nRW 9 FLAT \"b\" 8\n\0";
    write("vmdk_open", "descriptor", 3, &[descriptor, &*sparse()].concat());
    write("vmdk_open", "stream", 1, &stream());
}

/// Writes an input: see `blockhouse_fuzz::foreign` for its mode.
fn write(target: &str, name: &str, mode: u8, bytes: &[u8]) {
    println!("{target}/{name}: {} bytes", bytes.len());
    let folder = corpus(target);
    std::fs::create_dir_all(&folder).expect("a folder");
    std::fs::write(folder.join(name), [&[mode], bytes].concat()).expect("a seed");
}

/// The header of a VMDK file with tables: 32 KiB in grains of 4 KiB, tables of eight entries, the
/// directory at a sector.
fn vmdk_header(version: u32, flags: u32, directory: u64) -> Vec<u8> {
    let mut header = vec![0; SECTOR];
    header[..4].copy_from_slice(b"KDMV");
    for (field, value) in [(4, version), (8, flags), (44, 8)] {
        header[field..field + 4].copy_from_slice(&value.to_le_bytes());
    }
    for (field, value) in [(12, 64), (20, 8), (28, 1), (36, 1), (56, directory)] {
        header[field..field + 8].copy_from_slice(&u64::to_le_bytes(value));
    }
    header[73..77].copy_from_slice(b"\n \r\n");
    header[77] = (flags >> 16 & 1) as u8;
    header
}

/// Bytes, and zeros up to a whole sector.
fn sectors(bytes: &[u8]) -> Vec<u8> {
    let mut sectors = bytes.to_vec();
    sectors.resize(bytes.len().next_multiple_of(SECTOR), 0);
    sectors
}

fn table(entries: &[u32]) -> Vec<u8> {
    sectors(&entries.iter().flat_map(|entry| entry.to_le_bytes()).collect::<Vec<u8>>())
}

const TEXT: &[u8] = b"# Disk DescriptorFile\nparentCID=ffffffff\nRW 64 SPARSE \"a\"\n";

/// A file with data, zeros and holes.
fn sparse() -> Vec<u8> {
    let grains = table(&[8, 16, 1, 0, 24, 0, 1, 32]);
    [vmdk_header(1, 5, 2), sectors(TEXT), table(&[3]), grains].concat()
}

/// A file that was written as a stream: compressed grains, tables, a footer.
fn stream() -> Vec<u8> {
    let mut bytes = [vmdk_header(3, 0x3_0001, u64::MAX), sectors(TEXT)].concat();
    let mut grains = Vec::new();
    for grain in 0..3u64 {
        let content: Vec<u8> = (0..4096 / (grain + 1)).map(|at| (at / 5 % 7) as u8).collect();
        let mut stream = vec![0; 4200];
        let mut encoder = Compress::new(Compression::new(6), true);
        let content = sectors(&[content, vec![9; 4096]].concat()[..4096]);
        encoder.compress(&content, &mut stream, FlushCompress::Finish).expect("it compresses");
        stream.truncate(encoder.total_out() as usize);
        grains.push((bytes.len() / SECTOR) as u32);
        let (place, length) = ((grain * 8).to_le_bytes(), (stream.len() as u32).to_le_bytes());
        bytes.extend(sectors(&[&place[..], &length, &stream].concat()));
    }
    let tables = (bytes.len() / SECTOR) as u32;
    bytes.extend(table(&[grains[0], 0, grains[1], 0, 0, 0, 0, grains[2]]));
    bytes.extend(table(&[tables]));
    bytes.extend(table(&[0, 0, 0, 3]));
    bytes.extend(vmdk_header(3, 0x3_0001, u64::from(tables) + 1));
    [bytes, vec![0; SECTOR]].concat()
}

fn image(disk: &Path, image: &Path, options: &[&str]) -> Vec<u8> {
    let mut command = Command::new("qemu-img");
    command.args(["convert", "-f", "raw", "-O"]).args(options).args([disk, image]);
    assert!(command.status().expect("qemu-img").success(), "{command:?}");
    std::fs::read(image).expect("an image")
}

/// The structures of an image by qemu-img, as the target puts them together again; and a log entry
/// that changes one.
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
    write("vhdx_open", "qemu-dynamic", 3, &seed);
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
    write("vhdx_open", "log", 2, &seed);
}
