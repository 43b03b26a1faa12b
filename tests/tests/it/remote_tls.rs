//! Images on servers with TLS, of other projects and ours: they are read, written, exported again,
//! and used as the target of a mirror and as a base. Each reason why client and server do not trust
//! each other gets one line.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{command, json, qemu_io, str};
use blockhouse_tests::pki::{Pki, Validity, psk_file};
use blockhouse_tests::{Outcome, Scratch, Serve, Server, blockhouse, nbd_uri, need, require, run};
use rustix::process::Signal;
use serde_json::json;

use crate::jobs::{Foreign, wait_for};
use crate::tls::{Host, SIZE, TOOLS, assert_refused, by_certificate, by_key};

const SERVERS: [&str; 2] = ["qemu-nbd", "nbdkit"];
const TLS_1_2: &str = "NORMAL:-VERS-TLS-ALL:+VERS-TLS1.2";

/// Another project's server with TLS, which exports the image of a host at a Unix socket.
struct Other<'a> {
    host: &'a Host,
    socket: PathBuf,
}

impl<'a> Other<'a> {
    fn new(host: &'a Host) -> Self {
        Self { host, socket: host.scratch.socket("other") }
    }

    fn start(&self, program: &str, words: &[&str]) -> Foreign {
        // A server that was killed leaves its socket.
        let _ = fs::remove_file(&self.socket);
        Foreign::start(program, words, &self.socket)
    }

    /// Starts qemu-nbd. `credentials` is a QEMU object, without the prefix of its type and without
    /// its id.
    fn qemu(&self, credentials: &str) -> Foreign {
        let object = format!("tls-creds-{credentials},id=tls,endpoint=server");
        let words = ["--object", &object, "--tls-creds=tls", "--format=raw", "--persistent"];
        let rest = ["--shared=4", "--export-name=disk", "--socket", str(&self.socket)];
        let image = self.host.scratch.path("disk.img");
        self.start("qemu-nbd", &[&words[..], &rest, &[str(&image)]].concat())
    }

    fn qemu_x509(&self, folder: &Path, more: &str) -> Foreign {
        self.qemu(&format!("x509,verify-peer=yes,dir={}{more}", str(folder)))
    }

    fn qemu_psk(&self, more: &str) -> Foreign {
        let folder = self.host.scratch.path("keys");
        fs::create_dir_all(&folder).unwrap();
        fs::copy(&self.host.keys, folder.join("keys.psk")).unwrap();
        self.qemu(&format!("psk,dir={}{more}", str(&folder)))
    }

    fn nbdkit(&self, tls: &[&str]) -> Foreign {
        let image = self.host.scratch.path("disk.img");
        let words = ["-f", "-U", str(&self.socket), "--tls=require"];
        self.start("nbdkit", &[&words[..], tls, &["file", str(&image)]].concat())
    }

    fn by_certificate(&self, folder: &Path) -> String {
        let socket = str(&self.socket);
        let folder = str(folder);
        format!(
            "nbds+unix:///disk?socket={socket}&tls-certificates={folder}&tls-hostname=localhost"
        )
    }

    fn by_key(&self, user: &str, file: &Path) -> String {
        let (socket, file) = (str(&self.socket), str(file));
        format!("nbds+unix://{user}@/disk?socket={socket}&tls-psk-file={file}")
    }
}

/// Reads the host's image through this URI, and writes new content.
#[track_caller]
fn read_and_write(host: &mut Host, uri: &str) {
    let copy = host.scratch.path("copy.img");
    command(&["convert", uri, str(&copy)]).success();
    assert!(fs::read(&copy).unwrap() == host.content, "other bytes were read");
    host.content.rotate_left(4096 + 17);
    fs::write(&copy, &host.content).unwrap();
    command(&["convert", "--force", "--format", "raw", str(&copy), uri]).success();
    command(&["compare", uri, str(&copy)]).success();
    fs::remove_file(copy).unwrap();
}

/// Asserts that this URI is refused with one line that has these words.
#[track_caller]
fn refused(uri: &str, words: &[&str]) -> Outcome {
    failed(command(&["info", uri]), words)
}

#[track_caller]
fn failed(outcome: Outcome, words: &[&str]) -> Outcome {
    assert_eq!(outcome.status.code(), Some(1), "{}", outcome.describe("must fail"));
    let is_good = words.iter().all(|word| outcome.stderr.contains(word));
    assert!(is_good, "{}", outcome.describe(&format!("must say {words:?}")));
    assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.describe("one line"));
    outcome
}

#[test]
fn images_of_other_servers_are_read_and_written_by_certificates() {
    require!(need::tools(&[&TOOLS[..], &SERVERS].concat()));
    let mut host = Host::new();
    let folder = host.pki.folder().to_owned();
    let client = host.client.clone();
    for priority in ["", TLS_1_2] {
        let more = if priority.is_empty() { "" } else { &format!(",priority={priority}") };
        let (uri, server) = {
            let other = Other::new(&host);
            (other.by_certificate(&client), other.qemu_x509(&folder, more))
        };
        read_and_write(&mut host, &uri);
        drop(server);
    }
    let certificates = format!("--tls-certificates={}", str(&folder));
    let (uri, server) = {
        let other = Other::new(&host);
        (other.by_certificate(&client), other.nbdkit(&[&certificates, "--tls-verify-peer"]))
    };
    read_and_write(&mut host, &uri);
    drop(server);
    assert!(fs::read(host.scratch.path("disk.img")).unwrap() == host.content);
}

#[test]
fn images_of_other_servers_are_read_and_written_by_keys() {
    require!(need::tools(&[&TOOLS[..], &SERVERS].concat()));
    let mut host = Host::new();
    let keys = host.keys.clone();
    for priority in ["", TLS_1_2] {
        let more = if priority.is_empty() { "" } else { &format!(",priority={priority}") };
        let (uri, server) = {
            let other = Other::new(&host);
            (other.by_key("alice", &keys), other.qemu_psk(more))
        };
        read_and_write(&mut host, &uri);
        drop(server);
    }
    let (uri, server) = {
        let other = Other::new(&host);
        (other.by_key("bob", &keys), other.nbdkit(&[&format!("--tls-psk={}", str(&keys))]))
    };
    read_and_write(&mut host, &uri);
    drop(server);
}

#[test]
fn images_of_our_own_servers_are_read_and_written() {
    require!(need::tools(&TOOLS));
    let mut host = Host::new();
    let server = host.x509("required");
    let uri = by_certificate(&server, &host.client);
    read_and_write(&mut host, &uri);
    let info = json(&command(&["info", "--json", &uri]).success());
    assert_eq!(info["virtual-size"], SIZE);
    server.stop();
    let server = host.psk();
    let uri = by_key(&server, "bob", &host.keys);
    read_and_write(&mut host, &uri);
    server.stop();
    // A server that checks no client, and a client that checks no server.
    fs::remove_file(host.pki.folder().join("ca-cert.pem")).unwrap();
    let server = host.x509("optional");
    let uri = by_certificate(&server, &host.client);
    let (plain, _) = uri.split_once('?').unwrap();
    read_and_write(&mut host, &format!("{plain}?tls-verify-peer=false"));
    server.stop();
}

#[test]
fn a_server_that_is_not_who_it_has_to_be_is_refused() {
    require!(need::tools(&TOOLS));
    let host = Host::new();
    let server = host.x509("required");
    let uri = by_certificate(&server, &host.client);
    let stranger = Pki::new(&host.scratch.path("stranger"));
    let of_stranger = stranger.client("alice", Validity::Now);
    let words = ["the server's certificate (localhost)", "ca-cert.pem in tls-certificates"];
    refused(&by_certificate(&server, &of_stranger), &words);
    let (plain, _) = uri.split_once('?').unwrap();
    refused(plain, &["the server's certificate (localhost)", "add tls-certificates=DIR"]);
    let words = ["localhost", "mismatch", "tls-hostname=NAME"];
    refused(&format!("{uri}&tls-hostname=example.com"), &words);
    refused(&uri.replace("//localhost:", "//[::1]:"), &["::1"]);
    command(&["info", &uri.replace("//localhost:", "//127.0.0.1:")]).success();
    refused(&uri.replace("nbds://", "nbd://"), &["tls-certificates needs TLS"]);
    refused(&plain.replace("nbds://", "nbd://"), &["demands TLS", "nbds://"]);
    refused(&by_certificate(&server, Path::new("/nonexistent")), &["ca-cert.pem", "No such file"]);
    refused(&by_key(&server, "alice", &host.keys), &["the key of \"alice\"", "certificates"]);
    server.stop();
    host.pki.server_of(Validity::Expired);
    let server = host.x509("required");
    let uri = by_certificate(&server, &host.client);
    refused(&uri, &["the server's certificate (localhost)", "expired"]);
    server.stop();
    let server = host.serve().export("nbd://localhost:0/disk").start();
    refused(&by_certificate(&server, &host.client), &["the server has no TLS", "nbd://"]);
    server.stop();
}

/// Such a server cannot be an image, a target, a base, or the target of a mirror.
#[test]
fn a_server_that_shows_a_certificate_instead_of_the_key_is_refused() {
    require!(need::tools(&[&TOOLS[..], &SERVERS].concat()));
    let host = Host::new();
    let other = Other::new(&host);
    let uri = other.by_key("alice", &host.keys);
    let folder = str(host.pki.folder());
    for priority in ["NORMAL", "NORMAL:-VERS-TLS1.2", TLS_1_2] {
        let more = format!("x509,verify-peer=no,dir={folder},priority={priority}");
        let server = other.qemu(&more);
        // The server sends its certificate, or closes the connection because there is no common
        // cipher.
        refused(&uri, &["the server has"]);
        drop(server);
    }
    let server = other.nbdkit(&["--tls-verify-peer", &format!("--tls-certificates={folder}")]);
    refused(&uri, &["the server"]);
    let scratch = Scratch::new();
    let own = scratch.image_of("own.img", &host.content);
    failed(command(&["convert", "-n", "-O", "raw", own.str(), &uri]), &["the server"]);
    let overlay = scratch.path("overlay.qcow2");
    command(&["create", "-u", "-b", &uri, "-F", "raw", str(&overlay), "4M"]).success();
    let keys = str(host.keys.parent().unwrap());
    let words = ["map", "--allow-remote", "--allow-path", keys, str(&overlay)];
    failed(command(&words), &["the server"]);
    let control = scratch.socket("control");
    let serve = Serve::new(&scratch, own.path()).option("--control", &control);
    let running = serve.option("--sandbox-allow", keys).start();
    let start = json!({ "kind": "mirror", "disk": "own.img", "target": uri, "overwrite": true });
    Control::connect(&control).refused("job.start", start, -32000, &["the server"]);
    running.stop();
    drop(server);
}

/// The trusted authorities if the URI names none. A distribution's OpenSSL finds an authority by
/// the hash of its name; an OpenSSL built from source finds it in the file with all authorities.
#[test]
fn authorities_of_the_environment_or_else_of_the_system_are_trusted() {
    require!(need::tools(&[&TOOLS[..], &["openssl"]].concat()));
    let folder = Path::new("/etc/ssl/certs");
    let in_own_folder = require!(need::private_tmpfs(folder, 1 << 20));
    let host = Host::new();
    // The server does not check clients, because this client has no certificate.
    fs::remove_file(host.pki.folder().join("ca-cert.pem")).unwrap();
    let authority = host.client.join("ca-cert.pem");
    let server = host.x509("required");
    let uri = by_certificate(&server, &host.client);
    let (uri, _) = uri.split_once('?').unwrap();
    let words = ["the server's certificate (localhost)", "add tls-certificates=DIR"];
    refused(uri, &words);
    let info = |file: &Path| {
        let mut info = Command::new(blockhouse());
        run(info.args(["info", uri]).env("SSL_CERT_FILE", file))
    };
    info(&authority).success();
    let stranger = Pki::new(&host.scratch.path("stranger"));
    failed(info(&stranger.folder().join("ca-cert.pem")), &words);
    let install = r#"cp "$1" /etc/ssl/certs/ca-certificates.crt && cd /etc/ssl/certs &&
        ln -s ca-certificates.crt $(openssl x509 -noout -hash -in "$1").0 && exec "$2" info "$3""#;
    let mut installed = Command::new(&in_own_folder[0]);
    installed.args(&in_own_folder[1..]).args(["sh", "-c", install, "sh"]);
    installed.arg(&authority).arg(blockhouse()).arg(uri).env_remove("SSL_CERT_FILE");
    run(&mut installed).success();
    server.stop();
}

#[test]
fn a_client_whom_the_server_refuses_says_why() {
    require!(need::tools(&TOOLS));
    let host = Host::new();
    let server = host.x509("required");
    let nameless = host.scratch.path("nameless");
    fs::create_dir(&nameless).unwrap();
    fs::copy(host.client.join("ca-cert.pem"), nameless.join("ca-cert.pem")).unwrap();
    let outcome = refused(&by_certificate(&server, &nameless), &["client-cert.pem"]);
    assert_refused(&server, &outcome, &["refused by TLS", "no certificate"]);
    let expired = host.pki.client("eve", Validity::Expired);
    let outcome = refused(&by_certificate(&server, &expired), &["certificate", "expired"]);
    assert_refused(&server, &outcome, &["refused by TLS", "eve", "expired"]);
    host.pki.revoke(&host.client);
    server.signal(Signal::HUP);
    let uri = by_certificate(&server, &host.client);
    let is_revoked = || command(&["info", &uri]).stderr.contains("revoked");
    assert!(blockhouse_tests::eventually(std::time::Duration::from_secs(30), is_revoked));
    server.stop();
    let server = host.psk();
    let wrong = host.scratch.path("wrong.psk");
    psk_file(&wrong, &["alice", "mallory"]);
    let outcome = refused(&by_key(&server, "alice", &wrong), &["refuses the key", "alice"]);
    assert_refused(&server, &outcome, &["refused by TLS", "alice", "wrong"]);
    refused(&by_key(&server, "mallory", &wrong), &["refuses", "tls-psk-file"]);
    refused(&by_key(&server, "carol", &host.keys), &["has no key of \"carol\""]);
    server.stop();
}

/// A server at a Unix socket with TLS by pre-shared keys, and its URI.
pub(crate) fn keeper(host: &Host, scratch: &Scratch, image: &Path) -> (Server, String) {
    let socket = scratch.socket("keeper");
    let server = Serve::bare(scratch, image)
        .option("--tls-psk", &host.keys)
        .export(&format!("nbds+unix:///disk?socket={}", str(&socket)))
        .start();
    let uri =
        format!("nbds+unix://alice@/disk?socket={}&tls-psk-file={}", str(&socket), str(&host.keys));
    (server, uri)
}

#[test]
fn a_disk_is_mirrored_to_a_server_with_tls() {
    require!(need::tools(&TOOLS));
    let mut host = Host::new();
    let scratch = Scratch::new();
    let target = scratch.image_of("target.img", &vec![1; SIZE]).path().to_owned();
    let (keeper, uri) = keeper(&host, &scratch, &target);
    let control = host.scratch.socket("control");
    let allow = scratch.path("");
    let serve = host.serve().option("--control", &control).option("--sandbox-allow", &allow);
    let server = serve.start();
    let mut control = Control::connect(&control);
    let start = json!({ "kind": "mirror", "disk": "disk.img", "target": uri, "overwrite": true,
        "job": "m" });
    control.get("job.start", start);
    wait_for(&mut control, "m", "ready");
    control.get("job.complete", json!({ "job": "m" }));
    wait_for(&mut control, "m", "completed");
    // From now on the disk is on the other server.
    qemu_io("raw", Path::new(server.uri()), &["write -P 9 1M 4k", "flush"]);
    server.stop();
    keeper.stop();
    assert!(fs::read(host.scratch.path("disk.img")).unwrap() == host.content);
    host.content[1 << 20..(1 << 20) + 4096].fill(9);
    assert!(fs::read(target).unwrap() == host.content, "the copy is another");
}

#[test]
fn an_overlay_has_its_base_on_a_server_with_tls_that_comes_back() {
    require!(need::tools(&TOOLS));
    let host = Host::new();
    let scratch = Scratch::new();
    let base = host.scratch.path("disk.img");
    let (first, uri) = keeper(&host, &scratch, &base);
    let overlay = scratch.path("overlay.qcow2");
    let backing = format!("{uri}&reconnect=60");
    let words = ["create", "-b", &backing, "-F", "raw", "--allow-remote", "--allow-path"];
    let folder = host.keys.parent().unwrap();
    command(&[&words[..], &[str(folder), str(&overlay)]].concat()).success();
    // The image's creator may not use this host's keys.
    let outcome = command(&["map", "--allow-remote", str(&overlay)]).failure("--allow-path");
    assert!(outcome.stderr.contains("files of TLS"), "{}", outcome.stderr);
    let front = nbd_uri("", scratch.socket("front"));
    let server = Serve::bare(&scratch, &overlay)
        .export(&front)
        .flag("--allow-remote")
        .option("--allow-path", folder)
        .start();
    let read = scratch.path("read.img");
    let read_half = |at: &str| {
        let step = format!("read -v {at} 512");
        qemu_io("raw", Path::new(&front), &[&step, &format!("write -P 7 {at} 4k"), "flush"]);
    };
    read_half("64k");
    first.stop();
    let (second, _) = keeper(&host, &scratch, &base);
    read_half("2M");
    server.stop();
    let words =
        ["convert", "--allow-remote", "--allow-path", str(folder), str(&overlay), str(&read)];
    command(&words).success();
    second.stop();
    let mut model = host.content.clone();
    for at in [64 << 10, 2 << 20] {
        model[at..at + 4096].fill(7);
    }
    assert!(fs::read(&read).unwrap() == model, "the overlay reads other bytes");
}
