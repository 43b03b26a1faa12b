//! Snapshots of a served image, requested at the control socket: each has the content of one moment
//! for every client, the guests' data stays right, and invalid requests at the socket have no
//! effect.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use blockhouse_tests::nbd::{Address, Client, flag};
use blockhouse_tests::{
    Outcome, Scratch, Serve, Server,
    image_tool::{command, new_image, qemu_img, str},
    need, require, run_within, seeded, tool,
};
use fastrand::Rng;
use serde_json::{Value, json};

const BLOCK: usize = 4096;
/// The number of blocks that only one client uses.
const BLOCKS: usize = 1024;
const CLIENTS: usize = 3;
const LIMIT: Duration = Duration::from_secs(120);

/// The number of a client's writes, one after the other; the n-th fills its blocks with n.
#[derive(Default)]
struct Diary {
    begun: AtomicUsize,
    ended: AtomicUsize,
}

/// The blocks of the `number`-th write of a client: the first one and their number.
fn place(seed: u64, number: u64) -> (usize, usize) {
    let mut random = Rng::with_seed(seed ^ (number << 8));
    let first = random.usize(..BLOCKS);
    (first, random.usize(1..=12).min(BLOCKS - first))
}

fn write_until(stop: &AtomicBool, address: &Address, region: usize, seed: u64, diary: &Diary) {
    let mut client = Client::open(address);
    let mut random = Rng::with_seed(seed);
    let mut number = 0_u64;
    while !stop.load(Ordering::SeqCst) {
        number += 1;
        let (first, count) = place(seed, number);
        let bytes = number.to_be_bytes().repeat(count * BLOCK / 8);
        let flags = if random.u8(..4) == 0 { flag::FUA } else { 0 };
        diary.begun.fetch_add(1, Ordering::SeqCst);
        let offset = (region * BLOCKS + first) * BLOCK;
        assert_eq!(client.write(offset as u64, &bytes, flags), 0);
        diary.ended.fetch_add(1, Ordering::SeqCst);
        if random.u8(..16) == 0 {
            assert_eq!(client.flush(), 0);
        }
    }
    client.disconnect();
}

/// The number of writes that a client had completed before the snapshot was requested, and that it
/// had begun when the snapshot was complete.
#[derive(Clone, Copy)]
struct Bounds {
    least: u64,
    most: u64,
}

/// Checks that a region has the content after one of the client's writes, neither torn nor out of
/// order.
fn judge(content: &[u8], seed: u64, bounds: Bounds) {
    let number = |block: &[u8]| {
        assert!(block.chunks_exact(8).all(|word| *word == block[..8]), "a torn block");
        u64::from_be_bytes(block[..8].try_into().expect("eight bytes"))
    };
    let found: Vec<u64> = content.chunks_exact(BLOCK).map(number).collect();
    let moment = found.iter().copied().max().unwrap_or(0);
    let Bounds { least, most } = bounds;
    assert!((least..=most).contains(&moment), "after {moment} writes, not {least} to {most}");
    let mut wanted = vec![0; BLOCKS];
    for number in 1..=moment {
        let (first, count) = place(seed, number);
        wanted[first..first + count].fill(number);
    }
    assert!(found == wanted, "not what there was after {moment} writes");
}

fn serve(scratch: &Scratch, image: &Path) -> (Server, PathBuf) {
    let socket = scratch.socket("control");
    let server = Serve::new(scratch, image).option("--control", &socket);
    (server.option("--workers", "2").start(), socket)
}

fn snapshot(action: &str, socket: &Path, words: &[&str]) -> Outcome {
    command(&[&["snapshot", action, "--control", str(socket)], words].concat())
}

/// Random writes at depth 16 that fio verifies afterwards, after the other clients' regions.
fn verified_load(scratch: &Scratch, uri: &str) -> Outcome {
    let (offset, uri) = (CLIENTS * BLOCKS * BLOCK, format!("--uri={uri}"));
    let mut fio = tool("fio");
    fio.args(["--name=load", "--ioengine=nbd", "--rw=randwrite", "--bs=4k", "--iodepth=16", &uri]);
    fio.args(["--size=16M", "--loops=6", "--verify=crc32c", "--verify_fatal=1"]);
    run_within(LIMIT, fio.arg(format!("--offset={offset}")).current_dir(scratch.short()))
}

/// Takes a snapshot; returns for each client between which writes it was taken.
fn take(socket: &Path, image: &str, name: &str, diaries: &[Diary]) -> Vec<Bounds> {
    let count = |count: &AtomicUsize| count.load(Ordering::SeqCst) as u64;
    let least: Vec<u64> = diaries.iter().map(|diary| count(&diary.ended)).collect();
    let said = snapshot("create", socket, &[image, name]).success().stdout;
    let words: Vec<&str> = said.split_whitespace().collect();
    let pause = words.iter().find_map(|word| word.parse::<u64>().ok());
    assert!(pause.is_some_and(|pause| pause > 0) && said.contains(" us"), "{said}");
    eprintln!("{name}: {}", said.trim());
    let both = least.into_iter().zip(diaries);
    both.map(|(least, diary)| Bounds { least, most: count(&diary.begun) }).collect()
}

#[test]
fn each_holds_one_moment_of_every_client() {
    require!(need::tools(&["qemu-img", "fio"]));
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let image = str(&path);
    command(&["create", image, "64M"]).success();
    let (server, socket) = serve(&scratch, &path);
    let seed = seeded().u64(..1 << 40);
    let (stop, diaries) = (AtomicBool::new(false), [(); CLIENTS].map(|()| Diary::default()));
    let (address, uri) = (server.address(), server.uri().to_owned());
    let taken = std::thread::scope(|scope| {
        for (region, diary) in diaries.iter().enumerate() {
            let seed = seed + region as u64;
            let (stop, address) = (&stop, &address);
            scope.spawn(move || write_until(stop, address, region, seed, diary));
        }
        let fio = scope.spawn(|| verified_load(&scratch, &uri));
        let mut taken = Vec::new();
        for index in 0..5 {
            std::thread::sleep(Duration::from_millis(150));
            let name = format!("s{index}");
            taken.push((name.clone(), take(&socket, image, &name, &diaries)));
        }
        snapshot("delete", &socket, &[image, "s1"]).success();
        snapshot("rename", &socket, &[image, "s3", "renamed"]).success();
        let checked = fio.join();
        stop.store(true, Ordering::SeqCst);
        checked.expect("fio runs").success();
        taken
    });
    let list = snapshot("list", &socket, &[image, "--json"]).success().stdout;
    server.stop();
    qemu_img(&["check", image]).success();
    assert_eq!(command(&["snapshot", "list", "--json", image]).success().stdout, list);
    let listed: Value = serde_json::from_str(&list).expect("JSON");
    assert_eq!(listed.as_array().map(Vec::len), Some(4));
    for (name, bounds) in taken {
        let name = match name.as_str() {
            "s1" => continue,
            "s3" => "renamed",
            name => name,
        };
        let server = Serve::new(&scratch, &path).option("--snapshot", name).start();
        let mut client = Client::open(&server.address());
        for (region, bounds) in bounds.into_iter().enumerate() {
            let length = BLOCKS * BLOCK;
            let content = client.read((region * length) as u64, length as u64).expect("all of it");
            judge(&content, seed + region as u64, bounds);
        }
        client.disconnect();
        let copy = scratch.path("copy.raw");
        let part = format!("snapshot.name={name}");
        qemu_img(&["convert", "-O", "raw", "-l", &part, image, str(&copy)]).success();
        qemu_img(&["compare", "-f", "raw", "-F", "raw", str(&copy), server.uri()]).success();
        server.stop();
    }
}

#[test]
fn what_cannot_be_done_is_said_in_one_line() {
    let scratch = Scratch::new();
    let (path, raw) = (scratch.path("disk.qcow2"), scratch.image("disk.img", 1 << 20));
    let image = str(&path);
    command(&["create", image, "1M"]).success();
    let socket = scratch.socket("control");
    let serve = Serve::new(&scratch, &path).also(raw.path());
    let server = serve.option("--control", &socket).start();
    let mode = std::fs::metadata(&socket).expect("the socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "its owner alone may connect");
    snapshot("create", &socket, &[image, "one"]).success();
    let elsewhere = scratch.image("other.img", 1 << 20);
    let cases: [(&str, &[&str], &[&str]); 6] = [
        ("create", &[image, "one"], &["disk.qcow2", "'one' already"]),
        ("create", &[raw.str(), "one"], &["disk.img", "raw image has no snapshots"]),
        ("create", &[elsewhere.str(), "one"], &["other.img", "not served here", "disk.qcow2"]),
        ("apply", &[image, "one"], &["disk.qcow2", "is being served", "stop the server"]),
        ("delete", &[image, "two"], &["disk.qcow2", "no snapshot 'two'"]),
        ("rename", &[image, "one", &"x".repeat(256)], &["disk.qcow2", "1 to 255"]),
    ];
    for (action, words, expected) in cases {
        refused(&snapshot(action, &socket, words), expected);
    }
    let locked = command(&["snapshot", "create", image, "two"]);
    refused(&locked, &["disk.qcow2", "locked", "blockhouse", "--control SOCKET"]);
    let nobody = scratch.socket("nobody");
    refused(&snapshot("list", &nobody, &[image]), &["nobody", "cannot reach a server"]);
    server.stop();
    assert!(!socket.exists(), "the socket's file is left behind");
    let server = Serve::new(&scratch, &path).option("--control", &socket).flag("--read-only");
    let server = server.start();
    refused(&snapshot("create", &socket, &[image, "two"]), &["disk.qcow2", "reading only"]);
    server.stop();
    qemu_img(&["check", image]).success();
}

/// An image with half a million mapped clusters, so that a snapshot of it takes some preparation.
fn mapped_image(scratch: &Scratch) -> PathBuf {
    let path = scratch.path("mapped.qcow2");
    let how = ["-q", "-f", "qcow2", "-o", "preallocation=metadata"];
    qemu_img(&[&["create"], &how[..], &[str(&path), "32G"]].concat()).success();
    path
}

fn ask_to(socket: &Path, action: &str, name: &str) -> UnixStream {
    let mut stream = connect(socket);
    let params = json!({ "disk": "mapped.qcow2", "name": name });
    let method = format!("snapshot.{action}");
    let line = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
    stream.write_all(format!("{line}\n").as_bytes()).expect("it listens");
    stream
}

#[test]
fn a_client_that_leaves_cancels_its_snapshot_and_one_that_reads_on_gets_it() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let path = mapped_image(&scratch);
    let (server, socket) = serve(&scratch, &path);
    drop(ask_to(&socket, "create", "left"));
    // The list waits for the end of the abandoned request, whatever its result.
    let listed = snapshot("list", &socket, &[str(&path), "--json"]).success().stdout;
    eprintln!("a client left: {}", listed.trim());
    ask_and_stay(&socket, "create", "patient");
    ask_and_stay(&socket, "create", "deleted");
    drop(ask_to(&socket, "delete", "patient"));
    let listed = snapshot("list", &socket, &[str(&path), "--json"]).success().stdout;
    eprintln!("a client that deletes left: {}", listed.trim());
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(0, &[7; BLOCK], 0), 0);
    ask_and_stay(&socket, "delete", "deleted");
    assert_eq!(client.write(0, &[8; BLOCK], 0), 0);
    client.disconnect();
    server.stop();
    // Neither errors nor leaks.
    qemu_img(&["check", str(&path)]).success();
    let after = command(&["snapshot", "list", str(&path)]).success().stdout;
    assert_eq!(after.contains("patient"), listed.contains("patient"), "{after}");
    assert!(!after.contains("deleted"), "{after}");
}

/// Requests a change of the snapshots, shuts its sending side down, and waits for the answer.
fn ask_and_stay(socket: &Path, action: &str, name: &str) {
    let patient = ask_to(socket, action, name);
    patient.shutdown(Shutdown::Write).expect("a socket");
    let answer = hear(&patient);
    assert!(answer["result"]["pause-us"].as_u64().is_some_and(|pause| pause > 0), "{answer}");
}

#[test]
fn a_server_that_ends_takes_and_deletes_a_snapshot_as_a_whole_or_not_at_all() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let path = mapped_image(&scratch);
    command(&["snapshot", "create", str(&path), "three"]).success();
    for (action, name) in [("create", "one"), ("create", "two"), ("delete", "three")] {
        let (server, socket) = serve(&scratch, &path);
        let asked = ask_to(&socket, action, name);
        server.stop();
        let mut answer = String::new();
        // The connection may end without an answer.
        let _ = BufReader::new(&asked).read_line(&mut answer);
        let is_done = answer.contains("\"result\"");
        let is_refused = answer.contains("cancelled");
        assert!(is_done || is_refused || answer.is_empty(), "{answer}");
        qemu_img(&["check", str(&path)]).success();
        let listed = command(&["snapshot", "list", str(&path)]).success().stdout;
        let is_creation = action == "create";
        assert!(!is_done || listed.contains(name) == is_creation, "{listed}");
        assert!(!is_refused || listed.contains(name) != is_creation, "{listed}");
    }
}

fn refused(outcome: &Outcome, expected: &[&str]) {
    let said = outcome.describe("one line is expected");
    assert_eq!(outcome.status.code(), Some(1), "{said}");
    assert_eq!(outcome.stderr.lines().count(), 1, "{said}");
    for word in expected {
        assert!(outcome.stderr.contains(word), "{word:?}: {said}");
    }
}

fn connect(socket: &Path) -> UnixStream {
    let stream = UnixStream::connect(socket).expect("the server listens");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a socket");
    stream
}

fn hear(stream: &UnixStream) -> Value {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).expect("an answer");
    serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"))
}

const LIST: &[u8] =
    b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"snapshot.list\",\"params\":{\"disk\":\"disk.qcow2\"}}\n";

#[test]
fn nonsense_on_the_socket_harms_nobody() {
    let scratch = Scratch::new();
    let path = new_image(&scratch, "disk.qcow2", "1M");
    let (server, socket) = serve(&scratch, &path);
    let mut stream = connect(&socket);
    let mut random = seeded();
    let mut noise: Vec<u8> = (0..500).map(|_| random.u8(..)).collect();
    noise.retain(|byte| *byte != b'\n');
    let nested = [b'['; 60_000];
    let lines: [&[u8]; 7] = [
        b"",
        b"{",
        b"[1,2]",
        b"{\"execute\":\"quit\"}",
        b"{\"jsonrpc\":\"2.0\",\"method\":\"snapshot.create\",\"id\":{}}",
        &noise,
        &nested,
    ];
    for line in lines {
        stream.write_all(&[line, b"\n"].concat()).expect("it listens");
        let why = hear(&stream)["error"]["message"].as_str().map(str::to_owned);
        assert!(why.is_some_and(|why| !why.is_empty()), "{}", String::from_utf8_lossy(line));
    }
    // A line may come in pieces, and one piece may have several lines.
    for byte in LIST {
        stream.write_all(&[*byte]).expect("it listens");
    }
    assert!(hear(&stream)["result"].is_array());
    stream.write_all(&LIST.repeat(3)).expect("it listens");
    let mut reader = BufReader::new(&stream);
    for _ in 0..3 {
        let mut line = String::new();
        reader.read_line(&mut line).expect("an answer");
        assert!(line.contains("\"result\":[]"), "{line}");
    }

    // An endless line ends the connection, and is not buffered.
    let mut endless = connect(&socket);
    while endless.write_all(&[b'x'; 4096]).is_ok() {}
    let mut rest = Vec::new();
    // The answer may be lost because the server closes the connection with unread input.
    let _ = endless.read_to_end(&mut rest);
    assert!(rest.is_empty() || String::from_utf8_lossy(&rest).contains("65536 bytes"));

    // Silent clients, and one that disconnects in the middle of a line.
    let mut leaving = connect(&socket);
    leaving.write_all(b"{\"exec").expect("it listens");
    drop(leaving);
    let silent: Vec<UnixStream> = (0..40).map(|_| connect(&socket)).collect();
    stream.write_all(LIST).expect("it listens");
    assert!(hear(&stream)["result"].is_array(), "who is connected is answered");
    drop(silent);
    let again = blockhouse_tests::eventually(Duration::from_secs(20), || {
        snapshot("list", &socket, &[str(&path)]).status.success()
    });
    assert!(again, "there is room again");
    // An open connection does not prevent the server's end.
    server.stop();
    drop(stream);
}
