//! A host that runs out of space, memory or descriptors: the client gets the errno or waits, loses
//! nothing else, and continues when there is more again.

use std::io::Read;
use std::path::PathBuf;
use std::time::Duration;

use blockhouse_tests::nbd::{Client, command, connect, errno, flag};
use blockhouse_tests::{Cache, Engine, Scratch, Serve, eventually, need, on_every_engine, require};
use rustix::process::Resource;

const MIB: u64 = 1 << 20;
/// The space of the file system, and that of the image.
const ROOM: u64 = 8 * MIB;
const SIZE: u64 = 64 * MIB;

fn without_room_writes_fail_with_enospc_and_reads_go_on(engine: Engine) {
    let scratch = Scratch::in_memory();
    let folder = scratch.path("small");
    std::fs::create_dir(&folder).expect("a folder");
    let wrapper = require!(need::private_tmpfs(&folder, ROOM));
    let serve = Serve::new(&scratch, &folder.join("disk.img")).engine(engine);
    let serve = serve.cache(Cache::Writeback).option("--create", SIZE.to_string());
    let server = serve.under(&wrapper).start();
    let mut client = Client::open(&server.address());
    let piece = |number: u64| vec![number as u8 + 1; 1 << 20];
    let mut written = 0;
    let error = loop {
        match client.write(written * MIB, &piece(written), 0) {
            0 => written += 1,
            error => break error,
        }
        assert!(written * MIB <= ROOM, "more was taken than there is room for");
    };
    assert_eq!(error, errno::ENOSPC);
    assert!(written >= 6, "only {written} MiB of {ROOM} were taken");
    for flags in [0, flag::FUA] {
        assert_eq!(client.write(40 * MIB, &piece(0), flags), errno::ENOSPC, "flags {flags}");
    }
    let zeroes = client.simple(command::WRITE_ZEROES, 50 * MIB, 10 * MIB, flag::NO_HOLE);
    assert!([0, errno::ENOSPC].contains(&zeroes), "{zeroes}");
    for number in 0..written {
        assert_eq!(client.read(number * MIB, MIB), Ok(piece(number)), "MiB {number}");
    }
    // Overwriting needs no space.
    assert_eq!(client.write(0, &piece(99), 0), 0);
    assert_eq!(client.flush(), 0);
    // A discard frees space.
    assert_eq!(client.simple(command::TRIM, 0, 4 * MIB, 0), 0);
    for number in 30..33 {
        assert_eq!(client.write(number * MIB, &piece(number), flag::FUA), 0, "MiB {number}");
        assert_eq!(client.read(number * MIB, MIB), Ok(piece(number)), "MiB {number}");
    }
    assert_eq!(client.read(4 * MIB, MIB), Ok(piece(4)), "what was there is there");
    client.disconnect();
    // The file is visible only in the server's mount namespace.
    let seen = PathBuf::from(format!("/proc/{}/root", server.pid().as_raw_nonzero()));
    let seen = seen.join(folder.strip_prefix("/").expect("an absolute path")).join("disk.img");
    assert_eq!(std::fs::metadata(seen).expect("the image").len(), SIZE);
    server.stop();
}

fn without_memory_a_request_fails_and_the_server_goes_on(engine: Engine) {
    const LARGE: usize = 32 << 20;
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", SIZE);
    let server = Serve::new(&scratch, image.path()).engine(engine).start();
    let mut client = Client::open(&server.address());
    server.limit(Resource::As, Some(server.mapped_memory() + 16 * MIB));
    for _ in 0..3 {
        assert_eq!(client.write(0, &vec![1; LARGE], 0), errno::ENOMEM);
        assert_eq!(client.read(0, LARGE as u64), Err(errno::ENOMEM));
        assert_eq!(client.write(MIB + 100, &[2; 100_000], 0), 0, "there is memory for this");
    }
    let words = ["bytes of memory", "Cannot allocate"];
    let is_told = || words.iter().all(|word| server.log().contains(word));
    assert!(eventually(Duration::from_secs(20), is_told), "{}", server.log());
    server.limit(Resource::As, None);
    assert_eq!(client.write(0, &vec![3; LARGE], 0), 0);
    assert_eq!(client.read(0, LARGE as u64), Ok(vec![3; LARGE]));
    client.disconnect();
    server.stop();
}

fn without_descriptors_clients_wait_and_the_log_stays_short(engine: Engine) {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let server = Serve::new(&scratch, image.path()).engine(engine).start();
    server.limit_descriptors(1);
    let mut first = Client::open(&server.address());
    // The server could not accept another client, but logs nothing before one comes.
    std::thread::sleep(Duration::from_millis(350));
    assert_eq!(server.log(), "");
    let mut second = connect(&server.address());
    let is_told = || eventually(Duration::from_secs(5), || !server.log().is_empty());
    assert!(is_told(), "nothing says why the client waits");
    std::thread::sleep(Duration::from_millis(350));
    let log = server.log();
    assert_eq!(log.lines().count(), 1, "{log}");
    assert!(log.contains("Too many open files") && log.contains("LimitNOFILE"), "{log}");
    assert_eq!(first.write(0, &[1; 4096], 0), 0, "who is there is served");
    server.limit(Resource::Nofile, Some(256));
    let mut greeting = [0; 8];
    second.read_exact(&mut greeting).expect("it is accepted");
    assert_eq!(&greeting, b"NBDMAGIC");
    first.disconnect();
    drop(second);
    server.stop();
}

on_every_engine! {
    without_room_writes_fail_with_enospc_and_reads_go_on
    without_memory_a_request_fails_and_the_server_goes_on
    without_descriptors_clients_wait_and_the_log_stays_short
}

#[test]
fn the_limit_on_descriptors_is_raised_as_far_as_it_goes() {
    require!(need::tools(&["prlimit"]));
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let serve = Serve::new(&scratch, image.path());
    let server = serve.under(["prlimit", "--nofile=64:200", "--"]).start();
    let path = format!("/proc/{}/limits", server.pid().as_raw_nonzero());
    let limits = std::fs::read_to_string(path).expect("the server runs");
    let line = limits.lines().find(|line| line.starts_with("Max open files")).expect("a line");
    let values: Vec<_> = line.split_whitespace().skip(3).take(2).collect();
    assert_eq!(values, ["200", "200"], "{line}");
    server.stop();
    let refused = Serve::new(&scratch, image.path()).under(["prlimit", "--nofile=8:8", "--"]);
    refused.refused().failed(&["Too many open files", "LimitNOFILE"]);
}

#[test]
fn a_file_that_may_not_grow_further_is_full() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 4 * MIB);
    require!(need::tools(&["prlimit"]));
    // A write beyond a file size limit (EFBIG) is reported as ENOSPC, too.
    let serve = Serve::new(&scratch, image.path()).engine(Engine::Threads);
    let server = serve.under(["prlimit", "--fsize=1048576", "--"]).start();
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(0, &[1; 4096], 0), 0);
    let error = client.write(2 * MIB, &[1; 4096], 0);
    assert!([errno::ENOSPC, errno::EIO].contains(&error), "{error}");
    assert_eq!(client.read(0, 4096), Ok(vec![1; 4096]), "the server lives");
    client.disconnect();
    server.stop();
}
