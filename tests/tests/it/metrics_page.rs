//! The page on the metrics address: its files, the stream of its data, and which other sites cannot
//! read it.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use blockhouse_tests::metrics::{exchange, get};
use blockhouse_tests::nbd::Client;
use blockhouse_tests::{Scratch, Serve, Server, eventually};
use serde_json::Value;

/// The maximum number of streams that the server serves at once.
const MAX_STREAMS: usize = 4;
const LIMIT: Duration = Duration::from_secs(20);

fn start(scratch: &Scratch, name: &str) -> (Server, PathBuf) {
    let socket = scratch.socket("metrics");
    let image = scratch.image(name, 16 << 20);
    let server = Serve::new(scratch, image.path());
    (server.option("--metrics", format!("unix:{}", socket.display())).start(), socket)
}

/// A reader of the stream, after the HTTP header.
struct Reader(BufReader<UnixStream>);

impl Reader {
    fn open(socket: &Path) -> Self {
        let mut stream = UnixStream::connect(socket).expect("it listens");
        stream.set_read_timeout(Some(LIMIT)).expect("a limit");
        stream.write_all(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("a request");
        let mut reader = Self(BufReader::new(stream));
        let status = reader.line();
        assert!(status.starts_with("HTTP/1.1 200"), "{status}");
        while !reader.line().is_empty() {}
        reader
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).expect("the stream goes on");
        line.trim_end().to_owned()
    }

    /// The next message: its event type, which is empty for figures, and its data.
    fn message(&mut self) -> (String, Value) {
        let mut kind = String::new();
        loop {
            let line = self.line();
            match line.split_once(": ") {
                Some(("event", name)) => kind = name.to_owned(),
                Some(("data", data)) => {
                    assert_eq!(self.line(), "", "a message ends with an empty line");
                    return (kind, serde_json::from_str(data).expect("JSON"));
                }
                _ => panic!("{line}"),
            }
        }
    }

    fn figures(&mut self) -> Value {
        loop {
            let (kind, message) = self.message();
            if kind.is_empty() {
                return message;
            }
        }
    }
}

#[test]
fn the_page_runs_its_own_files_alone_and_in_no_frame() {
    let scratch = Scratch::new();
    let (server, socket) = start(&scratch, "disk.img");
    for (path, content_type) in
        [("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")]
    {
        let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
        let answer = exchange(&socket, request.as_bytes()).expect("an answer");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        for header in [
            "HTTP/1.1 200 OK",
            &format!("Content-Type: {content_type}; charset=utf-8"),
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'",
            "frame-ancestors 'none'",
            "X-Content-Type-Options: nosniff",
        ] {
            assert!(head.contains(header), "{path}: {header} is not in {head}");
        }
        // The page loads nothing from other sites, and has no inline scripts.
        assert!(!body.contains("http://") || body.contains("http://www.w3.org/2000/svg"), "{path}");
        assert!(!body.contains("https://") && !body.contains("innerHTML"), "{path}");
        assert!(!body.contains(" onclick=") && !body.contains("<style"), "{path}");
    }
    server.stop();
}

#[test]
fn the_stream_has_figures_each_second_and_events_at_once() {
    let scratch = Scratch::new();
    // Markup in a name is only text in the JSON.
    let name = "<script>alert(1)<!--.img";
    let (server, socket) = start(&scratch, name);
    let mut reader = Reader::open(&socket);
    let reads = |figures: &Value| -> u64 {
        let samples = figures["metrics"]["blockhouse_requests_total"].as_array();
        let of_reads = samples.into_iter().flatten();
        let of_reads = of_reads.filter(|sample| sample["labels"]["operation"] == "read");
        of_reads.map(|sample| sample["value"].as_u64().expect("a number")).sum()
    };
    let first = reader.figures();
    assert_eq!(first["metrics"]["blockhouse_disk_info"][0]["labels"]["disk"], name);
    assert_eq!(first["jobs"], Value::Array(Vec::new()));
    let before = reads(&first);
    let mut client = Client::open(&server.address());
    for at in 0..5 {
        client.read(at * 4096, 4096).expect("a read");
    }
    let event = loop {
        let (kind, message) = reader.message();
        if kind == "happened" {
            break message;
        }
    };
    assert_eq!(event["event"], "client.came", "{event}");
    let began = Instant::now();
    while reads(&reader.figures()) < before + 5 {
        assert!(began.elapsed() < LIMIT, "the reads are not counted");
    }
    drop(client);
    server.stop();
    // The end of the server is the end of the stream.
    let mut rest = Vec::new();
    reader.0.read_to_end(&mut rest).expect("an end");
}

#[test]
fn readers_of_the_stream_leave_places_for_scrapes() {
    let scratch = Scratch::new();
    let (server, socket) = start(&scratch, "disk.img");
    let mut readers: Vec<_> = (0..MAX_STREAMS).map(|_| Reader::open(&socket)).collect();
    readers.iter_mut().for_each(|reader| drop(reader.figures()));
    let refused = exchange(&socket, b"GET /events HTTP/1.1\r\n\r\n").expect("an answer");
    assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
    // Scrapes are answered while the maximum number of streams is open.
    for _ in 0..100 {
        assert!(get(&socket, "/metrics", "").contains("blockhouse_build_info"));
    }
    drop(readers);
    // A new stream is possible when the server has noticed that a reader has disconnected.
    let began = Instant::now();
    loop {
        let answer = exchange_head(&socket);
        if answer.starts_with("HTTP/1.1 200") {
            break;
        }
        assert!(began.elapsed() < LIMIT, "{answer}");
        std::thread::sleep(Duration::from_millis(100));
    }
    server.stop();
}

#[test]
fn clients_that_send_nothing_keep_out_no_scrape() {
    let scratch = Scratch::new();
    let (server, socket) = start(&scratch, "disk.img");
    let mut stream = Reader::open(&socket);
    let mut silent = Vec::new();
    for _ in 0..20 {
        silent.extend((0..50).map(|_| UnixStream::connect(&socket).expect("it listens")));
        let began = Instant::now();
        assert!(get(&socket, "/metrics", "").contains("blockhouse_build_info"));
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    }
    // A client that has sent its request is not disconnected.
    stream.figures();
    server.stop();
}

#[test]
fn readers_that_take_nothing_keep_out_no_scrape() {
    const DISKS: usize = 200;
    let scratch = Scratch::new();
    let socket = scratch.socket("metrics");
    // Long names make the figures larger than the socket's buffer.
    let image = |number: usize| scratch.image(&format!("{number:0200}.img"), 1 << 20);
    let serve = (1..DISKS).fold(Serve::new(&scratch, image(0).path()), |serve, number| {
        serve.also(image(number).path())
    });
    let metrics = format!("unix:{}", socket.display());
    let server = serve.ready_lines(DISKS).option("--metrics", metrics).start();
    let length = get(&socket, "/metrics.json", "").len();
    assert!(length > 300_000, "the socket holds {length} bytes");
    let ask = |path| {
        let mut stream = UnixStream::connect(&socket).expect("it listens");
        let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n");
        // A client beyond the maximum is disconnected.
        let _ = stream.write_all(request.as_bytes());
        stream
    };
    let slow: Vec<_> = ["/events", "/metrics.json"]
        .into_iter()
        .flat_map(|path| (0..20).map(move |_| path))
        .map(ask)
        .collect();
    let answer = || exchange(&socket, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let is_answered = || answer().is_ok_and(|answer| answer.starts_with("HTTP/1.1 200"));
    assert!(eventually(LIMIT, is_answered), "no scrape finds a place");
    drop(slow);
    server.stop();
}

/// Asks for the stream; returns the first line of the answer.
fn exchange_head(socket: &Path) -> String {
    let mut stream = UnixStream::connect(socket).expect("it listens");
    stream.set_read_timeout(Some(LIMIT)).expect("a limit");
    stream.write_all(b"GET /events HTTP/1.1\r\n\r\n").expect("a request");
    let mut line = String::new();
    // A connection beyond the maximum is closed without an answer.
    let _ = BufReader::new(stream).read_line(&mut line);
    line
}

#[test]
fn a_script_of_another_site_reads_no_figures() {
    let scratch = Scratch::new();
    let (server, socket) = start(&scratch, "disk.img");
    for path in ["/events", "/metrics", "/metrics.json"] {
        let request = format!("GET {path} HTTP/1.1\r\nSec-Fetch-Site: cross-site\r\n\r\n");
        let answer = exchange(&socket, request.as_bytes()).expect("an answer");
        assert!(answer.starts_with("HTTP/1.1 403"), "{path}: {answer}");
    }
    server.stop();
}
