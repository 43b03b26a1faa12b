//! Other programs' NBD servers as storage: Blockhouse uses the features that they have, does
//! without those that they lack, and no command waits for requests that they never answer.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use blockhouse_tests::image_tool::{command, json, qemu_img, str};
use blockhouse_tests::nbd::{Client, command as kind, flag};
use blockhouse_tests::{Scratch, Serve, eventually, nbd_uri, need, require, run, tool};

use crate::jobs::Foreign;

const SIZE: usize = 8 << 20;
/// Shorter than the timeout of a handshake.
const QUICK: Duration = Duration::from_secs(20);

/// Whether a server's disk can be written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    ReadWrite,
    ReadOnly,
}

/// A server's command line; `@S` stands for its socket, `@F` for the file of its disk.
type Row = (Kind, &'static str);

const SERVERS: [Row; 21] = [
    (Kind::ReadWrite, "qemu-nbd -t -f raw -k @S @F"),
    (Kind::ReadWrite, "qemu-nbd -t -f raw -e 2 -k @S @F"),
    (Kind::ReadWrite, "qemu-nbd -t -f raw -e 8 -k @S @F"),
    (Kind::ReadOnly, "qemu-nbd -t -r -f raw -k @S @F"),
    (Kind::ReadOnly, "qemu-nbd -t -r -e 2 -f raw -k @S @F"),
    (Kind::ReadWrite, "nbdkit -f -U @S file @F"),
    (Kind::ReadWrite, "nbdkit -f -U @S --filter=limit file @F limit=1"),
    (Kind::ReadWrite, "nbdkit -f -U @S --filter=limit file @F limit=2"),
    (Kind::ReadWrite, "nbdkit -f -U @S --filter=multi-conn file @F multi-conn-mode=disable"),
    (
        Kind::ReadWrite,
        "nbdkit -f -U @S --filter=blocksize-policy file @F blocksize-minimum=4096 blocksize-error-policy=error",
    ),
    (Kind::ReadWrite, "nbdkit -f -U @S --filter=delay file @F rdelay=10ms wdelay=10ms"),
    (Kind::ReadWrite, "nbdkit -f -U @S --filter=noextents --filter=nozero file @F"),
    (Kind::ReadWrite, "nbdkit -f -U @S --filter=fua file @F fuamode=emulate"),
    (Kind::ReadWrite, "nbdkit -f -U @S --filter=exportname file @F default-export=disk"),
    (Kind::ReadOnly, "nbdkit -f -r -U @S --filter=retry file @F"),
    (Kind::ReadWrite, "nbdkit -f -U @S --no-sr --filter=noparallel file @F serialize=connections"),
    // With these options nbdkit announces zero writes and refuses them.
    (Kind::ReadOnly, "nbdkit -f -r -U @S --oldstyle file @F"),
    (Kind::ReadWrite, "python3 @P plain @S @F"),
    (Kind::ReadWrite, "python3 @P polite-silent @S @F"),
    (Kind::ReadWrite, "python3 @P unfixed @S @F"),
    (Kind::ReadWrite, "python3 @P oldstyle-silent @S @F"),
];

struct Rig {
    scratch: Scratch,
    content: Vec<u8>,
}

impl Rig {
    fn new() -> Self {
        let scratch = Scratch::new();
        let mut content: Vec<u8> = (0..SIZE / 8).flat_map(|word| word.to_le_bytes()).collect();
        content[1 << 20..3 << 20].fill(0);
        fs::write(scratch.path("model.img"), &content).unwrap();
        fs::write(scratch.path("server.py"), include_str!("plain_server.py")).unwrap();
        Self { scratch, content }
    }

    fn path(&self, name: &str) -> String {
        str(&self.scratch.path(name)).to_owned()
    }

    fn socket(&self) -> PathBuf {
        self.scratch.socket("foreign")
    }

    fn uri(&self) -> String {
        nbd_uri("", self.socket())
    }

    /// Starts a server of a new file with the content.
    fn start(&self, words: &str) -> Foreign {
        fs::write(self.scratch.path("disk.img"), &self.content).unwrap();
        self.start_again(words)
    }

    /// Starts a server of the file as it is.
    fn start_again(&self, words: &str) -> Foreign {
        let _ = fs::remove_file(self.socket());
        let word = |word: &str| match word {
            "@S" => str(&self.socket()).to_owned(),
            "@F" => self.path("disk.img"),
            "@P" => self.path("server.py"),
            word => word.to_owned(),
        };
        let words: Vec<String> = words.split(' ').map(word).collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        Foreign::start(words[0], &words[1..], &self.socket())
    }

    #[track_caller]
    fn quick(&self, server: &str, words: &[&str]) {
        let begin = Instant::now();
        let mut outcome = command(words);
        // A server that limits its connections may not have noticed yet that the previous command
        // has disconnected.
        while server.contains("limit=")
            && outcome.stderr.contains("closed the connection")
            && begin.elapsed() < QUICK
        {
            std::thread::sleep(Duration::from_millis(50));
            outcome = command(words);
        }
        assert!(outcome.status.success(), "{}", outcome.describe(server));
        assert!(begin.elapsed() < QUICK, "{server}: {words:?} took {:?}", begin.elapsed());
    }
}

#[test]
fn servers_of_every_kind_are_read_written_and_compared() {
    require!(need::tools(&["qemu-nbd", "nbdkit", "python3", "qemu-img"]));
    let rig = Rig::new();
    let (uri, model) = (rig.uri(), rig.path("model.img"));
    for (kind, words) in SERVERS {
        let _server = rig.start(words);
        let copies =
            ["copy.img", "copy.qcow2", "part.img", "restored.img"].map(|name| rig.path(name));
        copies.iter().for_each(|copy| drop(fs::remove_file(copy)));
        let [raw, qcow2, part, restored] = copies.each_ref().map(String::as_str);
        rig.quick(words, &["info", &uri]);
        rig.quick(words, &["convert", &uri, raw]);
        assert!(fs::read(raw).unwrap() == rig.content, "{words}: other bytes were read");
        rig.quick(words, &["convert", "-O", "qcow2", &uri, qcow2]);
        rig.quick(words, &["compare", &uri, qcow2]);
        rig.quick(words, &["dd", &format!("if={uri}"), &format!("of={part}"), "bs=1M", "count=2"]);
        rig.quick(words, &["restore", &uri, restored]);
        rig.quick(words, &["map", &uri]);
        // The export as the base of an overlay with data.
        let overlay = rig.path("overlay.qcow2");
        let _ = fs::remove_file(&overlay);
        qemu_img(&["create", "-q", "-f", "qcow2", "-F", "raw", "-b", &model, &overlay]).success();
        qemu_img(&["rebase", "-q", "-u", "-F", "raw", "-b", &uri, &overlay]).success();
        rig.quick(words, &["compare", "--allow-remote", &overlay, raw]);
        if kind == Kind::ReadWrite {
            let other = rig.path("other.img");
            let mut content = rig.content.clone();
            content.rotate_left(1 << 20);
            fs::write(&other, &content).unwrap();
            rig.quick(words, &["convert", "-n", "-O", "raw", &other, &uri]);
            rig.quick(words, &["compare", &uri, &other]);
            assert!(fs::read(rig.path("disk.img")).unwrap() == content, "{words}: other bytes");
        }
    }
}

#[test]
fn what_a_server_does_not_have_or_forbids_is_told_in_a_line() {
    require!(need::tools(&["nbdkit", "python3"]));
    let rig = Rig::new();
    let named = nbd_uri("other", rig.socket());
    for (words, said) in [
        ("python3 @P plain @S @F", "no export named \"other\""),
        ("python3 @P polite @S @F", "no export named \"other\""),
        ("python3 @P oldstyle @S @F", "leave the name out of the URI"),
    ] {
        let _server = rig.start(words);
        let outcome = command(&["info", &named]);
        assert!(outcome.stderr.contains(said), "{}", outcome.describe(said));
        assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.describe("one line"));
    }
    let copy = rig.path("copy.img");
    for words in [
        "nbdkit -f -U @S --filter=error file @F error=EIO error-pread-rate=100%",
        "nbdkit -f -U @S --filter=protect file @F protect=0-",
    ] {
        let _server = rig.start(words);
        if words.contains("pread") {
            command(&["convert", &rig.uri(), &copy]).failure("answers with an error")
        } else {
            let model = rig.path("model.img");
            command(&["convert", "-n", "-O", "raw", &model, &rig.uri()]).failure("answers with")
        };
    }
}

/// A guest's requests reach the server unchanged, and continue after the server returns.
#[test]
fn durable_writes_discards_and_zeros_reach_a_server_that_comes_back() {
    require!(need::tools(&["nbdkit", "nbdinfo"]));
    let rig = Rig::new();
    let log = rig.path("log");
    let words = format!("nbdkit -f -U @S --filter=log file @F logfile={log}");
    let origin = rig.start(&words);
    let uri = format!("{}&reconnect=60", rig.uri());
    let server = Serve::new(&rig.scratch, uri.as_ref()).start();
    let mut client = Client::open(&server.address());
    let mut content = rig.content.clone();
    let mut change = |client: &mut Client, at: u64, byte: u8| {
        let (plain, durable) = (at, at + (64 << 10));
        assert_eq!(client.write(plain, &[byte; 4096], 0), 0);
        assert_eq!(client.write(durable, &[byte; 4096], flag::FUA), 0);
        let (discarded, zeros) = (at + (128 << 10), at + (192 << 10));
        assert_eq!(client.simple(kind::TRIM, discarded, 65_536, 0), 0);
        assert_eq!(client.simple(kind::WRITE_ZEROES, zeros, 65_536, flag::NO_HOLE), 0);
        assert_eq!(client.flush(), 0);
        for start in [plain, durable] {
            content[start as usize..][..4096].fill(byte);
        }
        // nbdkit's file plugin makes a discarded range a hole.
        content[discarded as usize..][..128 << 10].fill(0);
    };
    change(&mut client, 4 << 20, 1);
    let map = json(&run(tool("nbdinfo").args(["--map", "--json", server.uri()])).success());
    let is_hole = |part: &serde_json::Value| part["description"] == "hole,zero";
    assert!(map.as_array().expect("a list").iter().any(is_hole), "{map}");
    drop(origin);
    let told = fs::read_to_string(&log).expect("a log");
    for (kind, offset, words) in [
        ("Write", 4 << 20, "fua=0"),
        ("Write", (4 << 20) + (64 << 10), "fua=1"),
        ("Trim", (4 << 20) + (128 << 10), "fua=0"),
        ("Zero", (4 << 20) + (192 << 10), "trim=0"),
        ("Flush", 0, ""),
        ("Extents", 0, ""),
    ] {
        let (kind, offset) = (format!(" {kind} id="), format!(" offset={offset:#x} "));
        let is_it = |line: &&str| {
            line.contains(&kind)
                && (words.is_empty() || line.contains(&offset) && line.contains(words))
        };
        assert!(told.lines().any(|line| is_it(&line)), "{kind}{offset}{words}: {told}");
    }
    let origin = rig.start_again(&words);
    assert!(eventually(QUICK, || server.log().contains("connected again")), "{}", server.log());
    change(&mut client, 6 << 20, 2);
    let read = client.read(4 << 20, 4 << 20).expect("a read");
    drop(client);
    server.stop();
    drop(origin);
    assert!(read == content[4 << 20..], "other bytes are read");
    assert!(fs::read(rig.path("disk.img")).expect("its file") == content, "other bytes");
}
