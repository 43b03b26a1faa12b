//! The requests of a well-behaved guest, through a socket, rings and the loops.

use blockhouse_core::Durability;
use blockhouse_disk::{Access, Discard, Options as DiskOptions};
use blockhouse_vhost_user::driver::{DescriptorSpec, Options, write_chain};
use blockhouse_vhost_user::ring::{INDIRECT, WRITE};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};

use crate::common::*;

fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..length).map(|_| random.u8(..)).collect()
}

#[test]
fn what_is_written_is_read_on_every_queue() {
    for queues in [1, 4] {
        let served = Served::start(queues, 2);
        let mut guest = served.connect(Options { queues, ..Options::default() });
        for queue in 0..queues {
            let bytes = pattern(queue.into(), 64 << 10);
            let sector = 128 * u64::from(queue);
            assert_eq!(guest.write(queue.into(), sector, &bytes), OK);
            let other = usize::from((queue + 1) % queues);
            assert_eq!(guest.read(other, sector, bytes.len()).unwrap(), bytes);
        }
        assert_eq!(guest.request(0, FLUSH, 0, &[]), OK);
    }
}

#[test]
fn the_longest_queue_may_be_full() {
    const REQUESTS: u16 = (1 << 15) / 4;
    let served = Served::start(1, 1);
    let options = Options { entries: 1 << 15, memory: 16 << 20, ..Options::default() };
    let mut guest = served.connect(options);
    let image = pattern(1, 1 << 20);
    assert_eq!(guest.write(0, 0, &image), OK);
    let base = guest.base() + (1 << 20);
    for round in 0..3 {
        let sector = |slot: u16| u64::from(slot.wrapping_mul(7) + round) % 2048;
        for slot in 0..REQUESTS {
            let place = base + usize::from(slot) * 1024;
            let mut header = [0; 16];
            header[8..].copy_from_slice(&sector(slot).to_le_bytes());
            guest.driver.memory.write(place, &header);
            let chain = [
                DescriptorSpec::at(place, 16, 0),
                DescriptorSpec::at(place + 512, 512, WRITE),
                DescriptorSpec::at(place + 16, 1, WRITE),
            ];
            guest.queue(0).chain(4 * slot, &chain);
            guest.queue(0).add_available(4 * slot);
        }
        guest.queue(0).publish();
        for _ in 0..REQUESTS {
            let (head, written) = guest.queue(0).wait_used(LONG).expect("an answer");
            assert_eq!(written, 513);
            let mut bytes = [0; 512];
            guest.driver.memory.read(base + usize::from(head / 4) * 1024 + 512, &mut bytes);
            let start = sector(head / 4) as usize * 512;
            assert!(bytes == image[start..start + 512], "round {round}, request {head}");
        }
    }
}

#[test]
fn many_requests_at_once_each_get_their_own_data() {
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    let served = Served::start(2, 2);
    let mut guest = served.connect(Options { queues: 2, entries: 64, ..Options::default() });
    let image = pattern(seed, 1 << 20);
    for (index, part) in image.chunks(128 << 10).enumerate() {
        assert_eq!(guest.write(0, index as u64 * 256, part), OK);
    }
    // 16 requests of four descriptors each, with the data in two pieces.
    let base = guest.base() + DATA;
    let mut random = fastrand::Rng::with_seed(seed);
    for round in 0..200 {
        let queue = round % 2;
        let sectors: Vec<u64> = (0..16).map(|_| random.u64(..2040)).collect();
        for (slot, sector) in sectors.iter().enumerate() {
            let place = base + slot * 8192;
            let mut header = [0; 16];
            header[8..].copy_from_slice(&sector.to_le_bytes());
            guest.driver.memory.write(place, &header);
            let chain = [
                DescriptorSpec::at(place, 16, 0),
                DescriptorSpec::at(place + 512, 1000, WRITE),
                DescriptorSpec::at(place + 4096, 3096, WRITE),
                DescriptorSpec::at(place + 16, 1, WRITE),
            ];
            guest.queue(queue).chain(4 * slot as u16, &chain);
            guest.queue(queue).add_available(4 * slot as u16);
        }
        guest.queue(queue).publish();
        for _ in 0..16 {
            let (head, written) = guest.queue(queue).wait_used(LONG).expect("an answer");
            assert_eq!(written, 4097);
            let slot = usize::from(head / 4);
            let mut bytes = vec![0; 4096];
            guest.driver.memory.read(base + slot * 8192 + 512, &mut bytes[..1000]);
            guest.driver.memory.read(base + slot * 8192 + 4096, &mut bytes[1000..]);
            let start = sectors[slot] as usize * 512;
            assert!(bytes == image[start..start + 4096], "seed {seed}, round {round}");
        }
    }
}

/// A part of the driver's memory as a region.
fn part(guest: &Guest, start: usize, end: usize) -> VhostUserMemoryRegionInfo {
    let whole = guest.driver.region();
    VhostUserMemoryRegionInfo {
        guest_phys_addr: whole.guest_phys_addr + start as u64,
        userspace_addr: whole.userspace_addr + start as u64,
        mmap_offset: start as u64,
        memory_size: (end - start) as u64,
        ..whole
    }
}

#[test]
fn regions_of_any_size_and_place_are_used() {
    for served in [Served::start(1, 1), Served::registered(1, 1)] {
        let mut guest = served.connect(Options::default());
        let (data, end) = (guest.base() + DATA, guest.driver.memory.len());
        // No page begins or ends with one of them, and the last one is no multiple of anything.
        let parts = [(0, data + 1000), (data + 1000, data + 6001), (data + 6001, end - 77)];
        let regions = parts.map(|(start, end)| part(&guest, start, end));
        guest.driver.frontend().set_mem_table(&regions).unwrap();
        let bytes = pattern(9, 16 << 10);
        assert_eq!(guest.write(0, 8, &bytes), OK);
        guest.put(&vec![0; bytes.len()]);
        assert_eq!(guest.read(0, 8, bytes.len()).unwrap(), bytes);
    }
}

#[test]
fn indirect_tables_are_followed() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    let bytes = pattern(1, 4096);
    guest.put(&bytes);
    let inner = guest.base() + 64;
    let table =
        blockhouse_engine::VolatileSlice::new(guest.driver.memory.clone(), inner, 48).unwrap();
    let chain = [guest.header(OUT, 8), guest.data(0, 4096, 0), guest.status()];
    write_chain(&table, 0, &chain);
    assert_eq!(guest.submit(0, &[DescriptorSpec::at(inner, 48, INDIRECT)], LONG), Some(OK));
    assert_eq!(guest.read(0, 8, 4096).unwrap(), bytes);
}

#[test]
fn without_event_indices_and_without_the_protocols_features() {
    let served = Served::start(1, 1);
    for without in [1 << 29, 1 << 28, 1 << 30, (1 << 29) | (1 << 30)] {
        let without = without | (1 << 26);
        let mut guest = served.connect(Options { without, ..Options::default() });
        for round in 0..50 {
            let bytes = pattern(round, 4096);
            assert_eq!(guest.write(0, 8 * round, &bytes), OK);
            assert_eq!(guest.read(0, 8 * round, 4096).unwrap(), bytes);
        }
    }
}

#[test]
fn zeroes_and_discards() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    let bytes = pattern(3, 64 << 10);
    for unmap in [0, 1] {
        assert_eq!(guest.write(0, 0, &bytes), OK);
        assert_eq!(guest.ranges(0, WRITE_ZEROES, &[(8, 8, unmap), (32, 16, unmap)]), OK);
        let mut expected = bytes.clone();
        expected[4096..8192].fill(0);
        expected[16384..24576].fill(0);
        assert_eq!(guest.read(0, 0, bytes.len()).unwrap(), expected);
    }
    assert_eq!(guest.ranges(0, DISCARD, &[(0, 128, 0)]), OK);
    // Holes of a file read as zeros.
    assert_eq!(guest.read(0, 0, bytes.len()).unwrap(), vec![0; bytes.len()]);
}

#[test]
fn ranges_that_make_no_sense_are_refused() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    let end = SIZE / 512;
    assert_eq!(guest.ranges(0, DISCARD, &[(0, 8, 1)]), UNSUPPORTED, "no flag for discards");
    assert_eq!(guest.ranges(0, WRITE_ZEROES, &[(0, 8, 2)]), UNSUPPORTED, "an unknown flag");
    assert_eq!(guest.ranges(0, WRITE_ZEROES, &[(end - 1, 2, 0)]), FAILED, "past the end");
    assert_eq!(guest.ranges(0, DISCARD, &[(u64::MAX, 1, 0)]), FAILED);
    assert_eq!(guest.ranges(0, DISCARD, &[(u64::MAX / 512, u32::MAX, 0)]), FAILED);
    assert_eq!(guest.ranges(0, WRITE_ZEROES, &[(0, 0, 0); 33]), FAILED, "too many ranges");
    let data = guest.data(0, 15, 0);
    assert_eq!(guest.request(0, DISCARD, 0, &[data]), FAILED, "a piece of a range");
    assert_eq!(guest.request(0, DISCARD, 0, &[]), FAILED, "no range");
}

#[test]
fn one_bad_range_refuses_the_whole_request() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    let end = SIZE / 512;
    for kind in [WRITE_ZEROES, DISCARD] {
        assert_eq!(guest.write(0, 0, &[7; 4096]), OK);
        for (bad, expected) in
            [((end - 1, 2, 0), FAILED), ((end, 1, 0), FAILED), ((16, 1, 4), UNSUPPORTED)]
        {
            assert_eq!(guest.ranges(0, kind, &[(0, 8, 0), bad]), expected, "{bad:?}");
            assert_eq!(guest.read(0, 0, 4096).unwrap(), [7; 4096], "{bad:?}: nothing is done");
        }
    }
}

#[test]
fn the_end_of_the_disk_is_kept() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    let last = SIZE / 512 - 1;
    assert_eq!(guest.write(0, last, &[7; 512]), OK);
    assert_eq!(guest.read(0, last, 512).unwrap(), [7; 512]);
    assert_eq!(guest.write(0, last, &[7; 1024]), FAILED);
    assert_eq!(guest.read(0, last, 1024), Err(FAILED));
    assert_eq!(guest.read(0, u64::MAX, 512), Err(FAILED));
    assert_eq!(guest.read(0, 1 << 54, 512), Err(FAILED));
    assert_eq!(std::fs::metadata(&served.image).unwrap().len(), SIZE);
}

#[test]
fn the_serial_is_the_name() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    let data = guest.data(0, 20, WRITE);
    assert_eq!(guest.request(0, GET_ID, 0, &[data]), OK);
    assert_eq!(guest.get(20), b"a disk for tests wit");
    guest.put(&[9; 30]);
    let data = guest.data(0, 30, WRITE);
    assert_eq!(guest.request(0, GET_ID, 0, &[data]), OK);
    assert_eq!(guest.get(30)[19..], [b't', 9, 9, 9, 9, 9, 9, 9, 9, 9, 9]);
}

#[test]
fn unknown_requests_are_unsupported() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    for kind in [2, 3, 10, 14, u32::MAX] {
        assert_eq!(guest.request(0, kind, 0, &[]), UNSUPPORTED, "type {kind}");
    }
}

#[test]
fn a_read_only_disk_says_so_and_refuses_changes() {
    let options = DiskOptions { access: Access::ReadOnly, ..DiskOptions::default() };
    let served = Served::with(1, 1, options, &std::env::temp_dir());
    let mut guest = served.connect(Options::default());
    let bit = |bit: u32| guest.driver.features() >> bit & 1 == 1;
    assert!(bit(5) && !bit(13) && !bit(14));
    assert_eq!(guest.write(0, 0, &[1; 512]), FAILED);
    assert_eq!(guest.ranges(0, WRITE_ZEROES, &[(0, 1, 0)]), FAILED);
    assert_eq!(guest.read(0, 0, 512).unwrap(), [0; 512]);
}

#[test]
fn discards_that_are_ignored_are_not_offered() {
    let options = DiskOptions { discard: Discard::Ignore, ..DiskOptions::default() };
    let served = Served::with(1, 1, options, &std::env::temp_dir());
    let guest = served.connect(Options::default());
    assert_eq!(guest.driver.features() >> 13 & 1, 0);
}

#[test]
fn the_write_cache_is_what_it_says() {
    // Not on a file system in memory: that has no cache to speak of.
    let served = Served::with(1, 1, DiskOptions::default(), env!("CARGO_TARGET_TMPDIR").as_ref());
    let mut guest = served.connect(Options::default());
    let durable = |served: &Served| served.disk.stats().counters().durable_writes;
    assert!(guest.driver.writeback().unwrap());
    assert_eq!(guest.write(0, 0, &[1; 4096]), OK);
    let flushes = served.disk.stats().counters().flushes;
    assert_eq!(durable(&served), 0);
    guest.driver.set_writeback(0).unwrap();
    assert!(!guest.driver.writeback().unwrap());
    assert!(
        served.disk.stats().counters().flushes > flushes,
        "what was written before is durable too"
    );
    for count in 1..10 {
        assert_eq!(guest.write(0, 8 * count, &[1; 4096]), OK);
        assert_eq!(durable(&served), count);
    }
    guest.driver.set_writeback(1).unwrap();
    assert!(guest.driver.writeback().unwrap());
    assert_eq!(guest.write(0, 0, &[1; 4096]), OK);
    assert_eq!(durable(&served), 9);
    assert!(guest.driver.set_writeback(2).is_err());
}

#[test]
fn a_disk_whose_writes_are_all_durable_has_no_cache_to_turn_on() {
    let options = DiskOptions { durability: Durability::Data, ..DiskOptions::default() };
    let served = Served::with(1, 1, options, env!("CARGO_TARGET_TMPDIR").as_ref());
    let mut guest = served.connect(Options::default());
    assert!(!guest.driver.writeback().unwrap());
    guest.driver.set_writeback(1).unwrap();
    assert!(!guest.driver.writeback().unwrap());
    assert_eq!(guest.write(0, 0, &[1; 4096]), OK);
    assert_eq!(served.disk.stats().counters().durable_writes, 1);
}

#[test]
fn a_driver_that_knows_no_cache_gets_durable_writes() {
    let served = Served::with(1, 1, DiskOptions::default(), env!("CARGO_TARGET_TMPDIR").as_ref());
    let without = (1 << 9) | (1 << 11) | (1 << 26);
    let mut guest = served.connect(Options { without, ..Options::default() });
    assert_eq!(guest.write(0, 0, &[1; 4096]), OK);
    assert_eq!(served.disk.stats().counters().durable_writes, 1);
}

#[test]
fn a_driver_that_cannot_flush_starts_without_a_write_cache() {
    let served = Served::with(1, 1, DiskOptions::default(), env!("CARGO_TARGET_TMPDIR").as_ref());
    // CONFIG_WCE without FLUSH.
    let without = (1 << 9) | (1 << 26);
    let mut guest = served.connect(Options { without, ..Options::default() });
    assert!(!guest.driver.writeback().unwrap());
    assert_eq!(guest.write(0, 0, &[1; 4096]), OK);
    assert_eq!(served.disk.stats().counters().durable_writes, 1);
    // A migration begins: the driver is the same, and what it chose stays.
    guest.driver.set_writeback(1).unwrap();
    let features = guest.driver.features();
    guest.driver.frontend().set_features(features | 1 << 26).unwrap();
    assert!(guest.driver.writeback().unwrap());
    assert_eq!(guest.write(0, 0, &[1; 4096]), OK);
    assert_eq!(served.disk.stats().counters().durable_writes, 1);
    // A driver that flushes finds the cache that is there.
    guest.driver.frontend().set_features(features | 1 << 9).unwrap();
    assert!(guest.driver.writeback().unwrap());
}

#[test]
fn the_configuration_tells_size_queues_and_limits() {
    let served = Served::start(3, 1);
    let mut guest = served.connect(Options { queues: 3, ..Options::default() });
    assert_eq!(guest.driver.capacity().unwrap(), SIZE);
    let config = guest.driver.config(0, 60).unwrap();
    let number = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().unwrap());
    assert_eq!((number(12), number(20)), (126, 512), "segments, block size");
    assert_eq!(config[34..36], [3, 0], "queues");
    assert_eq!((number(36), number(40)), ((1 << 22) - 1, 32), "discards");
    assert_eq!(number(44), 128, "no discard of a raw image below 64 KiB");
    assert_eq!((number(48), number(52), config[56]), ((1 << 22) - 1, 32, 1), "zero writes");
    assert_eq!(guest.driver.config(60, 100).unwrap(), [0; 100]);
}
