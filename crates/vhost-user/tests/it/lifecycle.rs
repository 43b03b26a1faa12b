//! The events around requests: memory that comes and goes, other kicks and calls, logs, resets,
//! front-ends one after the other, resizes, the end.

use std::io::Write;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blockhouse_vhost_user::driver::{DescriptorSpec, GUEST, Options};
use blockhouse_vhost_user::ring::WRITE;
use vhost::vhost_user::message::VhostUserInflight;
use vhost::vhost_user::{Frontend, FrontendReqHandler, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::common::*;

#[test]
fn memory_is_added_and_removed_while_the_queue_runs() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    assert_eq!(guest.write(0, 0, &[5; 4096]), OK);
    let (file, more) = memory(8192);
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: GUEST << 4,
        memory_size: 8192,
        userspace_addr: 0x6000_0000_0000,
        mmap_offset: 0,
        mmap_handle: file.as_raw_fd(),
    };
    let data = DescriptorSpec { address: (GUEST << 4) + 4096, length: 4096, flags: WRITE };
    assert_eq!(guest.request(0, IN, 0, &[data]), FAILED, "not there yet");
    assert!(guest.driver.frontend().get_max_mem_slots().unwrap() >= 8);
    guest.driver.frontend().add_mem_region(&region).unwrap();
    assert_eq!(guest.request(0, IN, 0, &[data]), OK);
    let mut bytes = [0; 4096];
    more.read(4096, &mut bytes);
    assert_eq!(bytes, [5; 4096]);
    guest.driver.frontend().remove_mem_region(&region).unwrap();
    assert_eq!(guest.request(0, IN, 0, &[data]), FAILED, "gone again");
    assert!(guest.driver.frontend().remove_mem_region(&region).is_err());
}

#[test]
fn changed_pages_are_logged_and_no_others() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options { without: 0, ..Options::default() });
    let log = guest.log_changes();
    let dirty = |offset: usize| {
        let page = (GUEST as usize + offset) / 4096;
        let mut byte = [0];
        log.read(page / 8, &mut byte);
        byte[0] >> (page % 8) & 1 == 1
    };
    let base = guest.base();
    assert_eq!(guest.write(0, 0, &[6; 8192]), OK);
    assert!(dirty(base), "the status");
    assert!(!dirty(base + DATA) && !dirty(base + DATA + 4096), "data that was only read");
    let data = guest.data(4096, 8192, WRITE);
    assert_eq!(guest.request(0, IN, 0, &[data]), OK);
    let marks: Vec<bool> = (0..4).map(|page| dirty(base + DATA + 4096 * page)).collect();
    assert_eq!(marks, [false, true, true, false]);
    // The used ring is on the second page of the queue's, descriptors are on the first.
    assert!(dirty(4096) && !dirty(0));
}

#[test]
fn a_queue_stops_and_goes_on_where_it_was() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    for round in 0..5u32 {
        for _ in 0..100 {
            assert_eq!(guest.request(0, FLUSH, 0, &[]), OK);
        }
        let base = guest.driver.frontend().get_vring_base(0).unwrap();
        assert_eq!(base, 100 * (round + 1));
        guest.driver.start_queue(0).unwrap();
    }
    guest.driver.frontend().set_vring_enable(0, false).unwrap();
    let chain = [guest.header(FLUSH, 0), guest.status()];
    let short = std::time::Duration::from_millis(100);
    assert_eq!(guest.submit(0, &chain, short), None, "disabled");
    guest.driver.frontend().set_vring_enable(0, true).unwrap();
    assert!(guest.queue(0).wait_used(LONG).is_some(), "what was offered meanwhile is found");
}

#[test]
fn a_call_that_changes_hands_loses_nothing() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    for _ in 0..20 {
        assert_eq!(guest.request(0, FLUSH, 0, &[]), OK);
        let call = guest.driver.queues[0].call.try_clone().unwrap();
        guest.driver.frontend().set_vring_call(0, &call).unwrap();
        let kick = guest.driver.queues[0].kick.try_clone().unwrap();
        guest.driver.frontend().set_vring_kick(0, &kick).unwrap();
    }
}

#[test]
fn a_reset_brings_everything_back_but_the_write_cache() {
    let served = Served::start(2, 2);
    let mut guest = served.connect(Options { queues: 2, ..Options::default() });
    guest.driver.set_writeback(0).unwrap();
    // QEMU tells the guest of its own copy of the configuration, after a reboot, too. The firmware
    // does not know the write cache.
    let features = guest.driver.features();
    guest.driver.frontend().set_features(features & !(1 << 9 | 1 << 11)).unwrap();
    guest.driver.frontend().set_features(features).unwrap();
    assert!(!guest.driver.writeback().unwrap());
    guest.driver.frontend().reset_device().unwrap();
    guest.driver.frontend().set_features(features).unwrap();
    assert!(!guest.driver.writeback().unwrap());
    guest.driver.set_writeback(1).unwrap();
    assert!(guest.driver.writeback().unwrap());
    // A driver begins anew, with new rings.
    drop(guest);
    let mut guest = served.connect(Options { queues: 2, ..Options::default() });
    assert_eq!(guest.write(1, 0, &[1; 512]), OK);
}

#[test]
fn front_ends_come_and_go() {
    let served = Served::start(1, 1);
    for round in 0..20u8 {
        let mut guest = served.connect(Options::default());
        if round > 0 {
            assert_eq!(guest.read(0, 0, 4096).unwrap(), [round - 1; 4096]);
        }
        assert_eq!(guest.write(0, 0, &[round; 4096]), OK);
        if round % 3 == 0 {
            // Gone with a request in flight.
            let chain = [guest.header(IN, 0), guest.data(0, 4096, WRITE), guest.status()];
            guest.queue(0).chain(0, &chain);
            guest.queue(0).add_available(0);
            guest.queue(0).publish();
        }
    }
}

#[test]
fn several_devices_in_one_process() {
    let all: Vec<Served> = (0..4).map(|_| Served::start(1, 1)).collect();
    let mut guests: Vec<Guest> = all.iter().map(|one| one.connect(Options::default())).collect();
    for (index, guest) in guests.iter_mut().enumerate() {
        assert_eq!(guest.write(0, 0, &[index as u8; 4096]), OK);
    }
    for (index, guest) in guests.iter_mut().enumerate() {
        assert_eq!(guest.read(0, 0, 4096).unwrap(), [index as u8; 4096]);
    }
}

/// Adds a write and after it a chain that ends the connection, which the driver mends afterwards:
/// both are in flight then, at heads 0 and 10.
fn break_with_two_in_flight(guest: &mut Guest, byte: u8) {
    guest.put(&[byte; 4096]);
    let good = [guest.header(OUT, 0), guest.data(0, 4096, 0), guest.status()];
    guest.queue(0).chain(0, &good);
    guest.queue(0).add_available(0);
    let bad = guest.header(OUT, 0);
    guest.queue(0).chain(10, &[bad]);
    guest.queue(0).add_available(10);
    guest.queue(0).publish();
    while guest.driver.frontend().get_features().is_ok() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let mended = [guest.header(OUT, 0), guest.data(0, 4096, 0), guest.status()];
    guest.queue(0).chain(10, &mended);
}

#[test]
fn what_was_under_way_when_the_connection_broke_is_done_again() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    guest.driver.track().unwrap();
    guest.driver.set_writeback(0).unwrap();
    assert_eq!(guest.write(0, 0, &[1; 4096]), OK);
    for round in 2..10u8 {
        break_with_two_in_flight(&mut guest, round);
        // A new connection does what is not answered.
        guest.driver.reconnect(&served.socket.clone()).unwrap();
        assert!(!guest.driver.writeback().unwrap(), "the write cache is still off");
        let mut heads = [0, 0].map(|_| guest.queue(0).wait_used(LONG).expect("an answer").0);
        heads.sort_unstable();
        assert_eq!(heads, [0, 10], "each is answered once");
        assert_eq!(guest.read(0, 0, 4096).unwrap(), [round; 4096]);
    }
}

#[test]
fn memory_for_tracking_cannot_be_cut_off() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    let wanted = VhostUserInflight::new(0, 0, 1, 64);
    let (given, file) = guest.driver.frontend().get_inflight_fd(&wanted).unwrap();
    for size in [0, given.mmap_size - 1, given.mmap_size + 1] {
        let error = file.set_len(size).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied, "{size} bytes");
    }
    guest.driver.track().unwrap();
    assert_eq!(guest.write(0, 0, &[1; 512]), OK);
}

#[test]
fn a_queue_that_stops_at_once_has_done_again_what_its_base_counts() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    guest.driver.track().unwrap();
    assert_eq!(guest.write(0, 0, &[1; 4096]), OK);
    break_with_two_in_flight(&mut guest, 2);
    // Connections are served one after the other: an answer here means that the broken one has
    // ended.
    let other = Frontend::connect(&served.socket, 1).unwrap();
    other.get_features().unwrap();
    drop(other);
    // The queue's first turn finds the order to stop.
    let release = served.block_loop();
    guest.driver.reconnect(&served.socket.clone()).unwrap();
    let base = std::thread::scope(|scope| {
        let frontend = guest.driver.frontend().clone();
        let stopped = scope.spawn(move || frontend.get_vring_base(0).unwrap());
        std::thread::sleep(std::time::Duration::from_millis(100));
        drop(release);
        stopped.join().unwrap()
    });
    assert_eq!(base, 3);
    let mut heads: Vec<u16> =
        std::iter::from_fn(|| guest.queue(0).next_used()).map(|(head, _)| head).collect();
    heads.sort_unstable();
    assert_eq!(heads, [0, 10], "each request before the base was answered");
    guest.driver.start_queue(0).unwrap();
    assert_eq!(guest.read(0, 0, 4096).unwrap(), [2; 4096]);
}

#[test]
fn a_refused_message_changes_nothing() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    let region = guest.driver.region();
    let (small, _) = memory(4096);
    let Guest { driver } = &mut guest;
    assert!(driver.set_writeback(2).is_err());
    assert!(driver.writeback().unwrap());
    let kick = driver.queues[0].kick.try_clone().unwrap();
    let frontend = driver.frontend();
    assert!(frontend.set_features(1 << 63).is_err());
    assert!(frontend.set_vring_num(0, 128).is_err(), "it runs");
    assert!(frontend.set_vring_kick(7, &kick).is_err(), "no such queue");
    assert!(frontend.add_mem_region(&region).is_err(), "it overlaps");
    assert!(frontend.remove_mem_region(&region).is_err(), "the rings are there");
    let elsewhere = VhostUserMemoryRegionInfo { userspace_addr: 4096, ..region };
    assert!(frontend.set_mem_table(&[elsewhere]).is_err(), "no rings are there");
    let too_long = VhostUserMemoryRegionInfo { mmap_handle: small.as_raw_fd(), ..region };
    assert!(frontend.set_mem_table(&[too_long]).is_err());
    let tracked = VhostUserInflight::new(1 << 30, 0, 1, 64);
    assert!(frontend.set_inflight_fd(&tracked, small.as_raw_fd()).is_err());
    assert!(frontend.get_inflight_fd(&VhostUserInflight::new(0, 0, 1, 40000)).is_err());
    assert_eq!(guest.write(0, 0, &[7; 4096]), OK);
    assert_eq!(guest.read(0, 0, 4096).unwrap(), [7; 4096]);
}

#[test]
fn a_guest_cannot_have_its_connection_dropped_by_the_configuration() {
    let served = Served::start(1, 1);
    // Without acknowledgements there is no other way to refuse.
    let without = (1 << 26) | (1 << 30);
    let mut guest = served.connect(Options { without, ..Options::default() });
    for (offset, bytes) in [(32u32, &[2][..]), (0, &[0; 8]), (255, &[1]), (u32::MAX, &[1])] {
        let mut payload = [offset, bytes.len() as u32, 0].map(u32::to_ne_bytes).concat();
        payload.extend_from_slice(bytes);
        guest.driver.stream().write_all(&message(25, 0, &payload)).unwrap();
    }
    assert_eq!(guest.write(0, 0, &[7; 512]), OK);
    assert_eq!(exchange(guest.driver.stream(), 1, 0, &[]).len(), 8, "features");
}

#[test]
fn a_ring_without_kicks_is_polled() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    let without_descriptor = 0x100u64.to_ne_bytes();
    // The ring's kick, its call, and its errors.
    for request in [12, 13, 14] {
        let stream = guest.driver.stream();
        assert_eq!(exchange(stream, request, NEED_REPLY, &without_descriptor), [0; 8]);
    }
    for restarts in [false, true] {
        if restarts {
            guest.driver.frontend().set_vring_enable(0, false).unwrap();
            guest.driver.frontend().set_vring_enable(0, true).unwrap();
        }
        for round in 0..20 {
            let chain = [guest.header(FLUSH, 0), guest.status()];
            guest.queue(0).chain(0, &chain);
            guest.queue(0).add_available(0);
            guest.queue(0).publish();
            // A signal of the guest goes nowhere; nor does the device signal.
            let begun = std::time::Instant::now();
            while guest.queue(0).next_used().is_none() {
                assert!(begun.elapsed() < LONG, "round {round}");
                std::thread::sleep(std::time::Duration::from_micros(200));
            }
        }
    }
    // With its eventfds again.
    guest.driver.frontend().get_vring_base(0).unwrap();
    guest.driver.start_queue(0).unwrap();
    assert_eq!(guest.request(0, FLUSH, 0, &[]), OK);
}

#[test]
fn a_message_may_come_in_pieces() {
    let served = Served::start(1, 1);
    let guest = served.connect(Options::default());
    let mut stream = guest.driver.stream();
    let query = message(24, 0, &[0, 8, 0, 0, 0].map(u32::to_ne_bytes).concat());
    for piece in query.chunks(18) {
        stream.write_all(piece).unwrap();
        // So long that the server has read it by itself.
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert_eq!(reply(stream, 24)[12..], (SIZE / 512).to_ne_bytes());
}

#[test]
fn a_configuration_that_is_not_there_has_a_length_of_0() {
    let served = Served::start(1, 1);
    let guest = served.connect(Options::default());
    for (offset, length) in [(0u32, 0u32), (60, 0), (256, 1), (255, 2), (5000, 4), (u32::MAX, 2)] {
        let mut payload = [offset, length, 0].map(u32::to_ne_bytes).concat();
        payload.resize(12 + length as usize, 0);
        let answer = exchange(guest.driver.stream(), 24, 0, &payload);
        assert_eq!(answer, [offset, 0, 0].map(u32::to_ne_bytes).concat());
    }
}

#[test]
fn changes_of_the_log_are_told_if_the_front_end_wants() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options { without: 0, ..Options::default() });
    let event = EventFd::new(EFD_NONBLOCK).unwrap();
    let _log = guest.log_changes();
    guest.driver.frontend().set_log_fd(event.as_raw_fd()).unwrap();
    assert_eq!(guest.request(0, FLUSH, 0, &[]), OK);
    // The answer is seen before the device has told of the log; the next message comes after.
    guest.driver.frontend().set_vring_enable(0, false).unwrap();
    assert!(event.read().unwrap() > 0);
}

#[test]
fn a_resize_is_told() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    let listener = Arc::new(Listener::default());
    let mut handler = FrontendReqHandler::new(Arc::clone(&listener)).unwrap();
    guest.driver.frontend().set_backend_request_fd(&handler.get_tx_raw_fd()).unwrap();
    let past = SIZE / 512 + 8;
    assert_eq!(guest.write(0, past, &[1; 512]), FAILED);
    std::fs::OpenOptions::new().write(true).open(&served.image).unwrap().set_len(2 * SIZE).unwrap();
    let disk = Arc::clone(&served.disk);
    // Any loop will do.
    let loops = Loops::start(1);
    let grown = loops.handles[0].spawn(move || async move { disk.refresh_size(false).await });
    assert_eq!(grown.wait().unwrap().unwrap(), Some(2 * SIZE));
    served.device().resized();
    handler.handle_request().unwrap();
    assert_eq!(listener.0.load(Ordering::SeqCst), 1);
    assert_eq!(guest.driver.capacity().unwrap(), 2 * SIZE);
    assert_eq!(guest.write(0, past, &[1; 512]), OK);
}

#[test]
fn the_end_of_the_server_answers_what_is_under_way() {
    for _ in 0..10 {
        let mut served = Served::start(1, 1);
        let mut guest = served.connect(Options::default());
        let chain = [guest.header(OUT, 0), guest.data(0, 65536, 0), guest.status()];
        guest.queue(0).chain(0, &chain);
        guest.queue(0).add_available(0);
        guest.queue(0).publish();
        served.stop();
        // Taken and done, or not taken at all.
        match guest.queue(0).next_used() {
            Some((0, _)) => assert_eq!(guest.status_byte(), OK),
            Some(_) => panic!("another chain"),
            None => assert_eq!(guest.status_byte(), UNTOUCHED),
        }
        assert_eq!(served.disk.stats().counters().in_flight, 0);
    }
}
