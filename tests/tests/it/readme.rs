//! Tutorial pages: their commands work as typed, one after the other in an empty folder.

use blockhouse_tests::typed::{Folder, Serving, commands};
use blockhouse_tests::{need, require, run, tool};

const README: &str = include_str!("../../../README.md");
const COMMANDS: &str = include_str!("../../../docs/commands.md");
const FIRST_MACHINE: &str = include_str!("../../../docs/first-machine.md");
const FROM_QEMU: &str = include_str!("../../../docs/from-qemu.md");

/// Runs the commands of a page. A server runs until the next command that is not for its control
/// socket.
fn type_all(page: &str, folder: &Folder, least: usize) {
    let commands = commands(page, "blockhouse ");
    assert!(commands.len() >= least, "{commands:?}");
    let mut serving: Option<Serving> = None;
    for line in commands {
        let is_for_server =
            line.starts_with("blockhouse ctl") || line.contains(" create --control");
        if !is_for_server {
            serving.take().into_iter().for_each(Serving::stop);
        }
        if line.starts_with("blockhouse serve") {
            serving = Some(Serving::start(folder, line));
        } else {
            folder.run(line);
        }
    }
}

/// The commands in the cells of a table row.
fn cells(row: &str) -> Vec<&str> {
    row.split('`').skip(1).step_by(2).collect()
}

#[test]
fn the_first_command_of_the_readme_serves_what_the_next_line_reads() {
    require!(need::tools(&["qemu-io"]));
    let folder = Folder::new();
    let socket = folder.path("readme.sock");
    let here = |line: &str| line.replace("/tmp/blockhouse.sock", socket.to_str().expect("a name"));
    let [serve] = commands(README, "cargo run --release -- ")[..] else { panic!("one server") };
    let [read] = commands(README, "qemu-io ")[..] else { panic!("one client") };
    let serve = here(serve).replace("cargo run --release -- ", "blockhouse ");
    let serving = Serving::start(&folder, &serve);
    let said = folder.run(&here(read)).stdout;
    assert!(said.contains("read 1048576/1048576 bytes"), "{said}");
    serving.stop();
}

#[test]
fn every_command_of_every_day_works_as_typed() {
    let folder = Folder::new();
    type_all(COMMANDS, &folder, 15);
    assert!(folder.path("report.html").exists());
}

#[test]
fn a_first_machines_disk_is_made_served_and_changed_as_typed() {
    type_all(FIRST_MACHINE, &Folder::new(), 12);
}

#[test]
fn what_is_typed_for_qemu_img_has_the_same_effect_here() {
    require!(need::tools(&["qemu-img"]));
    let (theirs, ours) = (Folder::new(), Folder::new());
    let rows: Vec<_> = FROM_QEMU.lines().filter(|line| line.starts_with("| `qemu-img ")).collect();
    assert!(rows.len() > 20, "{rows:?}");
    for row in rows {
        let [qemu, blockhouse] = cells(row)[..] else { panic!("two commands: {row}") };
        theirs.run(qemu);
        ours.run(blockhouse);
    }
    let names = |folder: &Folder| {
        let entries = std::fs::read_dir(folder.path("")).expect("a folder");
        let names = entries.map(|entry| entry.expect("an entry").file_name());
        let mut names: Vec<_> = names.filter_map(|name| name.into_string().ok()).collect();
        names.retain(|name| name.contains('.'));
        names.sort();
        names
    };
    assert_eq!(names(&theirs), names(&ours));
    for name in names(&theirs) {
        let (theirs, ours) = (theirs.path(&name), ours.path(&name));
        run(tool("qemu-img").arg("compare").args([theirs, ours])).success();
    }
}

#[test]
fn what_is_typed_with_pipes_works_here() {
    require!(need::tools(&["gzip", "sha256sum"]));
    let folder = Folder::new();
    folder.run("blockhouse create disk.img 64M");
    let (_, section) = FROM_QEMU.split_once("## Pipes").expect("a section");
    let section = section.split("\n## ").next().unwrap_or_default().replace("\\|", "|");
    let rows: Vec<_> = section.lines().filter(|line| line.starts_with("| `")).collect();
    assert!(rows.len() > 3, "{rows:?}");
    for row in rows {
        folder.run(&format!("sh -c '{}'", cells(row)[1]));
    }
    for name in ["new.img", "new.qcow2"] {
        folder.run(&format!("blockhouse compare disk.img {name}"));
    }
}

#[test]
fn what_is_typed_for_other_servers_serves_here() {
    let folder = Folder::new();
    folder.run("blockhouse create disk.img 64M");
    folder.run("blockhouse create disk.qcow2 64M");
    let rows = FROM_QEMU.lines().filter(|line| line.contains("| `blockhouse serve "));
    let mut count = 0;
    for row in rows {
        let line = cells(row)[1];
        Serving::start(&folder, line).stop();
        count += 1;
    }
    assert!(count > 8, "{count} servers");
}
