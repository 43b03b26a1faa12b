//! Dynamic VHD images against a model: any table and any bitmaps, read extent by extent. Fixed
//! ones, whose guest writes what it likes.

use blockhouse_core::{ByteRange, Error, ErrorKind, ExtentState, Result, ToolProgress};
use blockhouse_format::{ForeignKind, Format, Intent};
use blockhouse_sim::{Sim, SimDisk};
use proptest::prelude::*;

use crate::common::foreign;

const SECTOR: u64 = 512;
const BLOCK: u64 = 128 << 10;
/// A block with its bitmap, which takes a sector.
const WHOLE: u64 = SECTOR + BLOCK;
const TABLE: usize = 1536;
const DATA: u64 = 2048;

fn seal(bytes: &mut [u8], field: usize) {
    bytes[field..field + 4].fill(0);
    let sum: u32 = bytes.iter().map(|&byte| u32::from(byte)).sum();
    bytes[field..field + 4].copy_from_slice(&(!sum).to_be_bytes());
}

fn footer(size: u64, kind: u32) -> [u8; 512] {
    let mut bytes = [0; 512];
    bytes[..8].copy_from_slice(b"conectix");
    bytes[13] = 1;
    bytes[16..24].copy_from_slice(&512u64.to_be_bytes());
    bytes[28..32].copy_from_slice(b"win ");
    bytes[48..56].copy_from_slice(&size.to_be_bytes());
    bytes[60..64].copy_from_slice(&kind.to_be_bytes());
    seal(&mut bytes, 64);
    bytes
}

/// A dynamic image whose table has these entries; the bitmaps of the blocks of its file follow each
/// other.
fn dynamic(table: &[Option<usize>], bitmaps: &[[u8; 32]], size: u64) -> Vec<u8> {
    let footer = footer(size, 3);
    let mut bytes = footer.to_vec();
    let mut header = [0; 1024];
    header[..8].copy_from_slice(b"cxsparse");
    header[16..24].copy_from_slice(&(TABLE as u64).to_be_bytes());
    header[25] = 1;
    header[28..32].copy_from_slice(&(table.len() as u32).to_be_bytes());
    header[32..36].copy_from_slice(&(BLOCK as u32).to_be_bytes());
    seal(&mut header, 36);
    bytes.extend(header);
    for entry in table {
        let sector = entry.map_or(u32::MAX, |block| (bitmap_at(block) / SECTOR) as u32);
        bytes.extend(sector.to_be_bytes());
    }
    bytes.resize(DATA as usize, 0);
    for bitmap in bitmaps {
        bytes.extend(bitmap);
        bytes.resize(bytes.len() + (WHOLE - 32) as usize, 5);
    }
    bytes.extend(footer);
    bytes
}

fn bitmap_at(block: usize) -> u64 {
    DATA + block as u64 * WHOLE
}

async fn open(sim: &Sim, bytes: Vec<u8>) -> Result<Format<SimDisk>> {
    foreign::open(sim, ForeignKind::Vpc, bytes).await
}

fn refusal(bytes: Vec<u8>) -> Error {
    let sim = Sim::new(1);
    let run = sim.clone();
    sim.block_on(async move { open(&run, bytes).await.err().expect("a refusal") })
}

proptest! {
    #[test]
    fn each_sector_is_where_table_and_bitmap_say(
        table in prop::collection::vec(prop::option::weighted(0.8, 0..4usize), 1..12),
        bitmaps in prop::collection::vec(
            prop_oneof![Just([0xff; 32]), prop::array::uniform32(any::<u8>())], 4),
        short in 0..BLOCK / SECTOR,
        start in 0..12 * BLOCK / SECTOR,
    ) {
        let sim = Sim::new(1);
        let size = table.len() as u64 * BLOCK - short * SECTOR;
        let table = foreign::distinct(&table, None, |block| block.is_some());
        let bytes = dynamic(&table, &bitmaps, size);
        let (run, start) = (sim.clone(), start * SECTOR % size);
        let expected = move |at: u64| {
            let (Some(block), inside) = (table[(at / BLOCK) as usize], at % BLOCK) else {
                return ExtentState::Zero;
            };
            let sector = inside / SECTOR;
            let byte = bitmaps[block][(sector / 8) as usize];
            match byte << (sector % 8) & 0x80 {
                0 => ExtentState::Zero,
                _ => ExtentState::Mapped { host: bitmap_at(block) + SECTOR + inside },
            }
        };
        sim.block_on(async move {
            let format = open(&run, bytes).await.unwrap();
            assert_eq!(format.size(), size);
            let mut rest = ByteRange::between(start, size);
            while !rest.is_empty() {
                let extent = format.map(rest, Intent::Read).await.unwrap();
                assert_eq!(extent.guest.offset(), rest.offset());
                assert!(!extent.guest.is_empty() && extent.guest.end() <= rest.end());
                for at in (rest.offset()..extent.guest.end()).step_by(512) {
                    let state = match extent.state {
                        ExtentState::Mapped { host } => {
                            ExtentState::Mapped { host: host + at - rest.offset() }
                        }
                        other => other,
                    };
                    assert_eq!(state, expected(at), "at {at}");
                }
                rest = rest.skip(extent.guest.length());
            }
        });
    }
}

#[test]
fn the_footer_at_the_end_decides_and_its_copy_stands_in_for_it() {
    let sim = Sim::new(1);
    let run = sim.clone();
    sim.block_on(async move {
        // The guest of a fixed image has written another one to its first sector.
        let mut fixed = vec![3; 4096];
        fixed[..512].copy_from_slice(&footer(1 << 30, 3));
        fixed.extend(footer(4096, 2));
        let format = open(&run, fixed).await.unwrap();
        assert_eq!(format.size(), 4096);
        let extent = format.map(ByteRange::between(512, 4096), Intent::Read).await.unwrap();
        assert_eq!(extent.state, ExtentState::Mapped { host: 512 });
        assert_eq!(format.check(&ToolProgress::default()).await.unwrap(), None);
        let mut cut = dynamic(&[Some(0)], &[[0xff; 32]], BLOCK);
        cut.truncate(cut.len() - 512);
        assert_eq!(open(&run, cut).await.unwrap().size(), BLOCK);
    });
}

#[test]
fn what_contradicts_itself_is_refused() {
    let sound = || dynamic(&[Some(0), None], &[[0xff; 32]], 2 * BLOCK);
    let last = sound().len() - 512;
    let mut wrong_sum = sound();
    wrong_sum[last + 70] ^= 1;
    let mut wrong_header = sound();
    wrong_header[512 + 100] ^= 1;
    let mut short = footer(1 << 20, 2).to_vec();
    short.splice(..0, [0; 4096]);
    let mut differencing = sound();
    differencing.splice(last.., footer(2 * BLOCK, 4));
    let mut far = footer(2 * BLOCK, 3);
    far[16..24].fill(0xff);
    seal(&mut far, 64);
    for (bytes, words) in [
        (far.to_vec(), "no header of a dynamic image"),
        (wrong_sum, "checksum"),
        (wrong_header, "checksum"),
        (short, "states a disk of 1048576 bytes, and the file has 4096"),
        (differencing, "parent image"),
        (vec![0; 4096], "no footer"),
        (vec![0; 100], "shorter than a footer"),
        (footer(2 * BLOCK, 3).to_vec(), "no header of a dynamic image"),
    ] {
        let error = refusal(bytes).to_string();
        assert!(error.contains(words) && error.contains("offset"), "{words}: {error}");
    }
}

#[test]
fn a_truncated_image_is_refused_and_reads_as_no_zeros() {
    let sim = Sim::new(1);
    let run = sim.clone();
    sim.block_on(async move {
        let shared = dynamic(&[Some(0), Some(1), Some(0)], &[[0xff; 32]; 2], 3 * BLOCK);
        foreign::assert_shared(&open(&run, shared).await.unwrap()).await;
        // Each 16 sectors after the one before, as one maker writes them.
        let mut apart = dynamic(&[Some(0), Some(1), Some(2)], &[[0xff; 32]; 3], 3 * BLOCK);
        for block in 0..3u32 {
            let entry = (DATA / SECTOR) as u32 + 16 * block;
            apart[TABLE + 4 * block as usize..][..4].copy_from_slice(&entry.to_be_bytes());
        }
        foreign::assert_shared(&open(&run, apart).await.unwrap()).await;
        // The bitmap of one block is the data of another, so zeros are not believed either.
        let mut inside = dynamic(&[Some(0), Some(1), None], &[[0xff; 32]; 2], 3 * BLOCK);
        let zeros = DATA as usize + 20 * SECTOR as usize;
        inside[zeros..zeros + 512].fill(0);
        let entry = (zeros as u64 / SECTOR) as u32;
        inside[TABLE + 4..TABLE + 8].copy_from_slice(&entry.to_be_bytes());
        let format = open(&run, inside).await.unwrap();
        let error = format.map(ByteRange::between(BLOCK, BLOCK + 512), Intent::Read).await;
        assert!(error.unwrap_err().to_string().contains("overlap"));
        let table = [Some(0), Some(1), None, None];
        let mut bytes = dynamic(&table, &[[0xff; 32]; 2], 4 * BLOCK);
        // Without the end of the last block; then without its bitmap. With and without a footer.
        for length in [bitmap_at(2) - 512, bitmap_at(1) + 4096, bitmap_at(1)] {
            bytes.truncate(length as usize);
            let mut ended = bytes.clone();
            ended.extend(footer(4 * BLOCK, 3));
            for cut in [bytes.clone(), ended] {
                if cut.len() as u64 == bitmap_at(2) {
                    continue;
                }
                let error = open(&run, cut).await.err().expect("a refusal");
                assert_eq!(error.kind(), ErrorKind::Corrupt);
                let text = error.to_string();
                assert!(text.contains("the image has been truncated"), "{text}");
                assert!(text.contains(&bitmap_at(2).to_string()), "{text}");
            }
        }
        // A file that is long enough, but whose last block reaches into its footer.
        let mut bytes = dynamic(&table, &[[0xff; 32]; 2], 4 * BLOCK);
        bytes.truncate(bitmap_at(2) as usize - 512);
        bytes.extend(footer(4 * BLOCK, 3));
        let format = open(&run, bytes).await.unwrap();
        let range = ByteRange::between(2 * BLOCK - 512, 2 * BLOCK);
        let error = format.map(range, Intent::Read).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert!(error.to_string().contains("past the end of the file"), "{error}");
        let report = format.check(&ToolProgress::default()).await.unwrap().expect("a report");
        assert_eq!(report.corruptions, 1, "{:?}", report.problems);
    });
}
