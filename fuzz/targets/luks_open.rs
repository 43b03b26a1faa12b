//! Any bytes as a LUKS container. The first byte says how its file is, as in `foreign`. Where the
//! others begin as JSON they are the metadata of a LUKS2 header whose checksum is right.
//!
//! What it asserts: the container is opened without a key, or refused with an error that names the
//! place. The disk is no longer than its file. Its extents and the areas of its key slots are read,
//! and the areas are as long as their slots need. Nothing is written, and no operation is
//! misaligned. Memory is bounded.
#![no_main]
#![forbid(unsafe_code)]

use blockhouse_core::Storage;
use blockhouse_disk::{Access, Disk, ImageFormat, Options};
use blockhouse_fuzz::foreign::Mode;
use blockhouse_fuzz::sparse_file::SparseFile;
use blockhouse_fuzz::walk::{Limits, read_extents};
use blockhouse_fuzz::{assert_tells_the_place, in_bounded_memory};
use blockhouse_sim::Sim;
use libfuzzer_sys::fuzz_target;
use sha2::{Digest, Sha256};

/// Bytes of the smallest LUKS2 header, and of its binary part.
const HEADER: usize = 16 << 10;
const BINARY: usize = 4096;

/// Zeros that follow: room for areas of key slots, and for a disk.
const ZEROS: u64 = 64 << 10;
const LIMITS: Limits = Limits { extents: 4, read: 4096 };

/// The file of the container that the input stands for.
fn container(mode: Mode, data: &[u8]) -> SparseFile {
    if data.first() != Some(&b'{') {
        return mode.file(data, &[], ZEROS);
    }
    let mut bytes = vec![0; HEADER];
    bytes[..6].copy_from_slice(b"LUKS\xba\xbe");
    bytes[7] = 2;
    bytes[8..16].copy_from_slice(&(HEADER as u64).to_be_bytes());
    bytes[72..78].copy_from_slice(b"sha256");
    let length = data.len().min(HEADER - BINARY);
    bytes[BINARY..BINARY + length].copy_from_slice(&data[..length]);
    let checksum = Sha256::digest(&bytes);
    bytes[448..480].copy_from_slice(&checksum);
    mode.file(&bytes, &[], ZEROS)
}

async fn look_at(storage: SparseFile) {
    let options = Options { access: Access::ReadOnly, ..Options::default() };
    let disk = match Disk::open(storage.clone(), ImageFormat::Luks, options).await {
        Ok(disk) => disk,
        Err(error) => return assert_tells_the_place(&error),
    };
    assert!(disk.size() <= storage.size(), "a disk longer than its file");
    read_extents(&disk, LIMITS).await;
    let encryption =
        disk.image().read_encryption().await.expect("it was read").expect("it is encrypted");
    let encryption = encryption.luks().expect("a header of LUKS");
    let areas = encryption.read_areas(&storage).await.expect("areas inside the file");
    for (slot, area) in encryption.header().slots.iter().zip(&areas) {
        if let Ok(key) = &slot.key {
            let needed = key.stripes as usize * encryption.header().key_bytes;
            assert!(area.len() >= needed, "slot {}", slot.number);
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((mode, bytes)) = Mode::split(data) else { return };
    in_bounded_memory(|| Sim::new(0).block_on(look_at(container(mode, bytes))));
});
