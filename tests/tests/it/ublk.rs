//! `--ublk`, `attach` and `detach` on a kernel without the driver: they are refused at the start,
//! with what to do. On a kernel with the driver they are tested in a guest (`cargo xtask vm ublk`).

use std::path::Path;

use blockhouse_tests::image_tool::command;
use blockhouse_tests::{Engine, Scratch, Serve};

const NO_DRIVER: [&str; 3] = ["/dev/ublk-control", "modprobe ublk_drv", "--nbd"];

/// Whether this machine's kernel has the driver: then these tests are skipped.
fn has_driver() -> bool {
    let has = Path::new("/dev/ublk-control").exists();
    if has {
        eprintln!("skipped: this kernel has the driver");
    }
    has
}

#[test]
fn without_the_driver_one_line_says_what_to_do_and_nothing_is_made() {
    if has_driver() {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.path("new.img");
    for word in ["--ublk", "--ublk=5"] {
        let serve = Serve::new(&scratch, &image).option("--create", "1M");
        serve.flag(word).refused().failed(&NO_DRIVER);
        assert!(!image.exists(), "it was made all the same");
    }
    refused_for_the_driver(&["detach", "/dev/ublkb0"], &NO_DRIVER);
}

fn refused_for_the_driver(words: &[&str], expected: &[&str]) {
    let outcome = command(words);
    expected.iter().for_each(|word| assert!(outcome.stderr.contains(word), "{outcome:?}"));
    assert_eq!(outcome.failure("").stderr.lines().count(), 1);
}

#[test]
fn without_any_driver_attach_names_both() {
    // The nbd module has parameters, so its folder exists even if it is built in.
    if has_driver() || Path::new("/sys/module/nbd").exists() {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    let path = image.path().to_str().expect("a path of text");
    refused_for_the_driver(&["attach", path], &[&NO_DRIVER[..], &["modprobe nbd"]].concat());
    refused_for_the_driver(&["detach", "/dev/nbd0"], &["modprobe nbd"]);
    // No server was started, so the image is unlocked.
    command(&["resize", path, "2M"]).success();
}

#[test]
fn other_engines_and_users_are_refused() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    for engine in [Engine::LinuxAio, Engine::Threads] {
        let serve = Serve::new(&scratch, image.path()).engine(engine).flag("--ublk=0");
        serve.refused().failed(&["ublk", engine.as_str(), "by io_uring alone"]);
    }
    let serve = Serve::new(&scratch, image.path()).option("--user", "65534").flag("--ublk=0");
    serve.refused().failed(&["ublk", "leave out --user"]);
}

#[test]
fn a_device_is_a_number_and_each_image_has_its_own() {
    let scratch = Scratch::new();
    let [image, other] = ["a.img", "b.img"].map(|name| scratch.image(name, 1 << 20));
    let serve = || Serve::new(&scratch, image.path());
    for wrong in ["--ublk=x", "--ublk=-1", "--ublk=1048576", "--ublk=/dev/ublkb0"] {
        serve().flag(wrong).refused().wrong_usage(&["--ublk", "the number of a device"]);
    }
    serve().also(other.path()).flag("--ublk=0").refused().wrong_usage(&["one --ublk each"]);
    for wrong in ["0", "ublkb0", "/dev/sda", "/dev/ublkb", "/dev/nbd", "/dev/nbd0p1"] {
        command(&["detach", wrong]).failure("like /dev/ublkb0");
    }
    for wrong in ["--id=x", "--id=-1", "--id=1048576"] {
        command(&["attach", "disk.img", wrong]).failure("--id");
    }
}
