//! `blockhouse bench`: it takes the time that it announces, and leaves no files.

use std::io::{PipeReader, PipeWriter, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use blockhouse_tests::browser::{DESK, LivePage, PHONE, Picture, Theme};
use blockhouse_tests::{
    LoopDevice, Scratch, blockhouse, eventually, need, require, run, run_within, wait_for_exit,
};
use rustix::fs::{OFlags, fcntl_setfl};
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

/// Measures everything, and returns the results. On a slow disk there may be no time left for the
/// last questions; then the measurement is repeated with more time.
fn measure_all(scratch: &Scratch) -> Value {
    let results = measure_within(scratch, 20);
    let is_short = results["left-out"].to_string().contains("there was no time left");
    if is_short { measure_within(scratch, 120) } else { results }
}

/// Measures everything in this many seconds, and returns the results.
fn measure_within(scratch: &Scratch, seconds: u64) -> Value {
    let folder = scratch.path(&format!("here{seconds}"));
    std::fs::create_dir(&folder).expect("a folder");
    let json = scratch.path("results.json");
    let mut command = bench(&["all", "--seconds", &seconds.to_string()], &folder);
    let begin = Instant::now();
    command.arg("--json").arg(&json).arg("--html").arg(scratch.path("results.html"));
    let outcome = run_within(Duration::from_secs(4 * seconds), &mut command);
    let elapsed = begin.elapsed();
    let outcome = outcome.success();
    assert!(outcome.stderr.contains(&format!("{seconds} s at most")), "{}", outcome.stderr);
    // The last round is finished and the files are removed, which takes longer on a busy machine.
    let most = Duration::from_secs(seconds + 40);
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
    let median = |row: &Value| row["latency-ns"]["p50"].as_f64().expect("a latency");
    for row in &wakeup[1..] {
        assert!(median(row) < median(wakeup[0]), "{row} beside {}", wakeup[0]);
    }
    let written = |what: &str| results[what]["bytes-written"].as_u64();
    if let (Some(announced), Some(took)) = (written("announced"), written("took")) {
        assert!(took <= announced, "announced {announced} bytes, wrote {took}");
    }
}

/// The schema's verdict on the results.
fn validate(scratch: &Scratch) -> String {
    let program = "import json, sys\n\
        from jsonschema import Draft202012Validator as Validator\n\
        schema, results = (json.load(open(name)) for name in sys.argv[1:])\n\
        Validator.check_schema(schema)\n\
        for error in Validator(schema).iter_errors(results): print(error.message)\n\
        results['rows'][0]['surprise'] = 1\n\
        assert list(Validator(schema).iter_errors(results)), 'the schema refuses nothing'";
    let schema =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/cli/src/bench/report/results.schema.json");
    let mut python = Command::new("/usr/bin/python3");
    python.args(["-c", program, schema]).arg(scratch.path("results.json"));
    run(&mut python).success().stdout
}

/// Checks the page of results as it looks on a phone, in both themes.
fn look_at_the_page(scratch: &Scratch) {
    let page = scratch.path("results.html");
    let text = std::fs::read_to_string(&page).expect("the page");
    for word in ["http:", "https:", "src=", "href=", "@import", "url(", "<script"] {
        assert!(!text.contains(word), "the page needs nothing else, but has {word}");
    }
    let answers =
        text.split("<ul class=\"answers\">").nth(1).and_then(|rest| rest.split("</ul>").next());
    let answers: Vec<_> = answers.expect("a list").split("<li>").skip(1).collect();
    assert_eq!(answers.len(), 6, "{answers:?}");
    assert!(answers[0].contains("Durable writes are "), "{answers:?}");
    let mut browser = require!(LivePage::open(scratch, &format!("file://{}", page.display())));
    browser.resize(DESK, Theme::Light);
    let desk = browser.examine();
    assert_eq!(desk["screen"], f64::from(DESK));
    assert_eq!(desk["cut"], 0, "a table is cut off: {desk}");
    assert_eq!(desk["crossed"], serde_json::json!([]), "lines cross labels");
    for theme in [Theme::Light, Theme::Dark] {
        browser.resize(PHONE, theme);
        let found = browser.examine();
        let number = |key: &str| found[key].as_f64().expect("a number");
        assert_eq!(found["dark"], theme == Theme::Dark, "the theme is in force: {found}");
        assert!(number("texts") > 500.0 && number("plots") > 20.0, "{theme:?}: {found}");
        let worst = |key: &str| found[key][0].as_f64().expect("a number");
        assert!(worst("worst") >= 4.5, "{theme:?}: a text is hard to read: {}", found["worst"]);
        assert!(worst("smallest") >= 10.0, "{theme:?}: a text is too small: {}", found["smallest"]);
        assert_eq!(number("screen"), f64::from(PHONE));
        assert_eq!(found["crossed"], serde_json::json!([]), "lines cross labels");
        assert!(number("width") <= f64::from(PHONE), "{theme:?}: wider than the screen: {found}");
        check_picture(&Picture::of(&browser.picture()), theme);
    }
}

/// Checks that most pixels are background of the theme's brightness, and enough pixels stand out
/// from it.
fn check_picture(picture: &Picture, theme: Theme) {
    let brightness = |pixel: &[u8; 3]| pixel.iter().map(|&one| u32::from(one)).sum::<u32>() / 3;
    let count = |test: &dyn Fn(u32) -> bool| {
        let hits = picture.pixels.iter().filter(|pixel| test(brightness(pixel))).count();
        hits as f64 / picture.pixels.len() as f64
    };
    let (bright, dark) = (count(&|one| one > 200), count(&|one| one < 60));
    let (ground, ink) = if theme == Theme::Light { (bright, dark) } else { (dark, bright) };
    assert!(ground > 0.7, "{theme:?}: {ground} of it is ground");
    assert!(ink > 0.005, "{theme:?}: {ink} of it stands out");
    let colours = |channel: usize, other: usize| {
        let differ = |one: &&[u8; 3]| one[channel].abs_diff(one[other]) > 60;
        picture.pixels.iter().filter(differ).count()
    };
    assert!(colours(0, 2) > 1000, "{theme:?}: the plots have colours");
}

#[test]
fn all_questions_are_answered_in_the_announced_time_on_a_disk() {
    let scratch = Scratch::new();
    let results = measure_all(&scratch);
    check(&results);
    for row in rows(&results, "fixed-files") {
        let note = row["note"].as_str().expect("what was found out");
        let wanted = if row["variant"] == "by slot" { "in force" } else { "as wanted" };
        assert!(note.starts_with(wanted), "{note}");
    }
    look_at_the_page(&scratch);
}

#[test]
fn all_questions_are_answered_in_the_announced_time_in_memory() {
    let scratch = Scratch::in_memory();
    check(&measure_all(&scratch));
    require!(need::python_module("jsonschema"));
    assert_eq!(validate(&scratch), "", "results.schema.json");
}

/// Starts a measurement and waits until it has made files.
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
fn a_second_interrupt_waits_for_nothing_and_leaves_nothing() {
    let scratch = Scratch::new();
    let folder = scratch.path("here");
    std::fs::create_dir(&folder).expect("a folder");
    // The pipe for its messages is full, so the program waits to write them.
    let (_reader, full) = full_pipe();
    let mut child = bench(&["fua"], &folder).stderr(full).spawn().expect("it starts");
    let has_begun = eventually(Duration::from_secs(20), || !names_in(&folder).is_empty());
    let id = Pid::from_raw(child.id() as i32).expect("a process id is not 0");
    // Two signals at once count as one, so they are sent repeatedly.
    let is_over = || {
        kill_process(id, Signal::INT).expect("it runs, or waits to be asked how it ended");
        wait_for_exit(&mut child, Duration::from_millis(100)).is_some()
    };
    let is_over = eventually(Duration::from_secs(20), is_over);
    let _ = child.kill();
    assert!(has_begun && is_over, "it begins: {has_begun}, it ends: {is_over}");
    assert_eq!(child.wait().expect("it is over").code(), Some(1));
    assert_eq!(names_in(&folder), [""; 0]);
}

/// A pipe that is full until it is read.
fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = std::io::pipe().expect("a pipe");
    fcntl_setfl(&writer, OFlags::NONBLOCK).expect("it is open");
    while writer.write(&[b' '; 4096]).is_ok() {}
    fcntl_setfl(&writer, OFlags::empty()).expect("it is open");
    (reader, writer)
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
fn a_block_device_is_measured_when_its_data_may_go() {
    let scratch = Scratch::in_memory();
    let image = scratch.image("disk", 256 << 20);
    let device = require!(LoopDevice::over(&image, &[]));
    let measure = |_| -> Value {
        let words = ["all", "--seconds", "8", "--destroy-data", "--json"];
        let outcome = run_within(Duration::from_secs(60), &mut bench(&words, device.path()));
        let outcome = outcome.success();
        assert!(outcome.stderr.contains("WRITTEN OVER"), "{}", outcome.stderr);
        serde_json::from_str(&outcome.stdout).expect("JSON")
    };
    // A machine that is busy with other disks may have no time left for any question.
    let mut measured = (0..3).map(measure);
    let results = measured.find(|results| !rows(results, "fua").is_empty()).expect("rows");
    assert_eq!(results["storage"]["file-system"], "block device");
    assert!(rows(&results, "vmstate").is_empty(), "it needs a folder");
    assert!(
        results["left-out"]
            .as_array()
            .expect("a list")
            .iter()
            .any(|one| one["question"] == "vmstate")
    );
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
