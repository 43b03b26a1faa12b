//! The usual options of `qemu-img` and `qemu-nbd` work, or the error names the right spelling.

use std::process::{Command, Stdio};
use std::time::Duration;

use blockhouse_tests::{
    Scratch, Serve, blockhouse,
    image_tool::{command, json, new_image, qemu_img, qemu_io, str},
    need, random_bytes, require, run, seeded, tool, wait_for_exit,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// The result of a command with `--output=json`, as users of qemu-img ask for it.
fn output_json(words: &[&str]) -> Value {
    json(&command(&[words, &["--output=json"]].concat()).success())
}

#[test]
fn an_overlay_has_the_size_of_its_backing_file() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let [base, over, theirs] = ["base.img", "over.qcow2", "theirs.qcow2"].map(|n| scratch.path(n));
    command(&["create", str(&base), "1.5M"]).success();
    command(&["create", "-f", "qcow2", "-b", "base.img", "-F", "raw", str(&over)]).success();
    qemu_img(&["create", "-f", "qcow2", "-b", "base.img", "-F", "raw", str(&theirs)]).success();
    let keys = ["virtual-size", "backing-filename", "backing-filename-format", "cluster-size"];
    let (ours, theirs) = (output_json(&["info", str(&over)]), output_json(&["info", str(&theirs)]));
    for key in keys {
        assert_eq!(ours[key], theirs[key], "{key}");
    }
    assert_eq!(ours["virtual-size"], 3 << 19);
    for words in [&["create", "-b", "base.img"][..], &["create", "-F", "raw"], &["create"]] {
        let outcome = command(&[words, &[str(&scratch.path("none.qcow2"))]].concat());
        assert_eq!(outcome.status.code(), Some(2), "{}", outcome.describe("wrong usage"));
        assert!(!outcome.stderr.contains("Usage: blockhouse\n"), "{}", outcome.stderr);
    }
    assert!(!scratch.path("none.qcow2").exists());
}

#[test]
fn a_disk_grows_and_shrinks_by_so_much() {
    let scratch = Scratch::new();
    let image = scratch.path("disk.qcow2");
    let size = || output_json(&["info", str(&image)])["virtual-size"].clone();
    command(&["create", str(&image), "10MiB"]).success();
    command(&["resize", str(&image), "+1.5M"]).success();
    assert_eq!(size(), (10 << 20) + (3 << 19));
    let refused = command(&["resize", str(&image), "-512K"]);
    assert!(refused.stderr.contains("--shrink"), "{}", refused.stderr);
    command(&["resize", "--shrink", str(&image), "-512K"]).success();
    assert_eq!(size(), 11 << 20);
    let refused = command(&["resize", "--shrink", str(&image), "-12M"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(refused.stderr.contains("cannot lose"), "{}", refused.stderr);
}

/// Otherwise `create` of a script that means qemu-io would replace an image.
#[test]
fn a_link_called_qemu_io_tells_its_version_alone() {
    let scratch = Scratch::new();
    let qemu_io = scratch.path("qemu-io");
    std::os::unix::fs::symlink(std::path::absolute(blockhouse()).unwrap(), &qemu_io).unwrap();
    let run_words = |words: &[&str]| run(Command::new(&qemu_io).args(words));
    assert!(run_words(&["--version"]).success().stdout.starts_with("qemu-io version 10."));
    let image = scratch.path("disk.raw");
    for words in [&["-c", "read 0 4k"][..], &["create", str(&image), "1M"]] {
        let refused = run_words(words);
        assert_eq!(refused.status.code(), Some(1), "{words:?}");
        assert!(refused.stderr.contains("QEMU's own qemu-io"), "{}", refused.stderr);
    }
    assert!(!image.exists());
}

#[test]
fn options_of_an_image_are_explained() {
    for words in [&["create", "-o", "help"][..], &["convert", "-o", "?", "a", "b.qcow2"]] {
        let outcome = command(words).success();
        for name in ["cluster_size", "preallocation", "backing_fmt", "refcount_bits"] {
            assert!(outcome.stdout.contains(name), "{}", outcome.stdout);
        }
    }
}

#[test]
fn an_image_in_use_can_be_looked_at() {
    let scratch = Scratch::new();
    let image = new_image(&scratch, "disk.qcow2", "1M");
    let server = Serve::new(&scratch, &image).start();
    for name in ["map", "check"] {
        let locked = command(&[name, str(&image)]);
        assert!(locked.stderr.contains("locked"), "{name}: {}", locked.stderr);
        output_json(&[name, "-U", str(&image)]);
    }
    let refused = command(&["check", "-U", "--repair", "all", str(&image)]);
    assert_eq!(refused.status.code(), Some(1), "{}", refused.describe("wrong usage"));
    server.stop();
}

#[test]
fn verbosity_may_be_asked_for_more_than_once() {
    let scratch = Scratch::new();
    let image = scratch.path("disk.img");
    command(&["-vvv", "create", str(&image), "1M"]).success();
}

#[test]
fn snapshots_are_managed_with_the_flags_of_qemu_img() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let image = scratch.path("disk.qcow2");
    let image = str(&image);
    command(&["create", image, "1M"]).success();
    assert_eq!(command(&["snapshot", "-l", image]).success().stdout, "");
    for name in ["before", "a name that is longer than its column"] {
        command(&["snapshot", "-q", "-c", name, image]).success();
    }
    let ours = command(&["snapshot", "-U", "-l", image]).success().stdout;
    let theirs = run(tool("qemu-img").args(["snapshot", "-l", image]).env("TZ", "UTC")).success();
    // Without an instruction count, older versions of QEMU print 0. Newer ones have other gaps
    // between the columns, and hours of four digits.
    let cut = |text: &str| -> Vec<String> {
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let words = |line: &str| words(line).replace('_', " ").replace(" 0000:", " 00:");
        text.lines().map(|line| words(line.trim_end_matches([' ', '0', '-']))).collect()
    };
    assert_eq!(cut(&ours), cut(&theirs.stdout));
    command(&["snapshot", "-a", "before", image]).success();
    command(&["snapshot", "-d", "before", image]).success();
    assert_eq!(output_json(&["snapshot", "list", image]).as_array().map(Vec::len), Some(1));
    let listed = command(&["snapshot", image]).success().stdout;
    assert_eq!(listed, command(&["snapshot", "-l", image]).success().stdout);
    let outcome = command(&["snapshot", "-c", "a", "-d", "b", image]);
    assert_eq!(outcome.status.code(), Some(2), "{}", outcome.describe("wrong usage"));
}

#[test]
fn a_copy_goes_into_a_target_that_is_there() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let source = scratch.image_of("source.img", &random_bytes(&mut seeded(), 3 << 20));
    let [target, missing] = ["target.qcow2", "none.qcow2"].map(|name| scratch.path(name));
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", str(&target), "4M"])
        .success();
    qemu_io("qcow2", &target, &["write -P 9 0 4M"]);
    let convert =
        ["convert", "-n", "-m", "8", "-W", "-t", "none", "-T", "writeback", "-O", "qcow2"];
    command(&[&convert[..], &[source.str(), str(&target)]].concat()).success();
    // The part of a larger target after the source's end stays unchanged.
    let rest = ["read -P 9 3M 1M"];
    qemu_io("qcow2", &target, &rest);
    command(&["resize", "-q", "--shrink", str(&target), "3M"]).success();
    qemu_img(&["compare", source.str(), str(&target)]).success();
    assert_eq!(output_json(&["info", str(&target)])["cluster-size"], 4096);
    command(&[&convert[..], &[source.str(), str(&missing)]].concat()).failure("none.qcow2");
    assert!(!missing.exists());
    let zeros = scratch.image("zeros.img", 4 << 20);
    command(&["convert", "-n", "--target-is-zero", source.str(), zeros.str()]).success();
    qemu_img(&["compare", source.str(), zeros.str()]).success();
    let refused = command(&["convert", "-S", "some", source.str(), str(&missing)]);
    assert_eq!(refused.status.code(), Some(2), "{}", refused.describe("wrong usage"));
}

#[test]
fn a_copy_becomes_an_overlay() {
    require!(need::tools(&["qemu-img"]));
    let scratch = Scratch::new();
    let content = random_bytes(&mut seeded(), 8 << 20);
    let base = scratch.image_of("base.img", &content);
    let mut changed = content.clone();
    changed[1 << 20..][..100].fill(1);
    changed[5 << 20..6 << 20].fill(0);
    let source = scratch.image_of("source.img", &changed);
    let [over, named] = ["over.qcow2", "named.qcow2"].map(|name| scratch.path(name));
    let words = ["convert", "-O", "qcow2", "-B", "base.img", "-F", "raw", source.str(), str(&over)];
    command(&words).success();
    let named_words = ["convert", "-o", "backing_file=base.img,backing_fmt=raw", source.str()];
    command(&[&named_words[..], &[str(&named)]].concat()).success();
    for image in [&over, &named] {
        qemu_img(&["compare", source.str(), str(image)]).success();
        let info = output_json(&["info", str(image)]);
        assert_eq!(info["backing-filename"], "base.img");
        assert!(info["actual-size"].as_u64() < Some(1 << 20), "{info}");
    }
    command(&["commit", "-d", "-b", base.str(), str(&over)]).success();
    qemu_img(&["compare", source.str(), base.str()]).success();
    // The overlay still has its content.
    let map = json(&command(&["map", "--json", str(&over)]).success());
    assert!(map.as_array().expect("extents").iter().any(|extent| extent["depth"] == 0), "{map}");
    let other = command(&["commit", "-b", source.str(), str(&over)]).failure("base.img");
    assert_eq!(other.status.code(), Some(1));
}

/// The percentages in progress lines, which overwrite each other.
fn percentages(text: &str) -> Vec<f64> {
    let lines = text.trim_end_matches('\n').split('\r').filter(|line| !line.is_empty());
    let number = |line: &str| {
        let inner = line.strip_prefix("    (").and_then(|line| line.strip_suffix("/100%)"));
        inner.and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("{line:?}"))
    };
    lines.map(number).collect()
}

#[test]
fn progress_is_printed_as_qemu_img_prints_it() {
    let scratch = Scratch::new();
    let source = scratch.image_of("source.img", &random_bytes(&mut seeded(), 5 << 20));
    let [copy, over] = ["copy.qcow2", "over.qcow2"].map(|name| scratch.path(name));
    let [full, raw, backup] = ["full.qcow2", "full.img", "backup.qcow2"].map(|n| scratch.path(n));
    command(&["create", "-b", source.str(), "-F", "raw", str(&over)]).success();
    for words in [
        &["convert", "-p", source.str(), str(&copy)][..],
        &["rebase", "-p", "-b", str(&copy), "-F", "qcow2", str(&over)],
        &["commit", "-p", str(&over)],
        &["create", "-p", "-o", "preallocation=full", str(&full), "40M"],
        &["create", "-p", "-o", "preallocation=full", str(&raw), "3M"],
        &["create", "-p", str(&scratch.path("sparse.img")), "3M"],
        &["resize", "-p", "--preallocation=full", str(&full), "+40M"],
        &["backup", "-p", "--verify", str(&full), str(&backup)],
    ] {
        let shown = percentages(&command(words).success().stdout);
        assert_eq!(
            (shown.first(), shown.last()),
            (Some(&0.0), Some(&100.0)),
            "{words:?} {shown:?}"
        );
        assert!(shown.is_sorted(), "{words:?} {shown:?}");
    }
    let compared = command(&["compare", "-p", source.str(), str(&copy)]).success().stdout;
    assert!(compared.starts_with("    (0.00/100%)\r"), "{compared:?}");
    assert!(compared.ends_with("(100.00/100%)\r\nImages are identical.\n"), "{compared:?}");
    for words in
        [&["check", "-p"][..], &["check", "-p", "-r", "all"], &["check", "-p", "-f", "raw"]]
    {
        let checked = command(&[words, &[str(&full)]].concat());
        let ended = checked.stdout.contains("(100.00/100%)\r\n");
        assert!(checked.stdout.starts_with("    (0.00/100%)\r") && ended, "{:?}", checked.stdout);
    }
    let mixed = command(&["check", "-p", "--output=json", str(&full)]);
    assert_eq!(mixed.status.code(), Some(1), "{}", mixed.describe("JSON is alone"));
    let quiet = command(&["compare", "-q", "-p", source.str(), str(&copy)]).success();
    assert_eq!((&*quiet.stdout, &*quiet.stderr), ("", ""));
    let checked = command(&["check", "-q", str(&copy)]).success();
    assert_eq!((&*checked.stdout, &*checked.stderr), ("", ""));
}

#[test]
fn sigusr1_asks_how_far_a_command_is() {
    const SIGUSR1: u32 = 10;
    let scratch = Scratch::new();
    let source = scratch.image_of("source.img", &random_bytes(&mut seeded(), 32 << 20));
    let target = scratch.path("target.qcow2");
    // If the copy completes before the test acts, the test tries again.
    for _ in 0..50 {
        let mut convert = Command::new(blockhouse());
        convert.args(["convert", "--force", source.str(), str(&target)]);
        let mut child = convert.stderr(Stdio::piped()).spawn().expect("it starts");
        let pid = Pid::from_child(&child);
        let is_caught = || {
            let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero()));
            let status = status.unwrap_or_default();
            let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:\t"));
            let caught = caught.and_then(|mask| u64::from_str_radix(mask, 16).ok());
            caught.is_some_and(|mask| mask >> (SIGUSR1 - 1) & 1 == 1)
        };
        while child.try_wait().expect("it is ours").is_none() && !is_caught() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = kill_process(pid, Signal::USR1);
        let status = wait_for_exit(&mut child, Duration::from_secs(60)).expect("it ends");
        assert!(status.success(), "{status}");
        let said = std::io::read_to_string(child.stderr.take().expect("a pipe")).expect("text");
        if !said.is_empty() {
            assert!(said.starts_with("    (") && said.ends_with("/100%)\n"), "{said:?}");
            return;
        }
    }
    panic!("nothing was told");
}
