//! VHDX images against a model: any block table, with bitmaps between; logs that were not replayed,
//! whole, cut and stale.

use blockhouse_core::{ByteRange, Error, ErrorKind, ExtentState, Result, ToolProgress};
use blockhouse_format::{ForeignKind, Format, Intent, replay_vhdx_log};
use blockhouse_sim::{Config, Report, Sim, SimDisk, for_seeds};
use proptest::prelude::*;

use crate::common::foreign;

const MIB: usize = 1 << 20;
const PAGE: usize = 4096;
const HEADER: usize = 64 << 10;
const REGIONS: usize = 192 << 10;
const LOG: usize = MIB;
const METADATA: usize = 2 * MIB;
const BAT: usize = 3 * MIB;
const BLOCK: u64 = MIB as u64;

/// The GUID of the log.
const GUID: [u8; 16] = [9; 16];

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

fn seal(bytes: &mut [u8]) {
    put(bytes, 4, &[0; 4]);
    let sum = crc32c::crc32c(bytes);
    put(bytes, 4, &sum.to_le_bytes());
}

/// The bytes of a GUID that is written `a-b-c-rest`.
fn guid(a: u32, b: u16, c: u16, rest: u64) -> Vec<u8> {
    let (a, b, c) = (a.to_le_bytes(), b.to_le_bytes(), c.to_le_bytes());
    [&a[..], &b, &c, &rest.to_be_bytes()].concat()
}

/// An image with this table and no blocks, of `size` bytes in blocks of 1 MiB.
fn image(table: &[u64], size: u64, file_size: usize) -> Vec<u8> {
    let mut file = vec![0; file_size];
    put(&mut file, 0, b"vhdxfile");
    let header = &mut file[HEADER..HEADER + PAGE];
    put(header, 0, b"head");
    put(header, 48, &GUID);
    put(header, 66, &[1]);
    put(header, 68, &(MIB as u32).to_le_bytes());
    put(header, 72, &(LOG as u64).to_le_bytes());
    seal(header);
    let regions = &mut file[REGIONS..REGIONS + (64 << 10)];
    put(regions, 0, b"regi");
    put(regions, 8, &[2]);
    let bat = guid(0x2dc2_7766, 0xf623, 0x4200, 0x9d64_115e_9bfd_4a08);
    let metadata = guid(0x8b7c_a206, 0x4790, 0x4b9a, 0xb8fe_575f_050f_886e);
    for (at, guid, place) in [(16, bat, BAT), (48, metadata, METADATA)] {
        put(regions, at, &guid);
        put(regions, at + 16, &(place as u64).to_le_bytes());
        put(regions, at + 24, &(MIB as u32).to_le_bytes());
        put(regions, at + 28, &[1]);
    }
    seal(regions);
    let metadata = &mut file[METADATA..METADATA + 2 * (64 << 10)];
    put(metadata, 0, b"metadata");
    put(metadata, 10, &[3]);
    let items = [
        (guid(0xcaa1_6737, 0xfa36, 0x4d43, 0xb3b6_33f0_aa44_e76b), BLOCK),
        (guid(0x2fa5_4224, 0xcd1b, 0x4876, 0xb211_5dbe_d83b_f4b8), size),
        (guid(0x8141_bf1d, 0xa96f, 0x4709, 0xba47_f233_a8fa_ab5f), 512),
    ];
    for (index, (guid, value)) in items.iter().enumerate() {
        let (entry, place) = (32 + 32 * index, (64 << 10) + 8 * index);
        put(metadata, entry, guid);
        put(metadata, entry + 16, &(place as u32).to_le_bytes());
        put(metadata, entry + 20, &[8]);
        put(metadata, entry + 24, &[4]);
        put(metadata, place, &value.to_le_bytes());
    }
    for (index, entry) in table.iter().enumerate() {
        put(&mut file, BAT + 8 * index, &entry.to_le_bytes());
    }
    file
}

/// An entry of the log that writes these pages at these offsets; `None` is a page of zeros.
fn entry(
    sequence: u64,
    tail: usize,
    changes: &[(usize, Option<&[u8]>)],
    file_size: u64,
) -> Vec<u8> {
    let pages = changes.iter().filter(|(_, page)| page.is_some()).count();
    let mut bytes = vec![0; PAGE * (1 + pages)];
    let length = bytes.len() as u32;
    put(&mut bytes, 0, b"loge");
    put(&mut bytes, 8, &length.to_le_bytes());
    put(&mut bytes, 12, &(tail as u32).to_le_bytes());
    put(&mut bytes, 16, &sequence.to_le_bytes());
    put(&mut bytes, 24, &[changes.len() as u8]);
    put(&mut bytes, 32, &GUID);
    put(&mut bytes, 48, &file_size.to_le_bytes());
    put(&mut bytes, 56, &file_size.to_le_bytes());
    let mut data = PAGE;
    for (index, (offset, page)) in changes.iter().enumerate() {
        let at = 64 + 32 * index;
        put(&mut bytes, at + 16, &(*offset as u64).to_le_bytes());
        put(&mut bytes, at + 24, &sequence.to_le_bytes());
        let Some(page) = page else {
            put(&mut bytes, at, b"zero");
            put(&mut bytes, at + 8, &(PAGE as u64).to_le_bytes());
            continue;
        };
        put(&mut bytes, at, b"desc");
        put(&mut bytes, at + 4, &page[PAGE - 4..]);
        put(&mut bytes, at + 8, &page[..8]);
        put(&mut bytes, data, page);
        put(&mut bytes, data, b"data");
        put(&mut bytes, data + 4, &((sequence >> 32) as u32).to_le_bytes());
        put(&mut bytes, data + PAGE - 4, &(sequence as u32).to_le_bytes());
        data += PAGE;
    }
    seal(&mut bytes);
    bytes
}

/// The first page of a block table.
fn page_of(table: &[u64]) -> Vec<u8> {
    let mut page: Vec<u8> = table.iter().flat_map(|entry| entry.to_le_bytes()).collect();
    page.resize(PAGE, 0);
    page
}

async fn open(sim: &Sim, bytes: Vec<u8>) -> Result<Format<SimDisk>> {
    foreign::open(sim, ForeignKind::Vhdx, bytes).await
}

/// The states of an image's blocks, or the reason why it does not open.
fn blocks(bytes: Vec<u8>) -> Result<Vec<ExtentState>> {
    let sim = Sim::new(1);
    let run = sim.clone();
    sim.block_on(async move {
        let format = open(&run, bytes).await?;
        let mut found = Vec::new();
        for start in (0..format.size()).step_by(BLOCK as usize) {
            let range = ByteRange::between(start, (start + BLOCK).min(format.size()));
            let extent = format.map(range, Intent::Read).await?;
            assert_eq!(extent.guest, range);
            found.push(extent.state);
        }
        Ok(found)
    })
}

fn refusal(bytes: Vec<u8>) -> Error {
    blocks(bytes).expect_err("a refusal")
}

const fn at(mib: u64) -> u64 {
    mib << 20 | 6
}

proptest! {
    #[test]
    fn each_block_is_where_the_table_says(
        table in prop::collection::vec((0..8u64, 1..12u64), 1..20),
        short in 0..2048u64,
    ) {
        let table = foreign::distinct(&table, (0, 1), |(state, _)| state == 6);
        let entries: Vec<u64> = table.iter().map(|(state, mib)| mib << 20 | state).collect();
        let size = entries.len() as u64 * BLOCK - short * 512;
        let sim = Sim::new(1);
        let run = sim.clone();
        let file = image(&entries, size, 12 * MIB);
        sim.block_on(async move {
            let format = open(&run, file).await.unwrap();
            assert_eq!(format.size(), size);
            for (start, (state, mib)) in (0..).step_by(MIB).zip(table) {
                let start = start as u64;
                let range = ByteRange::between(start, (start + BLOCK).min(size));
                let found = format.map(range, Intent::Read).await;
                match state {
                    4 | 7 => assert_eq!(found.unwrap_err().kind(), ErrorKind::Corrupt),
                    2 => assert_eq!(found.unwrap().state, ExtentState::Zero),
                    6 => assert_eq!(found.unwrap().state, ExtentState::Mapped { host: mib << 20 }),
                    _ => assert_eq!(found.unwrap().state, ExtentState::Hole),
                }
            }
        });
    }

    #[test]
    fn any_damage_is_an_error_or_harmless(
        damage in prop::collection::vec((0..7usize, 0..512usize, any::<u8>()), 1..6),
    ) {
        let mut file = image(&[at(4), 0, 2], 3 * BLOCK, 5 * MIB);
        let entry = entry(3, 0, &[(BAT, Some(&page_of(&[at(4)]))), (BAT + PAGE, None)], 0);
        put(&mut file, LOG, &entry);
        for (place, offset, value) in damage {
            let place = [0, HEADER, REGIONS, LOG, METADATA, METADATA + (64 << 10), BAT][place];
            file[place + offset] = value;
        }
        // With sound checksums damage gets further.
        seal(&mut file[HEADER..HEADER + PAGE]);
        seal(&mut file[REGIONS..REGIONS + (64 << 10)]);
        seal(&mut file[LOG..LOG + 2 * PAGE]);
        match blocks(file) {
            Ok(_) => {}
            Err(error) => prop_assert!(error.to_string().contains("offset"), "{error}"),
        }
    }
}

/// An entry whose offset is so high that the offset of the block's last bytes overflows.
#[test]
fn a_block_at_the_highest_offset_is_refused() {
    let mut file = image(&[0xffff_ffff_fff0_0006], 2 * BLOCK, 6 * MIB);
    put(&mut file, METADATA + (64 << 10), &(2 * BLOCK).to_le_bytes());
    let sim = Sim::new(1);
    let run = sim.clone();
    sim.block_on(async move {
        let format = open(&run, file).await.unwrap();
        for start in [0, BLOCK, 2 * BLOCK - 512] {
            let read = format.map(ByteRange::between(start, start + 512), Intent::Read).await;
            assert_eq!(read.unwrap_err().kind(), ErrorKind::Corrupt);
        }
    });
}

#[test]
fn the_log_is_replayed_in_memory_in_its_order() {
    let file = |entries: &[(usize, Vec<u8>)]| {
        let mut file = image(&[at(4), 0], 2 * BLOCK, 6 * MIB);
        entries.iter().for_each(|(place, entry)| put(&mut file, LOG + place, entry));
        file
    };
    let mapped = |mib: u64| ExtentState::Mapped { host: mib << 20 };
    let (first, second) = (page_of(&[at(5), 0]), page_of(&[0, at(5)]));
    let one = |tail| entry(7, tail, &[(BAT, Some(&first))], 0);
    let two = |tail| entry(8, tail, &[(BAT, Some(&second))], 0);
    let states = |entries: &[(usize, Vec<u8>)]| blocks(file(entries)).unwrap();
    let untouched = [mapped(4), ExtentState::Hole];
    assert_eq!(states(&[]), untouched);
    assert_eq!(states(&[(0, one(0))]), [mapped(5), ExtentState::Hole]);
    assert_eq!(states(&[(0, one(0)), (2 * PAGE, two(0))]), [ExtentState::Hole, mapped(5)]);
    // Zeros after a page.
    let zeros = entry(8, 0, &[(BAT, None)], 0);
    assert_eq!(states(&[(0, one(0)), (2 * PAGE, zeros)]), [ExtentState::Hole; 2]);
    // The head is what was written last, and the tail says where to begin.
    assert_eq!(states(&[(0, one(0)), (2 * PAGE, two(2 * PAGE))]), [ExtentState::Hole, mapped(5)]);
    // An entry that wraps around the end of the log, followed by one at its beginning.
    let mut wrapped = file(&[(PAGE, two(MIB - PAGE))]);
    put(&mut wrapped, LOG + MIB - PAGE, &one(MIB - PAGE)[..PAGE]);
    put(&mut wrapped, LOG, &one(MIB - PAGE)[PAGE..]);
    assert_eq!(blocks(wrapped).unwrap(), [ExtentState::Hole, mapped(5)]);
    // Entries on both sides of the end of what is read at once.
    let apart = [(14 * PAGE, one(14 * PAGE)), (16 * PAGE, two(14 * PAGE))];
    assert_eq!(states(&apart), [ExtentState::Hole, mapped(5)]);
    let across = [(15 * PAGE, one(15 * PAGE)), (17 * PAGE, two(15 * PAGE))];
    assert_eq!(states(&across), [ExtentState::Hole, mapped(5)]);
    // Stale: a lower number; a tail that is gone; another GUID; a torn last sector.
    let stale = entry(5, 8 * PAGE, &[(BAT, Some(&second))], 0);
    assert_eq!(states(&[(0, one(0)), (8 * PAGE, stale)]), [mapped(5), ExtentState::Hole]);
    assert_eq!(states(&[(0, one(16 * PAGE))]), untouched);
    let mut other = one(0);
    other[32] = 8;
    seal(&mut other);
    assert_eq!(states(&[(0, other)]), untouched);
    let mut torn = two(0);
    torn[PAGE + 100] ^= 1;
    assert_eq!(states(&[(0, one(0)), (2 * PAGE, torn)]), [mapped(5), ExtentState::Hole]);
}

/// A crash at any step of a replay into the file leaves the disk that the log says.
#[test]
fn a_log_is_replayed_into_the_file_at_whatever_step_a_crash_comes() {
    let expected = [ExtentState::Hole, ExtentState::Mapped { host: 5 << 20 }];
    let name = "a_log_is_replayed_into_the_file_at_whatever_step_a_crash_comes";
    let report = for_seeds(env!("CARGO_PKG_NAME"), name, 50, |seed| {
        let sim = Sim::new(seed);
        let mut random = sim.fork_prng();
        let config = Config { refuses_fua: false, ..Config::random(&mut random) };
        if config.alignment.offset > PAGE as u32 {
            return Ok(Report::default());
        }
        let mut file = image(&[at(4), 0], 2 * BLOCK, 6 * MIB);
        let (first, second) = (page_of(&[at(5), 0]), page_of(&[0, at(5)]));
        let mut longer = entry(7, 0, &[(BAT, Some(&first)), (6 * MIB, None)], 0);
        put(&mut longer, 56, &(7_u64 << 20).to_le_bytes());
        seal(&mut longer);
        put(&mut file, LOG, &longer);
        put(&mut file, LOG + 2 * PAGE, &entry(8, 0, &[(BAT, Some(&second))], 0));
        let before = blocks(file.clone()).map_err(|error| error.to_string());
        assert_eq!(before.as_deref(), Ok(&expected[..]));
        let disk = SimDisk::new(&sim, config, file);
        let replayed = disk.clone();
        let task = sim.spawn(async move { replay_vhdx_log(&replayed, [9; 16]).await });
        let (mut last, mut report) = (None, Report::default());
        while sim.step() {
            let moment = disk.counts();
            if last.replace(moment) != Some(moment) {
                report.crashes += 1;
                let after = blocks(disk.crash(&mut random)).map_err(|error| error.to_string())?;
                assert_eq!(after, expected, "after a crash");
            }
        }
        assert_eq!(task.output().expect("it ends").map_err(|error| error.to_string()), Ok(true));
        // The log is not needed, and not looked at.
        let mut file = disk.content();
        assert_eq!(file.len(), 7 * MIB);
        file[LOG..LOG + MIB].fill(0xff);
        assert_eq!(blocks(file).map_err(|error| error.to_string()).as_deref(), Ok(&expected[..]));
        Ok(report)
    });
    assert!(report.crashes > 100, "{} crashes", report.crashes);
}

/// A log that changes the headers, which say where it is, and headers after which there is no newer
/// one, are left alone: the image stays as readable as it was.
#[test]
fn a_log_that_would_cost_the_headers_is_not_replayed_into_the_file() {
    let logged = |offset: usize| {
        let mut file = image(&[at(4)], BLOCK, 6 * MIB);
        put(&mut file, LOG, &entry(7, 0, &[(BAT, Some(&page_of(&[at(5)]))), (offset, None)], 0));
        file
    };
    let mut last = logged(512 << 10);
    put(&mut last, HEADER + 8, &[0xff; 8]);
    let mut header = last[HEADER..HEADER + PAGE].to_vec();
    seal(&mut header);
    put(&mut last, HEADER, &header);
    for file in [logged(0), logged(HEADER), logged(2 * HEADER), last] {
        let before = blocks(file.clone()).unwrap();
        let sim = Sim::new(1);
        let disk = SimDisk::new(&sim, Config::default(), file.clone());
        let replayed = disk.clone();
        let task = sim.spawn(async move { replay_vhdx_log(&replayed, [9; 16]).await });
        while sim.step() {}
        let error = task.output().expect("it ends").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(disk.content() == file && blocks(file).unwrap() == before);
    }
}

#[test]
fn a_log_is_searched_by_few_requests() {
    let (sim, mut file) = (Sim::new(1), image(&[at(4), 0], 2 * BLOCK, 6 * MIB));
    put(&mut file, LOG, &entry(7, 0, &[(BAT, None)], 0));
    let run = sim.clone();
    let requests = sim.block_on(async move {
        let format = open(&run, file).await.unwrap();
        format.storage().counts().0
    });
    assert!(requests < 40, "{requests} requests for a log of 256 sectors");
}

#[test]
fn a_log_that_does_not_fit_is_refused() {
    let refused = |entry: Vec<u8>| {
        let mut file = image(&[at(4)], BLOCK, 6 * MIB);
        put(&mut file, LOG, &entry);
        refusal(file)
    };
    let page = page_of(&[at(5)]);
    let error = refused(entry(1, 0, &[(BAT, Some(&page))], 7 << 20)).to_string();
    assert!(error.contains("when the file had 7340032 bytes"), "{error}");
    let error = refused(entry(1, 0, &[(4 * MIB, Some(&page))], 0));
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.to_string().contains("is in the log"), "{error}");
    for (field, value, words) in [
        (64, b'x', "is invalid"),
        (80, 1, "contradicts"),
        (88, 2, "contradicts"),
        (24, 2, "contradicts"),
    ] {
        let mut damaged = entry(1, 0, &[(BAT, Some(&page))], 0);
        damaged[field] = value;
        seal(&mut damaged);
        let error = refused(damaged).to_string();
        assert!(error.contains(words) && error.contains("offset"), "{field}: {error}");
    }
}

#[test]
fn the_newer_of_two_headers_counts_and_a_second_region_table_helps() {
    let mut file = image(&[at(4)], BLOCK, 5 * MIB);
    let mut newer = file[HEADER..HEADER + PAGE].to_vec();
    put(&mut newer, 8, &[1]);
    put(&mut newer, 66, &[2]);
    seal(&mut newer);
    put(&mut file, 128 << 10, &newer);
    assert!(refusal(file.clone()).to_string().contains("version 2"));
    file[(128 << 10) + 5] ^= 1;
    assert!(blocks(file.clone()).is_ok(), "its checksum is wrong");
    let regions = file[REGIONS..REGIONS + (64 << 10)].to_vec();
    file[REGIONS + 5] ^= 1;
    assert!(refusal(file.clone()).to_string().contains("region tables"));
    put(&mut file, 256 << 10, &regions);
    assert!(blocks(file.clone()).is_ok());
    file[HEADER + 5] ^= 1;
    assert!(refusal(file).to_string().contains("headers"));
    assert!(refusal(Vec::new()).to_string().contains("no VHDX image"));
}

#[test]
fn a_check_names_the_blocks_that_a_truncated_file_lacks_in_part() {
    let sim = Sim::new(1);
    let run = sim.clone();
    sim.block_on(async move {
        // The cut bytes of the last block are bytes of the disk, or follow its end.
        for (size, expected) in [(2 * BLOCK, 1), (2 * BLOCK - 512, 0)] {
            let format = open(&run, image(&[at(4), at(5)], size, 6 * MIB - 512)).await.unwrap();
            foreign::assert_lacks(&format, ByteRange::between(BLOCK, size), expected).await;
        }
    });
}

#[test]
fn a_check_passes_over_the_entries_of_bitmaps() {
    let sim = Sim::new(1);
    let run = sim.clone();
    sim.block_on(async move {
        // After the entries of 4096 blocks comes that of a bitmap, which is no block.
        let mut table = vec![0; 4098];
        (table[4095], table[4096], table[4097]) = (at(4), at(4), at(5));
        let format = open(&run, image(&table, 4097 * BLOCK, 6 * MIB)).await.unwrap();
        let report = format.check(&ToolProgress::default()).await.unwrap().expect("a report");
        assert_eq!((report.corruptions, report.allocated_clusters), (0, 2));
        table[4097] = at(9);
        let format = open(&run, image(&table, 4097 * BLOCK, 6 * MIB)).await.unwrap();
        let report = format.check(&ToolProgress::default()).await.unwrap().expect("a report");
        assert!(report.problems[0].contains("block 4096 "), "{:?}", report.problems);
    });
}

#[test]
fn a_check_finds_what_a_table_has_twice_or_nowhere() {
    let sim = Sim::new(1);
    let run = sim.clone();
    sim.block_on(async move {
        let table = [at(4), at(5), at(4), at(9), 5 << 20 | 7, 2];
        let file = image(&table, 6 * BLOCK, 6 * MIB);
        foreign::assert_shared(&open(&run, file.clone()).await.unwrap()).await;
        let report = open(&run, file)
            .await
            .unwrap()
            .check(&ToolProgress::default())
            .await
            .unwrap()
            .expect("a report");
        assert_eq!(
            (report.corruptions, report.allocated_clusters),
            (3, 3),
            "{:?}",
            report.problems
        );
        let sound = open(&run, image(&[at(5), 0, at(4)], 3 * BLOCK, 6 * MIB)).await.unwrap();
        assert_eq!(
            sound.check(&ToolProgress::default()).await.unwrap().expect("a report").corruptions,
            0
        );
    });
}
