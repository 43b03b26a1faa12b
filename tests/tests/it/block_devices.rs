//! Block devices instead of files: loop devices, where the machine allows them.

use blockhouse_tests::nbd::{Client, Request, command, errno, flag};
use blockhouse_tests::{
    Engine, LoopDevice, Scratch, Serve, Trace, need, on_every_engine, random_bytes, require, run,
    seeded, tool,
};

const SIZE: u64 = 16 << 20;

fn a_device_is_written_read_zeroed_and_discarded(engine: Engine) {
    let scratch = Scratch::new();
    let image = scratch.image("backing", SIZE);
    let device = require!(LoopDevice::over(&image, &[]));
    let server = Serve::new(&scratch, device.path()).engine(engine).start();
    let mut client = Client::open(&server.address());
    assert_eq!(client.size(), SIZE);
    let bytes = random_bytes(&mut seeded(), 4 << 20);
    assert_eq!(client.write(0, &bytes, 0), 0);
    assert_eq!(client.write(5 << 20, &bytes[..4096], flag::FUA), 0);
    // Neither offset nor length is a multiple of the device's block size.
    assert_eq!(client.write((6 << 20) + 123, &bytes[..777], flag::FUA), 0);
    assert_eq!(client.simple(command::WRITE_ZEROES, 1 << 20, 1 << 20, 0), 0);
    assert_eq!(client.simple(command::WRITE_ZEROES, 100, 1000, flag::FUA), 0);
    assert_eq!(client.simple(command::WRITE_ZEROES, 2 << 20, 4096, flag::NO_HOLE), 0);
    assert_eq!(client.simple(command::TRIM, 3 << 20, 1 << 20, 0), 0);
    assert_eq!(client.flush(), 0);
    let check = |client: &mut Client| {
        assert_eq!(client.read(0, 100), Ok(bytes[..100].to_vec()));
        assert_eq!(client.read(100, 1000), Ok(vec![0; 1000]));
        assert_eq!(client.read(1100, 4096), Ok(bytes[1100..5196].to_vec()));
        assert_eq!(client.read(1 << 20, 1 << 20), Ok(vec![0; 1 << 20]));
        assert_eq!(client.read(2 << 20, 4096), Ok(vec![0; 4096]));
        let rest = (2 << 20) + 4096..3 << 20;
        let length = rest.len() as u64;
        assert_eq!(client.read(rest.start as u64, length), Ok(bytes[rest].to_vec()));
        assert_eq!(client.read(5 << 20, 4096), Ok(bytes[..4096].to_vec()));
        assert_eq!(client.read((6 << 20) + 123, 777), Ok(bytes[..777].to_vec()));
        assert_eq!(client.read((6 << 20) + 120, 3), Ok(vec![0; 3]));
    };
    check(&mut client);
    assert_eq!(client.write(SIZE, &[1; 512], 0), errno::ENOSPC);
    client.disconnect();
    server.stop();
    let server = Serve::new(&scratch, device.path()).engine(engine).start();
    let mut client = Client::open(&server.address());
    check(&mut client);
    client.disconnect();
    server.stop();
}

on_every_engine! {
    a_device_is_written_read_zeroed_and_discarded
}

#[test]
fn a_discard_on_a_device_gives_the_space_below_back() {
    let scratch = Scratch::new();
    let image = scratch.image("backing", SIZE);
    let device = require!(LoopDevice::over(&image, &[]));
    let server = Serve::new(&scratch, device.path()).start();
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(0, &vec![1; 8 << 20], flag::FUA), 0);
    assert_eq!(client.flush(), 0);
    run(&mut tool("sync")).success();
    let full = image.allocated();
    assert_eq!(client.simple(command::TRIM, 0, 8 << 20, 0), 0);
    assert_eq!(client.flush(), 0);
    let left = image.allocated();
    assert!(left + (8 << 20) <= full, "{left} of {full} bytes are still taken");
    client.disconnect();
    server.stop();
}

#[test]
fn blocks_of_4096_bytes_are_announced_and_smaller_requests_are_served() {
    require!(need::tools(&["nbdinfo"]));
    let scratch = Scratch::new();
    let image = scratch.image("backing", SIZE);
    let device = require!(LoopDevice::over(&image, &["--sector-size", "4096"]));
    let server = Serve::new(&scratch, device.path()).start();
    let outcome = run(tool("nbdinfo").args(["--json", server.uri()])).success();
    let answer: serde_json::Value = serde_json::from_str(&outcome.stdout).expect("JSON");
    assert_eq!(answer["exports"][0]["block_size_preferred"], 4096);
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(0, &[1; 8192], 0), 0);
    assert_eq!(client.write(4095, &[2; 2], flag::FUA), 0);
    assert_eq!(client.write(512, &[3; 512], 0), 0);
    let expected = [&[1; 512][..], &[3; 512], &[1; 3071], &[2; 2], &[1; 4095]].concat();
    assert_eq!(client.read(0, 8192), Ok(expected));
    client.disconnect();
    server.stop();
}

/// Through the page cache the kernel writes any range of a device, but zeroes and discards only
/// whole sectors.
#[test]
fn zeros_and_discards_of_parts_of_sectors_are_carried_out_in_every_cache_mode() {
    for (sectors, cache) in
        [("4096", "writeback"), ("4096", "writethrough"), ("4096", "unsafe"), ("512", "writeback")]
    {
        let scratch = Scratch::new();
        let image = scratch.image("backing", SIZE);
        let device = require!(LoopDevice::over(&image, &["--sector-size", sectors]));
        let server = Serve::new(&scratch, device.path()).option("--cache", cache).start();
        let mut client = Client::open(&server.address());
        let mut expected = random_bytes(&mut seeded(), 1 << 20);
        assert_eq!(client.write(0, &expected, 0), 0);
        for (offset, length, flags) in [
            (1024, 512, 0),
            (4196, 13, flag::FUA),
            (8192, 512, flag::NO_HOLE),
            (12_800, 6144, 0),
            (20_000, 70_000, flag::NO_HOLE),
            (98_303, 4098, flag::FUA),
        ] {
            assert_eq!(client.simple(command::WRITE_ZEROES, offset, length, flags), 0);
            expected[offset as usize..][..length as usize].fill(0);
        }
        // A discarded range may read as anything; the bytes around it stay.
        for (offset, length) in [(200_192, 512), (204_900, 8192), (220_000, 65_536)] {
            assert_eq!(client.simple(command::TRIM, offset, length, 0), 0);
            let now = client.read(offset, length).expect("it is read");
            expected[offset as usize..][..length as usize].copy_from_slice(&now);
        }
        assert_eq!(client.flush(), 0);
        assert_eq!(client.read(0, 1 << 20), Ok(expected), "{cache}, {sectors}");
        client.disconnect();
        server.stop();
    }
}

/// A synchronous `RWF_DSYNC` write to a device costs a FUA write and a flush. A write and a sync
/// cost less, because several writes can share the sync.
#[test]
fn a_durable_write_to_a_device_by_threads_is_a_write_and_a_sync() {
    require!(need::strace());
    let scratch = Scratch::new();
    let image = scratch.image("backing", SIZE);
    let device = require!(LoopDevice::over(&image, &[]));
    let trace = Trace::of(&scratch, device.path(), "pwritev2,pwritev,fdatasync,fsync", &[]);
    let serve = Serve::new(&scratch, device.path()).engine(Engine::Threads);
    let server = serve.under(&trace.wrapper).start();
    let mut client = Client::open(&server.address());
    let calls = trace.during(|| assert_eq!(client.write(4096, &[1; 4096], flag::FUA), 0));
    let [write, sync] = &calls[..] else { panic!("two calls are expected: {calls:#?}") };
    assert!(write.name == "pwritev2" && !write.arguments.contains("DSYNC"), "{write:?}");
    assert_eq!(sync.name, "fdatasync");
    let calls = trace.during(|| assert_eq!(client.flush(), 0));
    assert_eq!(calls, []);
    client.disconnect();
    server.stop();
}

/// Errors of the device: the file system below it is full, which a device reports only as EIO.
#[test]
fn an_error_of_the_device_reaches_the_client() {
    let small = Scratch::in_memory();
    let at = small.path("small");
    std::fs::create_dir(&at).expect("a folder");
    require!(need::root());
    let mount = |options: &[&str]| {
        let mut mount = tool("mount");
        mount.args(["-t", "tmpfs", "-o"]).args(options).arg("tmpfs").arg(&at);
        run(&mut mount)
    };
    if !mount(&["size=4m"]).status.success() {
        return need::skip("cannot mount a tmpfs");
    }
    let _unmount = Unmount(&at);
    let image = small.image("small/backing", SIZE);
    let device = require!(LoopDevice::over(&image, &["--direct-io=off"]));
    let server = Serve::new(&small, device.path()).start();
    let mut client = Client::open(&server.address());
    let piece = vec![1; 1 << 20];
    let errors: Vec<_> = (0..8).map(|at| client.write(at << 20, &piece, 0)).collect();
    let failed = errors.iter().filter(|error| **error != 0).count();
    assert!(failed >= 4, "the device took more than it can hold: {errors:?}");
    assert!(
        errors.iter().all(|error| [0, errno::EIO, errno::ENOSPC].contains(error)),
        "{errors:?}"
    );
    assert_eq!(client.read(0, 1 << 20), Ok(piece));
    let status =
        client.call(Request { command: command::CACHE, length: 4096, ..Request::default() }, &[]);
    assert_eq!(status.error, 0);
}

struct Unmount<'a>(&'a std::path::Path);

impl Drop for Unmount<'_> {
    fn drop(&mut self) {
        // Lazily, because the loop device may still use it.
        run(tool("umount").arg("-l").arg(self.0)).success();
    }
}
