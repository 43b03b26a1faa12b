//! The parts of an image by other programs: header extensions and feature bits that are not ours.

use std::path::Path;
use std::process::Command;

use blockhouse_core::{Buffer, Durability, Request};
use blockhouse_disk::Access;
use blockhouse_images::{CacheMode, ImageOptions};

use crate::qemu::{Folder, block_on, create, forget_backing_format, options, qemu_io, run};
use crate::require_qemu;

const SIZE: u64 = 1 << 20;
/// Where the header has its autoclear bits.
const AUTOCLEAR: usize = 88;

/// Whether a disk is written to while it is open for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Read,
    Written,
}

/// Opens an image for writing, uses and closes it; its bytes before and after.
fn used(image: &Path, how: Use) -> (Vec<u8>, Vec<u8>) {
    let before = std::fs::read(image).unwrap();
    block_on(async {
        let writing = ImageOptions { access: Access::ReadWrite, ..options(CacheMode::Writeback) };
        let disk = blockhouse_images::open(image, writing).await.unwrap();
        let mut buffer = Buffer::new(4096);
        disk.submit(Request::Read { offset: 0, into: buffer.lend() }).await.unwrap();
        if how == Use::Written {
            buffer.bytes_mut().fill(5);
            let (from, durability) = (buffer.lend(), Durability::None);
            disk.submit(Request::Write { offset: 8192, from, durability }).await.unwrap();
        }
        disk.close().await.unwrap();
    });
    (before, std::fs::read(image).unwrap())
}

fn autoclear(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(bytes[AUTOCLEAR..AUTOCLEAR + 8].try_into().unwrap())
}

fn check(image: &Path, more: &[&str]) -> Option<i32> {
    let mut check = Command::new("qemu-img");
    check.args(["check", "-q", "-f", "qcow2"]).args(more).arg(image);
    check.output().unwrap().status.code()
}

#[test]
fn changes_are_recorded_in_the_bitmaps_of_others() {
    require_qemu!();
    let folder = Folder::new();
    let image = folder.path("disk.qcow2");
    create(&image, &[], SIZE);
    qemu_io(&image, &["write -P 1 0 64k".to_owned()]);
    run("qemu-img", &["bitmap", "--add", image.to_str().unwrap(), "changes"]);
    let info = || run("qemu-img", &["info", "--output=json", image.to_str().unwrap()]);
    let (before, after) = used(&image, Use::Read);
    assert!(before == after && autoclear(&after) & 1 == 1, "nothing was changed");
    assert!(info().contains("\"changes\""));
    let (_, after) = used(&image, Use::Written);
    assert_eq!(autoclear(&after), 1);
    assert!(info().contains("\"changes\"") && !info().contains("in-use"), "QEMU believes in them");
    assert_eq!(check(&image, &[]), Some(0));
    qemu_io(&image, &["read -P 5 8k 4k".to_owned(), "read -P 1 12k 52k".to_owned()]);
}

#[test]
fn unknown_autoclear_bits_are_cleared_by_the_first_write() {
    require_qemu!();
    let folder = Folder::new();
    let image = folder.path("disk.qcow2");
    create(&image, &[], SIZE);
    let mut bytes = std::fs::read(&image).unwrap();
    bytes[AUTOCLEAR] = 0x40;
    std::fs::write(&image, bytes).unwrap();
    assert_eq!(autoclear(&used(&image, Use::Read).1), 0x40 << 56);
    assert_eq!(autoclear(&used(&image, Use::Written).1), 0);
    assert_eq!(check(&image, &[]), Some(0));
}

#[test]
fn unknown_header_extensions_are_kept() {
    require_qemu!();
    let folder = Folder::new();
    let (base, image) = (folder.path("base"), folder.path("disk.qcow2"));
    std::fs::write(&base, vec![1; SIZE as usize]).unwrap();
    create(&image, &["-b", base.to_str().unwrap(), "-F", "raw"], SIZE);
    forget_backing_format(&image);
    // Without the name of its format the backing file is refused: it goes out of the header.
    let mut bytes = std::fs::read(&image).unwrap();
    bytes[8..20].fill(0);
    std::fs::write(&image, bytes).unwrap();
    let (before, after) = used(&image, Use::Written);
    let unknown = 0x1234_5678_u32.to_be_bytes();
    let at = before[..512].windows(4).position(|word| word == unknown).unwrap();
    assert_eq!(before[at..at + 16], after[at..at + 16]);
    assert_eq!(before[104..512], after[104..512]);
}

/// A server that uses the page cache is killed: its file may end anywhere. Smaller clusters than a
/// page fit all the same.
#[test]
fn an_image_of_small_clusters_whose_file_ends_inside_of_a_sector_is_opened_past_the_page_cache() {
    require_qemu!();
    let folder = Folder::new();
    let image = folder.path("disk.qcow2");
    create(&image, &["-o", "cluster_size=512"], SIZE);
    qemu_io(&image, &["write -P 5 0 8k".to_owned()]);
    let length = std::fs::metadata(&image).unwrap().len();
    let end = |length| std::fs::File::options().write(true).open(&image).unwrap().set_len(length);
    end(length + 100).unwrap();
    let open = async |access| {
        let options = ImageOptions { access, ..options(CacheMode::None) };
        blockhouse_images::open(&image, options).await
    };
    block_on(async {
        open(Access::ReadOnly).await.expect("for reading");
        assert_eq!(std::fs::metadata(&image).unwrap().len(), length + 100);
        let disk = open(Access::ReadWrite).await.expect("for writing");
        let mut buffer = Buffer::new(8192);
        disk.submit(Request::Read { offset: 0, into: buffer.lend() }).await.unwrap();
        assert_eq!(buffer.bytes(), [5; 8192]);
        let (offset, durability) = (8192, Durability::None);
        disk.submit(Request::Write { offset, from: buffer.lend(), durability }).await.unwrap();
        disk.close().await.unwrap();
    });
    qemu_io(&image, &["read -P 5 0 16k".to_owned()]);
    assert_eq!(check(&image, &[]), Some(0));
    // One that is cut off is not changed.
    end(length / 2 + 100).unwrap();
    block_on(async { open(Access::ReadWrite).await.err().expect("it is cut off") });
    assert_eq!(std::fs::metadata(&image).unwrap().len(), length / 2 + 100);
}
