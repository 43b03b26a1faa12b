//! Servers that hand over vhost-user-blk devices to another process under load: no front-end sees
//! the end of its connection, no guest sees a wrong byte or a request that never completes, and a
//! kill at any step leaves at most one owner.

use std::path::PathBuf;
use std::time::Duration;

use blockhouse_tests::guest::{Guest, content};
use blockhouse_tests::nbd::{Client, Framing, Greeted};
use blockhouse_tests::upgrade::{
    self, Load, REGION, Servers, upgrade, upgrade_in_the_end, verify, verify_guest,
};
use blockhouse_tests::{Engine, Scratch, Serve, image_tool, on_every_engine, seeded};
use blockhouse_vhost_user::driver::Options;

use crate::upgrades::{FORMATS, Remains, STEPS, refuses_qemu, watch_locks};

const SIZE: u64 = 64 << 20;
const UPGRADES: usize = 5;

/// A server of an image of each of these formats, which exports each over NBD and as a device.
fn serve(scratch: &Scratch, formats: &[&str]) -> (Serve, Vec<(PathBuf, PathBuf)>) {
    let mut images = Vec::new();
    for (index, format) in formats.iter().enumerate() {
        let image = scratch.path(&format!("disk{index}.{format}"));
        let words = ["create", "--format", format, image_tool::str(&image), &SIZE.to_string()];
        image_tool::command(&words).success();
        images.push((image, scratch.socket(&format!("vu{index}"))));
    }
    let mut line = Serve::new(scratch, &images[0].0);
    for (image, _) in &images[1..] {
        line = line.also(image);
    }
    for (_, socket) in &images {
        line = line.option("--vhost-user-blk", socket);
    }
    let line = line.option("--queues", "2").option("--control", scratch.socket("control"));
    (line.ready_lines(2 * formats.len()), images)
}

/// Upgrades a server of these images while a guest and an NBD client of each verify it.
fn upgrade_under_load(engine: Engine, formats: &[&str], options: &[(&str, &str)]) {
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let (mut line, images) = serve(&scratch, formats);
    for (name, value) in options {
        line = line.option(name, value);
    }
    let server = line.engine(engine).start();
    let (load, random) = (Load::of_replies(301), seeded());
    std::thread::scope(|scope| {
        let load = &load;
        let _end = load.stop_at_the_end();
        let mut verifiers = Vec::new();
        let mut locks = Vec::new();
        for (index, (image, socket)) in images.iter().enumerate() {
            let mut random = random.clone();
            random.seed(random.get_seed() ^ index as u64);
            let (is_tracked, other) = (index % 2 == 0, random.fork());
            let guest = move || verify_guest(socket, 0, is_tracked, random, load);
            verifiers.push(scope.spawn(guest));
            let uri = &server.uris()[index];
            let export = uri.split("///").nth(1).and_then(|rest| rest.split('?').next());
            let export = export.expect("the name of an export").to_owned();
            let address = server.address();
            let client = Greeted::new(&address).go(&export, Framing::Extended);
            verifiers.push(scope.spawn(move || verify(client, REGION, other, load)));
            locks.push(scope.spawn(move || watch_locks(image, load)));
        }
        let mut gaps = Vec::new();
        for _ in 0..UPGRADES {
            std::thread::sleep(Duration::from_millis(100));
            gaps.push(upgrade::upgrade_under_load(&scratch.socket("control")));
            servers.wait_for(1);
        }
        std::thread::sleep(Duration::from_millis(100));
        load.stop();
        let seen: Vec<_> = verifiers.into_iter().map(|one| one.join().unwrap()).collect();
        let looks: Vec<_> = locks.into_iter().map(|looks| looks.join().unwrap()).collect();
        assert!(seen.iter().all(|seen| seen.replies > 300), "{seen:?}");
        assert!(looks.iter().all(|&looks| looks > 100), "{looks:?}");
        eprintln!(
            "{formats:?} on {}: gaps {gaps:?} ms; {seen:?}; {looks:?} looks",
            engine.as_str()
        );
    });
    servers.stop();
    assert!(images.iter().all(|(_, socket)| !socket.exists()));
    for (image, _) in
        images.iter().filter(|(image, _)| image.extension().is_some_and(|name| name == "qcow2"))
    {
        image_tool::qemu_img(&["check", image_tool::str(image)]).success();
    }
    drop(server);
}

on_every_engine! { guests_at_depth_64_notice_nothing }

fn guests_at_depth_64_notice_nothing(engine: Engine) {
    for format in FORMATS {
        upgrade_under_load(engine, &[format], &[]);
    }
    upgrade_under_load(engine, &["raw", "qcow2", "qcow2"], &[("--workers", "2")]);
}

#[test]
fn registered_memory_is_registered_again() {
    upgrade_under_load(Engine::IoUring, &["raw"], &[("--register-memory", "on")]);
}

#[test]
fn a_death_at_each_step_leaves_the_guest_one_owner_or_none() {
    for (step, remains) in STEPS {
        for format in FORMATS {
            dies_at(step, format, remains);
        }
    }
}

fn dies_at(step: &str, format: &str, remains: Remains) {
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let (line, images) = serve(&scratch, &[format]);
    let (image, socket) = &images[0];
    let server = line.environment("BLOCKHOUSE_HAND_OVER_FAULT", step).start();
    let mut guest = Guest::connect(socket, Options { queues: 2, ..Options::default() });
    guest.driver.track().expect("in-flight tracking");
    // The write is not flushed, but completed, so it must survive.
    guest.write(0, 1, 11);
    let outcome = upgrade(&scratch.socket("control"), &[]);
    if remains == Remains::Source {
        outcome.failure("not upgraded, the server goes on");
    }
    servers.wait_for(usize::from(remains != Remains::None));
    if remains == Remains::None {
        assert!(!guest.is_connected(), "{step}: no process serves the connection");
        drop(server);
        let line = Serve::bare(&scratch, image).option("--vhost-user-blk", socket);
        let again = line.option("--queues", "2").start();
        guest.driver.reconnect(socket).expect("the next server");
        assert_eq!(guest.read(1, 1), content(11), "{step}, {format}");
        again.stop();
    } else {
        refuses_qemu(image, format);
        assert_eq!(guest.read(1, 1), content(11), "{step}, {format}");
        guest.write(1, 1, 12);
        let mut client = Client::open(&server.address());
        assert!(client.read(4096, 4096) == Ok(content(12)), "{step}, {format}");
        assert!(guest.is_connected(), "{step}");
        // Another front-end connects to the device.
        drop(guest);
        let mut guest = Guest::connect(socket, Options::default());
        assert_eq!(guest.read(0, 1), content(12), "{step}, {format}");
        servers.stop();
    }
    if format == "qcow2" {
        image_tool::qemu_img(&["check", image_tool::str(image)]).success();
    }
}

#[test]
fn a_guest_goes_on_where_the_new_server_refuses() {
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let (line, images) = serve(&scratch, &["qcow2"]);
    let server = line.environment("BLOCKHOUSE_HAND_OVER_FAULT", "version").start();
    let load = Load::of_replies(128);
    std::thread::scope(|scope| {
        let (socket, load) = (&images[0].1, &load);
        let _end = load.stop_at_the_end();
        let guest = scope.spawn(move || verify_guest(socket, 0, true, seeded(), load));
        for (binary, why) in [
            ("/bin/false", "only if the server was started with --upgrade-to"),
            (image_tool::str(blockhouse_tests::blockhouse()), "of the hand-over's format"),
        ] {
            upgrade(&scratch.socket("control"), &["--binary", binary]).failure(why);
            assert_eq!(servers.running(), [server.pid()]);
        }
        load.stop();
        assert!(guest.join().unwrap().replies > 64);
    });
    server.stop();
}

#[test]
fn a_front_end_that_sends_a_message_in_part_is_waited_for_in_vain() {
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let (line, images) = serve(&scratch, &["raw"]);
    let server = line.start();
    let mut guest = Guest::connect(&images[0].1, Options::default());
    // `VHOST_USER_GET_FEATURES`, without its last byte.
    let message = [1u32, 1, 0].map(u32::to_ne_bytes).concat();
    std::io::Write::write_all(&mut guest.driver.stream(), &message[..11]).expect("room");
    std::thread::sleep(Duration::from_millis(100));
    let outcome = upgrade(&scratch.socket("control"), &[]);
    let outcome = outcome.failure("a message of the front-end was not carried out in time");
    assert!(outcome.stderr.contains(image_tool::str(&images[0].1)), "{}", outcome.stderr);
    std::io::Write::write_all(&mut guest.driver.stream(), &message[11..]).expect("room");
    let mut reply = [0; 20];
    std::io::Read::read_exact(&mut guest.driver.stream(), &mut reply).expect("a reply");
    guest.write(0, 1, 5);
    upgrade_in_the_end(&scratch.socket("control"), &[]);
    servers.wait_for(1);
    assert_eq!(guest.read(0, 1), content(5));
    assert!(guest.finish(0, Duration::ZERO).is_none());
    servers.stop();
    drop(server);
}
