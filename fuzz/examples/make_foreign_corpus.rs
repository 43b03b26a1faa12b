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
    ("vpc_open", "qemu-dynamic", &["vpc", "-o", "subformat=dynamic"], 4096, 512),
    ("vpc_open", "qemu-fixed", &["vpc", "-o", "subformat=fixed"], 512, 512),
    ("vpc_open", "qemu-size", &["vpc", "-o", "subformat=dynamic,force_size=on"], 4096, 512),
];

fn main() {
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
