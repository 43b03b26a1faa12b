//! Transient bitmaps, of a disk of any format: they record like persistent ones, end with the disk,
//! and leave nothing in the image.

use blockhouse_tests::control::Control;
use blockhouse_tests::nbd::Client;
use blockhouse_tests::{Scratch, Serve, Server};
use serde_json::{Value, json};

const MIB: u64 = 1 << 20;
const GRANULE: u64 = 64 << 10;
const FAILED: i64 = -32000;

struct Rig {
    scratch: Scratch,
    server: Server,
    control: Control,
    disk: String,
}

impl Rig {
    /// A server of a raw disk.
    fn start() -> Self {
        let scratch = Scratch::new();
        let image = scratch.image("disk.img", 8 * MIB);
        let (server, mut control) = Serve::new(&scratch, image.path()).start_with_control(&scratch);
        let disks = control.get("disk.list", json!({}));
        let disk = disks[0]["disk"].as_str().expect("a name").to_owned();
        Self { scratch, server, control, disk }
    }

    fn call(&mut self, method: &str, name: &str, more: Value) {
        let params = self.params(name, more);
        self.control.get(method, params);
    }

    fn params(&self, name: &str, more: Value) -> Value {
        let mut params = json!({ "disk": self.disk, "name": name });
        let more = more.as_object().cloned().unwrap_or_default();
        params.as_object_mut().expect("an object").extend(more);
        params
    }

    fn write(&self, at: u64) {
        assert_eq!(Client::open(&self.server.address()).write(at, &[7; 512], 0), 0);
    }

    /// The bitmaps: name, number of dirty bytes, and whether it is persistent.
    fn list(&mut self) -> Vec<(String, u64, bool)> {
        let bitmaps = self.control.get("bitmap.list", json!({ "disk": self.disk }));
        let told = bitmaps.as_array().expect("a list").iter().map(|one| {
            let name = one["name"].as_str().expect("a name").to_owned();
            (name, one["count"].as_u64().expect("a number"), one["persistent"] == true)
        });
        told.collect()
    }
}

fn told(list: &[(&str, u64, bool)]) -> Vec<(String, u64, bool)> {
    list.iter().map(|(name, count, is_stored)| ((*name).to_owned(), *count, *is_stored)).collect()
}

#[test]
fn they_record_changes_and_end_with_the_process() {
    let mut rig = Rig::start();
    rig.call("bitmap.add", "one", json!({ "transient": true }));
    rig.call("bitmap.add", "two", json!({ "transient": true, "disabled": true }));
    rig.write(0);
    rig.call("bitmap.enable", "two", json!({}));
    rig.write(MIB);
    assert_eq!(rig.list(), told(&[("one", 2 * GRANULE, false), ("two", GRANULE, false)]));
    rig.call("bitmap.disable", "one", json!({}));
    rig.write(2 * MIB);
    rig.call("bitmap.merge", "one", json!({ "source": "two" }));
    assert_eq!(rig.list(), told(&[("one", 3 * GRANULE, false), ("two", 2 * GRANULE, false)]));
    rig.call("bitmap.clear", "two", json!({}));
    assert_eq!(rig.list(), told(&[("one", 3 * GRANULE, false), ("two", 0, false)]));
    rig.call("bitmap.remove", "one", json!({}));
    rig.write(3 * MIB);
    assert_eq!(rig.list(), told(&[("two", GRANULE, false)]));
    // A raw disk gets a side file only with its first persistent bitmap.
    let side_file = rig.scratch.path("disk.img.bitmaps");
    assert!(!side_file.exists());
    let Rig { scratch, server, .. } = rig;
    server.stop();
    assert!(!side_file.exists());
    let socket = scratch.socket("control");
    let _server =
        Serve::new(&scratch, &scratch.path("disk.img")).option("--control", &socket).start();
    let disk = Control::connect(&socket).get("disk.list", json!({}))[0]["disk"].clone();
    let listed = Control::connect(&socket).call("bitmap.list", json!({ "disk": disk }));
    assert!(listed.is_err(), "{listed:?}");
}

#[test]
fn they_stand_beside_those_of_the_image_and_have_other_names() {
    let mut rig = Rig::start();
    rig.call("bitmap.add", "stored", json!({}));
    rig.call("bitmap.add", "brief", json!({ "transient": true }));
    for (name, more) in [("stored", json!({ "transient": true })), ("brief", json!({}))] {
        let params = rig.params(name, more);
        rig.control.refused("bitmap.add", params, FAILED, &["is there already"]);
    }
    rig.write(0);
    rig.call("bitmap.disable", "stored", json!({}));
    rig.write(MIB);
    assert_eq!(rig.list(), told(&[("stored", GRANULE, true), ("brief", 2 * GRANULE, false)]));
    let merge = rig.params("stored", json!({ "source": "brief" }));
    rig.control.refused("bitmap.merge", merge, FAILED, &["cannot be merged", "stored"]);
    rig.call("bitmap.clear", "brief", json!({}));
    rig.call("bitmap.merge", "brief", json!({ "source": "stored" }));
    assert_eq!(rig.list()[1], ("brief".into(), GRANULE, false));
    // Several changes are made at one moment, or none of them.
    let disk = rig.disk.clone();
    let of = |name: &str| json!({ "disk": disk, "name": name });
    let mut add = of("third");
    add["transient"] = true.into();
    let both = [json!({ "clear": of("brief") }), json!({ "add": add })];
    let doomed = [&both[..], &[json!({ "clear": of("none") })]].concat();
    rig.control.refused("disk.transaction", json!({ "bitmaps": doomed }), FAILED, &["none"]);
    assert_eq!(rig.list().len(), 2);
    rig.control.get("disk.transaction", json!({ "bitmaps": both }));
    assert_eq!(
        rig.list(),
        told(&[("stored", GRANULE, true), ("brief", 0, false), ("third", 0, false)])
    );
    // The new part of a longer disk counts as changed.
    rig.control.get("disk.resize", json!({ "disk": rig.disk, "size": 10 * MIB }));
    assert_eq!(rig.list()[2], ("third".into(), 2 * MIB, false));
}

#[test]
fn what_takes_too_much_memory_is_refused() {
    let mut rig = Rig::start();
    for (granularity, words) in [(1000, "power of two"), (1, "power of two")] {
        let params = rig.params("x", json!({ "transient": true, "granularity": granularity }));
        rig.control.refused("bitmap.add", params, FAILED, &[words]);
    }
    for number in 0..64 {
        rig.call("bitmap.add", &format!("b{number}"), json!({ "transient": true }));
    }
    let params = rig.params("x", json!({ "transient": true }));
    rig.control.refused("bitmap.add", params, FAILED, &["64 bitmaps in memory at most"]);
}

#[test]
fn backups_whose_names_are_taken_begin_with_no_change_of_bitmaps() {
    let mut rig = Rig::start();
    rig.call("bitmap.add", "old", json!({ "transient": true }));
    rig.write(0);
    for name in ["second", "target", "other", &format!("{}@taken", rig.disk)] {
        let image = rig.scratch.image(&format!("{name}.img"), 8 * MIB);
        rig.control.get("disk.open", json!({ "path": image.path(), "name": name }));
    }
    let disk = rig.disk.clone();
    let clear = json!({ "clear": { "disk": disk, "name": "old" } });
    let served = |disk: &str, name: &str| json!({ "disk": disk, "name": name });
    let job =
        |disk: &str, target: &str| json!({ "disk": disk, "name": "then", "target-disk": target });
    for (backups, word) in [
        ([served(&disk, "then"), served("second", "then")], "is called \"then\" already"),
        ([job(&disk, "target"), job("second", "other")], "is called \"then\" already"),
        ([served("second", "now"), served(&disk, "taken")], "give the backup another name"),
    ] {
        let params = json!({ "bitmaps": [clear], "backups": backups });
        rig.control.refused("disk.transaction", params, FAILED, &[word]);
        assert_eq!(rig.list(), told(&[("old", GRANULE, false)]));
        assert_eq!(rig.control.get("backup.list", json!({})), json!([]));
        assert_eq!(rig.control.get("job.list", json!({})), json!([]));
    }
    let params = json!({ "bitmaps": [clear], "backups": [served(&disk, "then")] });
    rig.control.get("disk.transaction", params);
    assert_eq!(rig.list(), told(&[("old", 0, false)]));
}
