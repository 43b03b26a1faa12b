//! The page on the metrics address in a real browser: under load, with a job, and while the server
//! is stopped and started again.
//!
//! With `BLOCKHOUSE_PICTURES=FOLDER` in the environment its pictures are written there.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use blockhouse_tests::browser::{LivePage, Theme, pictures};
use blockhouse_tests::image_tool::{command, str};
use blockhouse_tests::nbd::{Client, errno};
use blockhouse_tests::{LoopDevice, Scratch, Serve, Server, eventually, need, require};

use crate::jobs::ctl;

const WIDTHS: [u32; 3] = [400, 1280, 1600];
/// WCAG 2.1, success criterion 1.4.3.
const LEAST_CONTRAST: f64 = 4.5;
/// Markup in a name.
const ODD_NAME: &str = "<script>alert(1)<!--.img";

fn serve(scratch: &Scratch, address: &str) -> Server {
    let odd = scratch.path(ODD_NAME);
    Serve::new(scratch, &scratch.path("disk.img"))
        .also(&odd)
        .ready_lines(2)
        .option("--metrics", address)
        .option("--control", scratch.socket("control"))
        .start()
}

/// The URL of the page, from the server's log.
fn url(server: &Server) -> String {
    let find = || {
        let log = server.log();
        let (_, rest) = log.split_once("a page at ")?;
        rest.split_whitespace().next().map(ToOwned::to_owned)
    };
    assert!(eventually(Duration::from_secs(10), || find().is_some()), "{}", server.log());
    find().expect("it was there")
}

/// Checks the page in all widths and themes: nothing is cut off, and all texts are readable.
fn look(page: &mut LivePage, name: &str) {
    let pictures = pictures();
    for width in WIDTHS {
        for theme in [Theme::Light, Theme::Dark] {
            page.resize(width, theme);
            let found = page.examine();
            let is_dark = theme == Theme::Dark;
            assert_eq!(found["dark"], is_dark, "{found}");
            assert!(found["width"].as_u64() <= Some(u64::from(width)), "too wide: {found}");
            let worst = found["worst"][0].as_f64().expect("texts");
            assert!(worst >= LEAST_CONTRAST, "{name} at {width}, {theme:?}: {found}");
            assert!(found["smallest"][0].as_f64() >= Some(11.0), "{found}");
            let picture = page.picture();
            assert!(picture.len() > 5000, "an empty picture");
            if let Some(folder) = &pictures {
                let theme = if is_dark { "dark" } else { "light" };
                std::fs::write(folder.join(format!("page-{name}-{width}-{theme}.png")), picture)
                    .expect("a folder for pictures");
            }
        }
    }
}

/// Ends the guest on drop, also if an assertion fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn the_page_shows_load_jobs_and_a_server_that_goes_and_comes_back() {
    let scratch = Scratch::new();
    scratch.image("disk.img", 64 << 20);
    scratch.image(ODD_NAME, 16 << 20);
    let server = serve(&scratch, "127.0.0.1:0");
    let url = url(&server);
    let mut page = require!(LivePage::open(&scratch, &url));
    page.resize(WIDTHS[1], Theme::Light);
    page.wait_for("document.getElementById('state').className === 'live'");
    // A name is shown as text, not as markup.
    let names = "[...document.querySelectorAll('#disks tbody button')].map(one => one.textContent)";
    page.wait_for(&format!("{names}.length === 2"));
    assert_eq!(page.evaluate(names), serde_json::json!([ODD_NAME, "disk.img"]));
    let is_over = AtomicBool::new(false);
    let address = server.address();
    std::thread::scope(|scope| {
        let guest = scope.spawn(|| {
            let mut client = Client::open(&address);
            let mut at = 0;
            while !is_over.load(Relaxed) {
                client.read(at % (64 << 20), 4096).expect("a read");
                assert_eq!(client.write(at % (64 << 20), &[1; 4096], 0), 0);
                at += 4096;
            }
        });
        let over = Over(&is_over);
        let target = scratch.path("target.img");
        let mirror = ["mirror", "disk.img", str(&target), "--speed", "1M", "--job", "m"];
        ctl(&scratch, &mirror).success();
        page.wait_for(
            "document.querySelector('#disks tr.busy th')?.textContent.startsWith('disk.img') === true",
        );
        page.wait_for("document.querySelector('#jobs td')?.textContent === 'm (mirror)'");
        // Uses only the keyboard.
        let is_there = "document.activeElement?.textContent === 'disk.img'";
        let is_reached = (0..10).any(|_| {
            page.press_tab();
            page.evaluate(is_there) == true
        });
        assert!(is_reached, "no key leads to the disk");
        page.press_enter();
        page.wait_for("!document.getElementById('detail').hidden");
        page.wait_for("document.querySelectorAll('#requests tr').length >= 2");
        assert_eq!(page.evaluate(is_there), true, "the focus stays where it was");
        // Waits until there is some history.
        std::thread::sleep(Duration::from_secs(5));
        look(&mut page, "load");
        drop(over);
        guest.join().expect("the guest saw no error");
    });
    assert_eq!(page.complaints(), Vec::<String>::new());
    ctl(&scratch, &["job", "m", "cancel"]).success();
    let host = url.trim_start_matches("http://").trim_end_matches('/').to_owned();
    server.stop();
    page.wait_for("document.getElementById('state').className === 'gone'");
    look(&mut page, "gone");
    let server = serve(&scratch, &host);
    page.wait_for("document.getElementById('state').className === 'live'");
    page.wait_for("document.getElementById('events').textContent.includes('connected again')");
    // The browser's own messages about the missing server are the only ones allowed.
    for complaint in page.complaints() {
        assert!(complaint.contains("net::ERR_"), "{complaint}");
    }
    server.stop();
}

/// Writes wait for space on a full device, and fail after a timeout.
#[test]
fn the_page_shows_what_waits_for_room_and_what_failed() {
    require!(need::root());
    let scratch = Scratch::new();
    let file = scratch.image("backing", 4 << 20);
    let device = require!(LoopDevice::over(&file, &[]));
    command(&["create", "-f", "qcow2", str(device.path()), "1G"]).success();
    let server = Serve::new(&scratch, device.path())
        .option("--format", "qcow2")
        .option("--name", "volume")
        .option("--metrics", "127.0.0.1:0")
        .option("--on-full", "hold")
        .option("--hold-seconds", "12")
        .start();
    let mut page = require!(LivePage::open(&scratch, &url(&server)));
    page.wait_for("document.getElementById('state').className === 'live'");
    let mut client = Client::open(&server.address());
    std::thread::scope(|scope| {
        let refused = scope.spawn(|| {
            (0..8)
                .map(|part| client.write(part << 20, &[1; 1 << 20], 0))
                .find(|answer| *answer != 0)
        });
        page.wait_for(
            "document.querySelector('#disks .format')?.textContent.includes('1 wait for room') === true",
        );
        look(&mut page, "held");
        page.wait_for("document.getElementById('events').textContent.includes('disk.held')");
        page.wait_for("document.querySelector('#totals .bad')?.textContent > 0");
        look(&mut page, "error");
        assert_eq!(refused.join().expect("an answer"), Some(errno::ENOSPC));
    });
    server.stop();
}

/// A page of another site, which tries to read the server's data in every way that scripts have.
const OTHER_SITE: &str = r#"<!DOCTYPE html><meta charset="utf-8"><title>x</title><body><script>
const read = [], refused = [];
const note = (list, what) => list.push(what);
for (const path of ['/metrics.json', '/metrics', '/page.js', '/'])
  for (const mode of ['cors', 'no-cors'])
    fetch('SERVER' + path, { mode }).then(answer => answer.text())
      .then(text => note(text ? read : refused, path), () => note(refused, path));
const events = new EventSource('SERVER/events');
events.onmessage = () => note(read, 'events');
events.onerror = () => { events.close(); note(refused, 'events'); };
const script = document.createElement('script');
script.src = 'SERVER/page.js';
script.onload = () => note(read, 'script');
script.onerror = () => note(refused, 'script');
const frame = document.createElement('iframe');
frame.src = 'SERVER/';
frame.onload = () => note(frame.contentDocument ? read : refused, 'frame');
document.body.append(script, frame);
</script>"#;

/// A site at another address of this machine. Its thread ends with the process.
fn other_site(server: &str) -> String {
    let listener = TcpListener::bind("127.0.0.2:0").expect("a port");
    let url = format!("http://{}/", listener.local_addr().expect("it is bound"));
    let body = OTHER_SITE.replace("SERVER", server.trim_end_matches('/'));
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.read(&mut [0; 4096]);
            let head = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close";
            let _ = write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        }
    });
    url
}

#[test]
fn a_page_of_another_site_reads_nothing() {
    let scratch = Scratch::new();
    scratch.image("disk.img", 1 << 20);
    scratch.image(ODD_NAME, 1 << 20);
    let server = serve(&scratch, "127.0.0.1:0");
    let site = other_site(&url(&server));
    let mut page = require!(LivePage::open(&scratch, &site));
    page.wait_for("read.length + refused.length >= 11");
    assert_eq!(page.evaluate("read"), serde_json::json!([]));
    server.stop();
}
