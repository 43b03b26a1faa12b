//! Servers that are killed (SIGKILL) while a disk is forked, rolled back or committed into its
//! layer, or while that layer is merged into the next one, under writes that nothing flushes: the
//! next server serves a complete disk, the one that the records name; its children have the content
//! of one moment; and no bitmap lacks a change.
//!
//! `BLOCKHOUSE_FORK_KILLS` sets the number of kills.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use blockhouse_tests::control::Control;
use blockhouse_tests::image_tool::{check_after_kill, command, json as json_of, qemu_img, str};
use blockhouse_tests::{Scratch, Serve, need, require, seeded};
use fastrand::Rng;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::fork::image;
use crate::forks_bitmaps::dirty;
use crate::jobs::{BLOCK, LONG, SIZE, Writer, bytes_of};

const KILLS: usize = 8;
const NAME: &str = "disk";
const BITMAP: &str = "changes";

/// The operation in progress when a server is killed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Act {
    Fork,
    Rollback,
    Commit,
    /// The image below the top is merged into the next one, and its file is removed.
    Merge,
}

/// An overlay that a fork has made.
struct Layered {
    over: PathBuf,
    /// The disk's content at the fork.
    before: Vec<u64>,
    /// Whether a commit has begun to copy it into the image below.
    is_committed: bool,
}

struct Life {
    scratch: Scratch,
    base: PathBuf,
    overlays: Vec<Layered>,
    blocks: Vec<u64>,
    /// The disk's content when the bitmap was added.
    checkpoint: Option<Vec<u64>>,
    forks: usize,
    /// How often the act was complete before the kill.
    done: usize,
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut path = path.to_owned().into_os_string();
    path.push(suffix);
    path.into()
}

fn is_recorded(path: &Path) -> bool {
    with_suffix(path, ".moved").exists()
}

/// Whether `found` is the content `before` after some of these writes: the last ones if `are_last`,
/// else the first ones.
fn is_between(found: &[u64], before: &[u64], writes: &[(usize, u64)], are_last: bool) -> bool {
    let mut expected = before.to_vec();
    let mut wrong = found.iter().zip(before).filter(|(found, one)| found != one).count();
    let mut is_set = vec![false; expected.len()];
    let mut order: Vec<_> = writes.to_vec();
    if are_last {
        order.reverse();
    }
    for (index, number) in order {
        if wrong == 0 {
            return true;
        }
        if are_last && std::mem::replace(&mut is_set[index], true) {
            continue;
        }
        let is_right = |value: u64| found[index] == value;
        match (is_right(expected[index]), is_right(number)) {
            (true, false) => wrong += 1,
            (false, true) => wrong -= 1,
            (true, true) | (false, false) => {}
        }
        expected[index] = number;
    }
    wrong == 0
}

impl Life {
    fn new(name: &str) -> Self {
        let scratch = Scratch::new();
        let base = image(&scratch, name);
        let blocks = vec![0; (SIZE / BLOCK) as usize];
        Self { scratch, base, overlays: Vec::new(), blocks, checkpoint: None, forks: 0, done: 0 }
    }

    fn top(&self) -> &Path {
        self.overlays.last().map_or(&self.base, |one| &one.over)
    }

    /// The image below the top.
    fn lower(&self) -> &Path {
        let below = self.overlays.len().checked_sub(2);
        below.map_or(&self.base, |index| &self.overlays[index].over)
    }

    /// The second image below the top.
    fn lowest(&self) -> &Path {
        let below = self.overlays.len().checked_sub(3);
        below.map_or(&self.base, |index| &self.overlays[index].over)
    }

    fn serve(&self) -> Serve {
        let control = self.scratch.socket("control");
        Serve::new(&self.scratch, self.top()).option("--name", NAME).option("--control", control)
    }

    fn choose(&self, random: &mut Rng) -> Act {
        let is_committed = self.overlays.last().is_some_and(|top| top.is_committed);
        match (self.overlays.len(), random.u8(..10)) {
            (0, _) | (1..4, ..3) => Act::Fork,
            (_, 7) => Act::Commit,
            (2.., 8..) => Act::Merge,
            (1..9, _) if is_committed => Act::Fork,
            _ if is_committed => Act::Commit,
            _ => Act::Rollback,
        }
    }

    fn begin(&mut self, act: Act, control: &mut Control) {
        let (method, params) = match act {
            Act::Fork => {
                self.forks += 1;
                let over = self.scratch.path(&format!("over{}.qcow2", self.forks));
                let child = json!([{ "path": self.child() }]);
                let before = self.blocks.clone();
                self.overlays.push(Layered { over: over.clone(), before, is_committed: false });
                let disk = json!({ "disk": NAME, "overlay": over, "children": child });
                ("disk.fork", json!({ "disks": [disk] }))
            }
            Act::Rollback => ("disk.rollback", json!({ "disk": NAME, "force": true })),
            Act::Commit => ("job.start", json!({ "kind": "commit", "disk": NAME, "job": "c" })),
            Act::Merge => {
                let (top, base) = (self.lower(), self.lowest());
                let mut params =
                    json!({ "kind": "commit", "disk": NAME, "top": top, "base": base });
                params["delete"] = json!(true);
                ("job.start", params)
            }
        };
        let call = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        control.send(call.to_string().as_bytes()).expect("the server listens");
        if act == Act::Commit {
            let params = json!({ "job": "c" });
            let call =
                json!({ "jsonrpc": "2.0", "id": 2, "method": "job.complete", "params": params });
            control.send(call.to_string().as_bytes()).expect("the server listens");
        }
    }

    fn child(&self) -> PathBuf {
        self.scratch.path(&format!("child{}.qcow2", self.forks))
    }

    /// Kills a server during `act`, and finds out which image is the disk.
    fn kill(&mut self, act: Act, random: &mut Rng) {
        let mut server = self.serve().start();
        let mut control = Control::connect(&self.scratch.socket("control"));
        let mut writer = Writer::on(&server.address(), self.blocks.clone(), random.fork());
        self.add_bitmap(&mut control);
        let write = |writer: &mut Writer, random: &mut Rng| {
            writer.write(random.usize(..(SIZE / BLOCK) as usize));
        };
        (0..random.usize(1..100)).for_each(|_| write(&mut writer, random));
        self.blocks = writer.blocks();
        let first = writer.history().len();
        self.begin(act, &mut control);
        let began = Instant::now();
        let limit = match act {
            Act::Commit => 2_000_000,
            Act::Merge => 200_000,
            Act::Fork | Act::Rollback => 500_000,
        };
        let until = Duration::from_micros(random.u64(..limit));
        while began.elapsed() < until {
            write(&mut writer, random);
        }
        server.signal(Signal::KILL);
        server.wait(LONG);
        let (blocks, history) = (writer.blocks(), writer.history());
        drop((writer, control));
        let before = std::mem::replace(&mut self.blocks, blocks);
        self.settle(act, &before, &history[first..]);
    }

    fn settle(&mut self, act: Act, before: &[u64], writes: &[(usize, u64)]) {
        if act == Act::Merge {
            return self.settle_merge();
        }
        let (top, lower) = (self.top().to_owned(), self.lower().to_owned());
        let is_over = match act {
            Act::Fork => is_recorded(&lower),
            Act::Rollback => top.exists(),
            Act::Commit | Act::Merge => !is_recorded(&top),
        };
        let is_done = is_over == (act == Act::Fork);
        self.done += usize::from(is_done);
        // The other image is refused, if it exists.
        let other = if is_over { &lower } else { &top };
        // A commit removes one record before it writes the other: without a record, both images
        // have the same content.
        if is_recorded(other) {
            command(&["serve", str(other), "--nbd", "nbd://127.0.0.1:0"]).failure(".moved");
        } else {
            assert!(act != Act::Rollback || !is_over, "two disks");
        }
        let gone = if is_over { None } else { self.overlays.pop() };
        if let (Act::Commit, Some(top)) = (act, self.overlays.last_mut().filter(|_| is_over)) {
            top.is_committed = true;
        }
        let server = self.serve().start();
        let mut control = Control::connect(&self.scratch.socket("control"));
        let has_bitmap = self.has_bitmap(&mut control);
        drop(control);
        server.stop();
        let found = self.read(self.top());
        match (act, gone) {
            (Act::Rollback, Some(gone)) => {
                assert!(is_between(&found, &gone.before, writes, true), "no moment of the disk");
                self.blocks = found;
            }
            _ => assert!(found == self.blocks, "{act:?}: an answered write is lost"),
        }
        if act == Act::Fork {
            if is_over {
                // Without a child, the fork did not reach its moment.
                let mut at_fork = self.blocks.clone();
                if self.child().exists() {
                    at_fork = self.read(&self.child());
                    assert!(is_between(&at_fork, before, writes, false), "the child is no moment");
                    check_after_kill(&self.child());
                }
                self.overlays.last_mut().expect("it was forked").before = at_fork;
            }
            self.remove_files(!is_over, &top);
        }
        if self.top() != self.base || self.base.extension().is_some_and(|one| one == "qcow2") {
            check_after_kill(self.top());
        }
        match &self.checkpoint {
            Some(checkpoint) if has_bitmap => self.check_bitmap(checkpoint),
            _ => {
                self.checkpoint = None;
                // The side file of a raw image that the commit has changed.
                let _ = std::fs::remove_file(with_suffix(&self.base, ".bitmaps"));
            }
        }
    }

    /// Checks that the disk has the same content, over its layer or over the image that the layer
    /// was merged into.
    fn settle_merge(&mut self) {
        let info = qemu_img(&["info", "--output=json", "-f", "qcow2", str(self.top())]);
        let named = json_of(&info.success())["full-backing-filename"].clone();
        let (middle, lowest) = (self.lower().to_owned(), self.lowest().to_owned());
        let is_done = named == str(&lowest);
        assert!(is_done || named == str(&middle) && middle.exists(), "{named}");
        self.done += usize::from(is_done);
        let index = self.overlays.len() - 2;
        if is_done {
            self.overlays.remove(index);
            for gone in [middle.clone(), with_suffix(&middle, ".moved")] {
                // The file may not exist.
                let _ = std::fs::remove_file(gone);
            }
        } else {
            self.overlays[index].is_committed = true;
        }
        let server = self.serve().start();
        let has_bitmap = self.has_bitmap(&mut Control::connect(&self.scratch.socket("control")));
        server.stop();
        assert!(self.read(self.top()) == self.blocks, "an answered write is lost");
        check_after_kill(self.top());
        match &self.checkpoint {
            Some(checkpoint) if has_bitmap => self.check_bitmap(checkpoint),
            _ => self.checkpoint = None,
        }
    }

    /// Removes the files of a fork that are no longer needed.
    fn remove_files(&self, is_undone: bool, over: &Path) {
        let child = self.child();
        let overlay = is_undone.then(|| over.to_owned());
        let all = [with_suffix(&child, ".part"), with_suffix(over, ".part"), child];
        for path in all.into_iter().chain(overlay) {
            // The file may not exist.
            let _ = std::fs::remove_file(path);
        }
    }

    fn read(&self, image: &Path) -> Vec<u64> {
        let raw = self.scratch.path("found.raw");
        command(&["convert", "--force", "-O", "raw", str(image), str(&raw)]).success();
        let bytes = std::fs::read(&raw).expect("a file");
        let number = |block: &[u8]| u64::from_be_bytes(block[..8].try_into().expect("8 bytes"));
        let blocks: Vec<_> = bytes.chunks(BLOCK as usize).map(number).collect();
        assert!(bytes == bytes_of(&blocks), "a block is torn");
        blocks
    }

    fn has_bitmap(&self, control: &mut Control) -> bool {
        let params = json!({ "disk": NAME });
        let listed = control.call("bitmap.list", params).unwrap_or_default();
        let is_it = |one: &Value| one["name"] == BITMAP && one["inconsistent"] != true;
        listed.as_array().is_some_and(|all| all.iter().any(is_it))
    }

    fn add_bitmap(&mut self, control: &mut Control) {
        if self.checkpoint.is_none() {
            if self.has_bitmap(control) {
                control.get("bitmap.remove", json!({ "disk": NAME, "name": BITMAP }));
            }
            let params = json!({ "disk": NAME, "name": BITMAP, "granularity": BLOCK });
            control.get("bitmap.add", params);
            self.checkpoint = Some(self.blocks.clone());
        }
    }

    fn check_bitmap(&self, checkpoint: &[u64]) {
        let dirty = dirty(&self.scratch, self.top(), BITMAP);
        for (index, (now, before)) in self.blocks.iter().zip(checkpoint).enumerate() {
            let at = index as u64 * BLOCK;
            let is_dirty =
                || dirty.iter().any(|(from, length)| (*from..from + length).contains(&at));
            assert!(now == before || is_dirty(), "block {index} has changed, and is not said to");
        }
    }
}

#[test]
fn kills_leave_one_whole_disk() {
    require!(need::tools(&["nbdinfo", "qemu-img"]));
    let kills = std::env::var("BLOCKHOUSE_FORK_KILLS").ok();
    let kills = kills.map_or(KILLS, |kills| kills.parse().expect("a number"));
    let mut random = seeded();
    for (name, kills) in [("disk.img", kills / 2), ("disk.qcow2", kills.div_ceil(2))] {
        let mut life = Life::new(name);
        let mut acts = [0; 4];
        for _ in 0..kills {
            let act = life.choose(&mut random);
            acts[act as usize] += 1;
            life.kill(act, &mut random);
        }
        let [forks, rollbacks, commits, merges] = acts;
        eprintln!(
            "{name}: killed in {forks} forks, {rollbacks} rollbacks, {commits} commits, {merges} commits of layers; {} were done",
            life.done
        );
    }
}
