//! Any bytes as a LUKS container: it is opened without a key, mapped, and its key slots are read, or it is refused with
//! an error that names the place. Where the bytes begin as JSON they are the metadata of a LUKS2 header whose checksum is
//! right.
#![no_main]
#![forbid(unsafe_code)]

use blockhouse_core::{Fua, Storage};
use blockhouse_disk::{Access, Disk, ImageFormat, Options};
use blockhouse_fuzz::memory::Memory;
use blockhouse_fuzz::walk::read_extents;
use blockhouse_fuzz::{assert_tells_the_place, in_bounded_memory};
use blockhouse_sim::Sim;
use libfuzzer_sys::fuzz_target;
use sha2::{Digest, Sha256};

/// Bytes of the smallest LUKS2 header, and of its binary part.
const HEADER: usize = 16 << 10;
const BINARY: usize = 4096;

/// The container that the input stands for.
fn container(data: &[u8]) -> Vec<u8> {
    if data.first() != Some(&b'{') {
        return data.to_vec();
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
    bytes.resize(HEADER + (64 << 10), 0);
    bytes
}

async fn look_at(storage: Memory) {
    let options = Options { access: Access::ReadOnly, ..Options::default() };
    let disk = match Disk::open(storage.clone(), ImageFormat::Luks, options).await {
        Ok(disk) => disk,
        Err(error) => return assert_tells_the_place(&error),
    };
    assert!(disk.size() <= storage.size(), "a disk longer than its file");
    read_extents(&disk).await;
    let encryption = disk.read_encryption().await.expect("it was read").expect("it is encrypted");
    let areas = encryption.read_areas(&storage).await.expect("areas inside the file");
    for (slot, area) in encryption.header().slots.iter().zip(&areas) {
        if let Ok(key) = &slot.key {
            let needed = key.stripes as usize * encryption.header().key_bytes;
            assert!(area.len() >= needed, "slot {}", slot.number);
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let bytes = container(data);
    for block in [1, 512] {
        in_bounded_memory(|| {
            let sim = Sim::new(0);
            let storage = Memory::new(&sim, block, Fua::Native, bytes.clone());
            sim.block_on(look_at(storage));
        });
    }
});
