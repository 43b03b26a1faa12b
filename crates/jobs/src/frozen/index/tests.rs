//! Tests the index against a model, which is a list of blocks.

use proptest::prelude::*;

use super::*;

const SIZE: u64 = REGION + 20 * GRANULE + 1024;
const REGION_BLOCKS: usize = (REGION / BLOCK) as usize;

/// The state of a block of the model.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Model {
    Unsaved,
    Claimed,
    Saved(Place),
}

fn blocks(range: ByteRange) -> Range<usize> {
    (range.offset() / BLOCK) as usize..range.end().div_ceil(BLOCK) as usize
}

/// Asserts that the claim has the first block that is not saved, and only unsaved blocks.
fn check_claim(
    model: &[Model],
    (wanted, claimed): (ByteRange, ByteRange),
    has_room: bool,
    max_tables: u64,
) {
    let (wanted, claimed) = (blocks(wanted), blocks(claimed));
    let first = wanted.clone().find(|block| !matches!(model[*block], Model::Saved(_)));
    assert!(claimed.contains(&first.expect("not all is saved")));
    assert!(claimed.clone().all(|block| model[block] == Model::Unsaved));
    assert!(claimed.end <= wanted.end.next_multiple_of(16) && claimed.start >= wanted.start & !15);
    let region = claimed.start / REGION_BLOCKS;
    let (start, end) = (region * REGION_BLOCKS, ((region + 1) * REGION_BLOCKS).min(model.len()));
    let taken = model[start..end].iter().filter(|block| **block != Model::Unsaved).count();
    if taken * 16 >= end - start {
        // The claim includes the adjacent unsaved blocks of its granules.
        let before = claimed.start % 16 != 0;
        assert!(!before || model[claimed.start - 1] != Model::Unsaved);
        let after = claimed.end % 16 != 0 && claimed.end < end;
        assert!(!after || model[claimed.end] != Model::Unsaved);
    } else if has_room {
        assert_eq!(Some(claimed.start), first);
    } else if max_tables == 0 {
        let end = SIZE.div_ceil(BLOCK) as usize;
        assert!(claimed.start % 16 == 0 && (claimed.end % 16 == 0 || claimed.end == end));
    }
}

fn check_lookup(model: &[Model], index: &Index, wanted: ByteRange) {
    let (place, length) = index.lookup(wanted);
    assert!(length > 0 && length <= wanted.length());
    let found = wanted.truncate(length);
    for block in blocks(found) {
        let start = (block as u64 * BLOCK).max(found.offset());
        let at = place.skip(start - found.offset());
        let expected = match model[block] {
            Model::Saved(saved) => saved.skip(start % BLOCK),
            Model::Unsaved | Model::Claimed => Place::Source,
        };
        assert_eq!(at, expected, "block {block}");
    }
}

proptest! {
    #[test]
    fn it_is_a_list_of_blocks(
        max_tables in prop::sample::select(vec![0, 10 * TABLE_BYTES, u64::MAX]),
        steps in prop::collection::vec(
            (0..4_u8, 0..40_usize, 0..16 * BLOCK, 1..40 * BLOCK, 0..5_usize),
            1..60,
        ),
    ) {
        let index = Index::new(SIZE, max_tables).unwrap();
        let mut model = vec![Model::Unsaved; SIZE.div_ceil(BLOCK) as usize];
        let mut claims: Vec<Claimed<'_>> = Vec::new();
        let mut log = 0;
        for (what, granule, within, length, parts) in steps {
            // Around the border of the regions, and at the end.
            let offset = (REGION - 20 * GRANULE + granule as u64 * GRANULE + within).min(SIZE - 1);
            let range = ByteRange::between(offset, (offset + length).min(SIZE));
            let is_saved = blocks(range).all(|block| matches!(model[block], Model::Saved(_)));
            prop_assert_eq!(index.is_saved(range), is_saved);
            check_lookup(&model, &index, range);
            match (what, claims.pop()) {
                (0 | 1, last) => {
                    claims.extend(last);
                    let first = blocks(range).find(|block| !matches!(model[*block], Model::Saved(_)));
                    let has_room = index.tables.load(Ordering::Relaxed) < max_tables;
                    match index.claim(range) {
                        Claim::Nothing => prop_assert!(is_saved),
                        Claim::Wait => prop_assert_eq!(model[first.unwrap()], Model::Claimed),
                        Claim::Copy(claim) => {
                            check_claim(&model, (range, claim.rest()), has_room, max_tables);
                            model[blocks(claim.rest())].fill(Model::Claimed);
                            claims.push(claim);
                        }
                    }
                }
                (2, Some(mut claim)) => {
                    for number in 0..parts {
                        let part = claim.first_granules(GRANULE);
                        if part.is_empty() {
                            break;
                        }
                        let place = if number % 2 == 0 { Place::Log(log) } else { Place::Zeros };
                        log += part.length().next_multiple_of(BLOCK);
                        claim.finish_part(place);
                        for block in blocks(part) {
                            let after = block as u64 * BLOCK - part.offset();
                            model[block] = Model::Saved(place.skip(after));
                        }
                    }
                    if !claim.rest().is_empty() {
                        claims.push(claim);
                    }
                }
                (_, None) => {}
                (_, Some(claim)) => model[blocks(claim.rest())].fill(Model::Unsaved),
            }
        }
        prop_assert!(index.tables.load(Ordering::Relaxed) <= max_tables.saturating_add(2 * TABLE_BYTES));
    }
}

#[test]
fn changes_that_go_on_in_order_claim_more_and_more() {
    let index = Index::new(SIZE, u64::MAX).unwrap();
    let mut claims = 0;
    for block in 0..160 {
        if let Claim::Copy(mut claim) =
            index.claim(ByteRange::between(block * BLOCK, (block + 1) * BLOCK))
        {
            claim.finish_part(Place::Zeros);
            claims += 1;
        }
    }
    assert!(claims <= 5 + 9, "{claims} copies of ten granules");
}
