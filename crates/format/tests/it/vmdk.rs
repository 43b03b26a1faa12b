//! VMDK images against a model: any tables of grains, and disks of several extents in one storage.

use blockhouse_core::{ByteRange, Error, ErrorKind, ExtentState, Result, ToolProgress};
use blockhouse_format::{ForeignKind, Format, Intent};
use blockhouse_sim::{Sim, SimDisk};
use proptest::prelude::*;

use crate::common::foreign;

const SECTOR: usize = 512;
const GRAIN: u64 = 4096;
/// Entries of a grain table.
const ENTRIES: usize = 4;
const DIRECTORY: usize = SECTOR;
/// The first grain table; each takes a sector.
const TABLES: usize = 2 * SECTOR;
const GRAINS: usize = 64 * SECTOR;

/// A sparse extent of as many grains as there are entries, with `count` grains in the file; tables
/// without any entry are not there.
fn sparse(entries: &[u32], count: usize, capacity: u64) -> Vec<u8> {
    let mut file = vec![0; GRAINS];
    let mut put = |at: usize, value: u32| file[at..at + 4].copy_from_slice(&value.to_le_bytes());
    put(0, u32::from_le_bytes(*b"KDMV"));
    put(4, 1);
    put(8, 4);
    put(12, (capacity / 512) as u32);
    put(20, (GRAIN / 512) as u32);
    put(44, ENTRIES as u32);
    put(56, (DIRECTORY / SECTOR) as u32);
    for (index, table) in entries.chunks(ENTRIES).enumerate() {
        if table.iter().all(|&entry| entry == 0) {
            continue;
        }
        let at = TABLES + index * SECTOR;
        put(DIRECTORY + 4 * index, (at / SECTOR) as u32);
        for (entry, value) in table.iter().enumerate() {
            put(at + 4 * entry, *value);
        }
    }
    file.resize(GRAINS + count * GRAIN as usize, 7);
    file
}

/// The entry of grain `index` of the file.
fn entry(index: u32) -> u32 {
    (GRAINS / SECTOR) as u32 + index * (GRAIN / 512) as u32
}

async fn open(sim: &Sim, bytes: Vec<u8>) -> Result<Format<SimDisk>> {
    foreign::open(sim, ForeignKind::Vmdk, bytes).await
}

/// The image of a descriptor whose files are `files`, one after the other.
async fn open_files(sim: &Sim, lines: &str, files: &[Vec<u8>]) -> Result<Format<SimDisk>> {
    let text = format!("# Disk DescriptorFile\nparentCID=ffffffff\n{lines}\n");
    let image = open(sim, text.into()).await?;
    let (mut data, mut ranges) = (Vec::new(), Vec::new());
    for file in files {
        let start = data.len().next_multiple_of(4096);
        data.resize(start, 0);
        data.extend(file);
        ranges.push(ByteRange::between(start as u64, data.len() as u64));
    }
    image.with_extents(foreign::storage(sim, data), &ranges).await
}

fn refusal(lines: &str, files: &[Vec<u8>]) -> Error {
    let sim = Sim::new(1);
    let run = sim.clone();
    let (lines, files) = (lines.to_owned(), files.to_vec());
    sim.block_on(async move { open_files(&run, &lines, &files).await.err().expect("a refusal") })
}

/// The state of each sector.
async fn sectors(format: &Format<SimDisk>) -> Vec<ExtentState> {
    let mut rest = ByteRange::between(0, format.size());
    let mut found = Vec::new();
    while !rest.is_empty() {
        let extent = format.map(rest, Intent::Read).await.unwrap();
        assert_eq!(extent.guest.offset(), rest.offset());
        assert!(!extent.guest.is_empty() && extent.guest.end() <= rest.end());
        for at in (0..extent.guest.length()).step_by(SECTOR) {
            found.push(match extent.state {
                ExtentState::Mapped { host } => ExtentState::Mapped { host: host + at },
                other => other,
            });
        }
        rest = rest.skip(extent.guest.length());
    }
    found
}

proptest! {
    #[test]
    fn each_grain_is_where_its_table_says(
        grains in prop::collection::vec(prop::option::weighted(0.6, 0..9u32), 1..40),
        short in 0..8u64,
    ) {
        // Number 8 stands for zeros.
        let grains = foreign::distinct(&grains, None, |grain| grain.is_some_and(|grain| grain != 8));
        let entries: Vec<u32> = grains
            .iter()
            .map(|grain| grain.map_or(0, |grain| if grain == 8 { 1 } else { entry(grain) }))
            .collect();
        let capacity = grains.len() as u64 * GRAIN - short * 512;
        let file = sparse(&entries, 8, capacity);
        let sim = Sim::new(1);
        let run = sim.clone();
        sim.block_on(async move {
            let format = open(&run, file).await.unwrap();
            assert_eq!(format.size(), capacity);
            for (at, state) in (0..).step_by(SECTOR).zip(sectors(&format).await) {
                let expected = match grains[at / GRAIN as usize] {
                    None => ExtentState::Hole,
                    Some(8) => ExtentState::Zero,
                    Some(grain) => {
                        let start = u64::from(entry(grain)) * 512;
                        ExtentState::Mapped { host: start + at as u64 % GRAIN }
                    }
                };
                assert_eq!(state, expected, "at {at}");
            }
        });
    }
}

#[test]
fn extents_follow_each_other_and_each_is_in_its_file() {
    let sim = Sim::new(1);
    let run = sim.clone();
    sim.block_on(async move {
        let lines = "RW 3 FLAT \"flat\" 2\nRW 8 SPARSE \"sparse\"\nRW 2 ZERO\nRW 2 FLAT \"flat\" 0";
        let flat = vec![1; 5 * SECTOR];
        // The second grain lies past the end of its file, and is no part of the disk.
        let files = [flat, sparse(&[entry(0), entry(9)], 1, 2 * GRAIN)];
        let format = open_files(&run, lines, &files).await.unwrap();
        assert_eq!((format.size(), format.cluster_size()), (15 * 512, Some(GRAIN)));
        assert_eq!(format.header().extent_files(), [b"flat".to_vec(), b"sparse".to_vec()]);
        let mapped = |host: usize| ExtentState::Mapped { host: host as u64 };
        let sparse = 4096 + GRAINS;
        let expected = [2, 3, 4]
            .map(|sector| mapped(sector * SECTOR))
            .into_iter()
            .chain((0..8).map(|sector| mapped(sparse + sector * SECTOR)))
            .chain([ExtentState::Zero; 2])
            .chain([mapped(0), mapped(SECTOR)]);
        assert_eq!(sectors(&format).await, expected.collect::<Vec<_>>());
        assert_eq!(
            format.check(&ToolProgress::default()).await.unwrap().expect("a report").corruptions,
            0
        );
    });
}

#[test]
fn files_that_are_shorter_than_their_extents_are_refused() {
    let flat = || vec![1; 4 * SECTOR];
    for (lines, file, words) in [
        ("RW 5 FLAT \"a\" 0", flat(), "and its file 2048"),
        ("RW 4 FLAT \"a\" 1", flat(), "and its file 2048"),
        ("RW 9 SPARSE \"a\"", sparse(&[entry(0)], 1, GRAIN), "and its file 4096"),
        ("RW 8 SPARSE \"a\"", flat(), "another signature"),
        ("RW 8 SPARSE \"a\"", Vec::new(), "another signature"),
    ] {
        let error = refusal(lines, &[file]).to_string();
        assert!(error.contains(words) && error.contains("offset"), "{lines}: {error}");
    }
    let error = refusal("RW 1 FLAT \"a\" 0\nRW 1 FLAT \"b\" 0", &[flat()]);
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert!(refusal("", &[]).to_string().contains("no extents"));
}

#[test]
fn what_points_past_the_end_is_an_error_and_no_zeros() {
    let sim = Sim::new(1);
    let run = sim.clone();
    sim.block_on(async move {
        // One that two entries name.
        let shared = sparse(&[entry(0), entry(1), entry(0)], 2, 3 * GRAIN);
        foreign::assert_shared(&open(&run, shared).await.unwrap()).await;
        // A grain that the file has in part; one that it has not.
        let mut file = sparse(&[entry(0), entry(1), entry(2), 0], 2, 4 * GRAIN);
        file.truncate(file.len() - 512);
        let format = open(&run, file).await.unwrap();
        let read = |grain: u64| {
            let range = ByteRange::between(grain * GRAIN, (grain + 1) * GRAIN);
            format.map(range, Intent::Read)
        };
        assert!(read(0).await.is_ok() && read(3).await.is_ok());
        for grain in [1, 2] {
            let error = read(grain).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt);
            assert!(error.to_string().contains("past the end of the file"), "{error}");
        }
        let report = format.check(&ToolProgress::default()).await.unwrap().expect("a report");
        assert_eq!(report.corruptions, 2, "{:?}", report.problems);
        // A table past the end.
        let mut file = sparse(&[entry(0)], 1, GRAIN);
        file[DIRECTORY + 2] = 1;
        let format = open(&run, file).await.unwrap();
        let error = format.map(ByteRange::between(0, GRAIN), Intent::Read).await.unwrap_err();
        assert!(error.to_string().contains("grain table 0"), "{error}");
        assert_eq!(
            format.check(&ToolProgress::default()).await.unwrap().expect("a report").corruptions,
            1
        );
    });
}

#[test]
fn a_file_without_all_of_its_metadata_is_refused_in_words_that_scripts_look_for() {
    let sim = Sim::new(1);
    let run = sim.clone();
    sim.block_on(async move {
        let mut file = sparse(&[entry(0)], 1, GRAIN);
        file[64] = (GRAINS / SECTOR) as u8;
        file.truncate(GRAINS - SECTOR);
        let error = open(&run, file.clone()).await.err().expect("a refusal").to_string();
        assert!(error.contains("File truncated, expecting at least 32768 bytes"), "{error}");
        // A part of the last sector counts as the sector, as in QEMU.
        file.push(0);
        assert!(open(&run, file).await.is_ok());
        // The same words if the directory is cut off, too.
        let mut file = sparse(&[entry(0)], 1, GRAIN);
        file[64] = 255;
        file[57] = 255;
        file.truncate(DIRECTORY);
        let error = open(&run, file).await.err().expect("a refusal").to_string();
        assert!(error.contains("expecting at least 130560 bytes"), "{error}");
    });
}

#[test]
fn a_check_looks_whether_the_last_compressed_grain_is_whole() {
    let sim = Sim::new(1);
    let run = sim.clone();
    sim.block_on(async move {
        let mut file = sparse(&[entry(1), 0, entry(0)], 2, 3 * GRAIN);
        file[10] = 3;
        file[77] = 1;
        let last = GRAINS + GRAIN as usize;
        // The marker: the grain's sector, and 600 bytes of compressed data.
        file[last..last + 12].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 88, 2, 0, 0]);
        for (length, expected) in [(612, 0), (611, 1), (12, 1), (11, 1)] {
            let mut file = file.clone();
            file.truncate(last + length);
            let format = open(&run, file).await.unwrap();
            let report = format.check(&ToolProgress::default()).await.unwrap().expect("a report");
            assert_eq!(report.corruptions, expected, "{length}: {:?}", report.problems);
        }
    });
}

#[test]
fn tables_are_checked_in_any_order_and_by_few_requests_if_they_are_side_by_side() {
    // Tables in the order of the directory, then in another one.
    for is_in_order in [true, false] {
        let sim = Sim::new(1);
        let run = sim.clone();
        sim.block_on(async move {
            const COUNT: usize = 1000;
            let tables = DIRECTORY + (4 * COUNT).next_multiple_of(SECTOR);
            let grains = tables + COUNT * SECTOR;
            let mut file = sparse(&[], 0, (COUNT * ENTRIES) as u64 * GRAIN);
            file.resize(grains + 2 * GRAIN as usize, 0);
            let mut put = |at: usize, value: usize| {
                file[at..at + 4].copy_from_slice(&(value as u32).to_le_bytes());
            };
            for index in 0..COUNT {
                let place = if is_in_order { index } else { index * 501 % COUNT };
                put(DIRECTORY + 4 * index, tables / SECTOR + place);
            }
            let place = if is_in_order { COUNT - 1 } else { (COUNT - 1) * 501 % COUNT };
            put(tables + place * SECTOR + 12, grains / SECTOR);
            put(tables, grains / SECTOR + 8);
            let format = open(&run, file).await.unwrap();
            let before = format.storage().counts().0;
            let report = format.check(&ToolProgress::default()).await.unwrap().expect("a report");
            assert_eq!((report.corruptions, report.allocated_clusters), (0, 2));
            let requests = format.storage().counts().0 - before;
            assert!(!is_in_order || requests <= 3, "{requests} requests for 500 KiB of tables");
        });
    }
}

#[test]
fn what_cannot_be_read_is_refused_by_its_name() {
    let sim = Sim::new(1);
    let run = sim.clone();
    sim.block_on(async move {
        let mut stream = sparse(&[entry(0)], 1, GRAIN);
        stream[56..64].fill(0xff);
        for (bytes, words) in [
            (b"COWD".to_vec(), "an extent of 0 sectors"),
            (Vec::new(), "another signature"),
            (vec![b' '; 3 << 20], "another signature"),
            (stream, "no footer at its end"),
            ([&b"# Disk DescriptorFile\n"[..], &vec![b' '; 1 << 20]].concat(), "a descriptor of"),
        ] {
            let error = open(&run, bytes).await.err().expect("a refusal").to_string();
            assert!(error.contains(words) && error.contains("offset"), "{words}: {error}");
        }
        let unopened = open(&run, b"# Disk DescriptorFile\nRW 1 FLAT \"a\" 0\n".to_vec()).await;
        let unopened = unopened.unwrap();
        let error = unopened.map(ByteRange::between(0, 512), Intent::Read).await.unwrap_err();
        assert!(error.to_string().contains("not open"), "{error}");
    });
}

#[test]
fn the_tables_are_surveyed_when_data_is_read_for_the_first_time() {
    let sim = Sim::new(1);
    let run = sim.clone();
    sim.block_on(async move {
        let file = sparse(&[&[0; 200][..], &[entry(0)]].concat(), 1, 201 * GRAIN);
        let format = open(&run, file).await.unwrap();
        let opened = format.storage().counts().0;
        let hole = format.map(ByteRange::between(0, GRAIN), Intent::Read).await.unwrap();
        assert_eq!(hole.state, ExtentState::Hole);
        let requests = format.storage().counts().0 - opened;
        assert_eq!(requests, 1, "one page of the directory");
        let data = ByteRange::between(200 * GRAIN, 201 * GRAIN);
        assert!(format.map(data, Intent::Read).await.is_ok());
        let requests = format.storage().counts().0 - opened;
        assert_eq!(requests, 1 + 1 + 2, "a page with the table; the directory and the table");
    });
}
