//! `serve --metrics`: the numbers equal those of fio, of strace and of the requests that were made;
//! other tools parse the text; and no metrics client disturbs the server.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use blockhouse_tests::metrics::{Metrics, exchange, get};
use blockhouse_tests::nbd::{Client, Request, command, flag};
use blockhouse_tests::upgrade::{Servers, upgrade_in_the_end};
use blockhouse_tests::{
    Cache, Engine, Scratch, Serve, Server, Trace, eventually, need, require, run, tool,
};
use serde_json::Value;

const BLOCK: &[u8] = &[7; 4096];
const REQUESTS: &str = "blockhouse_requests_total";
const DURATIONS: &str = "blockhouse_request_duration_seconds";
const STAGES: &str = "blockhouse_stage_duration_seconds";
const LIMIT: Duration = Duration::from_secs(20);

fn serve(scratch: &Scratch, image: &Path) -> Serve {
    let address = format!("unix:{}", scratch.socket("metrics").display());
    Serve::new(scratch, image).option("--metrics", address)
}

fn is_served(socket: &Path) -> bool {
    let answer = exchange(socket, b"GET /metrics HTTP/1.1\r\n\r\n");
    answer.is_ok_and(|answer| answer.starts_with("HTTP/1.1 200"))
}

fn start(scratch: &Scratch) -> Server {
    serve(scratch, scratch.image("disk.img", 16 << 20).path()).start()
}

/// Runs a fio job; returns its report.
fn fio(scratch: &Scratch, server: &Server, options: &[&str]) -> Value {
    let mut fio = tool("fio");
    fio.args(["--name=load", "--thread", "--ioengine=nbd", "--size=16M", "--bs=4k"]);
    fio.args(options).args(["--output-format=json", &format!("--uri={}", server.uri())]);
    let outcome = run(fio.current_dir(scratch.short())).success();
    let start = outcome.stdout.find('{').expect("fio writes JSON");
    let report: Value = serde_json::from_str(&outcome.stdout[start..]).expect("JSON");
    assert_eq!(report["jobs"][0]["error"], 0, "{report}");
    report["jobs"][0].clone()
}

#[test]
fn fio_and_the_histograms_count_the_same_requests() {
    require!(need::tools(&["fio"]));
    let scratch = Scratch::new();
    let server = start(&scratch);
    let options = ["--rw=randrw", "--iodepth=16", "--number_ios=3000", "--fsync=100"];
    let job = fio(&scratch, &server, &options);
    let metrics = Metrics::read(&scratch.socket("metrics"));
    for operation in ["read", "write"] {
        let (ios, bytes) = (&job[operation]["total_ios"], &job[operation]["io_bytes"]);
        let labels = [("disk", "disk.img"), ("export", "nbd"), ("operation", operation)];
        for name in [REQUESTS, DURATIONS] {
            assert_eq!(Some(metrics.sum(name, &labels)), ios.as_u64(), "{operation} {name}");
        }
        let moved = metrics.sum("blockhouse_request_bytes_total", &labels);
        assert_eq!(Some(moved), bytes.as_u64(), "{operation}");
    }
    let flushes = metrics.sum(DURATIONS, &[("operation", "flush")]);
    assert_eq!(Some(flushes), job["sync"]["total_ios"].as_u64());
    server.stop();
}

/// Each host write takes at least 213 ms, the middle of a bucket, so that delays of a busy machine
/// are small compared with it.
#[test]
fn the_median_is_in_the_bucket_of_fio_s() {
    require!(need::tools(&["fio"]));
    require!(need::strace());
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 16 << 20);
    let slow = ["-e", "inject=pwritev,pwritev2,pwrite64:delay_enter=213000"];
    let trace = Trace::of(&scratch, image.path(), "pwritev,pwritev2,pwrite64", &slow);
    let server =
        serve(&scratch, image.path()).engine(Engine::Threads).under(&trace.wrapper).start();
    let job = fio(&scratch, &server, &["--rw=randwrite", "--iodepth=1", "--number_ios=12"]);
    let metrics = Metrics::read(&scratch.socket("metrics"));
    let median = |name, labels: &[(&str, &str)]| {
        let samples = metrics.samples(name, labels);
        samples[0]["p50"].as_f64().expect("there were writes")
    };
    let theirs = job["write"]["clat_ns"]["percentile"]["50.000000"].as_f64().expect("a median");
    let theirs = theirs / 1e9;
    let write = ("operation", "write");
    for ours in [median(DURATIONS, &[write]), median(STAGES, &[write, ("stage", "host")])] {
        // Our median is the upper bound of a bucket; fio's may be just above such a bound.
        assert!((theirs / 1.3..theirs * 1.3).contains(&ours), "{ours} s, and fio says {theirs} s");
    }
    server.stop();
}

#[test]
fn what_the_kernel_was_asked_for_is_what_the_stages_count() {
    require!(need::strace());
    let scratch = Scratch::new();
    let image = scratch.image_of("disk.img", &vec![1; 1 << 20]);
    let calls = "preadv,preadv2,pread64,pwritev,pwritev2,pwrite64,fdatasync,fsync";
    let trace = Trace::of(&scratch, image.path(), calls, &[]);
    let server = serve(&scratch, image.path()).engine(Engine::Threads).cache(Cache::None);
    let server = server.under(&trace.wrapper).start();
    let socket = scratch.socket("metrics");
    let mut client = Client::open(&server.address());
    let before = Metrics::read(&socket);
    let done = trace.during(|| {
        for index in 0..20_u64 {
            assert_eq!(client.write(index * 4096, BLOCK, 0), 0);
            assert_eq!(client.write(index * 4096, BLOCK, flag::FUA), 0);
            client.read(index * 4096, 4096).expect("a read");
            if index % 5 == 0 {
                assert_eq!([client.flush(), client.flush()], [0, 0]);
            }
        }
    });
    let after = Metrics::read(&socket);
    let counted = |operation: &str| {
        let labels = [("operation", operation)];
        let at_host = |metrics: &Metrics| {
            let stages = ["host", "metadata", "flush"];
            let of = |stage| metrics.sum(STAGES, &[("stage", stage), labels[0]]);
            stages.into_iter().map(of).sum::<u64>()
        };
        at_host(&after) - at_host(&before)
    };
    let is_durable = |arguments: &str| arguments.contains("RWF_DSYNC");
    let called = |name: &str, durable: bool| {
        let is = |call: &&blockhouse_tests::Call| {
            call.name.starts_with(name) && is_durable(&call.arguments) == durable
        };
        done.iter().filter(is).count() as u64
    };
    assert_eq!(counted("read"), called("pread", false));
    assert_eq!(counted("write"), called("pwrite", false));
    assert_eq!(counted("write_fua"), called("pwrite", true));
    assert_eq!(counted("flush"), called("f", false));
    assert_eq!((counted("write"), counted("write_fua"), counted("flush")), (20, 20, 4));
    let skipped = "blockhouse_flushes_skipped_total";
    assert_eq!(after.sum(skipped, &[]) - before.sum(skipped, &[]), 4);
    let fua = after.sum(REQUESTS, &[("operation", "write_fua"), ("export", "nbd")]);
    assert_eq!(fua, 20);
    client.disconnect();
    server.stop();
}

#[test]
fn clients_errors_and_questions_are_counted() {
    let scratch = Scratch::new();
    let server = start(&scratch);
    let socket = scratch.socket("metrics");
    let mut client = Client::open(&server.address());
    assert_ne!(client.write(1 << 40, BLOCK, 0), 0);
    client.read(1 << 40, 512).expect_err("past the end");
    let discard = Request { command: command::TRIM, length: 4096, ..Request::default() };
    assert_eq!(client.call(discard, &[]).error, 0);
    let metrics = Metrics::read(&socket);
    assert_eq!(metrics.sum("blockhouse_clients", &[("export", "nbd")]), 1);
    assert_eq!(metrics.sum(REQUESTS, &[("operation", "discard")]), 1);
    // The export refuses requests past the end before they reach the disk.
    assert_eq!(metrics.sum("blockhouse_disk_requests_in_flight", &[]), 0);
    assert_eq!(metrics.sum("blockhouse_disk_size_bytes", &[]), 16 << 20);
    client.disconnect();
    let clients = || Metrics::read(&socket).sum("blockhouse_clients", &[]);
    assert!(eventually(LIMIT, || clients() == 0));
    let metrics = Metrics::read(&socket);
    assert_eq!(metrics.sum("blockhouse_client_connections_total", &[]), 1);
    server.stop();
}

/// A server that has executed some requests of each kind.
fn used(scratch: &Scratch) -> Server {
    let server = start(scratch);
    let mut client = Client::open(&server.address());
    for flags in [0, flag::FUA] {
        assert_eq!(client.write(0, BLOCK, flags), 0);
    }
    client.read(0, 4096).expect("a read");
    assert_eq!(client.flush(), 0);
    client.disconnect();
    server
}

/// Runs a command that reads standard input, and must succeed.
fn feed(command: &mut Command, input: &str) {
    let command = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("it starts");
    child.stdin.take().expect("a pipe").write_all(input.as_bytes()).expect("it reads");
    let output = child.wait_with_output().expect("it ends");
    let told = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && told.is_empty(), "{told}");
}

#[test]
fn promtool_finds_nothing_wrong_with_the_text() {
    let promtool = require!(need::promtool());
    let scratch = Scratch::new();
    let server = used(&scratch);
    let text = get(&scratch.socket("metrics"), "/metrics", "");
    feed(Command::new(promtool).args(["check", "metrics"]), &text);
    server.stop();
}

#[test]
fn the_text_is_openmetrics_for_those_who_accept_that() {
    require!(need::python_module("prometheus_client.openmetrics.parser"));
    let scratch = Scratch::new();
    let server = used(&scratch);
    let accept = "Accept: application/openmetrics-text; version=1.0.0,text/plain;q=0.5\r\n";
    let text = get(&scratch.socket("metrics"), "/metrics", accept);
    assert!(text.ends_with("# EOF\n"), "{text}");
    let parse = "import sys; from prometheus_client.openmetrics.parser import \
                 text_string_to_metric_families as parse; \
                 assert len(list(parse(sys.stdin.read()))) > 10";
    feed(Command::new("/usr/bin/python3").args(["-c", parse]), &text);
    server.stop();
}

#[test]
fn the_two_forms_have_the_same_numbers() {
    let scratch = Scratch::new();
    let server = used(&scratch);
    let socket = scratch.socket("metrics");
    let text = get(&socket, "/metrics", "");
    let metrics = Metrics::read(&socket);
    let labels = [("disk", "disk.img"), ("export", "nbd"), ("operation", "write_fua")];
    let pairs = labels.map(|(name, value)| format!("{name}=\"{value}\"")).join(",");
    for (line, name) in [(REQUESTS.to_owned(), REQUESTS), (format!("{DURATIONS}_count"), DURATIONS)]
    {
        let line = format!("{line}{{{pairs}}} {}", metrics.sum(name, &labels));
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    assert_eq!(metrics.sum(REQUESTS, &labels), 1);
    server.stop();
}

#[test]
fn strange_and_silent_clients_are_no_trouble() {
    let scratch = Scratch::new();
    let server = start(&scratch);
    let socket = scratch.socket("metrics");
    let mode = std::fs::metadata(&socket).expect("a socket").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    for (request, status) in [
        (&b"GET /page HTTP/1.1\r\n\r\n"[..], "404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
        (b"\x00\xff\r\n", "400"),
        (&[b'A'; 100], "400"),
        (&[b"GET /metrics HTTP/1.1\r\nA: ".as_slice(), &[b'a'; 9000]].concat(), "431"),
    ] {
        let answer = exchange(&socket, request).unwrap_or_default();
        assert_eq!(answer.split(' ').nth(1), Some(status), "{}", request.escape_ascii());
    }
    let head = exchange(&socket, b"HEAD /metrics HTTP/1.1\r\n\r\n").expect("an answer");
    assert!(head.starts_with("HTTP/1.1 200") && head.ends_with("\r\n\r\n"), "{head}");
    // The maximum number of clients connect and send nothing.
    let silent: Vec<_> = (0..8).map(|_| UnixStream::connect(&socket).expect("accepted")).collect();
    let mut refused = UnixStream::connect(&socket).expect("the kernel accepts");
    assert_eq!(refused.read(&mut [0]).unwrap_or(0), 0, "it is disconnected");
    server.assert_serves();
    drop(silent);
    assert!(eventually(LIMIT, || is_served(&socket)));
    server.stop();
    assert!(!socket.exists(), "its file is removed");
}

#[test]
fn only_addresses_of_this_machine_are_served() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    for address in ["0.0.0.0:9618", "9618", "unix:"] {
        let refusal = Serve::new(&scratch, image.path()).option("--metrics", address).refused();
        refusal.wrong_usage(&["--metrics", "unix:PATH"]);
    }
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("it is bound").to_string();
    let refusal = Serve::new(&scratch, image.path()).option("--metrics", &address).refused();
    refusal.failed(&["--metrics", &address, "in use"]);
    if std::net::TcpListener::bind("[::1]:0").is_ok() {
        let serve = Serve::new(&scratch, image.path()).option("--metrics", "[::1]:0");
        let server = serve.flag("-v").start();
        let is_told = || server.log().contains("http://[::1]:");
        assert!(eventually(LIMIT, is_told), "{}", server.log());
        server.stop();
    }
}

#[test]
fn they_are_served_again_after_an_upgrade() {
    let scratch = Scratch::new();
    let image = scratch.image("disk.img", 1 << 20);
    let (control, socket) = (scratch.socket("control"), scratch.socket("metrics"));
    let _servers = Servers(&scratch);
    let mut server = serve(&scratch, image.path()).option("--control", &control).start();
    server.assert_serves();
    let before = Metrics::read(&socket).sum(REQUESTS, &[]);
    assert!(before > 0);
    upgrade_in_the_end(&control, &[]);
    server.wait(LIMIT);
    assert!(eventually(LIMIT, || is_served(&socket)));
    // Requests may be counted only after they were answered, so the number may be larger.
    assert!(Metrics::read(&socket).sum(REQUESTS, &[]) >= before, "they go on");
}

fn contrib(name: &str) -> String {
    format!("{}/../contrib/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn the_alert_rules_fire_when_they_should() {
    let promtool = require!(need::promtool());
    run(Command::new(&promtool).args(["check", "rules", &contrib("prometheus-rules.yml")]))
        .success();
    run(Command::new(&promtool).args(["test", "rules", &contrib("prometheus-rules.test.yml")]))
        .success();
}

#[test]
fn prometheus_understands_the_dashboard_s_questions() {
    let promtool = require!(need::promtool());
    let text = std::fs::read_to_string(contrib("grafana-dashboard.json")).expect("the dashboard");
    let dashboard: Value = serde_json::from_str(&text).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let targets = panels.iter().flat_map(|panel| panel["targets"].as_array().expect("targets"));
    let questions: Vec<_> =
        targets.map(|target| target["expr"].as_str().expect("a text")).collect();
    assert!(questions.len() >= panels.len() && panels.len() > 10);
    // Makes rules of the queries, which promtool can check. Names with a dollar are Grafana's
    // variables.
    let rule = |(index, question): (usize, &&str)| {
        let question = question.replace("$__rate_interval", "5m").replace(['$'], "");
        let question = serde_json::to_string(&question).expect("a text");
        format!("      - {{ record: \"panel:{index}\", expr: {question} }}\n")
    };
    let rules: String = questions.iter().enumerate().map(rule).collect();
    let scratch = Scratch::new();
    let file = scratch.path("rules.yml");
    std::fs::write(&file, format!("groups:\n  - name: panels\n    rules:\n{rules}")).expect("room");
    run(Command::new(promtool).args(["check", "rules"]).arg(&file)).success();
}
