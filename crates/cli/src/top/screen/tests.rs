//! Tests the live view on a terminal in memory.

use std::time::Duration;

use crossterm::event::{Event, KeyCode, KeyEvent, KeyModifiers};
use serde_json::json;

use super::super::app::{Next, SortBy};
use super::super::model::Snapshot;
use super::*;

/// Two disks, of which `b` has done this many reads.
fn reading(reads: u64) -> Snapshot {
    let request = |value: serde_json::Value| {
        let mut sample = json!({ "labels": { "disk": "b", "export": "nbd", "operation": "read" } });
        sample.as_object_mut().expect("an object").extend(value.as_object().expect("one").clone());
        json!([sample])
    };
    let answer = json!({
        "blockhouse_build_info": [{ "labels": { "version": "1.2.3" }, "value": 1 }],
        "blockhouse_disk_size_bytes": [
            { "labels": { "disk": "a" }, "value": 512 },
            { "labels": { "disk": "b" }, "value": 1024 },
        ],
        "blockhouse_clients": [{ "labels": { "disk": "b", "export": "nbd" }, "value": 3 }],
        "blockhouse_request_bytes_total": request(json!({ "value": reads * 4096 })),
        "blockhouse_request_duration_seconds": request(json!({
            "count": reads, "sum": 1.0, "p50": null, "p99": null, "buckets": [[0.000_04, reads]],
        })),
        "blockhouse_of_a_later_version": [{ "labels": {}, "value": 1 }],
    });
    Snapshot::parse(&answer).expect("metrics")
}

fn app() -> App {
    let mut app = App::new("here".into(), Duration::from_secs(1), reading(0));
    let mut next = reading(500);
    next.at = app.snapshot.at + Duration::from_secs(1);
    app.take(Ok(next));
    app
}

fn screen_of(app: &App, width: usize, height: usize) -> String {
    let mut canvas = Canvas::new(width, height);
    draw(&mut canvas, app);
    let mut sent = Vec::new();
    canvas.show(&Canvas::new(width, height), &mut sent).expect("it is shown");
    let before = sent.len();
    canvas.show(&canvas, &mut sent).expect("it is shown");
    assert_eq!(sent.len(), before, "nothing has changed");
    canvas.content()
}

fn press(app: &mut App, code: KeyCode) -> Next {
    app.handle(&Event::Key(code.into()))
}

#[test]
fn disks_rates_and_latencies_are_shown() {
    let mut app = app();
    let screen = screen_of(&app, 120, 30);
    for word in ["blockhouse 1.2.3 at here: 2 disks, 500 requests/s", "2.0M", "40us", "q quit"] {
        assert!(screen.contains(word), "{word}:\n{screen}");
    }
    press(&mut app, KeyCode::Down);
    let screen = screen_of(&app, 120, 30);
    for word in ["requests/s 500", "p99 40us", "nbd read", " b requests "] {
        assert!(screen.contains(word), "{word}:\n{screen}");
    }
}

#[test]
fn keys_do_what_the_help_says() {
    let mut app = app();
    assert_eq!(app.selected.as_deref(), Some("b"), "the busiest one");
    for (code, selected) in [
        (KeyCode::Up, "a"),
        (KeyCode::Down, "b"),
        (KeyCode::Down, "b"),
        (KeyCode::Up, "a"),
        (KeyCode::End, "b"),
        (KeyCode::Home, "a"),
        (KeyCode::PageDown, "b"),
    ] {
        press(&mut app, code);
        assert_eq!(app.selected.as_deref(), Some(selected), "{code:?}");
    }
    press(&mut app, KeyCode::Char('s'));
    assert_eq!((app.sort_by, &*app.rows[0].name), (SortBy::Rate, "b"));
    press(&mut app, KeyCode::Char('p'));
    assert!(app.is_paused && !app.is_due() && screen_of(&app, 120, 30).contains("PAUSED"));
    press(&mut app, KeyCode::Char('h'));
    assert!(screen_of(&app, 120, 30).contains("Ctrl-C  quit"));
    assert_eq!(press(&mut app, KeyCode::Esc), Next::GoOn);
    assert_eq!(press(&mut app, KeyCode::Char('x')), Next::GoOn);
    assert_eq!(press(&mut app, KeyCode::Char('q')), Next::Quit);
    let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(app.handle(&Event::Key(interrupt)), Next::Quit);
}

#[test]
fn a_server_that_is_away_is_told_of_until_it_is_back() {
    let mut app = app();
    app.take(Err(anyhow::anyhow!("no server listens")));
    assert!(screen_of(&app, 120, 30).contains("no server listens"));
    app.take(Ok(reading(0)));
    assert!(screen_of(&app, 120, 30).contains("q quit"));
}

#[test]
fn a_selected_disk_stays_selected_and_the_busiest_is_so_until_then() {
    let mut app = App::new("here".into(), Duration::from_secs(1), reading(0));
    assert_eq!(app.selected.as_deref(), Some("a"));
    app.take(Ok(reading(100)));
    assert_eq!(app.selected.as_deref(), Some("b"));
    press(&mut app, KeyCode::Up);
    app.take(Ok(reading(200)));
    assert_eq!(app.selected.as_deref(), Some("a"));
}

#[test]
fn what_a_server_that_is_gone_has_left_is_marked_as_old_with_the_cause() {
    let mut app = app();
    let why = "/run/blockhouse/metrics: cannot read metrics: Connection refused (os error 111); name what a \
               running server has in --metrics or --control";
    app.take(Err(anyhow::anyhow!(why)));
    for width in [60, 80, 120] {
        let screen = screen_of(&app, width, 24);
        assert!(screen.contains("OLD: ") && screen.contains("no answer for") || width > 60);
        let words = screen.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(why), "{width}:\n{screen}");
    }
}

#[test]
fn a_narrow_screen_has_fewer_columns_and_cuts_nothing() {
    let mut app = app();
    for name in ["customer-a-root", "customer-a-data"] {
        app.rows.push(Row { name: name.into(), ..Row::default() });
    }
    for width in [60, 64, 80, 100, 120] {
        let screen = screen_of(&app, width, 40);
        let headings: Vec<_> =
            screen.lines().nth(1).expect("headings").split_whitespace().collect();
        for heading in headings {
            let known = |known: &&str| known.split(' ').any(|word| word == heading);
            assert!(
                heading.is_empty() || table::HEADINGS.iter().any(known),
                "{heading}:\n{screen}"
            );
        }
        for word in
            ["customer-a-root", "customer-a-data", "P99", "40us", "500 requests/s", "h help"]
        {
            assert!(screen.contains(word), "{width}, {word}:\n{screen}");
        }
    }
}

#[test]
fn wide_and_combining_characters_keep_the_columns_straight() {
    let mut app = app();
    for name in ["磁盘一号-root", "e\u{301}\u{301}-data", "x\u{1100}\u{1100}y"] {
        app.rows.push(Row { name: name.into(), ..Row::default() });
    }
    for width in [12, 40, 60, 120] {
        let screen = screen_of(&app, width, 40);
        let ends = screen.lines().map(UnicodeWidthStr::width).collect::<Vec<_>>();
        assert!(ends.iter().all(|end| *end == width), "{ends:?}\n{screen}");
    }
    assert!(screen_of(&app, 120, 40).contains("磁盘一号-root"));
}

#[test]
fn any_size_of_terminal_will_do() {
    let mut app = app();
    for shows_help in [false, true] {
        app.shows_help = shows_help;
        for width in [1, 2, 7, 40, 80, 300] {
            for height in [1, 2, 3, 8, 24, 100] {
                screen_of(&app, width, height);
            }
        }
    }
}

#[test]
fn a_server_without_disks_has_a_view() {
    let mut app = App::new("here".into(), Duration::from_secs(1), reading(0));
    let empty = Snapshot::parse(&json!({})).expect("no metrics");
    app.take(Ok(empty));
    press(&mut app, KeyCode::Down);
    assert!(screen_of(&app, 80, 24).contains("0 disks"));
}
