//! The block sizes that guests and clients see: those of the image, and those of options.

use std::path::Path;

use blockhouse_tests::control::Control;
use blockhouse_tests::guest::Guest;
use blockhouse_tests::image_tool::{command, qemu_img, str};
use blockhouse_tests::{Scratch, Serve, need, require, run, tool};
use blockhouse_vhost_user::driver::Options;
use serde_json::{Value, json};

/// The GUID, as stored, of the VHDX metadata item with the sector size.
const SECTOR_SIZE: [u8; 16] = [
    0x1d, 0xbf, 0x41, 0x81, 0x6f, 0xa9, 0x09, 0x47, 0xba, 0x47, 0xf2, 0x33, 0xa8, 0xfa, 0xab, 0x5f,
];

/// An image made by qemu-img and changed, whose disk has sectors of 4096 bytes.
fn vhdx(scratch: &Scratch) -> std::path::PathBuf {
    let path = scratch.path("disk.vhdx");
    qemu_img(&["create", "-q", "-f", "vhdx", str(&path), "64M"]).success();
    let mut file = std::fs::read(&path).expect("an image");
    let entry = file.windows(16).position(|window| window == SECTOR_SIZE).expect("the item");
    let table = file[..entry].windows(8).rposition(|window| window == b"metadata");
    let offset = u32::from_le_bytes(file[entry + 16..entry + 20].try_into().unwrap()) as usize;
    let value = table.expect("the table") + offset;
    assert_eq!(file[value..value + 4], 512_u32.to_le_bytes());
    file[value..value + 4].copy_from_slice(&4096_u32.to_le_bytes());
    std::fs::write(&path, file).expect("it can be written");
    path
}

/// Fields of the configuration space: sector, physical block and discard alignment, in bytes.
fn seen_by_guest(socket: &Path) -> [u64; 3] {
    let mut guest = Guest::connect(socket, Options::default());
    let config = guest.driver.config(0, 60).expect("the configuration");
    let word = |at: usize| u64::from(u32::from_le_bytes(config[at..at + 4].try_into().unwrap()));
    [word(20), word(20) << config[24], word(44) * 512]
}

fn seen_by_client(uri: &str) -> [Value; 2] {
    let outcome = run(tool("nbdinfo").arg("--json").arg(uri)).success();
    let answer: Value = serde_json::from_str(&outcome.stdout).expect("nbdinfo writes JSON");
    let export = &answer["exports"][0];
    ["block_size_minimum", "block_size_preferred"].map(|key| export[key].clone())
}

#[test]
fn sectors_of_4096_bytes_are_served_as_such_and_a_copy_warns() {
    require!(need::tools(&["nbdinfo", "qemu-img"]));
    let scratch = Scratch::new();
    let (base, overlay) = (vhdx(&scratch), scratch.path("overlay.qcow2"));
    command(&["create", "-b", str(&base), "-F", "vhdx", str(&overlay)]).success();
    for (image, mode) in [(&base, "--read-only"), (&overlay, "--copy-on-read")] {
        let socket = scratch.socket("vu");
        let serve = Serve::new(&scratch, image).option("--vhost-user-blk", &socket);
        let server = serve.flag(mode).start();
        let [sector, physical, discard] = seen_by_guest(&socket);
        assert_eq!(sector, 4096, "{mode}");
        assert!(physical >= 4096 && discard >= 65536, "{physical} {discard}");
        let [smallest, preferred] = seen_by_client(server.uri());
        assert_eq!((smallest, preferred), (4096.into(), physical.into()), "{mode}");
        server.stop();
    }
    let told = command(&["info", "--output", "json", str(&base)]).success();
    let told: Value = serde_json::from_str(&told.stdout).expect("JSON");
    assert_eq!(told["logical-block-size"], 4096);
    for (source, target) in [(&base, "copy.img"), (&base, "copy.qcow2"), (&overlay, "flat.qcow2")] {
        let copied = command(&["convert", str(source), str(&scratch.path(target))]).success();
        assert!(copied.stderr.contains("--logical-block-size 4096"), "{}", copied.stderr);
    }
    let (raw, plain) = (scratch.path("copy.img"), scratch.path("plain.qcow2"));
    let plain = command(&["convert", str(&raw), str(&plain)]).success();
    assert!(!plain.stderr.contains("sectors"), "{}", plain.stderr);
}

#[test]
fn sizes_that_are_asked_for_are_told() {
    require!(need::tools(&["nbdinfo"]));
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 8 << 20);
    let (socket, control) = (scratch.socket("vu"), scratch.socket("control"));
    let serve = Serve::new(&scratch, image.path()).option("--vhost-user-blk", &socket);
    let serve = serve.option("--logical-block-size", "4K").option("--physical-block-size", "16K");
    let serve = serve.option("--discard-granularity", "1M").option("--control", &control);
    let server = serve.start();
    let sizes = [4096, 16384, 1 << 20];
    assert_eq!(seen_by_guest(&socket), sizes);
    assert_eq!(seen_by_client(server.uri()), [json!(4096), json!(16384)]);
    let mut control = Control::connect(&control);
    let told = |disk: &Value| {
        ["logical-block-size", "physical-block-size", "discard-granularity"]
            .map(|key| disk[key].as_u64().expect("a number"))
    };
    assert_eq!(told(&control.get("disk.list", json!({}))[0]), sizes);
    let odd = json!({ "disk": "disk.img", "size": (8 << 20) + 512 });
    control.refused("disk.resize", odd, -32000, &["sectors of 4096"]);
    let (second, other) = (scratch.image("other.qcow2", 8 << 20), scratch.socket("other"));
    let open = json!({
        "path": second.path(), "format": "raw", "exports": [other], "logical-block-size": "1K",
        "physical-block-size": 2048, "discard-granularity": "4K",
    });
    control.get("disk.open", open);
    assert_eq!(seen_by_guest(&other), [1024, 2048, 4096]);
    let small = scratch.image("small.img", 1536);
    let open = json!({ "path": small.path(), "logical-block-size": 4096 });
    control.refused("disk.open", open, -32000, &["small.img", "1536 bytes", "4096"]);
    server.stop();
    for (option, size) in [("--logical-block-size", "8K"), ("--discard-granularity", "3K")] {
        command(&["serve", image.str(), option, size]).failure("power of two");
    }
}
