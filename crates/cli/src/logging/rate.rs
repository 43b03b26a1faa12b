//! How often one place in the code may write to the log.
//!
//! Each call site has [`BURST`] lines in [`PERIOD`]; what it repeats beyond that is counted, and one line says
//! how many they were and what one of them said. Lines that only `--verbose` shows are not limited.

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

/// Lines of one call site in a period.
const BURST: u32 = 10;
/// See [`BURST`].
const PERIOD: Duration = Duration::from_secs(10);

/// The counts of all call sites.
#[derive(Default)]
pub struct RateLimit(Mutex<HashMap<Identifier, Site>>);

struct Site {
    start: Instant,
    written: u32,
    left_out: u64,
    /// One line that was left out.
    example: String,
}

impl RateLimit {
    /// The one of this process.
    pub fn shared() -> &'static Self {
        static LIMIT: OnceLock<RateLimit> = OnceLock::new();
        LIMIT.get_or_init(Self::default)
    }

    /// Whether the call site may write its line at `now`. The period's lines that were left out come
    /// first, as text. `line` makes the line.
    fn admit(
        &self,
        site: Identifier,
        now: Instant,
        line: impl FnOnce(&mut String) -> fmt::Result,
    ) -> Result<String, fmt::Error> {
        let mut sites = self.0.lock();
        let fresh = || Site { start: now, written: 0, left_out: 0, example: String::new() };
        let site = sites.entry(site).or_insert_with(fresh);
        let mut text = String::new();
        if now.saturating_duration_since(site.start) >= PERIOD {
            text = site.take_summary(now);
            *site = fresh();
        }
        if site.written < BURST {
            site.written += 1;
            line(&mut text)?;
        } else {
            if site.left_out == 0 {
                line(&mut site.example)?;
            }
            site.left_out += 1;
        }
        Ok(text)
    }

    /// Lines about the periods that are over at `now`.
    pub fn take_summaries(&self, now: Instant) -> String {
        self.summaries(now, |site| now.saturating_duration_since(site.start) >= PERIOD)
    }

    /// Lines about all periods.
    pub fn take_all_summaries(&self, now: Instant) -> String {
        self.summaries(now, |_| true)
    }

    fn summaries(&self, now: Instant, is_due: impl Fn(&Site) -> bool) -> String {
        // A panic may have come while the lock was held; then there are no summaries.
        let Some(mut sites) = self.0.try_lock_for(Duration::from_millis(100)) else {
            return String::new();
        };
        let due = sites.values_mut().filter(|site| is_due(site));
        due.map(|site| site.take_summary(now)).collect()
    }
}

impl Site {
    /// The line about what was left out, if there was any.
    fn take_summary(&mut self, now: Instant) -> String {
        let left_out = std::mem::take(&mut self.left_out);
        let example = std::mem::take(&mut self.example);
        if left_out == 0 {
            return String::new();
        }
        let seconds = now.saturating_duration_since(self.start).as_secs_f64();
        let example = example.trim();
        format!(" WARN {left_out} more lines in {seconds:.0} s like this one: {example}\n")
    }
}

/// Formats events, as far as the limit lets them through.
pub struct Limited<F> {
    format: F,
    limit: &'static RateLimit,
}

impl<F> Limited<F> {
    /// Formats as `format` does.
    pub fn new(format: F, limit: &'static RateLimit) -> Self {
        Self { format, limit }
    }
}

impl<S, N, F> FormatEvent<S, N> for Limited<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        if *metadata.level() > Level::INFO {
            return self.format.format_event(context, writer, event);
        }
        let line = |text: &mut String| self.format.format_event(context, Writer::new(text), event);
        let text = self.limit.admit(metadata.callsite(), Instant::now(), line)?;
        writer.write_str(&text)
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

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
        let mut log = String::new();
        let mut add = |milliseconds: u64, number: u64| {
            let now = start + Duration::from_millis(milliseconds);
            let site = CALLSITE.metadata().callsite();
            log += &limit.admit(site, now, |text| writeln!(text, "line {number}")).expect("a line");
        };
        (0..1000).for_each(|number| add(number, number));
        add(10_000, 1000);
        let lines: Vec<_> = log.lines().collect();
        assert_eq!(lines.len(), 12, "{log}");
        assert_eq!(lines[..10], (0..10).map(|n| format!("line {n}")).collect::<Vec<_>>());
        assert_eq!(lines[10], " WARN 990 more lines in 10 s like this one: line 10");
        assert_eq!(lines[11], "line 1000");
    }

    #[test]
    fn a_flood_that_is_over_is_counted_all_the_same() {
        let limit = RateLimit::default();
        let start = Instant::now();
        for number in 0..15 {
            let site = CALLSITE.metadata().callsite();
            limit.admit(site, start, |text| writeln!(text, "line {number}")).expect("a line");
        }
        assert_eq!(limit.take_summaries(start), "", "the period is not over");
        let end = start + PERIOD;
        let summary = " WARN 5 more lines in 10 s like this one: line 10\n";
        assert_eq!(limit.take_summaries(end), summary);
        assert_eq!(limit.take_all_summaries(end), "");
    }
}
