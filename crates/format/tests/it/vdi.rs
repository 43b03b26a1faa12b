//! VDI images against a model: any block table, read extent by extent.

use blockhouse_core::{ByteRange, ErrorKind, ExtentState, Result, ToolProgress};
use blockhouse_format::{
    Access, BitmapActivity, Discard, ForeignKind, Format, ImageFormat, Intent, OpenOptions,
};
use blockhouse_sim::{Config, Sim, SimDisk};
use futures_util::future::join_all;
use proptest::prelude::*;

use crate::common::foreign;

const BLOCK: u64 = 4096;
const TABLE: usize = 512;
const DATA: usize = 1024;

/// An image of as many blocks as the table has entries; block `n` of the file is filled with `n +
/// 1`.
fn image(table: &[u32], file_blocks: usize, size: u64) -> Vec<u8> {
    let mut bytes = vec![0; DATA];
    let mut put = |offset: usize, value: u32| {
        bytes[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
    };
    put(0x40, 0xbeda_107f);
    put(0x44, 0x0001_0001);
    put(0x4c, 1);
    put(0x154, TABLE as u32);
    put(0x158, DATA as u32);
    put(0x168, 512);
    put(0x170, size as u32);
    put(0x178, BLOCK as u32);
    put(0x180, table.len() as u32);
    let used = table.iter().filter(|&&entry| entry < u32::MAX - 1).count();
    put(0x184, used as u32);
    for (index, &entry) in table.iter().enumerate() {
        put(TABLE + 4 * index, entry);
    }
    (0..file_blocks).for_each(|block| bytes.extend([block as u8 + 1; BLOCK as usize]));
    bytes
}

async fn open(sim: &Sim, bytes: Vec<u8>) -> Result<Format<SimDisk>> {
    foreign::open(sim, ForeignKind::Vdi, bytes).await
}

proptest! {
    #[test]
    fn each_block_is_where_the_table_says(
        table in prop::collection::vec(
            prop_oneof![3 => 0..40u32, 1 => Just(u32::MAX), 1 => Just(u32::MAX - 1)], 1..40),
        short in 0..BLOCK,
        start in 0..40 * BLOCK,
    ) {
        let sim = Sim::new(1);
        let blocks = table.len() as u32;
        let size = (u64::from(blocks) * BLOCK - short).next_multiple_of(512);
        let table = foreign::distinct(&table, u32::MAX, |entry| entry < blocks);
        let bytes = image(&table, 40, size);
        let (run, start) = (sim.clone(), start % size);
        sim.block_on(async move {
            let format = open(&run, bytes).await.unwrap();
            assert_eq!(format.size(), size);
            let mut rest = ByteRange::between(start, size);
            while !rest.is_empty() {
                let entry = |at: u64| table[(at / BLOCK) as usize];
                let found = format.map(rest, Intent::Read).await;
                let first = entry(rest.offset());
                if first >= blocks && first < u32::MAX - 1 {
                    let error = found.unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Corrupt);
                    let end = (rest.offset() + 1).next_multiple_of(BLOCK);
                    rest = rest.skip(end - rest.offset());
                    continue;
                }
                let extent = found.unwrap();
                assert_eq!(extent.guest.offset(), rest.offset());
                assert!(!extent.guest.is_empty() && extent.guest.end() <= rest.end());
                for at in (rest.offset()..extent.guest.end()).step_by(512) {
                    let expected = match entry(at) {
                        entry if entry >= u32::MAX - 1 => ExtentState::Zero,
                        block => {
                            let inside = at % BLOCK;
                            let host = DATA as u64 + u64::from(block) * BLOCK + inside;
                            ExtentState::Mapped { host: host - (at - rest.offset()) }
                        }
                    };
                    assert_eq!(extent.state, expected, "at {at}");
                }
                rest = rest.skip(extent.guest.length());
            }
        });
    }
}

#[test]
fn blocks_past_the_end_of_the_file_are_an_error_and_no_zeros() {
    let sim = Sim::new(1);
    let run = sim.clone();
    sim.block_on(async move {
        let format = open(&run, image(&[1, 2, 0], 2, 3 * BLOCK)).await.unwrap();
        let range = ByteRange::between(0, 3 * BLOCK);
        assert_eq!(format.map(range, Intent::Read).await.unwrap().guest.length(), BLOCK);
        let error = format.map(range.skip(BLOCK), Intent::Read).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("past the end of the file"), "{error}");
        assert!(format.map(range.skip(2 * BLOCK), Intent::Read).await.is_ok());
        let report = format.check(&ToolProgress::default()).await.unwrap().expect("a report");
        assert_eq!(report.corruptions, 1, "{:?}", report.problems);
    });
}

/// The search for blocks that are used twice needs much memory.
#[test]
fn lookups_at_once_share_one_search() {
    let sim = Sim::new(1);
    let run = sim.clone();
    sim.block_on(async move {
        for (table, is_sound) in [([0, 1, 2], true), ([0, 1, 1], false)] {
            let format = open(&run, image(&table, 3, 3 * BLOCK)).await.unwrap();
            let reads = || format.storage().counts().0;
            let before = reads();
            let range = ByteRange::between(0, 512);
            let found = join_all((0..32).map(|_| format.map(range, Intent::Read))).await;
            assert!(found.iter().all(|found| found.is_ok() == is_sound), "{found:?}");
            assert!(
                reads() - before <= 34,
                "a page for each, and one search: {}",
                reads() - before
            );
            let before = reads();
            assert_eq!(format.map(range, Intent::Read).await.is_ok(), is_sound);
            assert_eq!(reads(), before, "its outcome is remembered");
        }
    });
}

#[test]
fn a_check_names_the_blocks_that_a_truncated_file_lacks_in_part() {
    let sim = Sim::new(1);
    let run = sim.clone();
    sim.block_on(async move {
        // The cut bytes of the last block are bytes of the disk, or follow its end.
        for (size, expected) in [(2 * BLOCK, 1), (2 * BLOCK - 512, 0)] {
            let mut bytes = image(&[0, 1], 2, size);
            bytes.truncate(bytes.len() - 512);
            let format = open(&run, bytes).await.unwrap();
            foreign::assert_lacks(&format, ByteRange::between(BLOCK, size), expected).await;
        }
    });
}

#[test]
fn a_check_finds_what_a_table_has_twice_or_nowhere() {
    let sim = Sim::new(1);
    let run = sim.clone();
    sim.block_on(async move {
        let table = [1, 0, 1, 7, u32::MAX, u32::MAX - 1];
        let mut bytes = image(&table, 6, 6 * BLOCK);
        foreign::assert_shared(&open(&run, bytes.clone()).await.unwrap()).await;
        bytes[0x184] = 9;
        let report = open(&run, bytes)
            .await
            .unwrap()
            .check(&ToolProgress::default())
            .await
            .unwrap()
            .expect("a report");
        assert_eq!((report.corruptions, report.allocated_clusters), (3, 3));
        let all = report.problems.join("\n");
        for words in
            ["block 3 is said to be in block 7", "share the data", "states 9 blocks in use"]
        {
            assert!(all.contains(words), "{words}: {all}");
        }
        let sound = open(&run, image(&[1, 0, 2], 3, 3 * BLOCK)).await.unwrap();
        let report = sound.check(&ToolProgress::default()).await.unwrap().expect("a report");
        assert_eq!((report.corruptions, report.fragmented_clusters), (0, 2));
        assert_eq!(report.end, DATA as u64 + 3 * BLOCK);
    });
}

#[test]
fn an_image_is_not_opened_to_be_written_or_with_a_cut_table() {
    let sim = Sim::new(1);
    let run = sim.clone();
    sim.block_on(async move {
        let storage = SimDisk::new(&run, Config::default(), image(&[0], 1, BLOCK));
        let options = OpenOptions {
            access: Access::ReadWrite,
            discard: Discard::Unmap,
            bitmap_activity: BitmapActivity::DEFAULT,
        };
        let kind = ImageFormat::Foreign(ForeignKind::Vdi);
        let error = Format::open(storage, kind, options).await.err().expect("a refusal");
        assert_eq!(error.kind(), ErrorKind::ReadOnly);
        assert!(error.to_string().contains("blockhouse convert"), "{error}");
        let mut cut = image(&[0], 1, BLOCK);
        cut.truncate(514);
        let error = open(&run, cut).await.err().expect("a refusal").to_string();
        assert!(error.contains("File truncated, expecting at least 516 bytes"), "{error}");
        let error = open(&run, Vec::new()).await.err().expect("a refusal").to_string();
        assert!(error.contains("no VDI image"), "{error}");
    });
}
