//! Bitmaps of damaged images, too many bitmaps and too large ones: guests' data is not changed, and
//! after a refusal all programs can open the image.

use std::path::Path;

use blockhouse_tests::image_tool::{command, new_image, qemu_img, str};
use blockhouse_tests::nbd::Client;
use blockhouse_tests::{Scratch, Serve, need, require, run, tool};
use serde_json::json;

use crate::bitmaps::{check, dirty, info};

/// The maximum number of enabled bitmaps.
const MAX_ENABLED: usize = 64;
const CLUSTER: u64 = 4096;

fn be(bytes: &[u8], at: usize, length: usize) -> u64 {
    bytes[at..at + length].iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// Sets the first entry of the only bitmap's table to `offset`.
fn point_bits_to(image: &Path, name: &str, offset: u64) {
    let mut bytes = std::fs::read(image).expect("it is there");
    let name = bytes.windows(name.len()).rposition(|window| window == name.as_bytes());
    let entry = name.expect("in the directory") - 24;
    let table = be(&bytes, entry, 8) as usize;
    assert_ne!(be(&bytes, table, 8), 0, "it has bits");
    bytes[table..table + 8].copy_from_slice(&offset.to_be_bytes());
    std::fs::write(image, bytes).expect("it can be written");
}

#[test]
fn bits_that_have_no_cluster_of_their_own_overwrite_nothing() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    for case in ["free", "at the end", "far past the end"] {
        let image = str(&path);
        let options = format!("cluster_size={CLUSTER}");
        command(&["create", "-o", &options, image, "64M"]).success();
        command(&["bitmap", "add", image, "changes"]).success();
        // A write sets bits in the bitmap, and the image gets free space.
        let server = Serve::new(&scratch, &path).start();
        let mut client = Client::open(&server.address());
        assert_eq!(client.write(0, &[1; 1 << 20], 0), 0);
        drop(client);
        server.stop();
        let end = std::fs::metadata(&path).expect("a file").len();
        let free = end.next_multiple_of(CLUSTER);
        if case == "free" {
            // Makes the file longer than its used part.
            let file = std::fs::OpenOptions::new().write(true).open(&path).expect("a file");
            file.set_len(end + (1 << 20)).expect("room");
        }
        let offset = match case {
            "far past the end" => 1 << 55,
            _ => free,
        };
        point_bits_to(&path, "changes", offset);
        let server = Serve::new(&scratch, &path).start();
        let mut client = Client::open(&server.address());
        for number in 1..64_u8 {
            let at = u64::from(number) << 20;
            assert_eq!(client.write(at, &[number; CLUSTER as usize], 0), 0, "{case}");
        }
        for number in 1..64_u8 {
            let found = client.read(u64::from(number) << 20, CLUSTER).expect("a read");
            assert!(found.iter().all(|byte| *byte == number), "{case}: the bytes of {number}");
        }
        drop(client);
        server.stop();
        let left = command(&["bitmap", "list", "--json", image]).success();
        assert_eq!(left.stdout.trim(), "[]", "{case}: bitmaps that cannot be kept are given up");
        qemu_img(&["check", "-r", "leaks", image]).success();
        std::fs::remove_file(&path).expect("it is there");
    }
}

#[test]
fn a_disk_does_not_outgrow_its_bitmaps() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let image = str(&path);
    command(&["create", image, "1G"]).success();
    command(&["bitmap", "add", "-g", "512", image, "fine"]).success();
    let refused = command(&["resize", image, "5T"]).failure("'fine' would take more than 512 MiB");
    assert_eq!(refused.stderr.trim_end().lines().count(), 1, "{}", refused.stderr);
    assert_eq!(info(image)[0]["name"], "fine");
    // Follows the hint of the error.
    command(&["bitmap", "add", "-g", "64K", image, "coarse"]).success();
    command(&["bitmap", "merge", image, "coarse", "fine"]).success();
    command(&["bitmap", "remove", image, "fine"]).success();
    command(&["resize", image, "5T"]).success();
    assert_eq!(info(image)[0]["name"], "coarse");
    check(image);
}

#[test]
fn no_more_bitmaps_are_enabled_than_changes_are_recorded_in() {
    let scratch = Scratch::new();
    let path = new_image(&scratch, "disk.qcow2", "16M");
    let (server, mut control) = Serve::new(&scratch, &path).start_with_control(&scratch);
    let named = |name: &str| json!({ "disk": "disk.qcow2", "name": name });
    for number in 0..MAX_ENABLED {
        control.get("bitmap.add", named(&format!("b{number}")));
    }
    let words = ["64 bitmaps are enabled", "disable"];
    control.refused("bitmap.add", named("more"), -32000, &words);
    let idle = json!({ "disk": "disk.qcow2", "name": "idle", "disabled": true });
    control.get("bitmap.add", idle);
    control.refused("bitmap.enable", named("idle"), -32000, &words);
    control.get("bitmap.enable", named("b0"));
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(0, &[1; 4096], 0), 0, "a guest does not see it");
    control.get("bitmap.disable", named("b0"));
    control.get("bitmap.enable", named("idle"));
    assert_eq!(client.write(1 << 20, &[1; 4096], 0), 0);
    drop(client);
    server.stop();
    command(&["check", str(&path)]).success();
}

/// Makes the first entry of the first L2 table point past the end of the file.
fn lose_first_cluster(image: &Path) {
    let mut bytes = std::fs::read(image).expect("it is there");
    let l1 = be(&bytes, 40, 8) as usize;
    let l2 = (be(&bytes, l1, 8) & 0x00ff_ffff_ffff_fe00) as usize;
    bytes[l2..l2 + 8].copy_from_slice(&(1_u64 << 63 | 1 << 50).to_be_bytes());
    std::fs::write(image, bytes).expect("it can be written");
}

#[test]
fn a_repair_that_changes_what_is_read_is_in_the_bitmaps() {
    require!(need::tools(&["qemu-img", "qemu-io", "qemu-nbd", "nbdinfo"]));
    let scratch = Scratch::new();
    let path = scratch.path("disk.qcow2");
    let image = str(&path);
    for has_bits in [false, true] {
        command(&["create", image, "64M"]).success();
        run(tool("qemu-io").args(["-f", "qcow2", "-c", "write -P 7 0 1M", image])).success();
        command(&["bitmap", "add", image, "changes"]).success();
        command(&["bitmap", "add", "--disabled", image, "idle"]).success();
        if has_bits {
            run(tool("qemu-io").args(["-f", "qcow2", "-c", "write -P 7 1M 64K", image])).success();
        }
        // A repair of refcounts only does not change the bitmap.
        let before = dirty(image, "changes");
        let mut bytes = std::fs::read(&path).expect("it is there");
        let refcounts = be(&bytes, be(&bytes, 48, 8) as usize, 8) as usize;
        bytes[refcounts + 11] = 9;
        std::fs::write(&path, bytes).expect("it can be written");
        command(&["check", "--repair", "all", image]);
        assert_eq!(dirty(image, "changes"), before, "{has_bits}");
        lose_first_cluster(&path);
        command(&["check", "--repair", "all", image]);
        check(image);
        run(tool("qemu-io").args(["-f", "qcow2", "-c", "read -P 0 0 64K", image])).success();
        assert_eq!(dirty(image, "changes"), [(0, 64 << 20)], "{has_bits}");
        assert_eq!(dirty(image, "idle"), []);
        std::fs::remove_file(&path).expect("it is there");
    }
}
