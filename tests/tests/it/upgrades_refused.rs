//! Servers that cannot be upgraded, because they have something that cannot be handed over: disks
//! on other servers, and keys. One line says so, no client is disconnected, and doing what the line
//! says is enough.

use std::path::Path;

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{command, str};
use blockhouse_tests::nbd::{Client, option};
use blockhouse_tests::upgrade::{Servers, upgrade, upgrade_in_the_end};
use blockhouse_tests::{Scratch, Serve, Server, need, require};
use serde_json::json;

use crate::remote_tls::keeper;
use crate::tls::{Host, TOOLS, by_hand};

/// Asserts that an upgrade is refused in one line with these words, and that the server still
/// serves its client.
#[track_caller]
fn refused(servers: &Servers<'_>, server: &Server, client: &mut Client, words: &[&str], round: u8) {
    let control = servers.0.socket("control");
    for option in [&[][..], &["--disconnect-tls"]] {
        assert_eq!(client.write(4096, &[round; 4096], 0), 0);
        let outcome = upgrade(&control, option).failure("not upgraded, the server goes on");
        assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.describe("one line"));
        for word in words {
            assert!(outcome.stderr.contains(word), "{}", outcome.describe(word));
        }
        assert_eq!(servers.running(), [server.pid()]);
        assert!(client.read(4096, 4096) == Ok(vec![round; 4096]));
    }
    Control::connect(&control).get("server.version", json!({}));
}

#[test]
fn a_disk_on_a_server_with_tls_is_not_handed_over() {
    require!(need::tools(&TOOLS));
    let host = Host::new();
    let far = Scratch::new();
    let (keeper, uri) = keeper(&host, &far, &host.scratch.path("disk.img"));
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let folder = host.keys.parent().expect("a folder");
    let overlay = scratch.path("overlay.qcow2");
    let create = ["create", "-b", &uri, "-F", "raw", "--allow-remote", "--allow-path"];
    command(&[&create[..], &[str(folder), str(&overlay)]].concat()).success();
    let control = scratch.socket("control");
    for (round, image) in [Path::new(&uri), &overlay].into_iter().enumerate() {
        let server = Serve::new(&scratch, image)
            .option("--control", &control)
            .flag("--allow-remote")
            .option("--allow-path", folder)
            .option("--tls-psk", &host.keys)
            .option("--tls", "optional")
            .start();
        let mut client = Client::open(&server.address());
        let words = ["another server", "close the disk"];
        refused(&servers, &server, &mut client, &words, round as u8 + 1);
        // A refused upgrade does not disconnect a client with TLS.
        let mut secured = by_hand(&server, &host, "alice");
        let outcome = upgrade(&control, &["--disconnect-tls"]).failure("another server");
        assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.describe("one line"));
        let list = [&b"IHAVEOPT"[..], &option::LIST.to_be_bytes(), &[0; 4]].concat();
        secured.send_data(&list).expect("it is connected");
        assert_eq!(secured.next_record(), Some(23), "an answer");
        drop((secured, client));
        let mut ask = Control::connect(&control);
        let disk = ask.get("disk.list", json!({}))[0]["disk"].clone();
        ask.get("disk.close", json!({ "disk": disk, "force": true }));
        drop(ask);
        upgrade_in_the_end(&control, &["--disconnect-tls"]);
        servers.stop();
        drop(server);
    }
    keeper.stop();
}

#[test]
fn an_encrypted_disk_is_not_handed_over() {
    let scratch = Scratch::new();
    let servers = Servers(&scratch);
    let key = scratch.path("key");
    std::fs::write(&key, "a key").expect("a file");
    let control = scratch.socket("control");
    for (round, options) in
        [["luks", "iter-time=10"], ["qcow2", "encrypt.format=luks,encrypt.iter-time=10"]]
            .into_iter()
            .enumerate()
    {
        let [format, option] = options;
        let (image, round) = (scratch.path(&format!("disk.{format}")), round as u8 + 1);
        let words = ["create", "-f", format, "-o", option, "--key-file", str(&key)];
        command(&[&words[..], &[str(&image), "1M"]].concat()).success();
        let serve = || {
            let serve = Serve::new(&scratch, &image).option("--format", format);
            serve.option("--key-file", &key).option("--control", &control)
        };
        let server = serve().start();
        let mut client = Client::open(&server.address());
        refused(&servers, &server, &mut client, &["is encrypted", "its key", "stop"], round);
        // Stops and starts the server, as the line says; all writes are there.
        server.stop();
        let server = serve().start();
        let mut client = Client::open(&server.address());
        assert!(client.read(4096, 4096) == Ok(vec![round; 4096]));
        drop(client);
        server.stop();
    }
}
