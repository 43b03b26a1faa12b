//! The rate limit of log lines, for each call site.
//!
//! Each call site may write [`BURST`] lines in [`PERIOD`]. Further lines are omitted and counted;
//! a summary line reports their number and the message of the first one. Debug lines are not
//! limited.

use std::collections::HashMap;
use std::fmt;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::callsite::Identifier;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::line::{Line, LineFormat};

/// Maximum lines of one call site in a [`PERIOD`].
const BURST: u32 = 10;
/// The period in which a call site may write [`BURST`] lines.
const PERIOD: Duration = Duration::from_secs(10);

/// The counts of all call sites.
#[derive(Default)]
pub struct RateLimit(Mutex<HashMap<Identifier, Site>>);

struct Site {
    start: Instant,
    written: u32,
    left_out: u64,
    /// The message of the first omitted line.
    example: String,
}

impl RateLimit {
    /// The rate limit of this process.
    pub fn shared() -> &'static Self {
        static LIMIT: OnceLock<RateLimit> = OnceLock::new();
        LIMIT.get_or_init(Self::default)
    }

    /// The lines to write at `now`: the summary of the call site's earlier period, if any, and
    /// then the result of `line`, if the limit admits it.
    fn admit(&self, site: Identifier, now: Instant, line: impl FnOnce() -> Line) -> Vec<Line> {
        let mut sites = self.0.lock();
        let fresh = || Site { start: now, written: 0, left_out: 0, example: String::new() };
        let site = sites.entry(site).or_insert_with(fresh);
        let mut lines = Vec::new();
        if now.saturating_duration_since(site.start) >= PERIOD {
            lines.extend(site.take_summary(now));
            *site = fresh();
        }
        if site.written < BURST {
            site.written += 1;
            lines.push(line());
        } else {
            if site.left_out == 0 {
                site.example = line().message;
            }
            site.left_out += 1;
        }
        lines
    }

    /// The summaries of the periods that have ended at `now`.
    pub fn take_summaries(&self, now: Instant) -> Vec<Line> {
        self.summaries(now, |site| now.saturating_duration_since(site.start) >= PERIOD)
    }

    /// The summaries of all periods, ended or not.
    pub fn take_all_summaries(&self, now: Instant) -> Vec<Line> {
        self.summaries(now, |_| true)
    }

    fn summaries(&self, now: Instant, is_due: impl Fn(&Site) -> bool) -> Vec<Line> {
        // The panic hook runs this in a thread that may hold the lock. Then no summary is made.
        let Some(mut sites) = self.0.try_lock_for(Duration::from_millis(100)) else {
            return Vec::new();
        };
        let due = sites.values_mut().filter(|site| is_due(site));
        due.filter_map(|site| site.take_summary(now)).collect()
    }
}

impl Site {
    /// The summary line; `None` if no line was omitted.
    fn take_summary(&mut self, now: Instant) -> Option<Line> {
        let left_out = std::mem::take(&mut self.left_out);
        let example = std::mem::take(&mut self.example);
        if left_out == 0 {
            return None;
        }
        let seconds = now.saturating_duration_since(self.start).as_secs_f64();
        let what = format!("{left_out} more lines in {seconds:.0} s like this one: {example}");
        Some(Line::of_log(Level::WARN, what))
    }
}

/// Formats the events that the rate limit admits.
pub struct Limited {
    format: LineFormat,
    limit: &'static RateLimit,
}

impl Limited {
    /// Formats events in this format, within this limit.
    pub fn new(format: LineFormat, limit: &'static RateLimit) -> Self {
        Self { format, limit }
    }
}

impl<S, N> FormatEvent<S, N> for Limited
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let (metadata, line) = (event.metadata(), || Line::of_event(event));
        let lines = if *metadata.level() > Level::INFO {
            vec![line()]
        } else {
            self.limit.admit(metadata.callsite(), Instant::now(), line)
        };
        lines.iter().try_for_each(|line| writer.write_str(&line.render(self.format)))
    }
}

#[cfg(test)]
mod tests {
    use tracing::callsite::{Callsite, DefaultCallsite};
    use tracing::metadata;

    use super::*;

    static CALLSITE: DefaultCallsite = DefaultCallsite::new(&META);
    static META: tracing::Metadata<'static> = metadata! {
        name: "test",
        target: "test",
        level: Level::WARN,
        fields: &[],
        callsite: &CALLSITE,
        kind: tracing::metadata::Kind::EVENT,
    };

    #[test]
    fn a_flood_is_a_few_lines_and_a_count() {
        let limit = RateLimit::default();
        let start = Instant::now();
        let mut log = Vec::new();
        let mut add = |milliseconds: u64, number: u64| {
            let now = start + Duration::from_millis(milliseconds);
            let site = CALLSITE.metadata().callsite();
            let line = || Line::of_log(Level::INFO, format!("line {number}"));
            log.extend(limit.admit(site, now, line).into_iter().map(|line| line.message));
        };
        (0..1000).for_each(|number| add(number, number));
        add(10_000, 1000);
        assert_eq!(log.len(), 12, "{log:?}");
        assert_eq!(log[..10], (0..10).map(|n| format!("line {n}")).collect::<Vec<_>>());
        assert_eq!(log[10], "990 more lines in 10 s like this one: line 10");
        assert_eq!(log[11], "line 1000");
    }

    #[test]
    fn a_flood_that_is_over_is_counted_all_the_same() {
        let limit = RateLimit::default();
        let start = Instant::now();
        for number in 0..15 {
            let site = CALLSITE.metadata().callsite();
            limit.admit(site, start, || Line::of_log(Level::INFO, format!("line {number}")));
        }
        assert!(limit.take_summaries(start).is_empty(), "the period is not over");
        let end = start + PERIOD;
        let summaries = limit.take_summaries(end);
        let messages: Vec<_> = summaries.iter().map(|line| &line.message[..]).collect();
        assert_eq!(messages, ["5 more lines in 10 s like this one: line 10"]);
        assert!(limit.take_all_summaries(end).is_empty());
    }
}
