//! Guests and front-ends that break the rules: an error for what can be answered, a dropped
//! connection for what cannot, and in either case the next one is served.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use blockhouse_disk::{DetectZeroes, Options as DiskOptions};
use blockhouse_vhost_user::driver::{DescriptorSpec, GUEST, Options, write_chain};
use blockhouse_vhost_user::ring::{INDIRECT, NEXT, WRITE};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserInflight;
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::common::*;

/// Long enough for an answer that must not come.
const SHORT: Duration = Duration::from_millis(300);

/// Where there is no memory.
const NOWHERE: u64 = 1 << 20;

/// Checks that the server serves a new front-end.
fn still_serves(served: &Served) {
    let mut guest = served.connect(Options::default());
    assert_eq!(guest.write(0, 0, &[3; 512]), OK);
    assert_eq!(guest.read(0, 0, 512).unwrap(), [3; 512]);
}

/// Has a guest do something; the request must be refused, and the next one served.
fn is_refused(what: &str, make: impl Fn(&mut Guest) -> Vec<DescriptorSpec>) {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    let chain = make(&mut guest);
    assert_eq!(guest.submit(0, &chain, LONG), Some(FAILED), "{what}");
    assert_eq!(guest.write(0, 0, &[3; 512]), OK, "{what}: the connection lives on");
}

/// Has a guest do something; its connection must be dropped without an answer.
fn is_dropped(what: &str, make: impl Fn(&mut Guest) -> Vec<DescriptorSpec>) {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    let chain = make(&mut guest);
    assert_eq!(guest.submit(0, &chain, SHORT), None, "{what}");
    is_cut_off(what, &mut guest);
    still_serves(&served);
}

fn is_cut_off(what: &str, guest: &mut Guest) {
    assert!(guest.driver.frontend().get_features().is_err(), "{what}: the connection is over");
}

#[test]
fn buffers_that_make_no_sense_are_refused() {
    let status = |guest: &Guest| guest.status();
    is_refused("no data", |guest| vec![guest.header(IN, 0), status(guest)]);
    is_refused("a short header", |guest| {
        let header = DescriptorSpec { length: 15, ..guest.header(IN, 0) };
        vec![header, guest.data(0, 512, WRITE), status(guest)]
    });
    is_refused("an empty header", |guest| {
        let header = DescriptorSpec { length: 0, ..guest.header(IN, 0) };
        vec![header, guest.data(0, 512, WRITE), status(guest)]
    });
    is_refused("empty data", |guest| {
        vec![guest.header(IN, 0), guest.data(0, 0, WRITE), guest.data(0, 512, WRITE), status(guest)]
    });
    is_refused("only a status", |guest| vec![status(guest)]);
    is_refused("a header to write to", |guest| {
        let header = DescriptorSpec { flags: WRITE, ..guest.header(IN, 0) };
        vec![header, guest.data(0, 512, WRITE), status(guest)]
    });
    is_refused("a read into a buffer to read", |guest| {
        vec![guest.header(IN, 0), guest.data(0, 512, 0), status(guest)]
    });
    is_refused("a write from a buffer to write", |guest| {
        vec![guest.header(OUT, 0), guest.data(0, 512, WRITE), status(guest)]
    });
    is_refused("both directions", |guest| {
        vec![
            guest.header(OUT, 0),
            guest.data(0, 512, 0),
            guest.data(512, 512, WRITE),
            status(guest),
        ]
    });
    is_refused("a buffer to read behind one to write", |guest| {
        let (header, data) = (guest.header(IN, 0), guest.data(0, 512, WRITE));
        vec![header, data, guest.data(512, 16, 0), status(guest)]
    });
    is_refused("half a sector", |guest| {
        vec![guest.header(IN, 0), guest.data(0, 256, WRITE), status(guest)]
    });
}

/// A chain of a header, `count` buffers of `length` bytes, all of them the same memory, and a
/// status, in an indirect table.
fn aliasing(guest: &mut Guest, count: usize, length: u32) -> Vec<DescriptorSpec> {
    let inner = guest.base() + 64;
    let bytes = 16 * (count + 2);
    let memory = guest.driver.memory.clone();
    let table = blockhouse_engine::VolatileSlice::new(memory, inner, bytes).unwrap();
    let mut chain = vec![guest.header(IN, 0)];
    chain.extend(std::iter::repeat_n(guest.data(32 << 10, length, WRITE), count));
    chain.push(guest.status());
    write_chain(&table, 0, &chain);
    vec![DescriptorSpec::at(inner, bytes as u32, INDIRECT)]
}

#[test]
fn requests_beyond_the_announced_limits_are_refused() {
    const SIZE_MAX: u64 = 1 << 1;
    const SEG_MAX: u64 = 1 << 2;
    let served = Served::start(1, 1);
    let connect = |without| {
        served.connect(Options {
            memory: 10 << 20,
            without: Options::default().without | without,
            ..Options::default()
        })
    };
    let mut guest = connect(0);
    let config = guest.driver.config(8, 8).unwrap();
    let number = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().unwrap());
    let (size_max, seg_max) = (number(0), number(4));
    assert!(size_max >= 4 << 20, "Linux sends 4 MiB at a time");
    let submit = |guest: &mut Guest, count: usize, length: u32| {
        let chain = aliasing(guest, count, length);
        guest.submit(0, &chain, LONG)
    };
    assert_eq!(submit(&mut guest, 1, size_max), Some(OK));
    assert_eq!(submit(&mut guest, 1, size_max + 512), Some(FAILED));
    assert_eq!(submit(&mut guest, seg_max as usize, 512), Some(OK));
    assert_eq!(submit(&mut guest, seg_max as usize + 1, 512), Some(FAILED));
    assert_eq!(guest.write(0, 0, &[3; 512]), OK, "the connection lives on");
    drop(guest);
    // A driver that took neither feature was told of no limit.
    let mut guest = connect(SIZE_MAX | SEG_MAX);
    assert_eq!(submit(&mut guest, 1, size_max + 512), Some(OK));
    assert_eq!(submit(&mut guest, seg_max as usize + 1, 512), Some(OK));
}

#[test]
fn addresses_outside_of_the_memory_are_refused() {
    for address in [NOWHERE, 0, u64::MAX, u64::MAX - 511, GUEST - 1] {
        is_refused("data to write to", |guest| {
            let data = DescriptorSpec { address, length: 512, flags: WRITE };
            vec![guest.header(IN, 0), data, guest.status()]
        });
        is_refused("data to read", |guest| {
            vec![
                guest.header(OUT, 0),
                DescriptorSpec { address, length: 512, flags: 0 },
                guest.status(),
            ]
        });
        is_refused("a header", |guest| {
            let header = DescriptorSpec { address, length: 16, flags: 0 };
            vec![header, guest.data(0, 512, WRITE), guest.status()]
        });
    }
    is_refused("data that reaches out of the memory", |guest| {
        let data = DescriptorSpec { length: !511, ..guest.data(0, 0, WRITE) };
        vec![guest.header(IN, 0), data, guest.status()]
    });
}

#[test]
fn a_broken_queue_with_an_eventfd_for_errors_leaves_the_others_alone() {
    let served = Served::start(2, 2);
    let mut guest = served.connect(Options { queues: 2, ..Options::default() });
    let broken = EventFd::new(EFD_NONBLOCK).unwrap();
    guest.driver.frontend().set_vring_err(0, &broken).unwrap();
    guest.driver.frontend().get_vring_base(0).unwrap();
    guest.driver.start_queue(0).unwrap();
    for round in 1..4 {
        let chain = vec![guest.header(OUT, 0), guest.data(0, 512, 0)];
        assert_eq!(guest.submit(0, &chain, SHORT), None, "no status");
        assert_eq!(broken.read().unwrap(), 1, "round {round}");
        assert_eq!(guest.write(1, 0, &[round; 512]), OK);
        assert_eq!(guest.read(1, 0, 512).unwrap(), [round; 512]);
        // The driver resets its device: new rings in the place of the broken ones.
        guest.driver.frontend().get_vring_base(0).unwrap();
        guest.driver.reset_queue(0).unwrap();
        assert_eq!(guest.read(0, 0, 512).unwrap(), [round; 512]);
    }
    assert_eq!(broken.read().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

#[test]
fn a_chain_without_a_status_is_the_end() {
    is_dropped("no status", |guest| vec![guest.header(OUT, 0), guest.data(0, 512, 0)]);
    is_dropped("an empty status", |guest| {
        let status = DescriptorSpec { length: 0, ..guest.status() };
        vec![guest.header(IN, 0), guest.data(0, 512, WRITE), status]
    });
    for address in [NOWHERE, u64::MAX] {
        is_dropped("a status nowhere", |guest| {
            let status = DescriptorSpec { address, length: 1, flags: WRITE };
            vec![guest.header(IN, 0), guest.data(0, 512, WRITE), status]
        });
    }
    is_dropped("a status whose address wraps", |guest| {
        let status = DescriptorSpec { address: u64::MAX, length: 2, flags: WRITE };
        vec![guest.header(IN, 0), guest.data(0, 512, WRITE), status]
    });
}

#[test]
fn chains_that_go_round_or_astray_are_the_end() {
    let offer = |what: &str, edit: &dyn Fn(&mut Guest)| {
        let served = Served::start(1, 1);
        let mut guest = served.connect(Options::default());
        let chain = [guest.header(IN, 0), guest.data(0, 512, WRITE), guest.status()];
        guest.queue(0).chain(0, &chain);
        guest.queue(0).add_available(0);
        edit(&mut guest);
        assert_eq!(guest.queue(0).wait_used(SHORT), None, "{what}");
        is_cut_off(what, &mut guest);
        still_serves(&served);
    };
    let next = |guest: &mut Guest, links: &[(u16, u16)]| {
        let buffer = DescriptorSpec { flags: NEXT | WRITE, ..guest.data(0, 512, 0) };
        links.iter().for_each(|&(index, next)| guest.queue(0).describe(index, buffer, next));
        guest.queue(0).publish();
    };
    offer("itself", &|guest| next(guest, &[(1, 1)]));
    offer("two in a circle", &|guest| next(guest, &[(1, 2), (2, 1)]));
    offer("out of the table", &|guest| next(guest, &[(1, 64)]));
    offer("far out of the table", &|guest| next(guest, &[(1, u16::MAX)]));
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    guest.queue(0).add_available(64);
    guest.queue(0).publish();
    assert_eq!(guest.queue(0).wait_used(SHORT), None);
    is_cut_off("a head that is not there", &mut guest);
    offer("more available than there are", &|guest| {
        guest.queue(0).publish_index(65);
    });
    offer("an index that goes back", &|guest| {
        guest.queue(0).publish_index(u16::MAX);
    });
}

#[test]
fn the_write_flag_of_an_indirect_table_is_ignored() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    let inner = guest.base() + 64;
    let memory = guest.driver.memory.clone();
    let table = blockhouse_engine::VolatileSlice::new(memory, inner, 48).unwrap();
    write_chain(&table, 0, &[guest.header(IN, 0), guest.data(0, 512, WRITE), guest.status()]);
    let chain = [DescriptorSpec::at(inner, 48, INDIRECT | WRITE)];
    assert_eq!(guest.submit(0, &chain, LONG), Some(OK));
}

#[test]
fn indirect_tables_that_virtio_forbids_are_the_end() {
    // A table with a good request, and how it is referred to.
    let offer = |what: &str, refer: &dyn Fn(&mut Guest, usize) -> Vec<DescriptorSpec>| {
        is_dropped(what, |guest| {
            let inner = guest.base() + 64;
            let memory = guest.driver.memory.clone();
            let table = blockhouse_engine::VolatileSlice::new(memory, inner, 1024).unwrap();
            let chain = [guest.header(IN, 0), guest.data(0, 512, WRITE), guest.status()];
            write_chain(&table, 0, &chain);
            refer(guest, inner)
        });
    };
    let table = |inner, length, flags| DescriptorSpec::at(inner, length, INDIRECT | flags);
    offer("half a descriptor", &|_, inner| vec![table(inner, 24, 0)]);
    offer("an empty table", &|_, inner| vec![table(inner, 0, 0)]);
    offer("a table of millions", &|_, inner| vec![table(inner, 1 << 30, 0)]);
    offer("a table that ends early", &|_, inner| vec![table(inner, 32, 0)]);
    offer("something after the table", &|guest, inner| vec![table(inner, 48, 0), guest.status()]);
    offer("a table nowhere", &|_, _| {
        vec![DescriptorSpec { address: NOWHERE, length: 48, flags: INDIRECT }]
    });
    offer("a table in a table", &|guest, inner| {
        let memory = guest.driver.memory.clone();
        let outer = blockhouse_engine::VolatileSlice::new(memory, inner + 1024, 16).unwrap();
        write_chain(&outer, 0, &[table(inner, 48, 0)]);
        vec![table(inner + 1024, 16, 0)]
    });
    offer("a table that goes round", &|guest, inner| {
        let memory = guest.driver.memory.clone();
        let table = blockhouse_engine::VolatileSlice::new(memory, inner, 32).unwrap();
        let data = guest.data(0, 512, WRITE);
        write_chain(&table, 0, &[data, data]);
        // The second one's successor is the first.
        let memory = guest.driver.memory.clone();
        let second = blockhouse_engine::VolatileSlice::new(memory, inner + 16, 16).unwrap();
        second.store_u64(8, 512 | u64::from(WRITE | NEXT) << 32);
        vec![DescriptorSpec::at(inner, 32, INDIRECT)]
    });
}

#[test]
fn a_table_at_an_odd_address_is_read_all_the_same() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    let inner = guest.base() + 67;
    let chain = [guest.header(IN, 0), guest.data(0, 512, WRITE), guest.status()];
    for (index, buffer) in chain.iter().enumerate() {
        let at = inner + 16 * index;
        let flags = buffer.flags | if index < 2 { NEXT } else { 0 };
        guest.driver.memory.write(at, &buffer.address.to_le_bytes());
        guest.driver.memory.write(at + 8, &buffer.length.to_le_bytes());
        guest.driver.memory.write(at + 12, &flags.to_le_bytes());
        guest.driver.memory.write(at + 14, &(index as u16 + 1).to_le_bytes());
    }
    assert_eq!(guest.submit(0, &[DescriptorSpec::at(inner, 48, INDIRECT)], LONG), Some(OK));
}

#[test]
fn random_tables_never_hang_the_server() {
    let seed =
        std::env::var("SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
    eprintln!(
        "seed {seed}; again: SEED={seed} cargo test -p blockhouse-vhost-user --test it hostile::"
    );
    let mut random = fastrand::Rng::with_seed(seed);
    let served = Served::start(1, 1);
    for _ in 0..60 {
        let mut guest = served.connect(Options::default());
        for index in 0..64 {
            let address = match random.u8(..4) {
                0 => random.u64(..),
                _ => GUEST + random.u64(..guest.driver.memory.len() as u64),
            };
            let length = if random.bool() { 512 } else { random.u32(..8192) };
            let flags = random.u16(..8);
            guest.queue(0).describe(
                index,
                DescriptorSpec { address, length, flags },
                random.u16(..66),
            );
        }
        for _ in 0..random.usize(1..20) {
            guest.queue(0).add_available(random.u16(..65));
        }
        guest.queue(0).publish();
        guest.queue(0).wait_used(Duration::from_millis(5));
    }
    still_serves(&served);
}

#[test]
fn rings_that_are_nowhere_or_of_no_size_are_refused() {
    let served = Served::start(1, 1);
    for size in [0, 3, 2049, 65535] {
        let mut guest = served.connect(Options::default());
        let frontend = guest.driver.frontend();
        frontend.get_vring_base(0).unwrap();
        frontend.set_vring_num(0, size).unwrap();
        let region = guest.driver.region();
        guest.driver.frontend().set_mem_table(&[region]).unwrap();
        // It starts with its kick descriptor.
        let kick = guest.driver.queues[0].kick.try_clone().unwrap();
        let started = guest.driver.frontend().set_vring_kick(0, &kick);
        assert!(started.is_err(), "{size} entries");
    }
    still_serves(&served);
}

#[test]
fn memory_that_is_not_there_is_refused() {
    let served = Served::start(1, 1);
    let odd = |edit: &dyn Fn(&mut VhostUserMemoryRegionInfo)| {
        let mut guest = served.connect(Options::default());
        let mut region = guest.driver.region();
        edit(&mut region);
        assert!(guest.driver.frontend().set_mem_table(&[region]).is_err());
    };
    odd(&|region| region.memory_size *= 2);
    odd(&|region| region.mmap_offset = 4096);
    odd(&|region| region.memory_size += 1);
    odd(&|region| region.mmap_offset = 1);
    odd(&|region| region.memory_size = 0);
    odd(&|region| region.guest_phys_addr = u64::MAX - 100);
    odd(&|region| region.mmap_offset = 1 << 60);
    // Rings that the new memory does not have.
    odd(&|region| region.userspace_addr += 1 << 30);
    still_serves(&served);
}

#[test]
fn memory_that_may_have_to_be_waited_for_is_refused() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.set_len(guest.driver.memory.len() as u64).unwrap();
    let region =
        VhostUserMemoryRegionInfo { mmap_handle: file.as_raw_fd(), ..guest.driver.region() };
    assert!(guest.driver.frontend().set_mem_table(&[region]).is_err());
    drop(guest);
    still_serves(&served);
}

/// Demands that the connection ends soon, and that the same device and another one serve on.
fn is_the_end_of_it_alone(what: &str, guest: &mut Guest, served: &Served, other: &mut Guest) {
    let start = Instant::now();
    while guest.driver.frontend().get_features().is_ok() {
        assert!(start.elapsed() < LONG, "{what}: the connection lives on");
    }
    assert_eq!(other.write(0, 8, &[4; 512]), OK, "{what}");
    assert_eq!(other.read(0, 8, 512).unwrap(), [4; 512], "{what}");
    still_serves(served);
}

#[test]
fn memory_that_vanishes_ends_its_own_connection_only() {
    let (served, neighbour) = (Served::start(1, 1), Served::start(1, 1));
    let mut other = neighbour.connect(Options::default());
    // From the rings on, or from the headers of requests on.
    for rings in [false, true] {
        let mut guest = served.connect(Options::default());
        assert_eq!(guest.write(0, 0, &[7; 512]), OK);
        let chain = [guest.header(IN, 0), guest.data(0, 512, WRITE), guest.status()];
        guest.queue(0).chain(0, &chain);
        guest.queue(0).add_available(0);
        guest.driver.cut_memory(if rings { 0 } else { guest.base() }).unwrap();
        guest.queue(0).publish();
        guest.queue(0).kick.write(1).unwrap();
        is_the_end_of_it_alone("guest memory", &mut guest, &served, &mut other);
    }
}

#[test]
fn a_page_that_is_lost_is_not_taken_for_zeros() {
    let options = DiskOptions { detect_zeroes: DetectZeroes::Unmap, ..DiskOptions::default() };
    let served = Served::with(1, 1, options, &std::env::temp_dir());
    let mut guest = served.connect(Options::default());
    assert_eq!(guest.write(0, 0, &[7; 4096]), OK);
    let chain = [guest.header(OUT, 0), guest.data(0, 4096, 0), guest.status()];
    guest.driver.cut_memory(guest.base() + DATA).unwrap();
    assert_eq!(guest.submit(0, &chain, SHORT), None, "there is nothing to write");
    is_cut_off("data that was looked at", &mut guest);
    let mut next = served.connect(Options::default());
    assert_eq!(next.read(0, 0, 4096).unwrap(), [7; 4096]);
}

#[test]
fn a_page_that_the_kernel_misses_fails_its_request_only() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    // Durable writes, whose failures may be failed flushes.
    guest.driver.set_writeback(0).unwrap();
    assert_eq!(guest.write(0, 0, &[7; 8192]), OK);
    guest.driver.cut_memory(guest.base() + DATA + 4096).unwrap();
    let lost = guest.data(4096, 4096, 0);
    assert_eq!(guest.request(0, OUT, 0, &[lost]), FAILED);
    assert_eq!(guest.request(0, OUT, 0, &[guest.data(0, 8192, 0)]), FAILED, "half of it");
    assert_eq!(guest.request(0, IN, 0, &[DescriptorSpec { flags: WRITE, ..lost }]), FAILED);
    assert_eq!(guest.request(0, FLUSH, 0, &[]), OK, "no flush has failed");
    assert_eq!(guest.write(0, 0, &[3; 4096]), OK);
    assert_eq!(guest.read(0, 0, 4096).unwrap(), [3; 4096]);
}

fn memory_file(size: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create("more", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, size).unwrap();
    file
}

#[test]
fn tracking_memory_and_a_log_that_vanish_end_their_own_connection_only() {
    let (served, neighbour) = (Served::start(1, 1), Served::start(1, 1));
    let mut other = neighbour.connect(Options::default());
    let mut guest = served.connect(Options::default());
    let file = memory_file(8192);
    let tracking = VhostUserInflight::new(8192, 0, 1, 64);
    guest.driver.frontend().get_vring_base(0).unwrap();
    guest.driver.frontend().set_inflight_fd(&tracking, file.as_raw_fd()).unwrap();
    guest.driver.start_queue(0).unwrap();
    assert_eq!(guest.write(0, 0, &[7; 512]), OK);
    rustix::fs::ftruncate(&file, 0).unwrap();
    let chain = [guest.header(IN, 0), guest.data(0, 512, WRITE), guest.status()];
    assert_eq!(guest.submit(0, &chain, SHORT), None);
    is_the_end_of_it_alone("tracking memory", &mut guest, &served, &mut other);

    let mut guest = served.connect(Options { without: 0, ..Options::default() });
    let (file, size) = (memory_file(1 << 20), 1 << 20);
    let region =
        VhostUserDirtyLogRegion { mmap_size: size, mmap_offset: 0, mmap_handle: file.as_raw_fd() };
    guest.driver.frontend().set_log_base(0, Some(region)).unwrap();
    assert_eq!(guest.write(0, 0, &[7; 512]), OK);
    rustix::fs::ftruncate(&file, 0).unwrap();
    // The answer may come before the log is found to be gone.
    let chain = [guest.header(IN, 0), guest.data(0, 512, WRITE), guest.status()];
    let _ = guest.submit(0, &chain, SHORT);
    is_the_end_of_it_alone("the log", &mut guest, &served, &mut other);
}

#[test]
fn memory_that_overlaps_is_refused() {
    let served = Served::start(1, 1);
    let mut guest = served.connect(Options::default());
    let region = guest.driver.region();
    assert!(guest.driver.frontend().add_mem_region(&region).is_err());
    assert_eq!(guest.write(0, 0, &[3; 512]), OK, "the connection lives on");
    drop(guest);
    still_serves(&served);
}

#[test]
fn a_front_end_that_descriptors_are_too_few_for_is_dropped() {
    // The limit is of the whole process.
    let binary = std::env::current_exe().unwrap();
    let mut command = std::process::Command::new(binary);
    command.args(["--exact", "hostile::few_descriptors_are_left", "--ignored", "--nocapture"]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
#[ignore = "lowers a limit of its process"]
fn few_descriptors_are_left() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let served = Served::start(1, 1);
    let before = getrlimit(Resource::Nofile);
    // From here on descriptors have consecutive numbers.
    let null = std::fs::File::open("/dev/null").unwrap();
    let _taken: Vec<_> = (0..64).map(|_| null.try_clone().unwrap()).collect();
    for left in 1..=3 {
        let client = {
            use rustix::net::{AddressFamily, SocketType, socket};
            socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap()
        };
        let next = null.try_clone().unwrap().as_raw_fd() as u64;
        let few = Rlimit { current: Some(next + left), ..before };
        setrlimit(Resource::Nofile, few).unwrap();
        let address = rustix::net::SocketAddrUnix::new(&served.socket).unwrap();
        rustix::net::connect(&client, &address).unwrap();
        let mut client = UnixStream::from(client);
        client.set_read_timeout(Some(LONG)).unwrap();
        let end = std::io::Read::read(&mut client, &mut [0]);
        assert!(matches!(end, Ok(0)), "{left} left: {end:?}");
        setrlimit(Resource::Nofile, before).unwrap();
    }
    still_serves(&served);
}

#[test]
fn queues_that_do_not_exist_are_refused() {
    let served = Served::start(1, 1);
    let guest = served.connect(Options::default());
    let kick = guest.driver.queues[0].kick.try_clone().unwrap();
    drop(guest);
    let other = vhost::vhost_user::Frontend::connect(&served.socket, 300).unwrap();
    other.set_hdr_flags(vhost::vhost_user::message::VhostUserHeaderFlag::NEED_REPLY);
    other.set_owner().unwrap();
    // Without the negotiation there are no replies; the connection's end tells.
    let _ = other.set_vring_kick(200, &kick);
    assert!(other.get_features().is_err());
    drop(other);
    still_serves(&served);
}

#[test]
fn garbage_instead_of_messages_ends_the_connection() {
    use std::io::{Read, Write};
    let served = Served::start(1, 1);
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], &[1, 0, 0, 0]] {
        let mut stream = std::os::unix::net::UnixStream::connect(&served.socket).unwrap();
        let _ = stream.write_all(bytes);
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
    }
    still_serves(&served);
}
