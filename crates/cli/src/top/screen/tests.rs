//! The live view on terminals of memory.

use std::time::Duration;

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{Event, KeyCode, KeyModifiers};
use serde_json::json;

use super::super::app::{Next, SortBy};
use super::super::model::Snapshot;
use super::*;

/// Two disks, of which `b` has done so many reads.
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

fn screen_of(app: &App, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal");
    terminal.draw(|frame| draw(frame, app)).expect("it is drawn");
    terminal.backend().to_string()
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
    assert_eq!(app.selected.as_deref(), Some("a"));
    for (code, selected) in [
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
    let interrupt =
        ratatui::crossterm::event::KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
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
