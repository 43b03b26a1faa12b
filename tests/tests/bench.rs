//! `blockhouse bench`: it keeps what it announces, and leaves nothing behind.
#![forbid(unsafe_code)]

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use blockhouse_tests::{
    LoopDevice, Scratch, blockhouse, eventually, need, require, run, run_within, wait_for_exit,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

fn bench(arguments: &[&str], file: &Path) -> Command {
    let mut command = Command::new(blockhouse());
    command.arg("bench").args(arguments).arg("--file").arg(file);
    command
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("the folder is there").flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Measures everything, and gives the results.
fn measure_all(scratch: &Scratch, seconds: u64) -> Value {
    let folder = scratch.path("here");
    std::fs::create_dir(&folder).expect("a folder");
    let json = scratch.path("results.json");
    let mut command = bench(&["all", "--seconds", &seconds.to_string()], &folder);
    let begin = Instant::now();
    let outcome = run_within(Duration::from_secs(4 * seconds), command.arg("--json").arg(&json));
    let elapsed = begin.elapsed();
    let outcome = outcome.success();
    assert!(outcome.stderr.contains(&format!("{seconds} s at most")), "{}", outcome.stderr);
    // What is begun is finished: one round of the last case, and the removal of the files.
    let most = Duration::from_secs(seconds + 10);
    assert!(elapsed < most, "announced {seconds} s, took {elapsed:?}");
    assert_eq!(names_in(&folder), [""; 0], "nothing is left");
    assert!(outcome.stdout.contains("measured on other machines"), "{}", outcome.stdout);
    let text = std::fs::read_to_string(json).expect("the results");
    serde_json::from_str(&text).expect("JSON")
}

/// The rows of a question.
fn rows<'a>(results: &'a Value, question: &str) -> Vec<&'a Value> {
    let rows = results["rows"].as_array().expect("rows").iter();
    rows.filter(|row| row["question"] == question).collect()
}

fn check(results: &Value) {
    for question in ["fua", "datasync", "vmstate", "wakeup", "random"] {
        assert!(!rows(results, question).is_empty(), "{question}: {:#}", results["left-out"]);
    }
    for row in results["rows"].as_array().expect("rows") {
        let number = |key: &str| row[key].as_f64().expect("a number");
        assert!(number("requests-per-second") > 0.0 && number("requests") > 0.0, "{row}");
        let latency = |key: &str| row["latency-ns"][key].as_u64().expect("a latency");
        assert!(latency("p50") <= latency("p99") && latency("p99") <= latency("p99.9"), "{row}");
    }
    let wakeup = rows(results, "wakeup");
    for row in &wakeup[1..] {
        let ratio = row["ratio"]["median"].as_f64().expect("a ratio");
        assert!(ratio > 5.0, "a wake-up in force beside one that is withheld: {row}");
    }
    let written = |what: &str| results[what]["bytes-written"].as_u64();
    if let (Some(announced), Some(took)) = (written("announced"), written("took")) {
        assert!(took <= announced, "announced {announced} bytes, wrote {took}");
    }
}

#[test]
fn all_questions_are_answered_in_the_announced_time_on_a_disk() {
    let results = measure_all(&Scratch::new(), 20);
    check(&results);
    for row in rows(&results, "fixed-files") {
        let note = row["note"].as_str().expect("what was found out");
        let wanted = if row["variant"] == "by slot" { "in force" } else { "as wanted" };
        assert!(note.starts_with(wanted), "{note}");
    }
}

#[test]
fn all_questions_are_answered_in_the_announced_time_in_memory() {
    check(&measure_all(&Scratch::in_memory(), 20));
}

/// A measurement that has begun to write.
fn begin(arguments: &[&str], folder: &Path) -> Child {
    let mut command = bench(arguments, folder);
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts");
    let has_begun = || !names_in(folder).is_empty();
    assert!(eventually(Duration::from_secs(20), has_begun), "it makes a folder");
    child
}

#[test]
fn an_interrupt_at_any_time_leaves_nothing() {
    let scratch = Scratch::new();
    for (number, question) in ["fua", "vmstate", "wakeup"].into_iter().enumerate() {
        for (signal, after) in [(Signal::INT, 20), (Signal::TERM, 1500)] {
            let folder = scratch.path(&format!("{number}-{after}"));
            std::fs::create_dir(&folder).expect("a folder");
            let mut child = begin(&[question, "--seconds", "60"], &folder);
            std::thread::sleep(Duration::from_millis(after));
            let id = Pid::from_raw(child.id() as i32).expect("a process id is not 0");
            kill_process(id, signal).expect("it runs");
            let status = wait_for_exit(&mut child, Duration::from_secs(20));
            let _ = child.kill();
            assert_eq!(status.expect("it ends").code(), Some(1), "{question} after {after} ms");
            assert_eq!(names_in(&folder), [""; 0], "{question} after {after} ms");
        }
    }
}

#[test]
fn an_existing_file_is_not_touched() {
    let scratch = Scratch::new();
    let precious = scratch.image_of("precious", &[7; 4096]);
    let before = precious.state();
    run(&mut bench(&["random", "--seconds", "3"], precious.path())).success();
    assert_eq!(precious.state(), before);
    run(&mut bench(&["random", "--destroy-data"], precious.path())).failure("are needed");
    assert_eq!(precious.state(), before, "too small for it");
    let missing = scratch.path("missing");
    run(&mut bench(&["random", "--destroy-data"], &missing)).failure("cannot be written over");
    assert!(!missing.exists());
}

#[test]
fn a_block_device_is_refused_without_a_word_for_it() {
    let scratch = Scratch::new();
    let image = scratch.image("disk", 1 << 20);
    let device = require!(LoopDevice::over(&image, &[]));
    run(&mut bench(&["fua"], device.path())).failure("--destroy-data");
    assert!(image.content().iter().all(|&byte| byte == 0));
}

#[test]
fn too_little_room_is_told_before_anything_is_made() {
    let scratch = Scratch::new();
    let folder = scratch.path("small");
    std::fs::create_dir(&folder).expect("a folder");
    let wrapper = require!(need::private_tmpfs(&folder, 16 << 20));
    let mut command = Command::new(&wrapper[0]);
    command.args(&wrapper[1..]).arg(blockhouse()).args(["bench", "fua", "--file"]).arg(&folder);
    run(&mut command).failure("are needed");
}

#[test]
fn results_that_would_find_no_place_are_refused_at_once() {
    let scratch = Scratch::new();
    let mut command = bench(&["all", "--json", "/nowhere/results.json"], &scratch.path(""));
    let begin = Instant::now();
    run(&mut command).failure("no such folder");
    assert!(begin.elapsed() < Duration::from_secs(5));
}
