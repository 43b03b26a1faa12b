//! A disk beside a flat array: batches of concurrent requests that share blocks but no byte leave
//! exactly the bytes that the array has.

use blockhouse_core::{Alignment, Buffer, Durability, Fua, Request, Unmap};
use blockhouse_disk::Options;
use blockhouse_sim::{Config, Support};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::common::{Rig, assert_same, span};

const SECTORS: usize = 1400;
const SIZE: usize = SECTORS * 512;

#[derive(Clone, Debug)]
enum Verb {
    Read,
    Write(u8, Durability),
    Zero(blockhouse_core::Fallback),
    Flush,
}

/// One request: what to do with the bytes from the last request's end on, after a gap.
#[derive(Clone, Debug)]
struct Step {
    gap: usize,
    length: usize,
    misplaced: usize,
    verb: Verb,
}

fn durability() -> impl Strategy<Value = Durability> {
    prop_oneof![Just(Durability::None), Just(Durability::Data), Just(Durability::Full)]
}

fn verb() -> impl Strategy<Value = Verb> {
    use blockhouse_core::Fallback::{Allowed, Forbidden};
    prop_oneof![
        2 => Just(Verb::Read),
        4 => (any::<u8>(), durability()).prop_map(|(byte, durability)| Verb::Write(byte, durability)),
        1 => prop_oneof![Just(Allowed), Just(Forbidden)].prop_map(Verb::Zero),
        1 => Just(Verb::Flush),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let gap = prop_oneof![Just(0), 1..2000_usize, (0..8_usize).prop_map(|blocks| blocks * 512)];
    let length = prop_oneof![
        4 => 1..6000_usize,
        4 => (1..20_usize).prop_map(|sectors| sectors * 512),
        1 => 200_000..400_000_usize,
    ];
    let misplaced = prop_oneof![3 => Just(0), 1 => 1..64_usize];
    (gap, length, misplaced, verb()).prop_map(|(gap, length, misplaced, verb)| Step {
        gap,
        length,
        misplaced,
        verb,
    })
}

fn config() -> impl Strategy<Value = Config> {
    let support =
        || prop_oneof![Just(Support::Yes), Just(Support::No), Just(Support::FailsOnFirstUse)];
    let block = prop_oneof![Just(1_u32), Just(512), Just(4096), Just(8192), Just(65536)];
    (block, support(), any::<bool>()).prop_map(|(block, write_zeroes, native)| Config {
        alignment: Alignment { offset: block, memory: block.min(512) },
        write_zeroes,
        fua: if native { Fua::Native } else { Fua::Emulated },
        ..Config::default()
    })
}

/// Runs one batch; the array is changed as the disk should be.
fn run_batch(rig: &Rig, steps: &[Step], flat: &mut [u8]) {
    let mut next = 0;
    let mut running = Vec::new();
    for step in steps {
        let start = next + step.gap;
        let end = (start + step.length).min(SIZE);
        if start >= end {
            break;
        }
        next = end;
        let offset = start as u64;
        let mut buffer = Buffer::new(step.misplaced + end - start);
        if let Verb::Write(byte, _) = step.verb {
            buffer.bytes_mut().fill(byte);
        }
        let vector = buffer.lend_range(step.misplaced, end - start);
        let request = match step.verb {
            Verb::Read => Request::Read { offset, into: vector },
            Verb::Write(_, durability) => Request::Write { offset, from: vector, durability },
            Verb::Zero(fallback) => Request::WriteZeroes {
                range: span(offset, (end - start) as u64),
                unmap: Unmap::Allowed,
                fallback,
                durability: Durability::None,
            },
            Verb::Flush => Request::Flush,
        };
        running.push((rig.start(request), step.clone(), start..end, buffer));
    }
    rig.sim.run();
    for (task, step, range, buffer) in running {
        let outcome = task.output().expect("nobody waits for ever");
        match step.verb {
            Verb::Read => assert_same(&buffer.bytes()[step.misplaced..], &flat[range]),
            Verb::Write(byte, _) => flat[range].fill(byte),
            Verb::Zero(_) if outcome.is_ok() => flat[range].fill(0),
            Verb::Zero(fallback) => {
                assert_eq!(fallback, blockhouse_core::Fallback::Forbidden);
                continue;
            }
            Verb::Flush => {}
        }
        outcome.expect("nothing fails here");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn concurrent_neighbours_do_not_disturb_each_other(
        config in config(),
        batches in vec(vec(step(), 1..12), 1..6),
    ) {
        let rig = Rig::new(config, SIZE, Options::default());
        let mut flat = vec![0xee; SIZE];
        for batch in &batches {
            run_batch(&rig, batch, &mut flat);
            assert_same(&rig.storage.content(), &flat);
        }
    }
}
