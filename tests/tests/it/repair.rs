//! `blockhouse check --repair` on images in which single bytes were damaged. Afterwards our check
//! and `qemu-img check` find nothing, and the guest's data is still there.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use blockhouse_tests::nbd::{Client, command as nbd_command};
use blockhouse_tests::{
    Outcome, Scratch, Serve,
    image_tool::{command, json, qemu_img, qemu_io, str},
    need, require, run, tool,
};
use serde_json::Value;

use crate::storage_daemon::called;

const CLUSTER: u64 = 64 << 10;
const COPIED: u64 = 1 << 63;

/// An image that is damaged and repaired.
struct Patient {
    path: PathBuf,
}

impl Patient {
    /// An image with data in the clusters 0 to 15 and 32 to 47 of 64 KiB, in one L2 table.
    fn new(scratch: &Scratch, name: &str, options: &str) -> Self {
        let path = scratch.path(name);
        qemu_img(&["create", "-f", "qcow2", "-o", options, str(&path), "600M"]).success();
        let patient = Self { path };
        patient.qemu_io(&["write -P 1 0 1M", "write -P 2 2M 1M"]);
        patient
    }

    fn qemu_io(&self, steps: &[&str]) {
        qemu_io("qcow2", &self.path, steps);
    }

    fn word(&self, offset: u64) -> u64 {
        let mut bytes = [0; 8];
        let file = OpenOptions::new().read(true).open(&self.path).expect("an image");
        file.read_exact_at(&mut bytes, offset).expect("it is that long");
        u64::from_be_bytes(bytes)
    }

    fn set(&self, offset: u64, bytes: &[u8]) {
        let file = OpenOptions::new().write(true).open(&self.path).expect("an image");
        file.write_all_at(bytes, offset).expect("it can be written");
    }

    fn set_word(&self, offset: u64, word: u64) {
        self.set(offset, &word.to_be_bytes());
    }

    /// The offset of the `index`-th entry of the active L1 table.
    fn l1(&self, index: u64) -> u64 {
        self.word(40) + index * 8
    }

    /// The offset of the `index`-th entry of the first L2 table.
    fn l2(&self, index: u64) -> u64 {
        (self.word(self.l1(0)) & !COPIED) + index * 8
    }

    /// The offset of a cluster's 16-bit refcount in the first refcount block.
    fn refcount(&self, cluster: u64) -> u64 {
        self.word(self.word(48)) + cluster * 2
    }

    fn cluster_of(&self, index: u64) -> u64 {
        (self.word(self.l2(index)) & !COPIED) / CLUSTER
    }

    fn is_corrupt_marked(&self) -> bool {
        self.word(72) & 2 != 0
    }

    fn repair(&self, what: &str) -> Outcome {
        command(&["check", "--json", "--repair", what, "-f", "qcow2", str(&self.path)])
    }

    /// Repairs everything; then QEMU's check must find nothing, and the data must be right.
    #[track_caller]
    fn recovers(&self, steps: &[&str]) -> Value {
        let outcome = self.repair("all").success();
        qemu_img(&["check", "-f", "qcow2", str(&self.path)]).success();
        command(&["check", "-f", "qcow2", str(&self.path)]).success();
        assert!(!self.is_corrupt_marked());
        self.qemu_io(steps);
        json(&outcome)
    }

    /// As `recovers`; then the image can be written, too.
    #[track_caller]
    fn must_recover(&self, steps: &[&str]) -> Value {
        let report = self.recovers(steps);
        self.qemu_io(&["write -P 9 100M 1M", "read -P 9 100M 1M"]);
        qemu_img(&["check", "-f", "qcow2", str(&self.path)]).success();
        report
    }
}

const INTACT: [&str; 3] = ["read -P 1 0 1M", "read -P 2 2M 1M", "read -P 0 1M 1M"];

#[test]
fn a_repair_is_told_as_qemu_img_tells_it() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let patient = Patient::new(&scratch, "told.qcow2", "compat=1.1");
    qemu_img(&["snapshot", "-c", "s", str(&patient.path)]).success();
    // One of two references is not counted, and another cluster is counted too often.
    let [low, high] = [0, 1].map(|index| patient.refcount(patient.cluster_of(index)));
    patient.set(low, &1u16.to_be_bytes());
    patient.set(high, &5u16.to_be_bytes());
    let ours = |line: &[&str]| run(called(&scratch, "qemu-img").args(line));
    for scope in ["leaks", "all"] {
        let copy = scratch.path(scope);
        let line = ["check", "-f", "qcow2", "-r", scope, str(&copy)];
        let told = [true, false].map(|is_ours| {
            std::fs::copy(&patient.path, &copy).expect("a copy");
            let outcome = if is_ours { ours(&line) } else { qemu_img(&line) };
            (outcome.status.code(), outcome.stdout, outcome.stderr)
        });
        assert_eq!(told[0], told[1], "-r {scope}");
    }
    let vmdk = scratch.path("disk.vmdk");
    qemu_img(&["create", "-f", "vmdk", str(&vmdk), "1M"]).success();
    let line = ["check", "-f", "vmdk", "-r", "all", str(&vmdk)];
    let outcome = ours(&line);
    assert_eq!(
        outcome.status.code(),
        qemu_img(&line).status.code(),
        "{}",
        outcome.describe("vmdk")
    );
}

#[test]
fn leaks_are_given_back() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let patient = Patient::new(&scratch, "leaks.qcow2", "compat=1.1");
    let before = qemu_img(&["check", "--output=json", "-f", "qcow2", str(&patient.path)]);
    // Two discarded clusters whose refcounts stay, and one whose refcount is too high.
    for index in [3, 4] {
        patient.set_word(patient.l2(index), 0);
    }
    let twice = patient.cluster_of(5);
    patient.set(patient.refcount(twice), &[0, 2]);
    patient.set_word(patient.l2(5), twice * CLUSTER);
    let found = command(&["check", "--json", "-f", "qcow2", str(&patient.path)]);
    assert_eq!(found.status.code(), Some(3), "{}", found.describe("leaks only"));
    let report = json(&patient.repair("leaks").success());
    assert_eq!((&report["leaks-fixed"], &report["leaks"]), (&3.into(), &Value::Null), "{report}");
    let theirs = qemu_img(&["check", "--output=json", "-f", "qcow2", str(&patient.path)]).success();
    assert_eq!(json(&theirs)["total-clusters"], json(&before)["total-clusters"]);
    patient.qemu_io(&["read -P 0 192k 128k", "read -P 1 320k 704k", "read -P 2 2M 1M"]);
}

#[test]
fn a_repair_of_leaks_leaves_corruption_alone() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let patient = Patient::new(&scratch, "both.qcow2", "compat=1.1");
    patient.set_word(patient.l2(3), 0);
    patient.set(patient.refcount(patient.cluster_of(7)), &[0, 0]);
    let outcome = patient.repair("leaks");
    assert_eq!(outcome.status.code(), Some(2), "{}", outcome.describe("still corrupt"));
    let report = json(&outcome);
    assert_eq!(report["leaks-fixed"], 1, "{report}");
    assert_eq!(report["corruptions"], 2, "{report}");
    patient.must_recover(&["read -P 0 192k 64k", "read -P 1 256k 768k", "read -P 2 2M 1M"]);
}

#[test]
fn an_image_that_is_clean_is_not_touched() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let patient = Patient::new(&scratch, "clean.qcow2", "compat=1.1");
    let before = std::fs::read(&patient.path).expect("an image");
    for what in ["leaks", "all"] {
        let report = json(&patient.repair(what).success());
        assert_eq!(report.get("leaks-fixed"), None, "{report}");
    }
    assert!(std::fs::read(&patient.path).expect("an image") == before);
}

#[test]
fn wrong_counts_and_marks_are_corrected() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    for compat in ["compat=0.10", "compat=1.1", "lazy_refcounts=on"] {
        let patient = Patient::new(&scratch, &format!("counts-{compat}.qcow2"), compat);
        let count = patient.refcount(patient.cluster_of(7));
        patient.set(count, &[0, 0]);
        patient.set(patient.refcount(patient.cluster_of(9)), &[0, 3]);
        patient.set_word(patient.l2(2), patient.word(patient.l2(2)) & !COPIED);
        patient.set_word(patient.l1(0), patient.word(patient.l1(0)) & !COPIED);
        let report = patient.must_recover(&INTACT);
        assert!(report["corruptions-fixed"].as_u64() >= Some(3), "{report}");
        assert_eq!(report["leaks-fixed"], 1, "{report}");
    }
}

#[test]
fn entries_out_of_the_file_and_against_the_format_lose_what_is_wrong() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let patient = Patient::new(&scratch, "entries.qcow2", "compat=1.1");
    patient.set_word(patient.l2(1), COPIED | 1 << 40);
    // A reserved bit: the offset is still good. An unaligned offset is not.
    patient.set_word(patient.l2(2), patient.word(patient.l2(2)) | 2);
    patient.set_word(patient.l2(3), patient.word(patient.l2(3)) | 512);
    patient.set_word(patient.l1(1), COPIED | 1 << 45);
    patient.set(79, &[2]);
    let steps =
        ["read -P 1 0 64k", "read -P 0 64k 64k", "read -P 1 128k 64k", "read -P 0 192k 64k"];
    patient.must_recover(&[&steps[..], &["read -P 1 256k 768k", "read -P 2 2M 1M"]].concat());
    patient.qemu_io(&["read -P 0 512M 1M", "write -P 5 512M 1M", "read -P 5 512M 1M"]);
}

#[test]
fn a_compressed_cluster_is_not_marked_as_counting_one() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let patient = Patient::new(&scratch, "packed.qcow2", "compat=1.1");
    patient.qemu_io(&["write -c -P 5 4M 64k"]);
    patient.set_word(patient.l2(64), patient.word(patient.l2(64)) | COPIED);
    let found = command(&["check", "-f", "qcow2", str(&patient.path)]);
    assert_eq!(found.status.code(), Some(2), "{}", found.describe("QEMU calls it corrupt"));
    let report = patient.must_recover(&[&INTACT[..], &["read -P 5 4M 64k"]].concat());
    assert_eq!(report["corruptions-fixed"], 1, "{report}");
}

#[test]
fn clusters_with_two_owners_are_copied_when_one_is_written() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let patient = Patient::new(&scratch, "shared.qcow2", "compat=1.1");
    patient.set_word(patient.l2(20), patient.word(patient.l2(0)));
    // A second part of the disk uses the L2 table of the first.
    patient.set_word(patient.l1(1), patient.word(patient.l1(0)));
    patient.recovers(&["read -P 1 0 1M", "read -P 1 1280k 64k", "read -P 1 512M 1M"]);
    patient.qemu_io(&["write -P 7 1280k 64k", "read -P 1 0 1M", "read -P 7 1280k 64k"]);
    patient.qemu_io(&["write -P 8 512M 64k", "read -P 1 0 1M", "read -P 8 512M 64k"]);
    // Clusters that have only one owner left lack the COPIED flag, which costs a copy, until the
    // next repair.
    patient.recovers(&["read -P 1 0 1M", "read -P 7 1280k 64k", "read -P 8 512M 64k"]);
}

#[test]
fn a_shared_table_does_not_keep_the_image_from_being_served() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let patient = Patient::new(&scratch, "served.qcow2", "compat=1.1");
    patient.set_word(patient.l1(1), patient.word(patient.l1(0)));
    patient.recovers(&["read -P 1 0 1M", "read -P 1 512M 1M"]);
    let server = Serve::new(&scratch, &patient.path).start();
    let uri = server.uri().to_owned();
    for step in ["write -P 8 512M 64k", "read -P 1 0 1M", "read -P 8 512M 64k"] {
        let outcome = run(tool("qemu-io").args(["-f", "raw", "-c", step, &uri])).success();
        assert!(!outcome.stdout.contains("failed"), "{}", outcome.describe(step));
    }
    server.stop();
    patient.recovers(&["read -P 1 0 1M", "read -P 8 512M 64k"]);
}

#[test]
fn a_broken_refcount_table_is_made_anew() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    for (name, options) in
        [("v2", "compat=0.10"), ("wide", "refcount_bits=64"), ("v3", "compat=1.1")]
    {
        let patient = Patient::new(&scratch, name, options);
        for kind in 0..6 {
            let before = patient.word(48);
            let data = patient.cluster_of(0) * CLUSTER;
            let block = patient.word(before);
            let broken = [0, 1 << 50, block | 256, data, patient.l2(0), before];
            patient.set_word(before, broken[kind]);
            patient.must_recover(&INTACT);
            assert_ne!(patient.word(48), before, "{name}: {:#x}", broken[kind]);
        }
    }
}

#[test]
fn bitmaps_keep_their_clusters() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let patient = Patient::new(&scratch, "bitmaps.qcow2", "compat=1.1");
    qemu_img(&["bitmap", "--add", "-f", "qcow2", str(&patient.path), "changes"]).success();
    patient.qemu_io(&["write -P 3 8M 1M"]);
    patient.set_word(patient.l2(3), 0);
    let report = json(&patient.repair("leaks").success());
    assert_eq!(report["leaks-fixed"], 1, "{report}");
    qemu_img(&["check", "-f", "qcow2", str(&patient.path)]).success();
    let info = json(&qemu_img(&["info", "--output=json", "-f", "qcow2", str(&patient.path)]));
    let bitmaps = &info["format-specific"]["data"]["bitmaps"];
    assert_eq!(bitmaps[0]["name"], "changes", "{info}");
    assert!(!bitmaps[0]["flags"].to_string().contains("in-use"), "{info}");
}

#[test]
fn snapshots_keep_their_data() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let patient = Patient::new(&scratch, "snapshots.qcow2", "compat=1.1");
    qemu_img(&["snapshot", "-c", "one", str(&patient.path)]).success();
    patient.qemu_io(&["write -P 3 0 512k"]);
    let cluster = patient.cluster_of(10);
    patient.set(patient.refcount(cluster), &[0, 1]);
    patient.set_word(patient.l2(10), COPIED | (cluster * CLUSTER));
    patient.must_recover(&["read -P 3 0 512k", "read -P 1 512k 512k", "read -P 2 2M 1M"]);
    patient.qemu_io(&["write -P 4 512k 512k"]);
    qemu_img(&["snapshot", "-a", "one", str(&patient.path)]).success();
    patient.qemu_io(&INTACT);
}

#[test]
fn a_cluster_with_more_users_than_can_be_counted_is_told_and_the_image_stays_marked() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let patient = Patient::new(&scratch, "narrow.qcow2", "refcount_bits=1");
    patient.set_word(patient.l2(20), patient.word(patient.l2(0)));
    let outcome = patient.repair("all");
    assert_eq!(outcome.status.code(), Some(2), "{}", outcome.describe("it cannot be mended"));
    assert!(outcome.stderr.contains("refcounts of 1 bits reach 1"), "{}", outcome.describe("why"));
    assert!(patient.is_corrupt_marked());
    let copy = scratch.path("copy.qcow2");
    command(&["convert", str(&patient.path), str(&copy)]).success();
    qemu_img(&["check", str(&copy)]).success();
}

/// An image in a sparse file of 4 TiB with little data.
fn sparse(scratch: &Scratch, name: &str, options: &str) -> Patient {
    let patient = Patient::new(scratch, name, options);
    let file = OpenOptions::new().write(true).open(&patient.path).expect("an image");
    file.set_len(4 << 40).expect("holes cost nothing");
    patient
}

#[test]
fn the_length_of_a_file_costs_nothing() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let options = "compat=1.1,cluster_size=512,lazy_refcounts=on";
    let patient = sparse(&scratch, "long.qcow2", options);
    let path = str(&patient.path);
    command(&["check", path]).success();
    // Sets the dirty bit: refcounts are rebuilt when the image is opened.
    patient.set(79, &[1]);
    command(&["snapshot", "create", path, "one"]).success();
    command(&["snapshot", "delete", path, "one"]).success();
    // A broken refcount table.
    patient.set_word(patient.word(48), 1 << 50);
    patient.repair("all").success();
    command(&["check", path]).success();
}

#[test]
fn refcount_blocks_in_holes_cost_nothing() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let patient = sparse(&scratch, "blocks.qcow2", "compat=1.1,cluster_size=2M");
    let path = str(&patient.path);
    // 262,143 refcount blocks of 2 MiB, none of which is in the file.
    let blocks = (1..262_144_u64).flat_map(|index| ((index + 1000) << 21).to_be_bytes());
    patient.set(patient.word(48) + 8, &blocks.collect::<Vec<_>>());
    command(&["snapshot", "create", path, "one"]).success();
    assert_eq!(command(&["check", path]).status.code(), Some(2));
    patient.repair("all").success();
    command(&["snapshot", "delete", path, "one"]).success();
    qemu_img(&["check", path]).success();
}

/// Asserts that a command fails with one line about a file that ends too soon.
#[track_caller]
fn must_tell_of_the_end(words: &[&str]) {
    let outcome = command(words);
    let said = outcome.describe("must say that the file ends too soon");
    assert!(!outcome.status.success() && outcome.stderr.lines().count() == 1, "{said}");
    assert!(
        outcome.stderr.contains("end of the file") || outcome.stderr.contains("cut off"),
        "{said}"
    );
    assert!(outcome.stderr.contains("offset"), "{said}");
}

#[test]
fn what_a_cut_off_file_has_lost_is_no_zeros() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let patient = Patient::new(&scratch, "cut.qcow2", "compat=1.1");
    let path = str(&patient.path);
    let whole = scratch.path("whole.qcow2");
    std::fs::copy(&patient.path, &whole).expect("a copy");
    let file = OpenOptions::new().write(true).open(&patient.path).expect("an image");
    let end = patient.cluster_of(40) * CLUSTER - 1000;
    file.set_len(end).expect("it can be cut");
    let copy = scratch.path("copy.img");
    must_tell_of_the_end(&["convert", path, str(&copy)]);
    assert!(!copy.exists());
    must_tell_of_the_end(&["compare", path, str(&whole)]);
    must_tell_of_the_end(&["map", path]);
    must_tell_of_the_end(&["resize", path, "1G"]);
    must_tell_of_the_end(&["snapshot", "create", path, "new"]);
    let info = command(&["info", path]).success();
    assert!(info.stdout.contains("cut off"), "{}", info.describe("must say so"));
    let found = command(&["check", path]);
    assert_eq!(found.status.code(), Some(2), "{}", found.describe("it is corrupt"));
    Serve::new(&scratch, &patient.path).refused().failed(&[
        "cut off",
        "--read-only",
        "get the whole",
    ]);
    let server = Serve::new(&scratch, &patient.path).flag("--read-only").start();
    let uri = server.uri().to_owned();
    // The last cluster of the cut file is incomplete.
    let steps = [("read -P 1 0 1M", true), ("read 2496k 4k", false), ("read 2560k 4k", false)];
    for (step, is_there) in steps {
        let outcome = run(tool("qemu-io").args(["-r", "-f", "raw", "-c", step, &uri]));
        assert_eq!(outcome.status.success(), is_there, "{}", outcome.describe(step));
    }
    server.stop();
    assert_eq!(patient.path.metadata().expect("an image").len(), end, "nothing was written");
    patient.must_recover(&["read -P 1 0 1M", "read -P 2 2M 448k", "read -P 0 2560k 512k"]);
    // The header alone, which some programs fetch of a remote image for its size.
    std::fs::OpenOptions::new().write(true).open(&whole).unwrap().set_len(CLUSTER).unwrap();
    let info = command(&["info", str(&whole)]).success();
    assert!(info.stdout.contains("cut off"), "{}", info.describe("must say so"));
    must_tell_of_the_end(&["convert", str(&whole), str(&copy)]);
    must_tell_of_the_end(&["map", str(&whole)]);
    assert_eq!(command(&["check", str(&whole)]).status.code(), Some(2));
    must_tell_of_the_end(&["resize", str(&whole), "1G"]);
    must_tell_of_the_end(&["check", "--repair", "all", str(&whole)]);
    assert_eq!(whole.metadata().expect("an image").len(), CLUSTER, "nothing was written");
}

/// The active disk has lost nothing, but the server would write to clusters that belong to the
/// snapshot.
#[test]
fn an_image_is_not_written_to_when_a_snapshot_of_it_is_cut_off() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let patient = Patient::new(&scratch, "snapshot.qcow2", "compat=1.1");
    // Makes space for the snapshot's metadata before the data that is lost.
    patient.qemu_io(&["write -P 5 8M 1M", "write -P 3 4M 64k", "discard 8M 1M"]);
    let lost = patient.cluster_of(64) * CLUSTER;
    qemu_img(&["snapshot", "-c", "kept", str(&patient.path)]).success();
    patient.qemu_io(&["discard 4M 64k"]);
    assert_ne!(patient.cluster_of(64) * CLUSTER, lost, "the active disk refers to it no more");
    let file = OpenOptions::new().write(true).open(&patient.path).expect("an image");
    file.set_len(lost).expect("it can be cut");
    Serve::new(&scratch, &patient.path).refused().failed(&["cut off", "--read-only"]);
    assert_eq!(patient.path.metadata().expect("an image").len(), lost, "nothing was written");
    patient.qemu_io(&["read -P 1 0 1M"]);
}

/// A repair can still recover data whose refcount is 0, so an orderly end must not cut it off.
#[test]
fn data_that_is_not_counted_is_not_cut_off_with_the_end_of_the_file() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let patient = Patient::new(&scratch, "uncounted.qcow2", "compat=1.1");
    for index in 40..48 {
        patient.set(patient.refcount(patient.cluster_of(index)), &[0, 0]);
    }
    let length = patient.path.metadata().expect("an image").len();
    let server = Serve::new(&scratch, &patient.path).start();
    let mut client = Client::open(&server.address());
    assert_eq!(client.simple(nbd_command::TRIM, 0, CLUSTER, 0), 0);
    client.disconnect();
    server.stop();
    assert_eq!(patient.path.metadata().expect("an image").len(), length);
    patient.must_recover(&["read -P 1 64k 960k", "read -P 2 2M 1M"]);
}

#[test]
fn the_last_cluster_may_end_behind_the_file() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let patient = Patient::new(&scratch, "short.qcow2", "compat=1.1");
    let file = OpenOptions::new().write(true).open(&patient.path).expect("an image");
    let last = (0..48).filter(|&index| patient.word(patient.l2(index)) != 0);
    let last = last.map(|index| patient.cluster_of(index)).max().expect("there are clusters");
    file.set_len(last * CLUSTER + 512).expect("it can be cut");
    qemu_img(&["check", str(&patient.path)]).success();
    command(&["check", str(&patient.path)]).success();
    command(&["convert", str(&patient.path), str(&scratch.path("copy.img"))]).success();
    Serve::new(&scratch, &patient.path).start().stop();
}

#[test]
fn compressed_data_that_is_cut_off_is_not_unpacked() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let patient = Patient::new(&scratch, "packed.qcow2", "compat=1.1");
    let noise: Vec<u8> = (0..CLUSTER).map(|byte| ((byte * byte) >> 7) as u8).collect();
    let input = scratch.path("noise");
    std::fs::write(&input, noise).expect("a file");
    patient.qemu_io(&[&format!("write -c -s {} 4M 64k", str(&input))]);
    let end = patient.path.metadata().expect("an image").len();
    let packed = patient.word(patient.l2(64)) & ((1 << 54) - 1);
    assert!(packed < end && end - packed > 2048, "{packed} of {end}");
    let file = OpenOptions::new().write(true).open(&patient.path).expect("an image");
    file.set_len(packed + (end - packed) / 2).expect("it can be cut");
    command(&["convert", str(&patient.path), str(&scratch.path("copy.img"))])
        .failure("cannot decompress");
}

/// Two snapshots, and data that differs from both.
fn with_snapshots(scratch: &Scratch, name: &str) -> Patient {
    let patient = Patient::new(scratch, name, "compat=1.1");
    for snapshot in ["one", "two"] {
        qemu_img(&["snapshot", "-c", snapshot, str(&patient.path)]).success();
    }
    patient.qemu_io(&["write -P 3 0 512k"]);
    patient
}

/// Damages the snapshots, repairs the image, and expects that exactly the snapshots `left` remain.
/// The report of the loss has the words `told`.
#[track_caller]
fn must_keep(damage: impl FnOnce(&Patient, u64), left: &[&str], told: &[&str]) {
    let scratch = Scratch::new();
    let patient = with_snapshots(&scratch, "snapshots.qcow2");
    damage(&patient, patient.word(64));
    let found = command(&["check", "-f", "qcow2", str(&patient.path)]);
    assert_eq!(found.status.code(), Some(2), "{}", found.describe("it is corrupt"));
    let repaired = patient.repair("all").success();
    patient.must_recover(&["read -P 3 0 512k", "read -P 1 512k 512k", "read -P 2 2M 1M"]);
    let info = json(&qemu_img(&["info", "--output=json", "-f", "qcow2", str(&patient.path)]));
    let snapshots = info["snapshots"].as_array().cloned().unwrap_or_default();
    let names: Vec<_> = snapshots.iter().map(|one| one["name"].as_str().unwrap_or("")).collect();
    assert_eq!(names, left, "{info}");
    for word in told.iter().chain(&["SNAPSHOT TABLE REPAIRED"]) {
        let found = if *word == "SNAPSHOT TABLE REPAIRED" { &repaired } else { &found };
        assert!(found.stderr.contains(word), "{}", found.describe(word));
    }
    for name in left {
        command(&["snapshot", "delete", "-f", "qcow2", str(&patient.path), name]).success();
    }
    qemu_img(&["check", "-f", "qcow2", str(&patient.path)]).success();
}

#[test]
fn snapshots_behind_a_bad_table_offset_are_removed() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    // A table offset that is not aligned to a cluster, which QEMU does not open at all; and one far
    // beyond the end of the file.
    must_keep(|patient, table| patient.set_word(64, table + 512), &[], &["2 snapshots", "offset"]);
    must_keep(|patient, _| patient.set_word(64, 1 << 40), &[], &["2 snapshots", "ends before"]);
}

#[test]
fn a_snapshot_with_a_bad_l1_table_is_removed() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let told = ["the snapshot 'one' (id 1) cannot be used", "L1 table"];
    let skewed = |patient: &Patient, table| patient.set_word(table, patient.word(table) + 512);
    must_keep(skewed, &["two"], &told);
    must_keep(|patient, table| patient.set_word(table, 1 << 40), &["two"], &told);
    must_keep(|patient, table| patient.set_word(table, 0), &["two"], &told);
    must_keep(|patient, table| patient.set(table + 8, &[0x40, 0, 0, 0]), &["two"], &told);
    // The offset of a guest's data, which is neither used nor repaired as a table.
    let data = |patient: &Patient, table| {
        patient.set_word(table, patient.cluster_of(40) * CLUSTER);
    };
    must_keep(data, &["two"], &[]);
}

#[test]
fn a_snapshot_with_an_impossible_length_is_kept_where_its_name_is_found() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let told = ["the snapshot 'one' (id 1) has extra data of an invalid length"];
    let long = |patient: &Patient, table: u64| patient.set(table + 36, &[0, 1, 0x86, 0xa0]);
    must_keep(long, &["one", "two"], &told);
}

#[test]
fn a_count_of_snapshots_that_is_too_high_is_corrected() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let told = ["2 entries of the snapshot table are empty"];
    must_keep(|patient, _| patient.set(60, &[0, 0, 0, 4]), &["one", "two"], &told);
    let told = ["snapshots cannot be used"];
    must_keep(|patient, _| patient.set(60, &[0, 1, 0, 1]), &["one", "two"], &told);
    must_keep(|patient, _| patient.set(60, &[0xff; 4]), &["one", "two"], &told);
}

#[test]
fn a_bad_snapshot_table_leaves_the_disk_readable() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let patient = with_snapshots(&scratch, "readable.qcow2");
    patient.set_word(64, patient.word(64) + 512);
    let copy = scratch.path("copy.img");
    command(&["convert", "-f", "qcow2", str(&patient.path), str(&copy)]).success();
    command(&["snapshot", "list", str(&patient.path)]).failure("check --repair all");
    Serve::new(&scratch, &patient.path).refused().failed(&["check --repair all"]);
    assert!(!patient.is_corrupt_marked());
}

#[test]
fn an_image_that_is_served_is_not_repaired() {
    require!(need::tools(&["qemu-img", "qemu-io"]));
    let scratch = Scratch::new();
    let patient = Patient::new(&scratch, "busy.qcow2", "compat=1.1");
    for read_only in [false, true] {
        let mut serve = Serve::new(&scratch, &patient.path);
        if read_only {
            serve = serve.flag("--read-only");
        }
        let server = serve.start();
        let outcome = patient.repair("all").failure("locked");
        assert_eq!(outcome.status.code(), Some(1));
        server.stop();
    }
    patient.repair("all").success();
}

#[test]
fn raw_images_have_nothing_to_repair() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    let outcome = command(&["check", "--repair", "all", image.str()]);
    assert_eq!(outcome.status.code(), Some(63), "{}", outcome.describe("no checks"));
}
