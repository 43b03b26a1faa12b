//! Clients: where they can connect, and whether they see each other's writes.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use blockhouse_tests::nbd::{
    Address, Client, Framing, Greeted, command, errno, flag, option, reply,
};
use blockhouse_tests::{
    Engine, Scratch, Serve, eventually, nbd_uri, need, on_every_engine, require, run, tool,
};

const MIB: u64 = 1 << 20;

fn nbdinfo(uri: &str) -> Command {
    let mut nbdinfo = tool("nbdinfo");
    nbdinfo.args(["--size", uri]);
    nbdinfo
}

fn unix_uri(scratch: &Scratch, socket: &str, name: &str) -> String {
    nbd_uri(name, scratch.socket(socket))
}

#[test]
fn block_status_of_clusters_that_nothing_was_written_to_is_zero() {
    require!(need::tools(&["nbdinfo", "qemu-img"]));
    let scratch = Scratch::new();
    let image = scratch.path("disk.qcow2");
    let mut create = tool("qemu-img");
    create.args(["create", "-f", "qcow2", "-o", "preallocation=metadata"]).arg(&image).arg("64M");
    run(&mut create).success();
    let server = Serve::new(&scratch, &image).start();
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(32 * MIB, &[7; 65536], 0), 0);
    client.disconnect();
    let map = run(tool("nbdinfo").args(["--map", "--json", server.uri()])).success();
    let map: serde_json::Value = serde_json::from_str(&map.stdout).expect("JSON");
    let extents: Vec<(u64, u64, u64)> = map
        .as_array()
        .expect("extents")
        .iter()
        .map(|one| ["offset", "length", "type"].map(|key| one[key].as_u64().expect("a number")))
        .map(|[offset, length, kind]| (offset, length, kind))
        .collect();
    let (before, after) = (32 * MIB, 32 * MIB + 65536);
    let (data, zero) = (0, 2);
    let expected = [(0, before, zero), (before, 65536, data), (after, 64 * MIB - after, zero)];
    assert_eq!(extents, expected);
    server.stop();
}

#[test]
fn without_options_a_new_image_is_served_on_a_socket_in_the_users_runtime_folder() {
    require!(need::tools(&["nbdinfo", "nbdcopy"]));
    let scratch = Scratch::new();
    let disk = scratch.path("disk.img");
    let serve = Serve::bare(&scratch, &disk).option("--create", "1G");
    let server = serve.environment("XDG_RUNTIME_DIR", scratch.short()).start();
    assert!(server.uri().starts_with("nbd+unix:///"), "{}", server.uri());
    let Address::Unix(socket) = server.address() else { panic!("a Unix socket is expected") };
    assert!(socket.starts_with(scratch.short()), "{}", socket.display());
    let outcome = run(&mut nbdinfo(server.uri())).success();
    assert_eq!(outcome.stdout.trim(), (1 << 30).to_string());
    let log = server.log();
    assert!(log.contains("nbdinfo") && log.contains(server.uri()), "what to try next: {log}");
    server.stop();
    assert!(!socket.exists(), "the socket's file is left behind");
    assert_eq!(disk.metadata().expect("the image is there").len(), 1 << 30);
}

#[test]
fn an_image_of_the_size_to_create_is_served_as_it_is() {
    let scratch = Scratch::new();
    let disk = scratch.path("disk.img");
    for start in [0, 1] {
        let server = Serve::new(&scratch, &disk).option("--create", "1M").start();
        let mut client = Client::open(&server.address());
        assert_eq!(client.read(0, 512), Ok(vec![start; 512]));
        assert_eq!(client.write(0, &[1; 512], 0), 0);
        client.disconnect();
        server.stop();
    }
}

#[test]
fn several_uris_lead_to_one_image() {
    require!(need::tools(&["nbdinfo"]));
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let server = Serve::bare(&scratch, image.path())
        .export(&unix_uri(&scratch, "one", "first"))
        .export(&unix_uri(&scratch, "one", "second"))
        .export(&unix_uri(&scratch, "two", ""))
        .export("nbd://127.0.0.1:0/tcp")
        .start();
    let uris = server.uris();
    assert_eq!(uris.len(), 4);
    for uri in uris {
        let outcome = run(&mut nbdinfo(uri)).success();
        assert_eq!(outcome.stdout.trim(), MIB.to_string(), "{uri}");
    }
    let one = Address::Unix(scratch.socket("one"));
    let two = Address::Unix(scratch.socket("two"));
    let mut writer = Greeted::new(&one).go("second", Framing::Structured);
    let mut reader = Greeted::new(&two).go("", Framing::Extended);
    assert_eq!(writer.write(1000, b"seen by all", 0), 0);
    assert_eq!(reader.read(1000, 11), Ok(b"seen by all".to_vec()));
    writer.disconnect();
    reader.disconnect();
    server.stop();
}

#[test]
fn several_images_are_served_under_the_names_of_their_files() {
    require!(need::tools(&["nbdinfo"]));
    let scratch = Scratch::new();
    let first = scratch.image_of("first.img", &[1; 4096]);
    let second = scratch.image_of("second.img", &[2; 8192]);
    let server = Serve::new(&scratch, first.path()).also(second.path()).start();
    let expected = ["first.img", "second.img"].map(|name| unix_uri(&scratch, "nbd", name));
    assert_eq!(server.uris(), expected);
    let listed = run(tool("nbdinfo").args(["--list", "--json", server.uri()])).success().stdout;
    let listed: serde_json::Value = serde_json::from_str(&listed).expect("JSON");
    let exports = listed["exports"].as_array().expect("a list").iter();
    let exports: Vec<_> = exports.map(|export| export["export-name"].as_str()).collect();
    assert_eq!(exports, [Some("first.img"), Some("second.img")]);
    let greeted = || Greeted::new(&server.address());
    let mut one = greeted().go("first.img", Framing::Simple);
    let mut two = greeted().go("second.img", Framing::Simple);
    assert_eq!((one.size(), two.size()), (4096, 8192));
    assert_eq!(one.write(0, &[3; 512], 0), 0);
    assert_eq!(two.read(0, 8192), Ok(vec![2; 8192]), "the other image changed");
    // Clients that ask for no name get the first export.
    let mut default = greeted().go("", Framing::Simple);
    assert_eq!(default.read(0, 512), Ok(vec![3; 512]));
    for client in [one, two, default] {
        client.disconnect();
    }
    server.stop();
}

/// The names in the reply to LIST at a socket.
fn listed(address: &Address) -> Vec<String> {
    let replies = Greeted::new(address).option(option::LIST, &[]);
    let servers = replies.iter().filter(|answer| answer.kind == reply::SERVER);
    servers
        .map(|answer| {
            let length = u32::from_be_bytes(*answer.data.first_chunk().expect("a length")) as usize;
            String::from_utf8(answer.data[4..4 + length].to_vec()).expect("a name")
        })
        .collect()
}

#[test]
fn a_socket_offers_what_its_uris_name_and_nothing_else() {
    let scratch = Scratch::new();
    let first = scratch.image_of("first.img", &[1; 4096]);
    let second = scratch.image_of("second.img", &[2; 8192]);
    let server = Serve::bare(&scratch, first.path())
        .also(second.path())
        .export(&unix_uri(&scratch, "one", "first"))
        .export(&unix_uri(&scratch, "two", "second.img"))
        .export(&unix_uri(&scratch, "all", ""))
        .ready_lines(4)
        .start();
    let expected =
        [("one", "first"), ("two", "second.img"), ("all", "first.img"), ("all", "second.img")];
    assert_eq!(server.uris(), expected.map(|(socket, name)| unix_uri(&scratch, socket, name)));
    let [one, two, all] = ["one", "two", "all"].map(|name| Address::Unix(scratch.socket(name)));
    assert_eq!(listed(&one), ["first"]);
    assert_eq!(listed(&two), ["second.img"]);
    assert_eq!(listed(&all), ["first.img", "second.img"]);
    for name in ["second", "second.img", "first.img", "two"] {
        let data = blockhouse_tests::nbd::go_data(name);
        let mut greeted = Greeted::new(&one);
        assert_eq!(greeted.outcome(option::INFO, &data), reply::ERR_UNKNOWN, "{name}");
        assert_eq!(greeted.outcome(option::GO, &data), reply::ERR_UNKNOWN, "{name}");
        let mut greeted = Greeted::new(&one);
        greeted.send_head(option::EXPORT_NAME, name.len() as u32).expect("the head is taken");
        greeted.0.write_all(name.as_bytes()).expect("the name is taken");
        assert_eq!(greeted.0.read(&mut [0; 16]).expect("an end"), 0, "{name} is opened");
    }
    let content = |address: &Address, name: &str| {
        Greeted::new(address).go(name, Framing::Simple).read(0, 4).expect("bytes")
    };
    assert_eq!((content(&one, "first"), content(&one, "")), (vec![1; 4], vec![1; 4]));
    assert_eq!((content(&two, "second.img"), content(&two, "")), (vec![2; 4], vec![2; 4]));
    server.stop();
}

#[test]
fn uris_of_one_image_are_told_apart_by_their_sockets() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let server = Serve::bare(&scratch, image.path())
        .export(&unix_uri(&scratch, "one", "a"))
        .export(&unix_uri(&scratch, "two", "b"))
        .start();
    for (socket, name) in [("one", "a"), ("two", "b")] {
        assert_eq!(listed(&Address::Unix(scratch.socket(socket))), [name]);
    }
    server.stop();
}

#[test]
fn images_are_called_as_they_are_told_to_be() {
    let scratch = Scratch::new();
    let folders = ["x", "y"].map(|folder| scratch.path(folder));
    folders.iter().for_each(|folder| std::fs::create_dir(folder).expect("a folder"));
    let [first, second] = folders.each_ref().map(|folder| folder.join("disk.img"));
    std::fs::write(&first, [1; 512]).expect("an image");
    std::fs::write(&second, [2; 512]).expect("an image");
    let serve =
        || Serve::bare(&scratch, &first).also(&second).export(&unix_uri(&scratch, "s", "system"));
    serve().refused().wrong_usage(&["two images are called 'disk.img'", "--name NAME per image"]);
    let named = || serve().option("--name", "system").option("--name", "data");
    named().refused().wrong_usage(&["y/disk.img", "no --nbd URI", "nbd+unix:///data?socket=PATH"]);
    let data = unix_uri(&scratch, "d", "data");
    named().export(&data).option("--name", "more").refused().wrong_usage(&["one --name each"]);
    named().export(&data).export(&data).refused().wrong_usage(&["'data'", "leave one out"]);
    let other = unix_uri(&scratch, "d", "date");
    named().export(&other).refused().wrong_usage(&["no image is called 'date'", "'data'"]);
    let server = named().export(&data).ready_lines(2).start();
    let byte = |socket: &str, name: &str| {
        let address = Address::Unix(scratch.socket(socket));
        Greeted::new(&address).go(name, Framing::Simple).read(0, 1)
    };
    assert_eq!((byte("s", "system"), byte("d", "data")), (Ok(vec![1]), Ok(vec![2])));
    server.stop();
}

#[test]
fn a_client_is_not_told_where_the_image_lies() {
    require!(need::tools(&["nbdinfo"]));
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let server = Serve::new(&scratch, image.path()).start();
    let folder = image.path().parent().expect("a folder").to_str().expect("a plain name");
    // The description of an export must not name the folder, whether a client asks for it or not.
    let asked = [&0u32.to_be_bytes()[..], &[0, 3, 0, 1, 0, 2, 0, 3]].concat();
    let mut greeted = Greeted::new(&server.address());
    let mut told = greeted.option(option::INFO, &asked);
    told.extend(greeted.option(option::LIST, &[]));
    for answer in told {
        let text = String::from_utf8_lossy(&answer.data).into_owned();
        assert!(!text.contains(folder) && !text.contains("disk.img"), "{text:?}");
    }
    let json = run(tool("nbdinfo").args(["--json", server.uri()])).success().stdout;
    assert!(!json.contains("\"description\""), "{json}");
    server.stop();
}

#[test]
fn a_tcp_export_has_its_name_and_port_in_the_uri() {
    require!(need::tools(&["nbdinfo"]));
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let server = Serve::bare(&scratch, image.path()).export("nbd://127.0.0.1:0/disk").start();
    let Address::Tcp(address) = server.address() else { panic!("a TCP address is expected") };
    assert_ne!(address.port(), 0);
    assert_eq!(server.uri(), format!("nbd://127.0.0.1:{}/disk", address.port()));
    run(&mut nbdinfo(server.uri())).success();
    server.stop();
    assert!(TcpStream::connect(address).is_err(), "somebody still listens");
}

#[test]
fn an_export_on_ipv6_is_found_by_its_uri() {
    require!(need::tools(&["nbdinfo"]));
    let probe = std::net::TcpListener::bind("[::1]:0");
    require!(probe.map_err(|error| format!("no IPv6 here: {error}")));
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let server = Serve::bare(&scratch, image.path()).export("nbd://[::1]:0/disk").start();
    assert!(server.uri().starts_with("nbd://[::1]:"), "{}", server.uri());
    run(&mut nbdinfo(server.uri())).success();
    server.stop();
}

#[test]
fn tcp_on_localhost_is_not_open_to_other_addresses() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let server = Serve::bare(&scratch, image.path()).export("nbd://localhost:0/").start();
    let port = server.uri().trim_end_matches('/').rsplit(':').next().expect("a port");
    let port: u16 = port.parse().expect("a port");
    // All of 127/8 is this machine, so a socket bound to all addresses would answer.
    let other = SocketAddr::from((Ipv4Addr::new(127, 1, 2, 3), port));
    assert!(TcpStream::connect(other).is_err(), "it listens on all addresses");
    server.stop();
}

#[test]
fn the_name_option_names_exports_whose_uri_has_none() {
    require!(need::tools(&["nbdinfo"]));
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let server = Serve::new(&scratch, image.path()).option("--name", "system").start();
    assert!(server.uri().starts_with("nbd+unix:///system?"), "{}", server.uri());
    run(&mut nbdinfo(server.uri())).success();
    server.stop();
}

#[test]
fn an_unknown_export_is_refused_by_name() {
    require!(need::tools(&["nbdinfo"]));
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let uri = unix_uri(&scratch, "nbd", "here");
    let server = Serve::bare(&scratch, image.path()).export(&uri).start();
    run(&mut nbdinfo(&unix_uri(&scratch, "nbd", "elsewhere"))).failure("export");
    run(&mut nbdinfo(server.uri())).success();
    // After a refusal the client can try another name on the same connection.
    let mut greeted = Greeted::new(&server.address());
    let name = |name: &str| blockhouse_tests::nbd::go_data(name);
    assert_eq!(greeted.outcome(option::INFO, &name("elsewhere")), reply::ERR_UNKNOWN);
    assert_eq!(greeted.outcome(option::GO, &name("elsewhere")), reply::ERR_UNKNOWN);
    let mut client = greeted.go("here", Framing::Simple);
    assert_eq!(client.read(0, 1), Ok(vec![0]));
    client.disconnect();
    server.stop();
}

#[test]
fn the_name_of_an_export_that_is_not_there_is_in_the_log_on_one_short_line() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let server =
        Serve::bare(&scratch, image.path()).export(&unix_uri(&scratch, "nbd", "here")).start();
    let name = format!("wrong\n\u{1b}[31mERROR{}", "x".repeat(3000));
    let mut greeted = Greeted::new(&server.address());
    // One client causes one line in the log, however often it asks.
    for _ in 0..50 {
        let data = blockhouse_tests::nbd::go_data(&name);
        assert_eq!(greeted.outcome(option::GO, &data), reply::ERR_UNKNOWN);
    }
    drop(greeted);
    let mut greeted = Greeted::new(&server.address());
    greeted.send_head(option::EXPORT_NAME, 4).expect("the head is taken");
    greeted.0.write_all(b"gone").expect("the name is taken");
    let is_told = || server.log().contains("\"gone\"");
    assert!(eventually(Duration::from_secs(10), is_told), "{}", server.log());
    let log = server.log();
    let first = log.lines().find(|line| line.contains("wrong")).expect("the first name");
    assert!(first.contains(r"wrong\n\u{1b}[31mERROR"), "{log}");
    assert!(log.lines().count() == 2 && log.lines().all(|line| line.len() < 250), "{log}");
    assert!(!log.contains("WARN"), "a stranger's mistake is no warning: {log}");
    server.stop();
}

#[test]
fn clients_that_look_and_leave_are_not_worth_a_line_in_the_log() {
    require!(need::tools(&["nbdinfo"]));
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let server = Serve::new(&scratch, image.path()).start();
    for _ in 0..5 {
        run(tool("nbdinfo").args(["--list", server.uri()])).success();
        drop(Greeted::new(&server.address()));
        let mut noise = Greeted::new(&server.address());
        noise.0.write_all(&[0x42; 64]).expect("the server listens");
    }
    Client::open(&server.address()).disconnect();
    assert_eq!(server.log(), "");
    server.stop();
}

#[test]
fn a_second_server_at_a_socket_disturbs_the_first_once() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let other = scratch.image("other.img", MIB);
    let server = Serve::new(&scratch, image.path()).flag("--verbose").start();
    let refused = Serve::new(&scratch, other.path()).refused();
    refused.failed(&["a running server listens there", "choose another path"]);
    Client::open(&server.address()).disconnect();
    let handshakes = || {
        let log = server.log();
        log.lines().filter(|line| line.contains("handshake over")).count()
    };
    assert!(eventually(Duration::from_secs(10), || handshakes() > 0), "{}", server.log());
    assert_eq!(handshakes(), 1, "{}", server.log());
    server.stop();
}

#[test]
fn a_read_only_export_says_so_and_answers_writes_with_eperm() {
    require!(need::tools(&["nbdinfo"]));
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.img", &[7; 8192]);
    let before = image.state();
    let server = Serve::new(&scratch, image.path()).flag("--read-only").start();
    run(tool("nbdinfo").args(["--is", "read-only", server.uri()])).success();
    for framing in Framing::ALL {
        let mut client = Client::open_with(&server.address(), framing);
        assert_eq!(client.write(0, &[1; 512], 0), errno::EPERM);
        assert_eq!(client.write(0, &[1; 512], flag::FUA), errno::EPERM);
        for request in [command::WRITE_ZEROES, command::TRIM] {
            assert_eq!(client.simple(request, 0, 512, 0), errno::EPERM, "request type {request}");
        }
        assert_eq!(client.read(0, 8192), Ok(vec![7; 8192]));
        assert_eq!(client.flush(), 0);
        client.disconnect();
    }
    server.stop();
    assert_eq!(image.state(), before);
}

fn fifty_clients_work_at_once(engine: Engine) {
    let scratch = Scratch::in_memory();
    let image = scratch.image("disk.img", 50 * MIB);
    let serve = Serve::new(&scratch, image.path()).option("--workers", "2");
    let server = serve.engine(engine).start();
    let address = server.address();
    std::thread::scope(|scope| {
        for number in 0..50u8 {
            let address = &address;
            scope.spawn(move || {
                let framing = Framing::ALL[usize::from(number) % 3];
                let mut client = Client::open_with(address, framing);
                let start = u64::from(number) * MIB;
                for round in 0..20 {
                    let block = [number ^ round; 7777];
                    let offset = start + u64::from(round) * 7777;
                    assert_eq!(client.write(offset, &block, 0), 0);
                    assert_eq!(client.read(offset, 7777), Ok(block.to_vec()));
                }
                assert_eq!(client.flush(), 0);
                client.disconnect();
            });
        }
    });
    server.stop();
    for number in 0..50u8 {
        let bytes = image.bytes(u64::from(number) * MIB + 19 * 7777, 7777);
        assert_eq!(bytes, [number ^ 19; 7777], "client {number}");
    }
}

/// `nbdcopy` with several connections relies on `CAN_MULTI_CONN`.
fn connections_see_each_others_writes(engine: Engine) {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let server = Serve::new(&scratch, image.path()).engine(engine).option("--workers", "2");
    let server = server.start();
    let mut clients: Vec<_> = (0..4).map(|_| Client::open(&server.address())).collect();
    for round in 0..40u8 {
        let writer = usize::from(round) % 4;
        let offset = u64::from(round) * 1111;
        assert_eq!(clients[writer].write(offset, &[round; 3333], 0), 0);
        for reader in &mut clients {
            assert_eq!(reader.read(offset, 3333), Ok(vec![round; 3333]));
        }
        assert_eq!(clients[(writer + 1) % 4].flush(), 0);
        assert_eq!(image.bytes(offset, 3333), [round; 3333]);
    }
    clients.into_iter().for_each(Client::disconnect);
    server.stop();
}

on_every_engine! {
    fifty_clients_work_at_once
    connections_see_each_others_writes
}

#[test]
fn a_socket_from_systemd_is_served() {
    require!(need::tools(&["nbdinfo"]));
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let socket = scratch.socket("activation");
    let listener = UnixListener::bind(&socket).expect("the test's own socket");
    // A client may connect before the server starts.
    let early = Address::Unix(socket.clone());
    let early = std::thread::spawn(move || Client::open(&early).read(0, 16));
    // As systemd does: the socket is descriptor 3, and LISTEN_PID is the process's own id.
    let script = r#"exec 3<&0 0</dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec "$@""#;
    let serve = Serve::bare(&scratch, image.path()).under(["sh", "-c", script, "sh"]);
    let server = serve.stdin(std::os::fd::OwnedFd::from(listener)).start();
    assert_eq!(early.join().expect("the early client is served"), Ok(vec![0; 16]));
    assert!(server.uri().contains(socket.to_str().expect("a plain name")), "{}", server.uri());
    run(&mut nbdinfo(server.uri())).success();
    server.stop();
    assert!(socket.exists(), "systemd's socket is not ours to remove");
}

#[test]
fn sockets_from_systemd_serve_what_the_uris_with_their_addresses_name() {
    let scratch = Scratch::new();
    let first = scratch.image_of("first.img", &[1; 4096]);
    let second = scratch.image_of("second.img", &[2; 4096]);
    let sockets = ["one", "two"].map(|name| scratch.socket(name));
    let script = r#"exec 3<&0 0</dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec "$@""#;
    let serve = |uris: &[(&str, &str)]| {
        let listener = UnixListener::bind(&sockets[0]).expect("the test's own socket");
        let serve = Serve::bare(&scratch, first.path()).also(second.path());
        let serve = serve.under(["sh", "-c", script, "sh"]);
        let export =
            |serve: Serve, uri: &(&str, &str)| serve.export(&unix_uri(&scratch, uri.0, uri.1));
        let serve = uris.iter().fold(serve, export);
        serve.stdin(std::os::fd::OwnedFd::from(listener))
    };
    let again = || std::fs::remove_file(&sockets[0]).expect("the socket's file is there");
    // Otherwise both disks would be served at a socket that seems to be for one of them, and "two"
    // would not be served.
    serve(&[("one", "first"), ("two", "second")]).refused().wrong_usage(&[
        "socket=",
        "/two",
        "passed its own sockets",
        "leave --nbd out",
    ]);
    again();
    let server = serve(&[("one", "first"), ("one", "second")]).ready_lines(2).start();
    assert_eq!(listed(&Address::Unix(sockets[0].clone())), ["first", "second"]);
    server.stop();
    again();
    let server = serve(&[]).start();
    assert_eq!(listed(&Address::Unix(sockets[0].clone())), ["first.img", "second.img"]);
    server.stop();
}

#[test]
fn sockets_for_another_process_are_not_taken() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let serve = Serve::new(&scratch, image.path());
    let server = serve.environment("LISTEN_FDS", "1").environment("LISTEN_PID", "1").start();
    Client::open(&server.address()).disconnect();
    server.stop();
}

#[test]
fn the_ready_line_comes_when_clients_can_connect() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    for _ in 0..10 {
        let server = Serve::new(&scratch, image.path()).start();
        Client::open(&server.address()).disconnect();
        server.stop();
    }
}

#[test]
fn descriptors_of_departed_clients_are_given_back() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", MIB);
    let server = Serve::new(&scratch, image.path()).start();
    let folder = format!("/proc/{}/fd", server.pid().as_raw_nonzero());
    let open = || std::fs::read_dir(Path::new(&folder)).expect("the server runs").count();
    Client::open(&server.address()).disconnect();
    let before = open();
    for number in 0..300 {
        let client = Client::open(&server.address());
        if number % 2 == 0 { client.disconnect() } else { drop(client) }
    }
    let settled = eventually(Duration::from_secs(60), || open() <= before);
    assert!(settled, "{} descriptors, {before} before", open());
    server.stop();
}
