//! The state of the live view: the last two readings, their history, and the effects of keys.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use anyhow::Result;
use crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::model::Snapshot;
use super::rates::{Row, rows};

/// How many readings the sparklines show at most.
const MAX_HISTORY: usize = 512;

/// The column that the disks are sorted by, the largest value first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SortBy {
    /// The name, alphabetically.
    Name,
    /// Requests a second.
    Rate,
    /// Bytes a second.
    Bytes,
    /// The 99th percentile of the latency.
    Latency,
    /// Errors.
    Errors,
}

impl SortBy {
    fn next(self) -> Self {
        match self {
            Self::Name => Self::Rate,
            Self::Rate => Self::Bytes,
            Self::Bytes => Self::Latency,
            Self::Latency => Self::Errors,
            Self::Errors => Self::Name,
        }
    }

    /// The column's name on the screen.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Rate => "requests/s",
            Self::Bytes => "bytes/s",
            Self::Latency => "p99",
            Self::Errors => "errors",
        }
    }
}

/// The next step after a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The view continues.
    GoOn,
    /// The view ends.
    Quit,
}

/// The past figures of a disk, the latest last.
#[derive(Default)]
pub struct History {
    /// Requests a second.
    pub rates: VecDeque<u64>,
    /// The median of latencies, in microseconds.
    pub p50: VecDeque<u64>,
    /// The 99th percentile of latencies, in microseconds.
    pub p99: VecDeque<u64>,
}

/// The state of the live view.
pub struct App {
    /// The server's address.
    pub server: String,
    /// The time between two readings.
    pub interval: Duration,
    /// The last reading.
    pub snapshot: Snapshot,
    /// The disks, sorted.
    pub rows: Vec<Row>,
    /// The history of each disk, by its name.
    pub history: HashMap<String, History>,
    /// The column that the disks are sorted by.
    pub sort_by: SortBy,
    /// The name of the selected disk: the busiest one, until a key selects another.
    pub selected: Option<String>,
    is_chosen: bool,
    /// Whether readings are paused.
    pub is_paused: bool,
    /// Whether the keys are explained.
    pub shows_help: bool,
    /// The reason why the last reading failed; `None` if it succeeded.
    pub failure: Option<String>,
    next_reading: Instant,
}

impl App {
    /// The view of a server after its first reading.
    pub fn new(server: String, interval: Duration, first: Snapshot) -> Self {
        let rows = rows(&first, &first);
        let selected = rows.first().map(|row| row.name.clone());
        Self {
            server,
            interval,
            snapshot: first,
            rows,
            history: HashMap::new(),
            sort_by: SortBy::Name,
            selected,
            is_chosen: false,
            is_paused: false,
            shows_help: false,
            failure: None,
            next_reading: Instant::now() + interval,
        }
    }

    /// How long until the next reading is due.
    pub fn time_to_reading(&self) -> Duration {
        if self.is_paused {
            Duration::from_secs(3600)
        } else {
            self.next_reading.saturating_duration_since(Instant::now())
        }
    }

    /// Whether the next reading is due.
    pub fn is_due(&self) -> bool {
        !self.is_paused && self.time_to_reading().is_zero()
    }

    /// Shows a reading, or the reason why it failed.
    pub fn take(&mut self, reading: Result<Snapshot>) {
        self.next_reading = Instant::now() + self.interval;
        let snapshot = match reading {
            Ok(snapshot) => snapshot,
            Err(error) => {
                self.failure = Some(format!("{error:#}"));
                return;
            }
        };
        self.failure = None;
        self.rows = rows(&self.snapshot, &snapshot);
        self.snapshot = snapshot;
        self.history.retain(|name, _| self.snapshot.disks.contains_key(name));
        for row in &self.rows {
            self.history.entry(row.name.clone()).or_default().push(row);
        }
        self.sort();
        if !self.is_chosen {
            self.select_busiest();
        }
    }

    /// The age of the figures on the screen; `None` while the server answers.
    pub fn age(&self) -> Option<Duration> {
        self.failure.as_ref().map(|_| self.snapshot.at.elapsed())
    }

    /// Selects the disk with the highest rate, if its rate is more than twice the rate of the
    /// selected disk. Otherwise the selection could alternate between two equally busy disks.
    fn select_busiest(&mut self) {
        let rate = |row: &Row| row.all.rate;
        let busiest = self.rows.iter().max_by(|one, other| rate(one).total_cmp(&rate(other)));
        let selected = self.selected_row().map_or(0.0, |(_, row)| rate(row));
        if let Some(busiest) = busiest.filter(|busiest| rate(busiest) > 2.0 * selected) {
            self.selected = Some(busiest.name.clone());
        }
    }

    /// The selected disk.
    pub fn selected_row(&self) -> Option<(usize, &Row)> {
        let is_selected = |row: &&Row| Some(&row.name) == self.selected.as_ref();
        let index = self.rows.iter().position(|row| is_selected(&row)).unwrap_or(0);
        Some((index, self.rows.get(index)?))
    }

    /// Handles a key. Other events have no effect.
    pub fn handle(&mut self, event: &Event) -> Next {
        let Event::Key(KeyEvent { code, modifiers, kind: KeyEventKind::Press, .. }) = event else {
            return Next::GoOn;
        };
        match code {
            KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => return Next::Quit,
            KeyCode::Esc if self.shows_help => self.shows_help = false,
            KeyCode::Char('q') | KeyCode::Esc => return Next::Quit,
            KeyCode::Char('h' | '?') => self.shows_help = !self.shows_help,
            KeyCode::Char('p' | ' ') => self.is_paused = !self.is_paused,
            KeyCode::Char('s') => {
                self.sort_by = self.sort_by.next();
                self.sort();
            }
            KeyCode::Up | KeyCode::Char('k') => self.select(-1),
            KeyCode::Down | KeyCode::Char('j') => self.select(1),
            KeyCode::PageUp => self.select(-10),
            KeyCode::PageDown => self.select(10),
            KeyCode::Home => self.select(isize::MIN),
            KeyCode::End => self.select(isize::MAX),
            _ => {}
        }
        Next::GoOn
    }

    fn select(&mut self, by: isize) {
        let Some((index, _)) = self.selected_row() else { return };
        let index = index.saturating_add_signed(by).min(self.rows.len() - 1);
        self.selected = Some(self.rows[index].name.clone());
        self.is_chosen = true;
    }

    fn sort(&mut self) {
        let key = |row: &Row| match self.sort_by {
            SortBy::Name => 0.0,
            SortBy::Rate => row.all.rate,
            SortBy::Bytes => row.all.bytes,
            SortBy::Latency => row.all.p99.unwrap_or_default().as_secs_f64(),
            SortBy::Errors => row.errors as f64,
        };
        let order = |a: &Row, b: &Row| key(b).total_cmp(&key(a)).then(a.name.cmp(&b.name));
        self.rows.sort_by(order);
    }
}

impl History {
    fn push(&mut self, row: &Row) {
        let microseconds = |time: Option<Duration>| time.map_or(0, |time| time.as_micros() as u64);
        for (list, value) in [
            (&mut self.rates, row.all.rate.round() as u64),
            (&mut self.p50, microseconds(row.all.p50)),
            (&mut self.p99, microseconds(row.all.p99)),
        ] {
            if list.len() == MAX_HISTORY {
                list.pop_front();
            }
            list.push_back(value);
        }
    }
}
