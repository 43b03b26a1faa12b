//! TLS with clients of other projects: who is served, who is refused, and what the log says.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use blockhouse_tests::nbd::{Framing, Greeted, go_data, option, reply};
use blockhouse_tests::pki::{Pki, Validity, psk_file};
use blockhouse_tests::tls12::Tls12;
use blockhouse_tests::upgrade::{Servers, upgrade};
use blockhouse_tests::{
    Outcome, Scratch, Serve, Server, blockhouse, eventually, image_tool::str, nbd_uri, need,
    random_bytes, require, run, run_within, seeded, tool,
};
use rustix::process::Signal;

pub(crate) const SIZE: usize = 4 << 20;
const ERR_TLS_REQD: u32 = 0x8000_0005;
pub(crate) const TOOLS: [&str; 5] = ["certtool", "psktool", "nbdinfo", "nbdcopy", "qemu-img"];

/// A host with an image, certificates of a server and a client from one authority, and pre-shared
/// keys.
pub(crate) struct Host {
    pub(crate) scratch: Scratch,
    pub(crate) pki: Pki,
    pub(crate) client: PathBuf,
    pub(crate) keys: PathBuf,
    pub(crate) content: Vec<u8>,
}

impl Host {
    pub(crate) fn new() -> Self {
        let scratch = Scratch::new();
        let content = random_bytes(&mut seeded(), SIZE);
        scratch.image_of("disk.img", &content);
        let pki = Pki::new(&scratch.path("pki"));
        pki.server();
        let client = pki.client("alice", Validity::Now);
        let keys = scratch.path("keys.psk");
        psk_file(&keys, &["alice", "bob"]);
        Self { scratch, pki, client, keys, content }
    }

    pub(crate) fn serve(&self) -> Serve {
        Serve::bare(&self.scratch, &self.scratch.path("disk.img"))
    }

    pub(crate) fn x509(&self, mode: &str) -> Server {
        let serve = self.serve().option("--tls-certificates", self.pki.folder());
        serve.option("--tls", mode).export("nbd://localhost:0/disk").start()
    }

    pub(crate) fn psk(&self) -> Server {
        self.serve().option("--tls-psk", &self.keys).export("nbd://localhost:0/disk").start()
    }
}

/// The port of a server at localhost.
fn port(server: &Server) -> u16 {
    let authority = server.uri().split('/').nth(2).expect("a host");
    authority.rsplit(':').next().and_then(|port| port.parse().ok()).expect("a port")
}

/// The URI with which libnbd's programs use the client certificate of this folder.
pub(crate) fn by_certificate(server: &Server, folder: &Path) -> String {
    format!("nbds://localhost:{}/disk?tls-certificates={}", port(server), str(folder))
}

pub(crate) fn by_key(server: &Server, user: &str, file: &Path) -> String {
    format!("nbds://{user}@localhost:{}/disk?tls-psk-file={}", port(server), str(file))
}

/// Waits for half a minute at most.
#[track_caller]
fn wait_until(condition: impl FnMut() -> bool, what: &str) {
    assert!(eventually(Duration::from_secs(30), condition), "not seen: {what}");
}

fn nbdinfo(uri: &str) -> Outcome {
    run(tool("nbdinfo").args(["--size", uri]))
}

/// Asserts that the client fails, and that the server logs one line with these words.
#[track_caller]
pub(crate) fn assert_refused(server: &Server, outcome: &Outcome, words: &[&str]) {
    assert!(!outcome.status.success(), "{}", outcome.describe("must fail"));
    let has_line = || {
        let log = server.log();
        log.lines().any(|line| words.iter().all(|word| line.contains(word)))
    };
    wait_until(has_line, &format!("a line with {words:?}: {}", server.log()));
}

#[test]
fn libnbd_and_qemu_read_and_write_by_certificates() {
    require!(need::tools(&TOOLS));
    let host = Host::new();
    let server = host.x509("required");
    assert!(server.uri().starts_with("nbds://"), "{}", server.uri());
    let uri = by_certificate(&server, &host.client);
    assert_eq!(nbdinfo(&uri).success().stdout.trim(), SIZE.to_string());
    let copy = host.scratch.path("copy.img");
    run(tool("nbdcopy").args([&uri, str(&copy)])).success();
    assert!(fs::read(&copy).unwrap() == host.content, "nbdcopy read other bytes");
    // In the other direction, with other content: many requests of 256 KiB in flight.
    let content = random_bytes(&mut seeded(), SIZE);
    let new = host.scratch.image_of("new.img", &content);
    run(tool("nbdcopy").args([new.str(), &uri])).success();
    let credentials = format!("tls-creds-x509,id=tls,endpoint=client,dir={}", str(&host.client));
    let qemu =
        format!("driver=nbd,host=localhost,port={},export=disk,tls-creds=tls", port(&server));
    let compare = ["compare", "--object", &credentials, "--image-opts", &qemu];
    let raw = format!("driver=raw,file.filename={}", new.str());
    run(tool("qemu-img").args(compare).arg(&raw)).success();
    server.stop();
    let served = fs::read(host.scratch.path("disk.img")).unwrap();
    assert!(served == content, "nbdcopy wrote other bytes");
}

#[test]
fn a_server_that_has_to_check_clients_starts_only_with_an_authority() {
    require!(need::tools(&TOOLS));
    let host = Host::new();
    let authority = host.pki.folder().join("ca-cert.pem");
    let refused = |more: &str, said: &str| {
        let folder = str(host.pki.folder());
        let object = format!("tls-creds-x509,id=t,endpoint=server,dir={folder}{more}");
        let serve = host.serve().option("--object", object).option("--tls-creds", "t");
        serve.export("nbd://localhost:0/disk").refused().wrong_usage(&[said, str(&authority)]);
    };
    refused(",verify-peer=no", "must show a certificate");
    fs::rename(&authority, authority.with_extension("old")).unwrap();
    refused("", "Unable to access credentials");
    refused(",verify-peer=yes", "Unable to access credentials");
}

#[test]
fn clients_are_checked_also_when_the_authority_was_removed() {
    require!(need::tools(&TOOLS));
    let host = Host::new();
    let server = host.x509("required");
    let authority = host.pki.folder().join("ca-cert.pem");
    fs::rename(&authority, authority.with_extension("old")).unwrap();
    server.signal(Signal::HUP);
    let told = || server.log().contains("clients are checked by it");
    assert!(eventually(Duration::from_secs(30), told), "{}", server.log());
    let nameless = host.scratch.path("nameless");
    fs::create_dir(&nameless).unwrap();
    fs::copy(host.client.join("ca-cert.pem"), nameless.join("ca-cert.pem")).unwrap();
    nbdinfo(&by_certificate(&server, &nameless)).failure("");
    nbdinfo(&by_certificate(&server, &host.client)).success();
    server.stop();
}

#[test]
fn credentials_are_objects_as_qemu_names_them() {
    require!(need::tools(&TOOLS));
    let host = Host::new();
    let disk = host.scratch.path("disk.img");
    let keys = |endpoint: &str| {
        let folder = str(host.keys.parent().expect("a folder"));
        format!("tls-creds-psk,id=t,dir={folder},endpoint={endpoint},username=alice")
    };
    let by_keys = host.serve().option("--object", keys("server")).option("--tls-creds", "t");
    let by_keys = by_keys.export("nbd://localhost:0/disk").start();
    let certificates = |name: &str| {
        let folder = str(&host.client);
        format!("tls-creds-x509,id={name},dir={folder},endpoint=client")
    };
    let image = |server: &Server, more: &str| {
        format!("driver=nbd,host=localhost,port={},export=disk,tls-creds=t{more}", port(server))
    };
    let compare = |object: &str, image: &str| {
        let raw = format!("driver=raw,file.filename={},file.locking=off", str(&disk));
        run(Command::new(blockhouse()).args([
            "compare",
            "--object",
            object,
            "--image-opts",
            image,
            &raw,
        ]))
    };
    compare(&keys("client"), &image(&by_keys, "")).success();
    compare(&keys("server"), &image(&by_keys, "")).failure("client endpoint");
    by_keys.stop();
    let by_certificates = host.x509("required");
    compare(&certificates("t"), &image(&by_certificates, "")).success();
    compare(&certificates("t"), &image(&by_certificates, ",tls-hostname=other"))
        .failure("hostname mismatch");
    compare(&certificates("u"), &image(&by_certificates, ""))
        .failure("No TLS credentials with id 't'");
}

#[test]
fn a_certificate_that_is_missing_wrong_expired_or_revoked_is_refused() {
    require!(need::tools(&TOOLS));
    let host = Host::new();
    let server = host.x509("required");
    // A client certificate of another authority; the client trusts the server's authority.
    let other = Pki::new(&host.scratch.path("other"));
    let stranger = other.client("mallory", Validity::Now);
    fs::copy(host.client.join("ca-cert.pem"), stranger.join("ca-cert.pem")).unwrap();
    let words = ["refused by TLS", "mallory"];
    assert_refused(&server, &nbdinfo(&by_certificate(&server, &stranger)), &words);
    let expired = host.pki.client("eve", Validity::Expired);
    let words = ["refused by TLS", "eve", "expired"];
    assert_refused(&server, &nbdinfo(&by_certificate(&server, &expired)), &words);
    let nameless = host.scratch.path("nameless");
    fs::create_dir(&nameless).unwrap();
    fs::copy(host.client.join("ca-cert.pem"), nameless.join("ca-cert.pem")).unwrap();
    let words = ["refused by TLS", "no certificate"];
    assert_refused(&server, &nbdinfo(&by_certificate(&server, &nameless)), &words);
    // The certificate is revoked while the server runs; SIGHUP makes the server read the list.
    let uri = by_certificate(&server, &host.client);
    nbdinfo(&uri).success();
    host.pki.revoke(&host.client);
    nbdinfo(&uri).success();
    server.signal(Signal::HUP);
    wait_until(|| server.log().contains("read the files again"), "a reload");
    assert_refused(&server, &nbdinfo(&uri), &["refused by TLS", "alice", "revoked"]);
    let good = host.pki.client("bob", Validity::Now);
    nbdinfo(&by_certificate(&server, &good)).success();
    // A reload that fails changes nothing.
    fs::write(host.pki.folder().join("server-key.pem"), "nonsense").unwrap();
    server.signal(Signal::HUP);
    wait_until(|| server.log().contains("server-key.pem"), "an error");
    nbdinfo(&by_certificate(&server, &good)).success();
    server.stop();
}

#[test]
fn without_a_ca_clients_are_not_checked_and_the_log_says_so() {
    require!(need::tools(&TOOLS));
    let host = Host::new();
    let folder = host.pki.folder();
    fs::remove_file(folder.join("ca-cert.pem")).unwrap();
    let server = host.x509("required");
    assert!(server.log().contains("ca-cert.pem"), "{}", server.log());
    let nameless = host.scratch.path("nameless");
    fs::create_dir(&nameless).unwrap();
    fs::copy(host.client.join("ca-cert.pem"), nameless.join("ca-cert.pem")).unwrap();
    nbdinfo(&by_certificate(&server, &nameless)).success();
    server.stop();
    let files = host.serve().option("--tls-certificates", folder).option("--tls-allow", "disk=x");
    files.refused().failed(&["ca-cert.pem", "is missing"]);
    fs::remove_file(folder.join("server-cert.pem")).unwrap();
    host.serve().option("--tls-certificates", folder).refused().failed(&["server-cert.pem"]);
}

#[test]
fn keys_admit_their_users_and_no_others() {
    require!(need::tools(&TOOLS));
    let host = Host::new();
    let server = host.psk();
    let uri = by_key(&server, "alice", &host.keys);
    let copy = host.scratch.path("copy.img");
    run(tool("nbdcopy").args([&uri, str(&copy)])).success();
    assert!(fs::read(&copy).unwrap() == host.content, "nbdcopy read other bytes");
    let wrong = host.scratch.path("wrong.psk");
    psk_file(&wrong, &["alice", "mallory"]);
    let outcome = nbdinfo(&by_key(&server, "alice", &wrong));
    assert_refused(&server, &outcome, &["refused by TLS", "alice", "wrong"]);
    let outcome = nbdinfo(&by_key(&server, "mallory", &wrong));
    assert_refused(&server, &outcome, &["refused by TLS", "mallory", "no key"]);
    let outcome = nbdinfo(&by_certificate(&server, &host.client));
    assert_refused(&server, &outcome, &["refused by TLS"]);
    // A new user, after a reload.
    fs::copy(&host.keys, host.scratch.path("old.psk")).unwrap();
    psk_file(&host.keys, &["carol"]);
    server.signal(Signal::HUP);
    wait_until(|| server.log().contains("read the files again"), "a reload");
    nbdinfo(&by_key(&server, "carol", &host.keys)).success();
    server.stop();
    fs::write(&host.keys, "alice:xyz\n").unwrap();
    host.serve().option("--tls-psk", &host.keys).refused().failed(&["keys.psk", "line 1"]);
}

#[test]
fn a_plain_client_gets_nothing_where_tls_is_required() {
    require!(need::tools(&TOOLS));
    let host = Host::new();
    let server = host.x509("required");
    let plain = format!("nbd://localhost:{}/disk", port(&server));
    let words = ["does not use TLS", "required"];
    assert_refused(&server, &nbdinfo(&plain), &words);
    let mut client = Greeted::new(&server.address());
    for number in [option::LIST, option::GO, 6, 8, 9, 10, 11, 99] {
        assert_eq!(client.outcome(number, &go_data("disk")), ERR_TLS_REQD, "option {number}");
        assert_eq!(client.outcome(number, &vec![0; 70_000]), ERR_TLS_REQD, "option {number}");
    }
    client.send_head(option::EXPORT_NAME, 4).unwrap();
    client.0.write_all(b"disk").unwrap();
    assert_eq!(client.0.read(&mut [0; 8]).unwrap_or(0), 0, "EXPORT_NAME ends the connection");
    server.stop();
}

#[test]
fn optional_tls_hides_the_exports_that_are_for_certain_clients() {
    require!(need::tools(&TOOLS));
    let host = Host::new();
    host.scratch.image_of("open.img", &host.content);
    let socket = host.scratch.socket("nbd");
    let serve = host.serve().also(&host.scratch.path("open.img"));
    let server = serve
        .option("--tls-certificates", host.pki.folder())
        .option("--tls", "optional")
        .option("--tls-allow", "disk.img=alice")
        .export(&nbd_uri("", &socket))
        .start();
    let plain = |name: &str| nbd_uri(name, &socket);
    let by = |name: &str, folder: &Path| {
        let socket = str(&socket);
        format!("nbds+unix://localhost/{name}?socket={socket}&tls-certificates={}", str(folder))
            .replace("//localhost/", "///")
    };
    nbdinfo(&plain("open.img")).success();
    assert!(!nbdinfo(&plain("disk.img")).status.success());
    let list = run(tool("nbdinfo").args(["--list", &plain("")])).success().stdout;
    assert!(list.contains("open.img") && !list.contains("disk.img"), "{list}");
    let mut client = Greeted::new(&server.address());
    assert_eq!(client.outcome(option::GO, &go_data("disk.img")), ERR_TLS_REQD);
    assert_eq!(client.outcome(option::GO, &go_data("none")), reply::ERR_UNKNOWN);
    let bob = host.pki.client("bob", Validity::Now);
    nbdinfo(&by("disk.img", &host.client)).success();
    nbdinfo(&by("open.img", &bob)).success();
    let outcome = nbdinfo(&by("disk.img", &bob));
    assert_refused(&server, &outcome, &["client refused", "bob", "disk.img", "--tls-allow"]);
    server.stop();
}

#[test]
fn an_nbds_socket_requires_tls_beside_a_plain_one() {
    require!(need::tools(&TOOLS));
    let host = Host::new();
    let (open, closed) = (host.scratch.socket("open"), host.scratch.socket("closed"));
    let serve = host.serve().option("--tls-psk", &host.keys).option("--tls", "optional");
    let server = serve
        .export(&nbd_uri("", &open))
        .export(&format!("nbds+unix:///?socket={}", str(&closed)))
        .start();
    assert!(server.uris()[1].starts_with("nbds+unix:"), "{:?}", server.uris());
    nbdinfo(&nbd_uri("", &open)).success();
    assert!(!nbdinfo(&nbd_uri("", &closed)).status.success());
    let query = format!("socket={}&tls-psk-file={}", str(&closed), str(&host.keys));
    nbdinfo(&format!("nbds+unix://alice@/?{query}")).success();
    server.stop();
    // With port 0 the address of the socket differs from that in the URI.
    let serve = host.serve().option("--tls-psk", &host.keys).option("--tls", "optional");
    let server = serve.export("nbds://localhost:0/disk").start();
    assert!(server.uri().starts_with("nbds:"), "{}", server.uri());
    assert!(!nbdinfo(&format!("nbd://localhost:{}/disk", port(&server))).status.success());
    nbdinfo(&by_key(&server, "alice", &host.keys)).success();
    server.stop();
}

#[test]
fn bytes_in_plain_behind_starttls_end_the_connection() {
    require!(need::tools(&TOOLS));
    let host = Host::new();
    let server = host.x509("optional");
    let mut client = Greeted::new(&server.address());
    // In one segment: STARTTLS, and an option that an attacker in the middle adds.
    let option = |number: u32, data: &[u8]| {
        let mut bytes = b"IHAVEOPT".to_vec();
        bytes.extend(number.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        bytes
    };
    client.0.write_all(&[option(option::STARTTLS, &[]), option(8, &[])].concat()).unwrap();
    let mut rest = Vec::new();
    client.0.read_to_end(&mut rest).expect("the connection ends");
    assert_eq!(rest.len(), 20, "the reply to STARTTLS and nothing more: {rest:?}");
    wait_until(|| server.log().contains("in plain after STARTTLS"), "a line in the log");
    // Options from before TLS are forgotten: a second STRUCTURED_REPLY counts as the first.
    let python = "import nbd, sys\n\
        h = nbd.NBD()\n\
        h.set_tls(nbd.TLS_REQUIRE)\n\
        h.set_tls_certificates(sys.argv[1])\n\
        h.set_opt_mode(True)\n\
        h.set_export_name('disk')\n\
        h.set_request_structured_replies(True)\n\
        h.connect_tcp('localhost', sys.argv[2])\n\
        assert h.get_structured_replies_negotiated()\n\
        h.opt_go()\n\
        assert len(h.pread(65536, 0)) == 65536\n\
        h.shutdown()\n";
    require!(need::python_module("nbd"));
    let words = ["-c", python, str(&host.client), &port(&server).to_string()];
    run(Command::new("/usr/bin/python3").args(words)).success();
    server.stop();
}

#[test]
fn hostile_handshakes_hold_their_seats_only_and_only_for_a_while() {
    require!(need::tools(&TOOLS));
    let host = Host::new();
    let serve = host.serve().option("--tls-certificates", host.pki.folder());
    let serve = serve.option("--limit", "clients=40,handshake=2");
    let server = serve.export("nbd://localhost:0/disk").start();
    let mut random = seeded();
    let begin = |bytes: &[u8]| {
        let mut client = Greeted::new(&server.address());
        assert_eq!(client.outcome(option::STARTTLS, &[]), reply::ACK);
        let _ = client.0.write_all(bytes);
        client
    };
    // Garbage ends the connection at once.
    for length in [5, 100, 5000] {
        let mut garbage = random_bytes(&mut random, length);
        garbage[0] |= 0x80;
        let mut client = begin(&garbage);
        let _ = client.0.read_to_end(&mut Vec::new());
    }
    wait_until(|| server.log().contains("refused by TLS"), "a line in the log");
    // The beginning of a ClientHello, and then silence: six bytes, which announce a record of 512
    // bytes.
    let start = Instant::now();
    let mut silent: Vec<_> = (0..35).map(|_| begin(&[22, 3, 1, 2, 0, 1])).collect();
    // Other clients are served meanwhile.
    nbdinfo(&by_certificate(&server, &host.client)).success();
    for client in &mut silent {
        let _ = client.0.read_to_end(&mut Vec::new());
    }
    assert!(start.elapsed() > Duration::from_secs(1), "they were not given their time");
    nbdinfo(&by_certificate(&server, &host.client)).success();
    server.stop();
}

/// fio writes and verifies, with many requests in flight.
#[test]
fn fio_writes_and_verifies_by_tls() {
    require!(need::tools(&[&TOOLS[..], &["fio"]].concat()));
    let host = Host::new();
    // libnbd takes no certificate files from fio's URI. It finds those of an ordinary user in the
    // home folder, which others must be allowed to enter.
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().join(".config/pki/libnbd");
    fs::create_dir_all(&folder).unwrap();
    for file in ["ca-cert.pem", "client-cert.pem", "client-key.pem"] {
        fs::copy(host.client.join(file), folder.join(file)).unwrap();
        fs::set_permissions(folder.join(file), fs::Permissions::from_mode(0o644)).unwrap();
    }
    let folders = [".config/pki/libnbd", ".config/pki", ".config", ""];
    for folder in folders.map(|name| home.path().join(name)) {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o777)).unwrap();
    }
    let server = host.x509("required");
    // Few bytes, because each request waits until three programs have been scheduled.
    for (size, depth, whole) in [("4k", "64", "512k"), ("256k", "4", "2M")] {
        let mut fio = tool("fio");
        if rustix::process::geteuid().is_root() {
            fio.uid(65534).gid(65534);
        }
        fio.current_dir(home.path()).env("HOME", home.path());
        fio.args(["--name=tls", "--ioengine=nbd", "--rw=randwrite", "--verify=crc32c"]);
        fio.arg(format!("--bs={size}"));
        fio.arg(format!("--iodepth={depth}"));
        fio.arg(format!("--size={whole}"));
        fio.arg(format!("--uri=nbds://localhost:{}/disk", port(&server)));
        let outcome = run_within(Duration::from_secs(300), &mut fio).success();
        assert!(outcome.stdout.contains("err= 0"), "{}", outcome.describe("must verify"));
    }
    server.stop();
}

#[test]
fn clients_of_tls_1_2_are_served_and_those_of_tls_1_1_are_not() {
    require!(need::tools(&TOOLS));
    let host = Host::new();
    let server = host.x509("required");
    let copy = host.scratch.path("copy.img");
    let by = |priority: &str| {
        let credentials = format!(
            "tls-creds-x509,id=tls,endpoint=client,dir={},priority=NORMAL:-VERS-TLS-ALL:{priority}",
            str(&host.client)
        );
        let source =
            format!("driver=nbd,host=localhost,port={},export=disk,tls-creds=tls", port(&server));
        let words = ["convert", "--object", &credentials, "--image-opts", &source, str(&copy)];
        run(tool("qemu-img").args(words))
    };
    by("+VERS-TLS1.2").success();
    assert!(fs::read(&copy).unwrap() == host.content, "qemu-img read other bytes");
    assert_refused(&server, &by("+VERS-TLS1.1"), &["refused by TLS", "no TLS 1.2 or later"]);
    server.stop();
}

/// A TLS 1.2 client with a user's key, in the phase in which the server waits for options.
pub(crate) fn by_hand(
    server: &Server,
    host: &Host,
    user: &str,
) -> Tls12<impl Read + Write + use<>> {
    let mut client = Greeted::new(&server.address());
    assert_eq!(client.outcome(option::STARTTLS, &[]), reply::ACK);
    let keys = fs::read_to_string(&host.keys).expect("keys");
    let line = keys.lines().find_map(|line| line.strip_prefix(&format!("{user}:")));
    let digits = line.expect("a key").as_bytes().chunks(2);
    let byte = |digits: &[u8]| u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16);
    let key: Vec<u8> = digits.map(|digits| byte(digits).expect("digits")).collect();
    Tls12::connect(client.0, user, &key).expect("a handshake")
}

#[test]
fn a_client_that_renegotiates_without_end_is_disconnected() {
    require!(need::tools(&TOOLS));
    let host = Host::new();
    let server = host.psk();
    let list = [&b"IHAVEOPT"[..], &option::LIST.to_be_bytes(), &[0; 4]].concat();
    // Some attempts at renegotiation are refused, and the connection continues.
    let mut client = by_hand(&server, &host, "alice");
    for _ in 0..10 {
        client.ask_to_renegotiate().unwrap();
    }
    client.send_data(&list).unwrap();
    let mut answers = std::iter::from_fn(|| client.next_record());
    assert_eq!(answers.by_ref().take(10).collect::<Vec<_>>(), [21; 10], "alerts");
    assert_eq!(answers.next(), Some(23), "the list");
    // After too many attempts the connection ends, so that they do not use unlimited memory.
    let mut client = by_hand(&server, &host, "bob");
    let is_over = (0..100_000).any(|_| client.ask_to_renegotiate().is_err());
    assert!(is_over, "it goes on for ever");
    nbdinfo(&by_key(&server, "alice", &host.keys)).success();
    server.stop();
}

#[test]
fn thousands_of_half_open_clients_keep_nobody_out() {
    require!(need::tools(&TOOLS));
    let host = Host::new();
    let serve = host.serve().option("--tls-certificates", host.pki.folder());
    let server = serve.option("--limit", "handshake=3").export("nbd://localhost:0/disk").start();
    let _ = rustix::process::setrlimit(
        rustix::process::Resource::Nofile,
        rustix::process::Rlimit {
            maximum: rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum,
            current: rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum,
        },
    );
    let address = ("localhost", port(&server));
    let half_open: Vec<_> = (0..4000)
        .filter_map(|_| {
            let mut socket = std::net::TcpStream::connect(address).ok()?;
            let mut hello = vec![0, 0, 0, 3];
            hello.extend(b"IHAVEOPT");
            hello.extend(option::STARTTLS.to_be_bytes());
            hello.extend(0_u32.to_be_bytes());
            socket.write_all(&hello).ok()?;
            Some(socket)
        })
        .collect();
    assert!(half_open.len() > 1000, "{} connections", half_open.len());
    let uri = by_certificate(&server, &host.client);
    wait_until(|| nbdinfo(&uri).status.success(), "a good client is served");
    assert!(server.resident_memory() < 512 << 20, "{} bytes", server.resident_memory());
    drop(half_open);
    server.stop();
}

/// Clients whose certificate or key is revoked are disconnected at the reload, and others are not.
#[test]
fn a_revoked_client_is_disconnected_at_the_reload() {
    require!(need::tools(&TOOLS));
    require!(need::python_module("nbd"));
    let host = Host::new();
    let python = "import nbd, os, signal, subprocess, sys, time\n\
        port, server, how, own, other, revoke = sys.argv[1:7]\n\
        def connect(who):\n\
        \x20   h = nbd.NBD()\n\
        \x20   h.set_tls(nbd.TLS_REQUIRE)\n\
        \x20   if how == 'x509':\n\
        \x20       h.set_tls_certificates(who)\n\
        \x20   else:\n\
        \x20       h.set_tls_psk_file(own)\n\
        \x20       h.set_tls_username(who)\n\
        \x20   h.set_export_name('disk')\n\
        \x20   h.connect_tcp('localhost', port)\n\
        \x20   h.pread(512, 0)\n\
        \x20   return h\n\
        gone, stays = (connect(own), connect(other)) if how == 'x509' else (connect('bob'), connect('alice'))\n\
        os.kill(int(server), signal.SIGHUP)\n\
        time.sleep(0.5)\n\
        gone.pread(512, 0)\n\
        subprocess.run(['sh', '-c', revoke], check=True)\n\
        os.kill(int(server), signal.SIGHUP)\n\
        end = time.time() + 20\n\
        try:\n\
        \x20   while time.time() < end:\n\
        \x20       gone.pread(512, 0)\n\
        \x20       time.sleep(0.05)\n\
        except nbd.Error:\n\
        \x20   print('disconnected')\n\
        stays.pread(512, 0)\n\
        print('stays')\n";
    let told = |server: &Server, words: [&str; 4]| {
        let mut command = Command::new("/usr/bin/python3");
        let process = server.pid().as_raw_nonzero().to_string();
        command.args(["-c", python, &port(server).to_string(), &process]).args(words);
        assert_eq!(run(&mut command).success().stdout, "disconnected\nstays\n");
        wait_until(|| server.log().contains("was revoked"), "a line about the revocation");
    };
    let server = host.x509("required");
    let bob = host.pki.client("bob", Validity::Now);
    // First a list without alice, and later the list that revokes her certificate.
    let list = host.pki.folder().join("ca-crl.pem");
    host.pki.revoke(&host.client);
    let later = host.scratch.path("later.pem");
    fs::rename(&list, &later).unwrap();
    let revoke = format!("mv {} {}", str(&later), str(&list));
    told(&server, ["x509", str(&host.client), str(&bob), &revoke]);
    server.stop();
    let server = host.serve().option("--tls-psk", &host.keys).export("nbds://localhost:0/disk");
    let server = server.start();
    let client_keys = host.scratch.path("client.psk");
    fs::copy(&host.keys, &client_keys).unwrap();
    let revoke = format!("sed -i /^bob:/d {}", str(&host.keys));
    told(&server, ["psk", str(&client_keys), "-", &revoke]);
    server.stop();
}

#[test]
fn an_upgrade_disconnects_clients_with_tls_only_where_it_is_asked_to() {
    require!(need::tools(&TOOLS));
    require!(need::python_module("nbd"));
    let host = Host::new();
    let control = host.scratch.socket("control");
    let socket = host.scratch.socket("nbd");
    let server = host
        .serve()
        .option("--tls-psk", &host.keys)
        .option("--tls", "optional")
        .option("--control", &control)
        .export(&nbd_uri("", &socket))
        .start();
    let python = "import nbd, sys, subprocess\n\
        def connect():\n\
        \x20   h = nbd.NBD()\n\
        \x20   h.set_tls(nbd.TLS_REQUIRE)\n\
        \x20   h.set_tls_psk_file(sys.argv[1])\n\
        \x20   h.set_tls_username('alice')\n\
        \x20   h.connect_unix(sys.argv[2])\n\
        \x20   return h\n\
        upgrade = lambda *w: subprocess.run([*sys.argv[3:], *w], capture_output=True, text=True)\n\
        h = connect()\n\
        h.pwrite(b'7' * 512, 0)\n\
        print(upgrade().stderr)\n\
        h.pread(512, 0)\n\
        print(upgrade('--disconnect-tls'))\n\
        try:\n\
        \x20   h.pread(512, 0)\n\
        except nbd.Error:\n\
        \x20   print('the connection has ended')\n\
        h = connect()\n\
        assert h.pread(512, 0) == b'7' * 512\n\
        h.shutdown()\n";
    let mut command = Command::new("/usr/bin/python3");
    command.args(["-c", python, str(&host.keys), str(&socket)]);
    command.arg(blockhouse_tests::blockhouse()).args(["upgrade", "--control", str(&control)]);
    let servers = Servers(&host.scratch);
    let outcome = run(&mut command).success();
    let told = outcome.stdout;
    for words in ["1 clients use TLS", "--disconnect-tls", "serves now", "has ended"] {
        assert!(told.contains(words), "{words}: {told}");
    }
    // A client without TLS is handed over, and the new server has TLS.
    let _plain = Greeted::new(&server.address()).go("", Framing::Structured);
    wait_until(
        || upgrade(&control, &[]).status.success(),
        "an upgrade once the client with TLS has gone",
    );
    let query = format!("socket={}&tls-psk-file={}", str(&socket), str(&host.keys));
    nbdinfo(&format!("nbds+unix://alice@/?{query}")).success();
    servers.stop();
}
