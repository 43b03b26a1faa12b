//! The examples of `--help`, as the option reference has them: each works as typed.

use blockhouse_tests::generated::options;
use blockhouse_tests::typed::{Folder, Serving, commands};
use blockhouse_tests::{Outcome, eventually};
use rustix::process::{Pid, Signal, kill_process};
use std::time::Duration;

/// The commands that make the images that examples rely on.
const IMAGES: &[&str] = &[
    "blockhouse create disk.img 64M",
    "blockhouse create disk.qcow2 64M",
    "blockhouse snapshot create disk.qcow2 before",
    "blockhouse bitmap add disk.qcow2 changes",
    "blockhouse bitmap add disk.qcow2 week",
    "blockhouse create base.img 64M",
    "blockhouse create -b base.img -F raw over.qcow2",
];

/// The sections of the page: a command's words after `blockhouse`, and its text.
fn sections() -> impl Iterator<Item = (&'static str, &'static str)> {
    let sections = options().split("\n## blockhouse").skip(1);
    sections.filter_map(|section| section.split_once('\n')).map(|(path, text)| (path.trim(), text))
}

/// Ends the server that an upgrade started.
fn end_successor(upgrade: &Outcome) {
    let number = upgrade.stdout.split(' ').nth(1).and_then(|word| word.parse().ok());
    let pid = number.and_then(Pid::from_raw).expect("the new process");
    kill_process(pid, Signal::INT).expect("it runs");
    let stat = format!("/proc/{}/stat", pid.as_raw_nonzero());
    let has_ended = || std::fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z "));
    assert!(eventually(Duration::from_secs(60), has_ended), "it does not stop");
}

/// Runs a line in a new folder.
fn type_alone(line: &str) {
    let folder = Folder::new();
    IMAGES.iter().for_each(|line| _ = folder.run(line));
    if line.starts_with("blockhouse restore") {
        folder.run("blockhouse backup disk.qcow2 monday.qcow2");
    }
    if line.starts_with("blockhouse serve") && !line.contains("--help") {
        return Serving::start(&folder, line).stop();
    }
    let asks = line.contains("--control control") || line.starts_with("blockhouse ctl control");
    let serve = "blockhouse serve disk.qcow2 --control control --nbd 'nbd+unix:///?socket=disk.sock' --limit iops=9999,group=slow";
    let server = match () {
        () if line.contains(" fork ") || line.contains(" rollback ") => {
            let server = Serving::start(&folder, "blockhouse serve disk.img --control control");
            if line.contains(" rollback ") {
                folder.run("blockhouse ctl control fork disk.img");
            }
            Some(server)
        }
        () if asks => Some(Serving::start(&folder, serve)),
        () if line.starts_with("blockhouse top") => {
            Some(Serving::start(&folder, "blockhouse serve disk.qcow2 --metrics unix:metrics"))
        }
        () => None,
    };
    let outcome = folder.run(line);
    if line.starts_with("blockhouse upgrade") {
        end_successor(&outcome);
        // It has handed over everything to the other process.
        drop(server);
    } else {
        server.into_iter().for_each(Serving::stop);
    }
}

#[test]
fn each_example_works_as_typed() {
    let mut count = 0;
    for (path, text) in sections() {
        let examples = commands(text, "blockhouse ");
        assert!(!examples.is_empty(), "blockhouse {path}: no example");
        // These examples are tested elsewhere or not here: they need a machine (vmstate.rs), the
        // kernel's ublk driver (lab/vm), a job or another host (jobs.rs and commits.rs) or a backup
        // (backups.rs); or they run until Ctrl-C; or they print nothing when they are ready
        // (storage_daemon.rs).
        let is_elsewhere = ["attach", "detach", "qemu-storage-daemon"].contains(&path)
            || path.starts_with("vmstate")
            || path.starts_with("ctl job ")
            || [
                "ctl events",
                "ctl reload",
                "ctl job",
                "ctl mirror",
                "ctl commit",
                "ctl stream",
                "ctl backup end",
            ]
            .contains(&path);
        let typed = examples.into_iter().filter(|line| !is_elsewhere && !line.contains(" --ublk"));
        if path.is_empty() {
            // The examples of `blockhouse` itself run one after the other in an empty folder.
            let folder = Folder::new();
            for line in typed {
                match line {
                    "blockhouse serve disk.qcow2" => Serving::start(&folder, line).stop(),
                    _ => _ = folder.run(line),
                }
            }
            continue;
        }
        for line in typed {
            count += 1;
            eprintln!("{line}");
            type_alone(&line.replace("bench fua", "bench fua --seconds 2"));
        }
    }
    assert!(count > 30, "{count} examples");
}
