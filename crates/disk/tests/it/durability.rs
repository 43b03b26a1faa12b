//! The cost of a durable request: the exact operations on the storage.

use blockhouse_core::SyncMode::{Data as DataSync, Full as FullSync};
use blockhouse_core::{Durability, Fua, Request, Unmap, WriteCache};
use blockhouse_disk::{FlushPolicy, Options};
use blockhouse_sim::Operation::{Close, Discard, Flush, Read, Write, WriteZeroes};
use blockhouse_sim::{Config, Rng, Support};

use crate::common::{Rig, blocks_of, span, steady, write, zeroes};

const SIZE: usize = 1 << 20;

fn rig(config: Config) -> Rig {
    Rig::new(config, SIZE, Options::default())
}

#[test]
fn a_durable_write_is_one_fua_write_and_leaves_nothing_to_flush() {
    let rig = rig(steady());
    rig.submit(write(4096, 512, 1, Durability::Data)).unwrap();
    rig.submit(Request::Flush).unwrap();
    assert_eq!(rig.log(), [Write(span(4096, 512), Durability::Data)]);
    let stats = rig.disk.stats().counters();
    // The one that was issued is the rig's, of the disk's past.
    assert_eq!((stats.durable_writes, stats.flushes_issued, stats.flushes_skipped), (1, 1, 1));
}

#[test]
fn without_native_fua_it_is_a_write_and_a_flush() {
    let rig = rig(Config { fua: Fua::Emulated, ..steady() });
    rig.submit(write(0, 512, 1, Durability::Data)).unwrap();
    assert_eq!(rig.log(), [Write(span(0, 512), Durability::None), Flush(DataSync)]);
}

/// As a kernel does that knows the flag for reads alone.
#[test]
fn native_fua_that_is_refused_is_emulated_from_then_on() {
    let rig = rig(Config { refuses_fua: true, ..steady() });
    let plain = Write(span(0, 512), Durability::None);
    rig.submit(write(0, 512, 1, Durability::Data)).unwrap();
    assert_eq!(rig.log(), [Write(span(0, 512), Durability::Data), plain, Flush(DataSync)]);
    assert_eq!(rig.storage.content()[..512], [1; 512]);
    assert_eq!(rig.disk.capabilities().fua, Fua::Emulated);
    rig.submit(write(0, 512, 2, Durability::Data)).unwrap();
    assert_eq!(rig.log(), [plain, Flush(DataSync)], "it is asked once");
    let crashed = rig.storage.crash(&mut Rng::with_seed(1));
    assert_eq!(crashed[..512], [2; 512]);
}

#[test]
fn writes_that_are_refused_at_the_same_time_are_all_carried_out() {
    let rig = rig(Config { refuses_fua: true, ..steady() });
    let writes: Vec<_> =
        (0..4).map(|block| rig.start(write(block * 512, 512, 3, Durability::Data))).collect();
    rig.sim.run();
    assert!(writes.iter().all(|write| write.output().unwrap().is_ok()));
    assert_eq!(rig.storage.crash(&mut Rng::with_seed(1))[..2048], [3; 2048]);
}

#[test]
fn a_refusal_that_nobody_waits_for_fails_no_flush() {
    let rig = rig(Config { refuses_fua: true, ..steady() });
    let dropped = rig.start(write(0, 512, 1, Durability::Data));
    rig.wait(1);
    dropped.cancel();
    rig.submit(write(512, 512, 2, Durability::None)).unwrap();
    rig.submit(Request::Flush).unwrap();
}

#[test]
fn full_durability_is_a_full_sync_always() {
    let rig = rig(steady());
    for _ in 0..2 {
        rig.submit(write(0, 512, 1, Durability::Full)).unwrap();
        assert_eq!(rig.log(), [Write(span(0, 512), Durability::None), Flush(FullSync)]);
    }
}

#[test]
fn a_flush_after_a_plain_write_is_issued_once() {
    let rig = rig(steady());
    rig.submit(write(0, 512, 1, Durability::None)).unwrap();
    for _ in 0..3 {
        rig.submit(Request::Flush).unwrap();
    }
    assert_eq!(rig.log(), [Write(span(0, 512), Durability::None), Flush(DataSync)]);
}

#[test]
fn a_flush_of_an_untouched_disk_is_nothing() {
    let rig = rig(steady());
    rig.submit(Request::Flush).unwrap();
    rig.sim
        .block_on({
            let disk = rig.disk.clone();
            async move { disk.close().await }
        })
        .unwrap();
    assert_eq!(rig.log(), [Close]);
}

#[test]
fn a_storage_without_a_cache_has_nothing_to_flush() {
    let rig = rig(Config { write_cache: WriteCache::None, ..steady() });
    rig.submit(write(0, 512, 1, Durability::None)).unwrap();
    rig.submit(Request::Flush).unwrap();
    assert_eq!(rig.log(), [Write(span(0, 512), Durability::None)]);
}

#[test]
fn durable_zero_writes_are_flushed_unless_their_zeros_went_as_data() {
    let durable = zeroes(0, 8192, Durability::Data);
    let offloaded = rig(steady());
    offloaded.submit(durable).unwrap();
    assert_eq!(offloaded.log(), [WriteZeroes(span(0, 8192), Unmap::Allowed), Flush(DataSync)]);

    let by_hand = rig(Config { write_zeroes: Support::No, ..steady() });
    by_hand.submit(zeroes(0, 8192, Durability::Data)).unwrap();
    assert_eq!(by_hand.log(), [Write(span(0, 8192), Durability::Data)]);

    let long = rig(Config { write_zeroes: Support::No, ..steady() });
    long.submit(zeroes(0, 512 << 10, Durability::Data)).unwrap();
    let half = |index: u64| Write(span(index * (256 << 10), 256 << 10), Durability::None);
    assert_eq!(long.log(), [half(0), half(1), Flush(DataSync)]);
}

#[test]
fn durable_discards_are_flushed() {
    let rig = rig(steady());
    let range = span(0, 4096);
    rig.submit(Request::Discard { range, durability: Durability::Data }).unwrap();
    assert_eq!(rig.log(), [Discard(range), Flush(DataSync)]);
}

#[test]
fn an_unaligned_durable_write_is_one_fua_write_of_whole_blocks() {
    let rig = rig(blocks_of(4096));
    rig.submit(write(100, 8192, 1, Durability::Data)).unwrap();
    assert_eq!(
        rig.log(),
        [Read(span(0, 4096)), Read(span(8192, 4096)), Write(span(0, 12288), Durability::Data)]
    );
}

#[test]
fn writethrough_makes_every_change_durable() {
    let options = Options { durability: Durability::Data, ..Options::default() };
    let rig = Rig::new(steady(), SIZE, options);
    rig.submit(write(0, 512, 1, Durability::None)).unwrap();
    rig.submit(zeroes(0, 512, Durability::None)).unwrap();
    assert_eq!(
        rig.log(),
        [
            Write(span(0, 512), Durability::Data),
            WriteZeroes(span(0, 512), Unmap::Allowed),
            Flush(DataSync)
        ]
    );
    assert_eq!(rig.disk.capabilities().write_cache, WriteCache::None);
}

#[test]
fn the_unsafe_policy_never_flushes() {
    let options = Options { flush: FlushPolicy::Ignore, ..Options::default() };
    let rig = Rig::new(steady(), SIZE, options);
    rig.submit(write(0, 512, 1, Durability::Data)).unwrap();
    rig.submit(write(0, 512, 1, Durability::Full)).unwrap();
    rig.submit(Request::Flush).unwrap();
    let plain = Write(span(0, 512), Durability::None);
    assert_eq!(rig.log(), [plain, plain]);
    assert_eq!(rig.disk.capabilities().fua, Fua::Ignored);
}
