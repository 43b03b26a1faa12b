//! VHDX images whose log was not replayed: Blockhouse reads the same as QEMU does after a replay of
//! the log.

use std::path::Path;

use blockhouse_tests::image_tool::{command, qemu_img, str};
use blockhouse_tests::{Image, Scratch, need, random_bytes, require, run, seeded, tool};

const PAGE: usize = 4096;
const HEADERS: [usize; 2] = [64 << 10, 128 << 10];
/// The offset of the region table, and the beginning of the GUID of its BAT region.
const REGIONS: usize = 192 << 10;
const BAT: [u8; 4] = 0x2dc2_7766u32.to_le_bytes();

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

fn number(bytes: &[u8], at: usize) -> usize {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes")) as usize
}

fn seal(bytes: &mut [u8]) {
    put(bytes, 4, &[0; 4]);
    let sum = crc32c::crc32c(bytes);
    put(bytes, 4, &sum.to_le_bytes());
}

/// The offset of the block allocation table.
fn block_table(file: &[u8]) -> usize {
    let entries = [REGIONS + 16, REGIONS + 48];
    let found = entries.into_iter().find(|&at| file[at..at + 4] == BAT).expect("a block table");
    number(file, found + 16)
}

/// Writes a log that exchanges the first two blocks of the disk, and a header that names the log.
fn log_exchanged_blocks(file: &mut [u8]) {
    let table = block_table(file);
    let mut page = file[table..table + PAGE].to_vec();
    let (first, second) = (file[table..table + 8].to_vec(), file[table + 8..table + 16].to_vec());
    assert_ne!(first, second, "two blocks with data");
    put(&mut page, 0, &second);
    put(&mut page, 8, &first);
    let size = (file.len() as u64).to_le_bytes();
    let mut entry = vec![0; 2 * PAGE];
    put(&mut entry, 0, b"loge");
    put(&mut entry, 8, &(2 * PAGE as u32).to_le_bytes());
    put(&mut entry, 16, &[1]);
    put(&mut entry, 24, &[1]);
    put(&mut entry, 32, &[9; 16]);
    put(&mut entry, 48, &size);
    put(&mut entry, 56, &size);
    put(&mut entry, 64, b"desc");
    put(&mut entry, 68, &page[PAGE - 4..]);
    put(&mut entry, 72, &page[..8]);
    put(&mut entry, 80, &(table as u64).to_le_bytes());
    put(&mut entry, 88, &[1]);
    put(&mut entry, PAGE, &page);
    put(&mut entry, PAGE, b"data\0\0\0\0");
    put(&mut entry, 2 * PAGE - 4, &[1, 0, 0, 0]);
    seal(&mut entry);
    let log = number(file, HEADERS[0] + 72);
    put(file, log, &entry);
    for header in HEADERS {
        let header = &mut file[header..header + PAGE];
        put(header, 48, &[9; 16]);
        seal(header);
    }
}

/// An image made by qemu-img with such a log, and the content of its disk without the log.
fn image(scratch: &Scratch) -> (Image, Vec<u8>) {
    let content = random_bytes(&mut seeded(), 3 << 20);
    let disk = scratch.image_of("disk.raw", &content);
    let made = scratch.path("made.vhdx");
    let options = "subformat=dynamic,block_size=1M";
    let convert = ["convert", "-f", "raw", "-O", "vhdx", "-o", options, disk.str(), str(&made)];
    qemu_img(&convert).success();
    let mut file = std::fs::read(&made).expect("an image");
    log_exchanged_blocks(&mut file);
    (scratch.image_of("dirty.vhdx", &file), content)
}

fn assert_same(left: &Path, right: &Path) {
    run(tool("cmp").args([left, right])).success();
}

#[test]
fn a_log_is_replayed_as_qemu_replays_it_and_the_file_stays() {
    require!(need::tools(&["qemu-img", "cmp"]));
    let scratch = Scratch::new();
    let (dirty, content) = image(&scratch);
    let before = dirty.state();
    let ours = scratch.path("ours.raw");
    command(&["convert", dirty.str(), str(&ours)]).success();
    command(&["check", dirty.str()]).success();
    assert_eq!(dirty.state(), before, "it was changed");
    let read = std::fs::read(&ours).expect("a disk");
    assert!(read[..1 << 20] == content[1 << 20..2 << 20], "the log was not replayed");
    let replayed = scratch.path("replayed.vhdx");
    std::fs::copy(dirty.path(), &replayed).expect("a copy");
    qemu_img(&["check", "-f", "vhdx", "-r", "all", str(&replayed)]).success();
    let theirs = scratch.path("theirs.raw");
    qemu_img(&["convert", "-f", "vhdx", "-O", "raw", str(&replayed), str(&theirs)]).success();
    assert_same(&ours, &theirs);
    command(&["compare", str(&replayed), dirty.str()]).success();
    // A repair replays the log into the file.
    let repaired = command(&["check", "--repair", "all", dirty.str()]).success();
    assert!(repaired.stdout.contains("1 corruption"), "{}", repaired.stdout);
    qemu_img(&["compare", "-f", "vhdx", "-F", "raw", dirty.str(), str(&theirs)]).success();
    qemu_img(&["check", "-f", "vhdx", dirty.str()]).success();
    let again = command(&["check", "--repair", "all", dirty.str()]).success();
    assert!(!again.stdout.contains("corruption"), "{}", again.stdout);
}

#[test]
fn a_log_that_was_torn_changes_nothing() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let (dirty, content) = image(&scratch);
    let mut file = dirty.content();
    let log = number(&file, HEADERS[0] + 72);
    file[log + 2 * PAGE - 1] ^= 1;
    let torn = scratch.image_of("torn.vhdx", &file);
    let ours = scratch.path("ours.raw");
    command(&["convert", torn.str(), str(&ours)]).success();
    assert!(std::fs::read(&ours).expect("a disk") == content);
}
