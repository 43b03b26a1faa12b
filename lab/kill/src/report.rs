//! The findings of all runs, as a table.

use std::collections::BTreeMap;

/// The counts of a run.
#[derive(Clone, Debug)]
pub struct Counts {
    /// The rows of the table that the run counts in: the kind of row and its name.
    pub rows: Vec<(&'static str, String)>,
    /// Servers that were killed.
    pub kills: u32,
    /// Servers whose log says that they replayed a redo log.
    pub replays: u32,
    /// Requests that were sent.
    pub requests: u64,
}

impl Counts {
    /// The counts of one kill. `requests` is the number of requests of the run so far, `earlier`
    /// the counts of its kills before.
    pub fn of_kill(
        rows: impl Into<Vec<(&'static str, String)>>,
        requests: u64,
        earlier: &[Self],
    ) -> Self {
        let before: u64 = earlier.iter().map(|counts| counts.requests).sum();
        Self { rows: rows.into(), kills: 1, requests: requests - before, replays: 0 }
    }

    /// The counts of a scenario other than the load.
    pub fn of_scenario(image: String, scenario: &str, kills: u32) -> Self {
        let rows = vec![("image", image), ("scenario", scenario.into())];
        Self { rows, kills, replays: 0, requests: 0 }
    }
}

/// Sums of one row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sums {
    runs: u32,
    kills: u32,
    findings: u32,
    requests: u64,
    replays: u32,
}

impl Sums {
    fn add(&mut self, counts: &Counts, has_finding: bool) {
        self.runs += 1;
        self.kills += counts.kills;
        self.findings += u32::from(has_finding);
        self.requests += counts.requests;
        self.replays += counts.replays;
    }
}

/// The sums of all rows.
#[derive(Default)]
pub struct Report {
    rows: BTreeMap<(&'static str, String), Sums>,
    all: Sums,
}

impl Report {
    /// Adds a run.
    pub fn add(&mut self, counts: &Counts, has_finding: bool) {
        for row in &counts.rows {
            self.rows.entry(row.clone()).or_default().add(counts, has_finding);
        }
        self.all.add(counts, has_finding);
    }

    /// Servers that were killed in all runs.
    pub fn kills(&self) -> u32 {
        self.all.kills
    }

    /// Runs that found something.
    pub fn findings(&self) -> u32 {
        self.all.findings
    }

    /// Prints all rows.
    pub fn print(&self) {
        println!("| | | runs | kills | replays | requests | findings |");
        println!("| --- | --- | --- | --- | --- | --- | --- |");
        let all = ("all", String::new());
        for ((kind, name), sums) in self.rows.iter().chain([(&all, &self.all)]) {
            let Sums { runs, kills, findings, requests, replays } = sums;
            println!(
                "| {kind} | {name} | {runs} | {kills} | {replays} | {requests} | {findings} |"
            );
        }
    }
}
