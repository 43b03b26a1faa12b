//! A history of bitmaps, in which each step is taken by QEMU's tools or by ours: whichever tool
//! takes a step, the result is the same.

use std::path::Path;

use blockhouse_tests::{
    Scratch, Serve,
    image_tool::{command, json, qemu_img, str},
    need, require, run, tool,
};
use serde_json::Value;

/// Which tool takes which step: bit N of `ours` is set if step N is ours.
struct Turns<'a> {
    ours: u32,
    step: u32,
    scratch: &'a Scratch,
}

impl Turns<'_> {
    fn is_ours(&mut self) -> bool {
        let is_ours = self.ours >> (self.step % 32) & 1 == 1;
        self.step += 1;
        is_ours
    }

    fn image(&mut self, arguments: &[&str]) {
        if self.is_ours() {
            command(arguments).success()
        } else {
            qemu_img(arguments).success()
        };
    }

    /// A command that both tools refuse.
    fn refused(&mut self, arguments: &[&str]) {
        let outcome = if self.is_ours() { command(arguments) } else { qemu_img(arguments) };
        outcome.failure("bitmap");
    }

    fn write(&mut self, image: &str, place: &str) {
        let write = format!("write -P 7 {place}");
        if !self.is_ours() {
            run(tool("qemu-io").args(["-f", "qcow2", "-c", &write, image])).success();
            return;
        }
        let server = Serve::new(self.scratch, Path::new(image)).option("--format", "qcow2").start();
        run(tool("qemu-io").args(["-f", "raw", "-c", &write, server.uri()])).success();
        server.stop();
    }
}

/// Bitmaps are added, cleared, disabled and enabled between writes, copied with a disk, merged from
/// its backing file and into it, and removed. Returns the bitmaps of the disk and of its backing
/// file at the end, and what they have recorded.
fn history(turns: &mut Turns<'_>) -> Vec<Value> {
    let names = ["base", "overlay", "copy", "raw"];
    let paths = names.map(|name| turns.scratch.path(&format!("{name}.qcow2")));
    let [base, overlay, copy, raw] = [0, 1, 2, 3].map(|index| str(&paths[index]));
    turns.image(&["create", "-q", "-f", "qcow2", base, "10M"]);
    turns.image(&["bitmap", "--add", "-f", "qcow2", base, "first"]);
    turns.write(base, "3M 1M");
    turns.image(&["create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", overlay, "10M"]);
    turns.write(overlay, "0 1M");
    turns.image(&["bitmap", "--add", "-g", "512k", "-f", "qcow2", overlay, "coarse"]);
    turns.image(&["bitmap", "--add", "--disable", "-f", "qcow2", overlay, "late"]);
    turns.write(overlay, "3M 1M");
    turns.image(&["bitmap", "--clear", "-f", "qcow2", overlay, "coarse"]);
    turns.write(overlay, "1M 1M");
    turns.image(&["bitmap", "--disable", "-f", "qcow2", overlay, "coarse"]);
    turns.image(&["bitmap", "--enable", "-f", "qcow2", overlay, "late"]);
    turns.write(overlay, "2M 1M");
    turns.refused(&["convert", "--bitmaps", "-O", "raw", overlay, raw]);
    turns.image(&["convert", "--bitmaps", "-O", "qcow2", overlay, copy]);
    turns.image(&["bitmap", "--add", "--disable", "-f", "qcow2", copy, "first"]);
    let from_base = ["--merge", "first", "-b", base, "-F", "qcow2", "-f", "qcow2", copy, "between"];
    turns.image(&[&["bitmap", "--add"], &from_base[..]].concat());
    turns.image(&["bitmap", "--merge", "between", "-f", "qcow2", copy, "first"]);
    let options = format!("driver=qcow2,file.driver=file,file.filename={copy}");
    turns.image(&["bitmap", "--remove", "--image-opts", &options, "between"]);
    turns.image(&["rebase", "-u", "-F", "qcow2", "-b", base, copy]);
    let from_copy = ["--merge", "late", "-b", copy, "-F", "qcow2", "-f", "qcow2", base, "last"];
    turns.image(&[&["bitmap", "--add"], &from_copy[..]].concat());

    let mut outcome = Vec::new();
    for (image, names) in [(copy, &["first", "coarse", "late"][..]), (base, &["first", "last"])] {
        qemu_img(&["check", "-q", "-f", "qcow2", image]).success();
        let info = json(&qemu_img(&["info", "--output=json", "-f", "qcow2", image]).success());
        outcome.push(info["format-specific"]["data"]["bitmaps"].clone());
        for name in names {
            let server = Serve::new(turns.scratch, image.as_ref()).flag("--read-only");
            let server = server.option("--format", "qcow2").option("--bitmap", name).start();
            let ours = dirty(name, &[server.uri()]);
            server.stop();
            let server = ["[", "qemu-nbd", "-r", "-f", "qcow2", "-B", name, image, "]"];
            assert_eq!(ours, dirty(name, &server), "{image}, {name}");
            outcome.push(ours);
        }
    }
    paths.iter().for_each(|path| _ = std::fs::remove_file(path));
    outcome
}

fn dirty(name: &str, server: &[&str]) -> Value {
    let map = format!("--map=qemu:dirty-bitmap:{name}");
    json(&run(tool("nbdinfo").args(["--json", &map, "--"]).args(server)).success())
}

#[test]
fn whoever_takes_a_step_the_bitmaps_are_the_same() {
    require!(need::tools(&["qemu-img", "qemu-io", "qemu-nbd", "nbdinfo"]));
    let scratch = Scratch::new();
    let by = |ours| history(&mut Turns { ours, step: 0, scratch: &scratch });
    let theirs = by(0);
    // All steps ours, alternating, and in irregular orders.
    for ours in [u32::MAX, 0x5555_5555, 0xaaaa_aaaa, 0x9a3c_61e5, 0x2cf0_d587] {
        assert_eq!(by(ours), theirs, "{ours:#x}");
    }
}
