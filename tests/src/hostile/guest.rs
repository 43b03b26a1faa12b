//! A guest that shares memory and misuses it: invalid descriptor chains, rings that change while
//! they are read, memory that shrinks, in-flight tracking that was tampered with, messages with
//! random numbers.

use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use blockhouse_engine::{FaultDomain, SharedMemory};
use blockhouse_vhost_user::driver::{DescriptorSpec, GUEST, Options, TestDriver, write_chain};
use blockhouse_vhost_user::ring::{INDIRECT, NEXT, WRITE};
use fastrand::Rng;
use rustix::fs::MemfdFlags;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserInflight};
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VringConfigData};

/// Bytes of the slot of a header or a data buffer in the memory for requests.
const SLOT: usize = 4096;
const SLOTS: usize = 256;

/// Connects, misbehaves and connects again until `until`.
pub fn guest(socket: &Path, random: &mut Rng, until: Instant) {
    while Instant::now() < until {
        // The server may refuse anything, at any time.
        let _ = session(socket, random);
    }
}

fn session(socket: &Path, random: &mut Rng) -> io::Result<()> {
    let options = Options {
        queues: random.u16(1..=3),
        entries: 1 << random.u32(1..=9),
        memory: SLOTS * SLOT,
        without: random.u64(..) & random.u64(..) & random.u64(..),
    };
    let mut driver = TestDriver::connect(socket, options)?;
    if random.u8(..3) == 0 {
        driver.track()?;
    }
    for _ in 0..random.u32(1..200) {
        act(&mut driver, options, random)?;
    }
    Ok(())
}

fn act(driver: &mut TestDriver, options: Options, random: &mut Rng) -> io::Result<()> {
    match random.u8(..24) {
        0..12 => post(driver, options, random),
        12..14 => describe_anything(driver, options, random),
        14 => {
            let queue = random.usize(..driver.queues.len());
            driver.queues[queue].publish_index(random.u16(..));
        }
        15 => scribble(&driver.memory, driver.requests(), random, 8),
        16 => scribble_meanwhile(driver, options, random),
        17 => shrink(driver, random)?,
        18 => tamper(driver, options, random)?,
        19 => say_anything(driver, options, random)?,
        _ => {
            let queue = random.usize(..driver.queues.len());
            let limit = Duration::from_millis(random.u64(..4));
            for _ in 0..random.u8(..8) {
                driver.queues[queue].wait_used(limit);
            }
        }
    }
    Ok(())
}

/// The offset of a random slot in the memory for requests.
fn place(driver: &TestDriver, random: &mut Rng) -> usize {
    driver.requests() + random.usize(..SLOTS - 1) * SLOT
}

/// Posts a request that is nearly valid.
fn post(driver: &mut TestDriver, options: Options, random: &mut Rng) {
    let header = place(driver, random);
    let kind = match random.u8(..8) {
        7 => random.u32(..),
        kind => [0, 1, 4, 8, 11, 13, 0][usize::from(kind)],
    };
    let sector = match random.u8(..8) {
        0 => random.u64(..),
        _ => random.u64(..1 << 15),
    };
    let mut bytes = [0; 17];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..16].copy_from_slice(&sector.to_le_bytes());
    driver.memory.write(header, &bytes);
    let mut chain = vec![DescriptorSpec::at(header, 16, 0)];
    for _ in 0..random.usize(..6) {
        chain.push(data(driver, kind, random));
    }
    chain.push(DescriptorSpec::at(header + 16, 1, WRITE));
    if random.u8(..8) == 0 {
        random.shuffle(&mut chain);
    }
    let entries = options.entries;
    let queue_index = random.usize(..driver.queues.len());
    let table_place = place(driver, random);
    let queue = &mut driver.queues[queue_index];
    let fits = u16::try_from(chain.len()).is_ok_and(|length| length < entries);
    let head = random.u16(..entries);
    if random.bool() || !fits {
        // An indirect table, whose length may be wrong.
        let table =
            blockhouse_engine::VolatileSlice::new(Arc::clone(&driver.memory), table_place, SLOT);
        write_chain(&table.expect("inside the memory"), 0, &chain);
        let length = match random.u8(..8) {
            0 => random.u32(..),
            _ => 16 * chain.len() as u32,
        };
        let flags = INDIRECT | if random.u8(..16) == 0 { NEXT | WRITE } else { 0 };
        queue.describe(head, DescriptorSpec::at(table_place, length, flags), random.u16(..));
    } else {
        let head = head.min(entries - chain.len() as u16 - 1);
        queue.chain(head, &chain);
        queue.add_available(head);
        queue.publish();
        return;
    }
    queue.add_available(head);
    queue.publish();
}

/// A data buffer. Its direction is mostly right; some buffers have the maximum length or an address
/// outside the slots.
fn data(driver: &TestDriver, kind: u32, random: &mut Rng) -> DescriptorSpec {
    let flags = match (kind, random.u8(..12)) {
        (_, 0) => random.u16(..),
        (0 | 8, _) => WRITE,
        _ => 0,
    };
    let length = match random.u8(..10) {
        0 => random.u32(..),
        1 => (SLOTS * SLOT) as u32,
        2 => 16 * random.u32(1..40),
        _ => 512 * random.u32(1..9),
    };
    let at = match random.u8(..10) {
        0 => return DescriptorSpec { address: random.u64(..), length, flags },
        1 => driver.requests(),
        _ => place(driver, random),
    };
    DescriptorSpec::at(at, length, flags)
}

fn describe_anything(driver: &mut TestDriver, options: Options, random: &mut Rng) {
    let index = random.usize(..driver.queues.len());
    for _ in 0..random.u8(1..16) {
        let address = GUEST + random.u64(..(SLOTS * SLOT) as u64);
        let buffer =
            DescriptorSpec { address, length: random.u32(..1 << 20), flags: random.u16(..8) };
        driver.queues[index].describe(
            random.u16(..options.entries),
            buffer,
            random.u16(..options.entries),
        );
    }
    driver.queues[index].add_available(random.u16(..));
    driver.queues[index].publish();
}

/// Overwrites some bytes of the first `length`.
fn scribble(memory: &SharedMemory, length: usize, random: &mut Rng, count: usize) {
    for _ in 0..count {
        memory.write(random.usize(..length), &[random.u8(..)]);
    }
}

/// Posts requests while another processor of the guest overwrites rings and headers.
fn scribble_meanwhile(driver: &mut TestDriver, options: Options, random: &mut Rng) {
    let (memory, stop) = (Arc::clone(&driver.memory), AtomicBool::new(false));
    let mut other = Rng::with_seed(random.u64(..));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let length = memory.len();
                scribble(&memory, length, &mut other, 64);
            }
        });
        for _ in 0..random.u8(1..32) {
            post(driver, options, random);
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// Takes memory away with requests in flight, and gives it back or not.
fn shrink(driver: &mut TestDriver, random: &mut Rng) -> io::Result<()> {
    let path = format!("/proc/self/fd/{}", driver.region().mmap_handle);
    let file = std::fs::File::options().write(true).open(path)?;
    let length = driver.memory.len() as u64;
    let rest = random.u64(..length) & !4095;
    file.set_len(rest)?;
    let _ = driver.queues[0].kick.write(1);
    std::thread::sleep(Duration::from_millis(random.u64(..5)));
    file.set_len(length)
}

/// Lets the server track requests in memory with random content.
fn tamper(driver: &mut TestDriver, options: Options, random: &mut Rng) -> io::Result<()> {
    let failed = |error: vhost::Error| io::Error::other(error);
    let wanted = VhostUserInflight::new(0, 0, options.queues, options.entries);
    let frontend = driver.frontend();
    for index in 0..usize::from(options.queues) {
        frontend.get_vring_base(index).map_err(failed)?;
    }
    let (given, file) = frontend.get_inflight_fd(&wanted).map_err(failed)?;
    let length = given.mmap_size as usize;
    let memory = SharedMemory::map(&file, given.mmap_offset, length, &FaultDomain::unconnected())?;
    scribble(&memory, length, random, 64);
    let mut told = given;
    if random.u8(..4) == 0 {
        told.mmap_size = random.u64(..given.mmap_size * 2);
        told.num_queues = random.u16(..);
    }
    frontend.set_inflight_fd(&told, file.as_raw_fd()).map_err(failed)?;
    for index in 0..usize::from(options.queues) {
        driver.start_queue(index)?;
    }
    scribble(&memory, length, random, 64);
    Ok(())
}

/// Sends a message with random numbers.
fn say_anything(driver: &mut TestDriver, options: Options, random: &mut Rng) -> io::Result<()> {
    let failed = |error: vhost::Error| io::Error::other(error);
    let index = random.usize(..usize::from(options.queues) + 1);
    let region = driver.region();
    let frontend = driver.frontend();
    match random.u8(..9) {
        0 => {
            let length = random.u32(1..64);
            let empty = vec![0; length as usize];
            let flags = VhostUserConfigFlags::empty();
            frontend.get_config(random.u32(..256), length, flags, &empty).map(drop)
        }
        1 => {
            let flags = VhostUserConfigFlags::empty();
            frontend.set_config(random.u32(..64), flags, &[random.u8(..)])
        }
        2 => frontend.set_vring_num(index, random.u16(..)),
        3 => frontend.set_vring_base(index, random.u16(..)),
        4 => frontend.set_features(random.u64(..)),
        5 => {
            let config = VringConfigData {
                queue_max_size: options.entries,
                queue_size: options.entries,
                flags: random.u32(..2),
                desc_table_addr: region.userspace_addr + random.u64(..1 << 21),
                used_ring_addr: region.userspace_addr + random.u64(..1 << 21),
                avail_ring_addr: region.userspace_addr + random.u64(..1 << 21),
                log_addr: Some(random.u64(..)),
            };
            frontend.set_vring_addr(index, &config)
        }
        6 => {
            let mut region = region;
            region.memory_size = random.u64(..1 << 24);
            region.guest_phys_addr = random.u64(..);
            if random.bool() {
                frontend.add_mem_region(&region).map(drop)
            } else {
                frontend.remove_mem_region(&region)
            }
        }
        7 => {
            let log = rustix::fs::memfd_create("log", MemfdFlags::CLOEXEC)?;
            rustix::fs::ftruncate(&log, random.u64(..1 << 20))?;
            let region = VhostUserDirtyLogRegion {
                mmap_size: random.u64(..1 << 21),
                mmap_offset: random.u64(..3) * 4096,
                mmap_handle: log.as_raw_fd(),
            };
            frontend.set_log_base(random.u64(..), Some(region))
        }
        _ => frontend.get_vring_base(index).map(drop),
    }
    .map_err(failed)
}
