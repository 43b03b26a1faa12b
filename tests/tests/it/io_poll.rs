//! `--io-poll on` where it cannot take effect is refused at the start, with the reason and what to
//! do. Its effect on a disk with poll queues is tested in a guest (`cargo xtask vm io-poll`).

use blockhouse_tests::{Engine, LoopDevice, Scratch, Serve, require};

const WITHOUT: &str = env!("CARGO_BIN_EXE_without_syscalls");

#[test]
fn a_disk_without_queues_to_poll_is_refused() {
    let scratch = Scratch::new();
    let backing = scratch.image("backing", 1 << 20);
    let device = require!(LoopDevice::over(&backing, &[]));
    let refusal = Serve::new(&scratch, device.path()).option("--io-poll", "on").refused();
    let name = device.path().to_str().unwrap();
    refusal.failed(&[name, "no queues to poll", "poll_queues=N", "leave out --io-poll"]);
}

#[test]
fn an_image_on_no_disk_is_refused() {
    let scratch = Scratch::in_memory();
    let image = scratch.image("disk.img", 1 << 20);
    let refusal = Serve::new(&scratch, image.path()).option("--io-poll", "on").refused();
    refusal.failed(&["disk.img", "no block device", "leave out --io-poll"]);
}

#[test]
fn a_refused_image_is_not_made() {
    let scratch = Scratch::in_memory();
    let image = scratch.path("new.img");
    let serve = Serve::new(&scratch, &image).option("--create", "1M");
    serve.option("--io-poll", "on").refused().failed(&["leave out --io-poll"]);
    assert!(!image.exists(), "it was made all the same");
}

#[test]
fn a_missing_image_is_said_to_be_missing() {
    let scratch = Scratch::new();
    for image in [scratch.path("none.img"), scratch.path("no/folder/none.img")] {
        let serve = Serve::new(&scratch, &image).option("--io-poll", "on");
        serve.refused().failed(&["none.img", "No such file", "check the path"]);
    }
}

#[test]
fn other_engines_are_refused() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    for engine in [Engine::LinuxAio, Engine::Threads] {
        let serve = Serve::new(&scratch, image.path()).engine(engine).option("--io-poll", "on");
        serve.refused().failed(&["--io-poll", "needs the engine io_uring", engine.as_str()]);
    }
    let serve = Serve::new(&scratch, image.path()).option("--io-poll", "on");
    let refusal = serve.under([WITHOUT, "io_uring_setup"]).refused();
    refusal.failed(&["needs the engine io_uring", "linux-aio", "Operation not permitted"]);
}

#[test]
fn the_page_cache_is_wrong_usage() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    for cache in ["writeback", "writethrough", "unsafe"] {
        let serve = Serve::new(&scratch, image.path()).option("--cache", cache);
        serve
            .option("--io-poll", "on")
            .refused()
            .wrong_usage(&["direct I/O", "--cache none or directsync"]);
    }
}
