//! `blockhouse serve --register-memory on`: its effect, also after a server was killed and started
//! again; and a host that does not allow enough locked memory.

use std::path::Path;

use blockhouse_engine::count_registered_buffers;
use blockhouse_tests::guest::{BLOCK, Guest, LONG, content};
use blockhouse_tests::{Engine, Scratch, Serve, Server, eventually, need, require};
use blockhouse_vhost_user::driver::Options;
use rustix::process::Signal;

const SIZE: u64 = 8 << 20;

fn serve(scratch: &Scratch, image: &Path, socket: &Path) -> Serve {
    Serve::bare(scratch, image)
        .option("--vhost-user-blk", socket)
        .option("--queues", "2")
        .option("--workers", "2")
        .option("--register-memory", "on")
        .engine(Engine::IoUring)
}

fn connect(socket: &Path) -> Guest {
    Guest::connect(socket, Options { queues: 2, ..Options::default() })
}

/// The number of registered buffers of `length` bytes in the server's rings.
fn slots_of(server: &Server, length: usize) -> usize {
    let process = Path::new("/proc").join(server.pid().as_raw_nonzero().to_string());
    count_registered_buffers(&process, length).expect("it runs")
}

#[test]
fn each_workers_ring_has_the_guests_memory_and_so_has_the_next_servers() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", SIZE);
    let socket = scratch.socket("vu");
    let mut server = serve(&scratch, image.path(), &socket).start();
    let mut guest = connect(&socket);
    for round in 1..4 {
        assert_eq!(slots_of(&server, guest.driver.memory.len()), 2);
        guest.write(0, 5, round);
        assert_eq!(guest.read(1, 5), content(round));
        assert_eq!(image.bytes(5 * BLOCK as u64, BLOCK), content(round));
        server.signal(Signal::KILL);
        server.wait(LONG);
        server = serve(&scratch, image.path(), &socket).start();
        guest.driver.reconnect(&socket).expect("the new server takes over");
        assert_eq!(guest.read(1, 5), content(round));
    }
    assert_eq!(server.log(), "");
    server.stop();
}

#[test]
fn off_is_the_default() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", SIZE);
    let socket = scratch.socket("vu");
    let server = Serve::bare(&scratch, image.path()).option("--vhost-user-blk", &socket).start();
    let guest = Guest::connect(&socket, Options::default());
    assert_eq!(slots_of(&server, guest.driver.memory.len()), 0);
    drop(guest);
    server.stop();
}

#[test]
fn a_host_that_allows_too_little_locked_memory_is_told_of_and_serves_without() {
    require!(need::tools(&["prlimit", "setpriv"]));
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", SIZE);
    let socket = scratch.socket("vu");
    // Enough for rings, which are locked memory, too, and too little for a guest's memory.
    let mut wrapper = vec!["prlimit", "--memlock=8388608:8388608"];
    if need::root().is_ok() {
        // Root has no limit, unless it lacks CAP_IPC_LOCK.
        wrapper.extend(["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock"]);
    }
    let server = serve(&scratch, image.path(), &socket).under(wrapper).start();
    for number in 1..3 {
        let options = Options { queues: 2, memory: 16 << 20, ..Options::default() };
        let mut guest = Guest::connect(&socket, options);
        assert_eq!(slots_of(&server, guest.driver.memory.len()), 0);
        for queue in 0..2 {
            guest.write(queue, 5, number);
            assert_eq!(guest.read(1 - queue, 5), content(number));
        }
        drop(guest);
    }
    eventually(LONG, || server.log().lines().count() >= 2);
    let log = server.log();
    let lines: Vec<_> = log.lines().collect();
    assert_eq!(lines.len(), 2, "a line for each guest: {log}");
    for word in ["guest memory", "Cannot allocate memory", "RLIMIT_MEMLOCK", "disk.img"] {
        assert!(lines.iter().all(|line| line.contains(word)), "{word:?} is expected: {log}");
    }
    server.stop();
}

#[test]
fn anything_but_on_and_off_is_refused() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", SIZE);
    let serve = Serve::bare(&scratch, image.path()).option("--register-memory", "yes");
    serve.refused().wrong_usage(&["--register-memory", "use on or off"]);
}
