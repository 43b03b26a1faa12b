//! `blockhouse top`: in a terminal, which tmux provides, and without one.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use blockhouse_tests::browser::{LivePage, Theme, pictures, terminal_page};
use blockhouse_tests::nbd::Client;
use blockhouse_tests::{
    Outcome, Scratch, Serve, Server, blockhouse, eventually, need, require, run, tool,
};

const LIMIT: Duration = Duration::from_secs(30);

/// A server of two disks with metrics, and the socket of the metrics.
fn start(scratch: &Scratch) -> (Server, PathBuf) {
    let socket = scratch.socket("metrics");
    let (one, two) = (scratch.image("one.img", 1 << 20), scratch.image("two.img", 1 << 20));
    let serve = Serve::new(scratch, one.path()).also(two.path());
    (serve.option("--metrics", format!("unix:{}", socket.display())).start(), socket)
}

fn top(words: &[&str], server: &Path) -> Outcome {
    run(Command::new(blockhouse()).arg("top").args(words).arg(server))
}

#[test]
fn without_a_terminal_it_is_one_table() {
    let scratch = Scratch::new();
    let (server, socket) = start(&scratch);
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(0, &[1; 4096], 0), 0);
    let outcome = top(&["--interval", "0.1"], &socket).success();
    let lines: Vec<_> = outcome.stdout.lines().collect();
    let [heading, one, two] = lines[..] else { panic!("{}", outcome.describe("three lines")) };
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert!(heading.starts_with("DISK") && heading.contains("P99"), "{heading}");
    assert_eq!(words(one)[..3], ["one.img", "1", "0"]);
    assert_eq!(words(two)[..3], ["two.img", "0", "0"]);
    client.disconnect();
    server.stop();
}

#[test]
fn what_is_no_server_with_metrics_is_one_line() {
    let scratch = Scratch::new();
    top(&[], &scratch.socket("none")).failure("--metrics or --control");
    let image = scratch.image("disk.img", 1 << 20);
    let server = Serve::new(&scratch, image.path()).start();
    // An NBD server sends first, and does not use HTTP.
    let outcome = top(&[], &scratch.socket("nbd")).failure("cannot read metrics");
    assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
    server.stop();
}

/// A terminal, provided by tmux.
struct Tmux<'a> {
    socket: PathBuf,
    scratch: &'a Scratch,
}

impl<'a> Tmux<'a> {
    fn start(scratch: &'a Scratch, line: &str) -> Self {
        let tmux = Self { socket: scratch.socket("tmux"), scratch };
        let size = ["-x", "120", "-y", "30"];
        tmux.run(&[&["-f", "/dev/null", "new-session", "-d"], &size[..], &[line]].concat())
            .success();
        tmux
    }

    fn resize(&self, columns: usize) {
        self.run(&["resize-window", "-x", &columns.to_string(), "-y", "30"]).success();
    }

    fn run(&self, words: &[&str]) -> Outcome {
        let mut command = tool("tmux");
        command.arg("-S").arg(&self.socket).args(words).current_dir(self.scratch.short());
        run(&mut command)
    }

    fn screen(&self) -> String {
        self.run(&["capture-pane", "-p"]).stdout
    }

    #[track_caller]
    fn wait_for(&self, word: &str) {
        let is_there = eventually(LIMIT, || self.screen().contains(word));
        assert!(is_there, "{word:?} is not on the screen:\n{}", self.screen());
    }

    fn press(&self, key: &str) {
        self.run(&["send-keys", key]).success();
    }
}

impl Drop for Tmux<'_> {
    fn drop(&mut self) {
        // tmux has ended already if the test passed.
        let _ = self.run(&["kill-server"]);
    }
}

#[test]
fn in_a_terminal_it_is_live_and_leaves_no_trace() {
    require!(need::tools(&["tmux"]));
    let scratch = Scratch::new();
    let (server, socket) = start(&scratch);
    let line = format!(
        "sh -c 'echo before; {} top --interval 0.2 {}; echo after $?; read line'",
        blockhouse().display(),
        socket.display()
    );
    let tmux = Tmux::start(&scratch, &line);
    tmux.wait_for("2 disks");
    tmux.wait_for("q quit");
    assert!(!tmux.screen().contains("before"), "it has a screen of its own");
    let mut client = Client::open(&server.address());
    assert_eq!(client.write(0, &[1; 4096], 0), 0);
    tmux.wait_for("nbd write");
    tmux.press("Down");
    tmux.wait_for("two.img requests");
    tmux.press("s");
    tmux.wait_for("sorted by requests/s");
    tmux.press("p");
    tmux.wait_for("PAUSED");
    tmux.press("h");
    tmux.wait_for("select a disk");
    tmux.press("Escape");
    tmux.press("p");
    client.disconnect();
    server.stop();
    tmux.wait_for("cannot read metrics");
    tmux.press("q");
    tmux.wait_for("after 0");
    assert!(tmux.screen().contains("before"), "the terminal is as before");
}

/// The rows of two disks whose names differ at their ends.
fn rows(screen: &str) -> Option<[Vec<String>; 2]> {
    let row = |name: &str| {
        let line = screen.lines().find(|line| line.contains(name) && !line.contains("requests"))?;
        Some(line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    };
    Some([row("customer-a-data")?, row("customer-a-root")?])
}

#[test]
fn in_small_terminals_columns_go_and_names_and_digits_stay() {
    require!(need::tools(&["tmux"]));
    let scratch = Scratch::new();
    let socket = scratch.socket("metrics");
    let images =
        ["customer-a-root.img", "customer-a-data.img"].map(|name| scratch.image(name, 16 << 20));
    let server = Serve::new(&scratch, images[0].path())
        .also(images[1].path())
        .option("--metrics", format!("unix:{}", socket.display()))
        .start();
    let line = format!("{} top --interval 0.2 {}", blockhouse().display(), socket.display());
    let tmux = Tmux::start(&scratch, &line);
    tmux.wait_for("2 disks");
    let mut client = Client::open(&server.address());
    let is_busy = || {
        assert_eq!(client.write(1 << 20, &[1; 64 << 10], 0), 0);
        // Waits for a rate other than that of the first moment.
        rows(&tmux.screen())
            .is_some_and(|[_, root]| root.iter().any(|word| word.ends_with('M')) && root[4] != "0")
    };
    assert!(eventually(LIMIT, is_busy), "no load:\n{}", tmux.screen());
    tmux.press("p");
    tmux.wait_for("PAUSED");
    let wide = rows(&tmux.screen()).expect("two disks");
    for columns in [120, 80, 60] {
        tmux.resize(columns);
        // After a resize the terminal cuts the old text until `top` draws again: then each figure
        // is one of the wide screen.
        let is_whole = |(row, wide): (&Vec<String>, &Vec<String>)| {
            row.len() > 4 && row.iter().all(|word| wide.contains(word))
        };
        let is_drawn = || {
            let screen = tmux.screen();
            let longest = screen.lines().map(|line| line.trim_end().chars().count()).max();
            let shown = rows(&screen).filter(|_| longest <= Some(columns));
            shown.is_some_and(|shown| shown.iter().zip(&wide).all(is_whole))
        };
        assert!(eventually(LIMIT, is_drawn), "{columns} columns of {wide:?}:\n{}", tmux.screen());
        if let Some(folder) = pictures() {
            let screen = tmux.run(&["capture-pane", "-e", "-p"]).stdout;
            let file = scratch.path("screen.html");
            std::fs::write(&file, terminal_page(&screen)).expect("scratch folders can be written");
            let mut page =
                require!(LivePage::open(&scratch, &format!("file://{}", file.display())));
            page.resize(columns as u32 * 9 + 16, Theme::Dark);
            page.wait_for("document.querySelectorAll('span').length > 10");
            std::fs::write(folder.join(format!("top-{columns}.png")), page.picture())
                .expect("a folder");
        }
    }
    tmux.press("q");
    client.disconnect();
    server.stop();
}
