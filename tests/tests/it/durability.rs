//! Durability as strace sees it: FUA is part of the write, a flush without unflushed writes makes
//! no system call, and a failure is remembered.

use std::path::Path;

use blockhouse_tests::nbd::{Client, Request, command, errno, flag};
use blockhouse_tests::{
    Cache, Call, Engine, Scratch, Serve, Server, Trace, eventually, need,
    on_every_engine_and_cache, require,
};
use lab_tools::block_device::has_flushes_to_share;

const BLOCK: &[u8] = &[0x5a; 4096];
/// The system calls that change a file or make it durable.
const CHANGES: &str = "pwritev2,pwritev,pwrite64,writev,write,fdatasync,fsync,sync,syncfs,\
                       sync_file_range,fallocate,ftruncate";

fn is_write(call: &Call) -> bool {
    call.name.contains("write")
}

fn is_sync(call: &Call) -> bool {
    call.name.contains("sync")
}

/// A traced server with the engine `threads`, whose image is on a disk and was written before.
fn traced(scratch: &Scratch, cache: Cache, options: &[&str]) -> (Server, Trace) {
    let image = scratch.image_of("disk.img", &vec![1; 1 << 20]);
    let trace = Trace::of(scratch, image.path(), CHANGES, options);
    let server = serve(scratch, image.path()).cache(cache).under(&trace.wrapper).start();
    (server, trace)
}

fn serve(scratch: &Scratch, image: &Path) -> Serve {
    Serve::new(scratch, image).engine(Engine::Threads)
}

#[test]
fn a_fua_write_is_one_pwritev2_with_dsync() {
    for cache in [Cache::None, Cache::Writeback] {
        require!(need::strace());
        let scratch = Scratch::new();
        let (server, trace) = traced(&scratch, cache, &[]);
        let mut client = Client::open(&server.address());
        let calls = trace.during(|| assert_eq!(client.write(8192, BLOCK, flag::FUA), 0));
        let [write] = &calls[..] else { panic!("one call is expected: {calls:#?}") };
        assert_eq!(write.name, "pwritev2");
        assert!(write.arguments.ends_with("1, 8192, RWF_DSYNC"), "{write:?}");
        assert_eq!(write.result, "4096");
        client.disconnect();
        server.stop();
    }
}

#[test]
fn a_flush_after_nothing_but_fua_writes_makes_no_system_call() {
    require!(need::strace());
    let scratch = Scratch::new();
    let (server, trace) = traced(&scratch, Cache::None, &[]);
    let mut client = Client::open(&server.address());
    // The first flush syncs what another process may have written.
    assert_eq!(client.flush(), 0);
    for block in 0..4 {
        assert_eq!(client.write(block * 4096, BLOCK, flag::FUA), 0);
    }
    let calls = trace.during(|| assert_eq!(client.flush(), 0));
    assert_eq!(calls, []);
    client.disconnect();
    server.stop();
}

/// After its server was killed, a client may ask the next server to flush writes that the first one
/// answered.
#[test]
fn a_flush_before_the_first_write_is_one_fdatasync_and_the_next_is_nothing() {
    require!(need::strace());
    let scratch = Scratch::new();
    let (server, trace) = traced(&scratch, Cache::None, &[]);
    let mut client = Client::open(&server.address());
    let first = trace.during(|| {
        client.read(0, 4096).expect("a read");
        assert_eq!(client.flush(), 0);
    });
    let [sync] = &first[..] else { panic!("one call is expected: {first:#?}") };
    assert_eq!((&*sync.name, &*sync.result), ("fdatasync", "0"));
    let second = trace.during(|| assert_eq!(client.flush(), 0));
    assert_eq!(second, []);
    client.disconnect();
    server.stop();
}

#[test]
fn a_flush_after_a_plain_write_is_one_fdatasync_and_the_next_is_nothing() {
    require!(need::strace());
    let scratch = Scratch::new();
    let (server, trace) = traced(&scratch, Cache::None, &[]);
    let mut client = Client::open(&server.address());
    let writes = trace.during(|| assert_eq!(client.write(0, BLOCK, 0), 0));
    assert!(writes.len() == 1 && !writes[0].arguments.contains("SYNC"), "{writes:#?}");
    let first = trace.during(|| assert_eq!(client.flush(), 0));
    let [sync] = &first[..] else { panic!("one call is expected: {first:#?}") };
    assert_eq!((&*sync.name, &*sync.result), ("fdatasync", "0"));
    let second = trace.during(|| assert_eq!(client.flush(), 0));
    assert_eq!(second, []);
    client.disconnect();
    server.stop();
}

#[test]
fn a_flush_covers_the_writes_of_other_connections() {
    require!(need::strace());
    let scratch = Scratch::new();
    let (server, trace) = traced(&scratch, Cache::None, &[]);
    let mut writer = Client::open(&server.address());
    let mut flusher = Client::open(&server.address());
    assert_eq!(writer.write(0, BLOCK, 0), 0);
    let calls = trace.during(|| assert_eq!(flusher.flush(), 0));
    assert_eq!(calls.iter().filter(|call| is_sync(call)).count(), 1, "{calls:#?}");
    let again = trace.during(|| assert_eq!(writer.flush(), 0));
    assert_eq!(again, []);
    writer.disconnect();
    flusher.disconnect();
    server.stop();
}

#[test]
fn flushes_at_the_same_time_share_one_fdatasync() {
    require!(need::strace());
    let scratch = Scratch::new();
    // The first sync takes long enough that all other flushes arrive meanwhile.
    let slow = ["-e", "inject=fdatasync:delay_enter=300000"];
    let (server, trace) = traced(&scratch, Cache::None, &slow);
    let mut clients: Vec<_> = (0..16).map(|_| Client::open(&server.address())).collect();
    assert_eq!(clients[0].write(0, BLOCK, 0), 0);
    let calls = trace.during(|| {
        let flush = Request { command: command::FLUSH, ..Request::default() };
        for client in &mut clients {
            client.send(flush).expect("the request is taken");
        }
        for client in &mut clients {
            assert_eq!(client.receive().expect("a reply").1.error, 0);
        }
    });
    assert_eq!(calls.len(), 1, "{calls:#?}");
    drop(clients);
    server.stop();
}

/// Sends durable writes of a block, `in_flight` at a time, and returns the system calls.
fn write_durably(trace: &Trace, client: &mut Client, in_flight: u64, times: u64) -> Vec<Call> {
    trace.during(|| {
        for _ in 0..times {
            for number in 0..in_flight {
                let (command, flags, offset) = (command::WRITE, flag::FUA, number * 4096);
                let write = Request { command, flags, offset, length: 4096 };
                client.send_with(write, BLOCK).expect("the request is taken");
            }
            for _ in 0..in_flight {
                assert_eq!(client.receive().expect("a reply").1.error, 0);
            }
        }
    })
}

#[test]
fn concurrent_durable_writes_have_fua_each_until_a_shared_flush_is_tried() {
    require!(need::strace());
    let scratch = Scratch::new();
    let (server, trace) = traced(&scratch, Cache::None, &[]);
    let mut client = Client::open(&server.address());
    let counts = |calls: &[Call]| {
        let durable = calls.iter().filter(|call| call.arguments.contains("RWF_DSYNC"));
        let writes = calls.iter().filter(|call| is_write(call));
        let syncs = calls.iter().filter(|call| is_sync(call));
        [writes.count(), durable.count(), syncs.count()]
    };
    let few = write_durably(&trace, &mut client, 64, 1);
    assert_eq!(counts(&few), [64, 64, 0], "{few:#?}");
    let [writes, durable, syncs] = counts(&write_durably(&trace, &mut client, 8, 400));
    assert_eq!(writes, 3200);
    if has_flushes_to_share(&scratch.path("")).expect("it is there") {
        assert!(durable >= 500, "{durable} of the first windows");
        assert!(durable < writes && syncs > 0, "{durable} of {writes}, {syncs} flushes");
    } else {
        assert_eq!((durable, syncs), (3200, 0));
    }
    client.disconnect();
    server.stop();
    // The kernel syncs the durable writes of a file one after the other.
    let scratch = Scratch::new();
    let (server, trace) = traced(&scratch, Cache::Writeback, &[]);
    let mut client = Client::open(&server.address());
    let [writes, durable, syncs] = counts(&write_durably(&trace, &mut client, 64, 1));
    assert!(writes == 64 && durable < 32 && syncs > 0, "{writes}, {durable}, {syncs}");
    client.disconnect();
    server.stop();
}

#[test]
fn a_write_without_fua_support_is_followed_by_one_fdatasync() {
    require!(need::strace());
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.img", &vec![1; 1 << 20]);
    let trace = Trace::of(&scratch, image.path(), CHANGES, &[]);
    let serve = serve(&scratch, image.path()).cache(Cache::None);
    let refuse = [env!("CARGO_BIN_EXE_without_syscalls"), "durable-pwritev2"];
    let server = serve.under(refuse).under(&trace.wrapper).start();
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(0, BLOCK, flag::FUA), 0, "it is found out");
    let calls = trace.during(|| assert_eq!(client.write(4096, BLOCK, flag::FUA), 0));
    let [write, sync] = &calls[..] else { panic!("two calls are expected: {calls:#?}") };
    assert!(is_write(write) && write.result == "4096", "{calls:#?}");
    assert_eq!((&*sync.name, &*sync.result), ("fdatasync", "0"));
    assert_eq!(client.read(4096, 4096), Ok(BLOCK.to_vec()));
    client.disconnect();
    server.stop();
}

#[test]
fn linux_aio_carries_dsync_with_the_write() {
    require!(need::strace());
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.img", &vec![1; 1 << 20]);
    let calls = format!("io_submit,{CHANGES}");
    let trace = Trace::start(&scratch, &calls, &[]);
    let serve = Serve::new(&scratch, image.path()).engine(Engine::LinuxAio).cache(Cache::None);
    let server = serve.under(&trace.wrapper).start();
    let mut client = Client::open(&server.address());
    assert_eq!(client.flush(), 0, "of what another process may have written");
    let calls = trace.during(|| assert_eq!(client.write(8192, BLOCK, flag::FUA), 0));
    let submitted: Vec<_> = calls.iter().filter(|call| call.name == "io_submit").collect();
    let [write] = &submitted[..] else { panic!("one write is expected: {calls:#?}") };
    assert!(write.arguments.contains("RWF_DSYNC"), "{write:?}");
    assert!(!calls.iter().any(is_sync), "{calls:#?}");
    let calls = trace.during(|| assert_eq!(client.flush(), 0));
    let asked = calls.iter().any(|call| is_sync(call) || call.name == "io_submit");
    assert!(!asked, "{calls:#?}");
    client.disconnect();
    server.stop();
}

#[test]
fn zeroes_and_discards_with_fua_leave_nothing_to_flush() {
    require!(need::strace());
    let scratch = Scratch::new();
    let (server, trace) = traced(&scratch, Cache::None, &[]);
    let mut client = Client::open(&server.address());
    for request in [command::WRITE_ZEROES, command::TRIM] {
        let calls = trace.during(|| {
            assert_eq!(client.simple(request, 65536, 65536, flag::FUA), 0);
        });
        let durable =
            calls.iter().any(|call| is_sync(call) || call.arguments.contains("RWF_DSYNC"));
        assert!(durable, "request type {request}: {calls:#?}");
        let calls = trace.during(|| assert_eq!(client.flush(), 0));
        assert_eq!(calls, [], "request type {request}");
    }
    client.disconnect();
    server.stop();
}

#[test]
fn writethrough_makes_every_write_durable() {
    require!(need::strace());
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.img", &vec![1; 1 << 20]);
    for mode in ["writethrough", "directsync"] {
        let trace = Trace::of(&scratch, image.path(), CHANGES, &[]);
        let serve = serve(&scratch, image.path()).option("--cache", mode);
        let server = serve.under(&trace.wrapper).start();
        let mut client = Client::open(&server.address());
        assert_eq!(client.flush(), 0, "of what another process may have written");
        let calls = trace.during(|| assert_eq!(client.write(0, BLOCK, 0), 0));
        let [write] = &calls[..] else { panic!("one call is expected: {calls:#?}") };
        assert!(write.arguments.ends_with("RWF_DSYNC"), "{mode}: {write:?}");
        let calls = trace.during(|| assert_eq!(client.flush(), 0));
        assert_eq!(calls, [], "{mode}");
        client.disconnect();
        server.stop();
    }
}

#[test]
fn unsafe_mode_flushes_nothing() {
    require!(need::strace());
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.img", &vec![1; 1 << 20]);
    let trace = Trace::of(&scratch, image.path(), CHANGES, &[]);
    let serve = serve(&scratch, image.path()).option("--cache", "unsafe");
    let server = serve.under(&trace.wrapper).start();
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(0, BLOCK, flag::FUA), 0);
    assert_eq!(client.write(0, BLOCK, 0), 0);
    assert_eq!(client.flush(), 0);
    client.disconnect();
    server.stop();
    let calls = trace.calls();
    let durable = calls.iter().any(|call| is_sync(call) || call.arguments.contains("DSYNC"));
    assert!(!durable, "{calls:#?}");
}

#[test]
fn a_stop_flushes_what_nobody_flushed() {
    require!(need::strace());
    let scratch = Scratch::new();
    let (server, trace) = traced(&scratch, Cache::None, &[]);
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(0, BLOCK, 0), 0);
    client.disconnect();
    let calls = trace.during(|| server.stop());
    assert!(calls.iter().any(|call| is_sync(call) && call.result == "0"), "{calls:#?}");
}

#[test]
fn a_failed_flush_is_not_forgotten() {
    require!(need::strace());
    let scratch = Scratch::new();
    // The first sync of each thread fails; later ones would succeed.
    let fail = ["-e", "inject=fdatasync:error=EIO:when=1"];
    let (mut server, _trace) = traced(&scratch, Cache::Writeback, &fail);
    let mut client = Client::open(&server.address());
    for round in 0..100 {
        assert_eq!(client.write(0, BLOCK, 0), 0);
        assert_eq!(client.flush(), errno::EIO, "flush {round}");
    }
    assert_eq!(client.read(0, 4096), Ok(BLOCK.to_vec()), "reads go on");
    client.disconnect();
    server.signal(rustix::process::Signal::TERM);
    let status = server.wait(std::time::Duration::from_secs(20));
    assert_eq!(status.code(), Some(1), "data may be lost: that is no success");
    let log = server.log();
    assert!(log.contains("disk.img") && log.contains("flush"), "{log}");
}

/// Ends a server in order whose flush has failed; it exits with status 1.
fn stop_failed(mut server: Server) {
    server.signal(rustix::process::Signal::TERM);
    let status = server.wait(std::time::Duration::from_secs(20));
    assert_eq!(status.code(), Some(1), "{}", server.log());
}

#[test]
fn a_failed_flush_outlives_a_killed_server_and_is_over_after_an_orderly_end() {
    require!(need::strace());
    let scratch = Scratch::new();
    let (server, _trace) =
        traced(&scratch, Cache::Writeback, &["-e", "inject=fdatasync:error=EIO"]);
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(0, BLOCK, 0), 0);
    assert_eq!(client.flush(), errno::EIO);
    // Killed.
    drop(server);
    let serve = || serve(&scratch, &scratch.path("disk.img")).start();
    for _ in 0..2 {
        let server = serve();
        let words = "a flush failed before its last server's process ended";
        assert!(
            eventually(std::time::Duration::from_secs(10), || server.log().contains(words)),
            "{}",
            server.log()
        );
        let mut client = Client::open(&server.address());
        assert_eq!(client.write(0, BLOCK, 0), 0);
        assert_eq!(client.flush(), errno::EIO);
        assert_eq!(client.write(0, BLOCK, flag::FUA), errno::EIO);
        // The server is killed once more, then stopped.
        drop(server);
    }
    stop_failed(serve());
    let server = serve();
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(0, BLOCK, 0), 0);
    assert_eq!(client.flush(), 0);
    client.disconnect();
    server.stop();
}

/// Options for strace that make every write fail.
fn failing_writes(error: &str) -> Vec<String> {
    let calls = ["pwritev2", "pwritev", "pwrite64"];
    let inject = calls.map(|call| ["-e".into(), format!("inject={call}:error={error}")]);
    inject.into_iter().flatten().collect()
}

#[test]
fn a_failing_write_fails_alone_and_with_its_errno() {
    for (name, code, flags) in [
        ("EIO", errno::EIO, &[0, 0][..]),
        ("ENOSPC", errno::ENOSPC, &[0, flag::FUA]),
        ("EDQUOT", errno::ENOSPC, &[0, flag::FUA]),
    ] {
        require!(need::strace());
        let scratch = Scratch::new();
        let options = failing_writes(name);
        let options: Vec<_> = options.iter().map(String::as_str).collect();
        let (server, _trace) = traced(&scratch, Cache::None, &options);
        let mut client = Client::open(&server.address());
        for &flags in flags {
            assert_eq!(client.write(4096, BLOCK, flags), code, "{name}, flags {flags}");
        }
        assert_eq!(client.read(4096, 4096), Ok(vec![1; 4096]), "reads go on");
        assert_eq!(client.flush(), 0, "nothing is lost that was acknowledged: {name}");
        client.disconnect();
        server.stop();
    }
}

/// If the host fails to make a write stable, older data of the same pages may be lost, too. The
/// host reports that only once.
#[test]
fn a_durable_write_that_fails_is_a_failed_flush() {
    require!(need::strace());
    let scratch = Scratch::new();
    let options = failing_writes("EIO:when=1");
    let options: Vec<_> = options.iter().map(String::as_str).collect();
    let (mut server, _trace) = traced(&scratch, Cache::Writeback, &options);
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(4096, BLOCK, flag::FUA), errno::EIO);
    assert_eq!(client.flush(), errno::EIO);
    for round in 0..100 {
        assert_eq!(client.write(4096, BLOCK, flag::FUA), errno::EIO, "write {round}");
    }
    assert_eq!(client.read(4096, 4096), Ok(vec![1; 4096]), "reads go on");
    client.disconnect();
    server.signal(rustix::process::Signal::TERM);
    assert_eq!(server.wait(std::time::Duration::from_secs(20)).code(), Some(1));
}

#[test]
fn a_failing_read_fails_alone() {
    require!(need::strace());
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.img", &vec![1; 1 << 20]);
    let calls = ["preadv2", "preadv", "pread64"];
    // The server reads the image's start when it opens the image; only later reads may fail.
    let inject: Vec<_> = calls.map(|call| format!("inject={call}:error=EIO:when=1+")).into();
    let options: Vec<_> = inject.iter().flat_map(|text| ["-e", text]).collect();
    let trace = Trace::of(&scratch, image.path(), &calls.join(","), &options);
    let serve = serve(&scratch, image.path()).option("--format", "raw");
    let server = serve.under(&trace.wrapper).start();
    let mut client = Client::open(&server.address());
    assert_eq!(client.read(0, 4096), Err(errno::EIO));
    assert_eq!(client.write(0, BLOCK, flag::FUA), 0, "writes go on");
    assert_eq!(client.read(0, 4096), Err(errno::EIO));
    client.disconnect();
    server.stop();
}

fn what_was_acknowledged_as_durable_outlives_a_kill(engine: Engine, cache: Cache) {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    let server = Serve::new(&scratch, image.path()).engine(engine).cache(cache).start();
    let mut client = Client::open(&server.address());
    for block in 0..16u8 {
        assert_eq!(client.write(u64::from(block) * 5000, &[block; 5000], flag::FUA), 0);
    }
    // SIGKILL.
    drop(server);
    for block in 0..16u8 {
        assert_eq!(image.bytes(u64::from(block) * 5000, 5000), [block; 5000]);
    }
}

on_every_engine_and_cache! {
    what_was_acknowledged_as_durable_outlives_a_kill
}
