//! `--engine auto` on hosts that forbid some engines, as containers do: the server takes the next
//! best engine, logs the reason once, and works.

use std::time::{Duration, Instant};

use blockhouse_tests::nbd::{Client, flag};
use blockhouse_tests::{Engine, Image, Scratch, Serve, Server, blockhouse, eventually, run};

const WITHOUT: &str = env!("CARGO_BIN_EXE_without_syscalls");

fn image(scratch: &Scratch) -> Image {
    scratch.image("disk.img", 1 << 20)
}

#[track_caller]
fn assert_works(server: &Server) {
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(1000, &[5; 5000], flag::FUA), 0);
    assert_eq!(client.read(1000, 5000), Ok(vec![5; 5000]));
    assert_eq!(client.flush(), 0);
    client.disconnect();
}

/// The lines of the log about the choice of an engine.
fn about_engines(server: &Server) -> Vec<String> {
    server.log().lines().filter(|line| line.contains("engine")).map(str::to_owned).collect()
}

#[test]
fn where_nothing_is_forbidden_auto_is_io_uring_and_says_nothing() {
    let scratch = Scratch::new();
    let server = Serve::new(&scratch, image(&scratch).path()).start();
    assert_works(&server);
    let folder = format!("/proc/{}/fd", server.pid().as_raw_nonzero());
    let files = std::fs::read_dir(folder).expect("it runs").flatten();
    let rings = files.filter(|file| {
        let target = std::fs::read_link(file.path()).unwrap_or_default();
        target.to_string_lossy().contains("io_uring")
    });
    assert!(rings.count() > 0, "no ring is open");
    assert_eq!(about_engines(&server), [] as [String; 0]);
    server.stop();
}

#[test]
fn without_io_uring_auto_is_linux_aio_and_says_why_once() {
    let scratch = Scratch::new();
    let serve = Serve::new(&scratch, image(&scratch).path()).option("--workers", "2");
    let server = serve.under([WITHOUT, "io_uring_setup"]).start();
    assert_works(&server);
    // Another thread writes the log, so the line may come late.
    eventually(Duration::from_secs(10), || !about_engines(&server).is_empty());
    let lines = about_engines(&server);
    let [line] = &lines[..] else { panic!("one line is expected: {lines:?}") };
    for word in ["linux-aio", "io_uring", "Operation not permitted"] {
        assert!(line.contains(word), "{word:?} is expected: {line}");
    }
    server.stop();
}

#[test]
fn without_io_uring_and_linux_aio_auto_is_threads_and_says_why_once() {
    let scratch = Scratch::new();
    let serve = Serve::new(&scratch, image(&scratch).path()).option("--workers", "2");
    let server = serve.under([WITHOUT, "io_uring_setup,io_setup"]).start();
    assert_works(&server);
    // Another thread writes the log, so the line may come late.
    eventually(Duration::from_secs(10), || !about_engines(&server).is_empty());
    let lines = about_engines(&server);
    let [line] = &lines[..] else { panic!("one line is expected: {lines:?}") };
    for word in ["threads", "no io_uring", "no linux-aio", "Operation not permitted"] {
        assert!(line.contains(word), "{word:?} is expected: {line}");
    }
    server.stop();
}

#[test]
fn an_engine_that_is_asked_for_by_name_is_not_replaced() {
    let scratch = Scratch::new();
    let image = image(&scratch);
    for (engine, forbidden) in [(Engine::IoUring, "io_uring_setup"), (Engine::LinuxAio, "io_setup")]
    {
        let serve = Serve::new(&scratch, image.path()).engine(engine);
        let refusal = serve.under([WITHOUT, forbidden]).refused();
        refusal.failed(&[engine.as_str(), "Operation not permitted", "--engine auto"]);
    }
}

#[test]
fn the_engine_and_the_kind_of_durable_writes_are_in_verbose_ready_lines() {
    let scratch = Scratch::new();
    let image = image(&scratch);
    for engine in Engine::ALL {
        let server = Serve::new(&scratch, image.path()).engine(engine).flag("--verbose").start();
        let begin = format!("engine={} fua=native sandbox=", engine.as_str());
        assert!(server.details().starts_with(&begin), "{}", server.details());
        server.stop();
    }
}

#[test]
fn info_tells_which_engine_would_be_used_and_why() {
    let scratch = Scratch::new();
    let image = image(&scratch);
    let info = |forbidden: &str| -> serde_json::Value {
        let mut info = std::process::Command::new(WITHOUT);
        info.arg(forbidden).arg(blockhouse()).args(["info", "--json"]).arg(image.path());
        serde_json::from_str(&run(&mut info).success().stdout).expect("JSON")
    };
    let answer = info("io_uring_setup");
    assert_eq!(answer["blockhouse"]["engine"], "linux-aio");
    assert_eq!(answer["blockhouse"]["engines-refused"][0]["engine"], "io_uring");
    let answer = info("io_uring_setup,io_setup");
    assert_eq!(answer["blockhouse"]["engine"], "threads");
}

/// The choice is made at every start, so it must be fast. The two starts alternate, and each counts
/// by its shortest time, so that a busy machine affects both.
#[test]
fn the_fallback_is_quick() {
    let scratch = Scratch::new();
    let image = image(&scratch);
    let start = |forbidden: &str| {
        let serve = Serve::new(&scratch, image.path()).under([WITHOUT, forbidden]);
        let begin = Instant::now();
        let server = serve.start();
        let time = begin.elapsed();
        server.stop();
        time
    };
    let (mut best, mut fallback) = (Duration::MAX, Duration::MAX);
    // Both starts use the wrapper; in the first it forbids a call that the server does not need.
    let is_quick = (1..=30).any(|pairs| {
        best = best.min(start("durable-pwritev2"));
        fallback = fallback.min(start("io_uring_setup,io_setup"));
        pairs >= 5 && fallback.saturating_sub(best) < Duration::from_millis(50)
    });
    assert!(is_quick, "{fallback:?} instead of {best:?}");
}
