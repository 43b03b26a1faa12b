//! Servers that hand over to another process under load: no client sees an end of file or a wrong
//! byte, no other program gets the image's lock, and a kill at any step leaves at most one owner.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::time::Duration;

use blockhouse_engine::{is_byte_locked, peer_process};
use blockhouse_tests::control::Control;
use blockhouse_tests::nbd::{Address, Client, Framing, Greeted};
use blockhouse_tests::upgrade::{
    Load, REGION, Servers, fill, upgrade, upgrade_in_the_end, upgrade_under_load, verify,
};
use blockhouse_tests::{
    Engine, Scratch, Serve, Server, eventually, image_tool, nbd_uri, need, on_every_engine,
    require, run, seeded, tool,
};
use rustix::process::Signal;
use serde_json::json;

pub const FORMATS: [&str; 2] = ["raw", "qcow2"];
const SIZE: u64 = 64 << 20;
/// The lock bytes that QEMU's writers hold: for writing and resizing, and against other writers and
/// resizers.
const LOCKED_BYTES: [u64; 4] = [101, 103, 201, 203];

/// A server with a control socket and an image of this format, and the path of the image.
fn serve(scratch: &Scratch, format: &str) -> (Serve, std::path::PathBuf) {
    let image = scratch.path(&format!("disk.{format}"));
    let size = SIZE.to_string();
    let words = ["create", "--format", format, image_tool::str(&image), &size];
    image_tool::command(&words).success();
    let serve = Serve::new(scratch, &image).option("--format", format);
    (serve.option("--control", scratch.socket("control")), image)
}

/// Checks continuously that all of the image's locks are held, more than 100 times; returns the
/// number of checks.
pub fn watch_locks(image: &Path, load: &Load) -> u64 {
    let file = std::fs::File::open(image).expect("the image is there");
    let mut looks = 0;
    while !load.is_stopped() || looks <= 100 {
        for byte in LOCKED_BYTES {
            assert!(is_byte_locked(file.as_fd(), byte).expect("locks"), "byte {byte} is free");
        }
        looks += 1;
        std::thread::sleep(Duration::from_micros(50));
    }
    looks
}

/// Asserts that QEMU does not get the lock. QEMU needs no lock to read a raw image, so there it
/// opens for writing.
pub fn refuses_qemu(image: &Path, format: &str) {
    let mut qemu_io = tool("qemu-io");
    qemu_io.args((format == "qcow2").then_some("-r"));
    qemu_io.args(["-f", format, "-c", "read 0 512"]).arg(image);
    run(&mut qemu_io).failure("lock");
}

on_every_engine! { clients_at_depth_64_notice_nothing }

fn clients_at_depth_64_notice_nothing(engine: Engine) {
    for format in FORMATS {
        let scratch = Scratch::new();
        let servers = Servers(&scratch);
        let (serve, image) = serve(&scratch, format);
        let server = serve.engine(engine).export("nbd://127.0.0.1:0").start();
        let port = server.uris()[1].rsplit([':', '/']).find_map(|word| word.parse::<u16>().ok());
        let tcp = Address::Tcp(([127, 0, 0, 1], port.expect("a port")).into());
        let addresses = [server.address(), tcp.clone(), tcp];
        let load = Load::of_replies(301);
        let random = seeded();
        std::thread::scope(|scope| {
            let (load, image) = (&load, &image);
            let _end = load.stop_at_the_end();
            let verifiers: Vec<_> = (0..)
                .zip([Framing::Simple, Framing::Structured, Framing::Extended])
                .map(|(index, framing)| {
                    let address = addresses[index as usize].clone();
                    let mut random = random.clone();
                    random.seed(random.get_seed() ^ index);
                    let client = Client::open_with(&address, framing);
                    scope.spawn(move || verify(client, index * REGION, random, load))
                })
                .collect();
            let locks = scope.spawn(move || watch_locks(image, load));
            let qemu = scope.spawn(|| {
                while !load.is_stopped() {
                    refuses_qemu(image, format);
                }
            });
            let mut gaps = Vec::new();
            for _ in 0..4 {
                std::thread::sleep(Duration::from_millis(100));
                gaps.push(upgrade_under_load(&scratch.socket("control")));
                servers.wait_for(1);
            }
            std::thread::sleep(Duration::from_millis(100));
            load.stop();
            let seen: Vec<_> = verifiers.into_iter().map(|one| one.join().unwrap()).collect();
            assert!(seen.iter().all(|seen| seen.replies > 300), "{seen:?}");
            qemu.join().unwrap();
            let looks = locks.join().unwrap();
            assert!(looks > 100, "{looks} looks at the locks");
            eprintln!("{format} on {}: gaps {gaps:?} ms; {seen:?}; {looks} looks", engine.as_str());
        });
        servers.stop();
        assert!(!scratch.socket("nbd").exists() && !scratch.socket("control").exists());
        if format == "qcow2" {
            image_tool::qemu_img(&["check", image_tool::str(&image)]).success();
        }
        drop(server);
    }
}

#[test]
fn a_disk_that_is_being_filled_is_flushed_before_the_pause_whose_parts_are_told() {
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let image = image_tool::new_image(&scratch, "filled.qcow2", "1T");
    let control = scratch.socket("control");
    let server = Serve::new(&scratch, &image).option("--control", &control).start();
    let client = Client::open_with(&server.address(), Framing::Extended);
    let load = Load::of_replies(64);
    std::thread::scope(|scope| {
        let load = &load;
        let _end = load.stop_at_the_end();
        let client = scope.spawn(move || fill(client, load));
        std::thread::sleep(Duration::from_millis(50));
        upgrade_under_load(&control);
        servers.wait_for(1);
        std::thread::sleep(Duration::from_millis(50));
        load.stop();
        assert!(client.join().expect("no error").replies > 16);
    });
    servers.stop();
    let log = server.log();
    let told = log.lines().find(|line| line.contains("serves now; requests waited for"));
    let told = told.unwrap_or_else(|| panic!("{log}"));
    for part in ["for those in flight", "flushes before it", "had left", "for the new process"] {
        assert!(told.contains(part), "{part:?}: {told}");
    }
    image_tool::qemu_img(&["check", image_tool::str(&image)]).success();
}

/// Which of the two processes remains when one is killed at a step.
#[derive(Clone, Copy, PartialEq)]
pub enum Remains {
    Source,
    Destination,
    None,
}

/// The steps, and what a kill at each leaves.
pub const STEPS: [(&str, Remains); 9] = [
    ("source-offered", Remains::None),
    ("source-settled", Remains::None),
    ("source-gave", Remains::Destination),
    ("source-gave-up", Remains::Destination),
    ("destination-offered", Remains::Source),
    ("destination-ready", Remains::Source),
    ("destination-may", Remains::Source),
    ("destination-opened", Remains::Source),
    ("destination-took", Remains::None),
];

#[test]
fn a_death_at_each_step_leaves_one_owner_or_none() {
    for (step, remains) in STEPS {
        for format in FORMATS {
            dies_at(step, format, remains);
        }
    }
}

fn dies_at(step: &str, format: &str, remains: Remains) {
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let (line, image) = serve(&scratch, format);
    let server = line.environment("BLOCKHOUSE_HAND_OVER_FAULT", step).start();
    let mut client = Client::open(&server.address());
    let text = |round: u8| vec![round; 100_000];
    // The write is not flushed, but acknowledged, so it must survive.
    assert_eq!(client.write(12345, &text(1), 0), 0);
    let outcome = upgrade(&scratch.socket("control"), &[]);
    match remains {
        Remains::Source => {
            let outcome = outcome.failure("not upgraded, the server goes on");
            assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
        }
        Remains::Destination | Remains::None => {}
    }
    servers.wait_for(usize::from(remains != Remains::None));
    if remains == Remains::None {
        assert!(client.is_closed(), "{step}: the connection is served by no process");
        drop(server);
        // Starts a server again, as the service manager does.
        let socket = scratch.socket("nbd");
        let again = Serve::bare(&scratch, &image)
            .option("--format", format)
            .export(&nbd_uri("", &socket))
            .start();
        let mut client = Client::open(&again.address());
        assert!(client.read(12345, 100_000) == Ok(text(1)), "{step}, {format}");
        again.stop();
    } else {
        let is_source = servers.running()[0] == server.pid();
        assert_eq!(is_source, remains == Remains::Source, "{step}");
        refuses_qemu(&image, format);
        assert!(client.read(12345, 100_000) == Ok(text(1)), "{step}, {format}");
        assert_eq!(client.write(12345, &text(2), 0), 0, "{step}, {format}");
        let mut other = Client::open(&server.address());
        assert!(other.read(12345, 100_000) == Ok(text(2)), "{step}, {format}");
        servers.stop();
    }
    if format == "qcow2" {
        image_tool::qemu_img(&["check", image_tool::str(&image)]).success();
    }
}

#[test]
fn a_new_server_that_cannot_take_over_leaves_the_old_one_in_service() {
    require!(need::root_mount());
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let (line, _) = serve(&scratch, "qcow2");
    // In a folder where the server cannot write: a program that it could have changed is not
    // started.
    let elsewhere = Scratch::new();
    let silent = elsewhere.path("blockhouse-silent");
    std::fs::write(&silent, "#!/bin/sh\nexec sleep 100\n").expect("a script");
    let other_options = elsewhere.path("blockhouse-other");
    let script =
        format!("#!/bin/sh\nexec {} \"$@\" --bad\n", blockhouse_tests::blockhouse().display());
    std::fs::write(&other_options, script).expect("a script");
    for script in [&silent, &other_options] {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(script, mode).expect("our own file");
    }
    let named = [Path::new("/nowhere/blockhouse"), &silent, &other_options];
    let line = named.into_iter().fold(line, |line, program| line.option("--upgrade-to", program));
    let server = line.environment("BLOCKHOUSE_HAND_OVER_FAULT", "version").start();
    let mut client = Client::open(&server.address());
    for (binary, why) in [
        ("/bin/false", "only if the server was started with --upgrade-to"),
        ("/nowhere/blockhouse", "cannot be started: No such file"),
        (image_tool::str(&silent), "did not get ready within 10s"),
        (image_tool::str(&other_options), "exit status: 2"),
        (image_tool::str(blockhouse_tests::blockhouse()), "version 6 of the hand-over's format"),
    ] {
        let outcome = upgrade(&scratch.socket("control"), &["--binary", binary]);
        let outcome = outcome.failure(why);
        assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
        assert_eq!(client.write(0, &[7; 4096], 0), 0);
        assert_eq!(servers.running(), [server.pid()]);
    }
    let is_told = || server.log().contains("not upgraded, this server goes on");
    assert!(eventually(Duration::from_secs(20), is_told), "{}", server.log());
    server.stop();
}

#[test]
fn a_request_during_an_upgrade_that_fails_causes_one_upgrade() {
    let (scratch, elsewhere) = (Scratch::new(), Scratch::new());
    let failing = elsewhere.path("blockhouse-failing");
    let [begun, fail] = ["begun", "fail"].map(|name| elsewhere.path(name));
    let script = format!(
        "#!/bin/sh\n: > {}\nwhile ! [ -e {} ]; do sleep 0.01; done\nexit 1\n",
        begun.display(),
        fail.display()
    );
    std::fs::write(&failing, script).expect("a script");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&failing, mode).expect("our own file");
    let mut server = serve(&scratch, "raw").0.option("--upgrade-to", &failing).start();
    let control = scratch.socket("control");
    let ask = || upgrade(&control, &[]).failure("exit status: 1");
    std::thread::scope(|scope| {
        let first = scope.spawn(ask);
        assert!(eventually(Duration::from_secs(60), || begun.exists()), "no upgrade begins");
        let mut second = Control::connect(&control);
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": "server.upgrade" });
        second.send(request.to_string().as_bytes()).expect("the server listens");
        // The server refuses a line that is no JSON also during an upgrade. It has received the
        // second request before this line.
        let mut other = Control::connect(&control);
        other.send(b"{").expect("the server listens");
        other.receive().expect("a refusal");
        std::fs::write(&fail, "").expect("our own folder");
        let refusal = second.receive().expect("an answer");
        assert!(refusal["error"].to_string().contains("exit status: 1"), "{refusal}");
        first.join().expect("it fails");
    });
    ask();
    // The main thread executes what waits for it before this signal.
    server.signal(Signal::TERM);
    server.wait(Duration::from_secs(60));
    let log = server.log();
    assert_eq!(log.matches("not upgraded, this server goes on").count(), 3, "{log}");
}

/// Each of several concurrent upgrades succeeds or gets an error, and no replaced server remains.
#[test]
fn upgrades_at_once_leave_one_server_and_an_answer_for_each() {
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let (line, _) = serve(&scratch, "qcow2");
    let server = line.start();
    let mut client = Client::open(&server.address());
    for _ in 0..3 {
        let outcomes = std::thread::scope(|scope| {
            let ask = || upgrade(&scratch.socket("control"), &[]);
            let all: Vec<_> = (0..4).map(|_| scope.spawn(ask)).collect();
            all.into_iter().map(|one| one.join().expect("no panic")).collect::<Vec<_>>()
        });
        let (done, refused): (Vec<_>, Vec<_>) =
            outcomes.into_iter().partition(|outcome| outcome.status.success());
        assert!(!done.is_empty(), "none of them upgraded");
        for outcome in refused {
            // The line has either the server's error, or says that the connection ended with the
            // old server.
            assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
        }
        servers.wait_for(1);
        assert_eq!(client.write(0, &[5; 4096], 0), 0);
    }
    // A server that is ending answers concurrent requests.
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| upgrade(&scratch.socket("control"), &[]));
        servers.stop();
        drop(asking.join().expect("no panic"));
    });
    servers.wait_for(0);
    drop(server);
}

/// A half-open handshake, a half-sent request, and a client that does not read.
#[test]
fn who_is_in_the_middle_of_something_is_served_or_told() {
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let (line, _) = serve(&scratch, "qcow2");
    let server = line.start();
    let mut half_open = Greeted::new(&server.address());
    let mut writer = Client::open(&server.address());
    let data = vec![3; 50_000];
    let request = blockhouse_tests::nbd::Request {
        command: blockhouse_tests::nbd::command::WRITE,
        flags: 0,
        offset: 777,
        length: data.len() as u64,
    };
    let mut bytes = writer.encode(request);
    bytes.extend_from_slice(&data);
    writer.socket.write_all(&bytes[..20_000]).expect("room");
    upgrade_in_the_end(&scratch.socket("control"), &[]);
    servers.wait_for(1);
    writer.socket.write_all(&bytes[20_000..]).expect("room");
    assert_eq!(writer.receive().expect("a reply").1.error, 0);
    assert!(writer.read(777, 50_000) == Ok(data));
    assert!(matches!(half_open.0.read(&mut [0; 16]), Ok(0)), "a handshake ends after a second");
    // A client that does not read its replies: the upgrade succeeds, and the client can continue.
    for _ in 0..8 {
        let read = blockhouse_tests::nbd::Request {
            command: blockhouse_tests::nbd::command::READ,
            flags: 0,
            offset: 0,
            length: 8 << 20,
        };
        writer.send(read).expect("room");
    }
    upgrade(&scratch.socket("control"), &[]).failure("did not take their replies");
    for _ in 0..8 {
        assert_eq!(writer.receive().expect("a reply").1.error, 0);
    }
    upgrade_in_the_end(&scratch.socket("control"), &[]);
    assert_eq!(writer.flush(), 0);
    servers.stop();
    drop(server);
}

#[test]
fn a_signal_upgrades_and_the_service_manager_is_told() {
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let socket = scratch.socket("notify");
    let manager = UnixDatagram::bind(&socket).expect("a socket");
    manager.set_read_timeout(Some(Duration::from_secs(20))).expect("a limit");
    // Without a control socket the sandbox allows no new listening socket.
    let image = scratch.image("disk.raw", SIZE);
    let line = Serve::new(&scratch, image.path()).option("--format", "raw");
    let server: Server = line.environment("NOTIFY_SOCKET", &socket).start();
    let hear = || {
        let mut bytes = [0; 1000];
        let count = manager.recv(&mut bytes).expect("a message in time");
        String::from_utf8_lossy(&bytes[..count]).into_owned()
    };
    assert!(hear().contains("READY=1"));
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(0, &[1; 4096], 0), 0);
    let first = server.pid();
    server.signal(Signal::USR2);
    let main = hear();
    servers.wait_for(1);
    let running = servers.running()[0];
    assert_ne!(running, first);
    assert_eq!(main.trim(), format!("MAINPID={}", running.as_raw_nonzero()));
    assert_eq!(client.read(0, 4096), Ok(vec![1; 4096]));
    // The kernel names the server of the socket: `detach` ends that process.
    let Address::Unix(socket) = server.address() else { panic!("not a Unix socket") };
    let stream = UnixStream::connect(socket).expect("it listens");
    let named = peer_process(&stream).expect("a name");
    assert_eq!(named, Some(running.as_raw_nonzero().get()));
    drop(stream);
    servers.stop();
    assert!(hear().contains("STOPPING=1"));
    drop(server);
}
