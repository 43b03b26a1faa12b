//! Any bytes as an image file: it is opened, checked and read, or refused with an error that names
//! the place; for reading, and for writing, which repairs what it must.
#![no_main]
#![forbid(unsafe_code)]

use blockhouse_core::Fua;
use blockhouse_disk::{Access, Disk, Image, ImageFormat, Options};
use blockhouse_format::qcow2::{self, Qcow2};
use blockhouse_fuzz::memory::Memory;
use blockhouse_fuzz::walk::{Limits, read_bitmaps, read_extents};
use blockhouse_fuzz::{assert_tells_the_place, in_bounded_memory};
use blockhouse_sim::Sim;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    for (access, block) in [(Access::ReadOnly, 1), (Access::ReadWrite, 512)] {
        in_bounded_memory(|| {
            let sim = Sim::new(0);
            let storage = Memory::new(&sim, block, Fua::Native, data.to_vec());
            let behind = Memory::new(&sim, 1, Fua::Native, vec![7; 70 << 10]);
            sim.block_on(look_at(storage.clone(), behind, access));
            sim.block_on(check(storage));
        });
    }
});

async fn look_at(storage: Memory, behind: Memory, access: Access) {
    let options = Options { access, ..Options::default() };
    let image = match Image::open(storage, ImageFormat::Qcow2, options).await {
        Ok(image) => image,
        Err(error) => return assert_tells_the_place(&error),
    };
    let is_backed = image.backing_file().is_some();
    let disk = Disk::new(if is_backed {
        let options = Options { access: Access::ReadOnly, ..Options::default() };
        image.with_backing(&Image::raw(behind, options).expect("a size of whole sectors"))
    } else {
        image
    });
    assert!(disk.image().cluster_size().is_some_and(u64::is_power_of_two));
    read_extents(&disk, Limits::default()).await;
    read_bitmaps(&disk).await;
    if access == Access::ReadWrite {
        // Nothing was changed, but damage may have been found.
        if let Err(error) = disk.close().await {
            assert_tells_the_place(&error);
        }
    }
}

async fn check(storage: Memory) {
    let options = qcow2::OpenOptions { access: qcow2::Access::ReadOnly, ..Default::default() };
    let Ok(image) = Qcow2::open(storage, options).await else { return };
    let report = qcow2::check(&image).await.expect("a storage that reads");
    assert!(report.problems.len() as u64 <= report.corruptions);
}
