//! Formats disks as a text table, and numbers for people.

use std::time::Duration;

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use super::rates::Row;

/// The headings of the table of disks.
pub const HEADINGS: [&str; 12] = [
    "DISK",
    "CLIENTS",
    "DEPTH",
    "READ/S",
    "WRITE/S",
    "FLUSH/S",
    "READ B/S",
    "WRITE B/S",
    "P50",
    "P99",
    "ERRORS",
    "ALLOCATED",
];

/// The columns of the table of disks, in the order in which a narrow screen drops them.
pub const FIRST_TO_GO: [usize; 11] = [11, 1, 5, 2, 6, 7, 8, 10, 4, 3, 9];

/// The name column is not narrowed below this width by the columns of numbers.
const MIN_NAME: usize = 16;

/// The columns of a table that fit in `width`, one space apart, and their widths.
///
/// Whole columns are dropped, in the order of `first_to_go`, so no digit and no heading is cut off.
/// The first column is a name and is never dropped. It gets at least two fifths of `width` if it
/// needs them, and the space that the other columns do not use.
pub fn fit<const N: usize>(
    lines: &[[String; N]],
    first_to_go: &[usize],
    width: usize,
) -> Vec<(usize, usize)> {
    let widest = |column: usize| {
        let widths = lines.iter().map(|line| line[column].width());
        widths.max().unwrap_or(0)
    };
    let longest = widest(0);
    let mut columns: Vec<_> = (0..N).map(|column| (column, widest(column))).collect();
    columns[0].1 = longest.min((width * 2 / 5).max(MIN_NAME));
    let needed =
        |columns: &[(usize, usize)]| columns.iter().map(|column| column.1 + 1).sum::<usize>() - 1;
    for gone in first_to_go {
        if needed(&columns) <= width {
            break;
        }
        columns.retain(|(column, _)| column != gone);
    }
    let others = needed(&columns) - columns[0].1;
    columns[0].1 = longest.min(width.saturating_sub(others));
    columns
}

/// Shortens a name to at most `width` columns. Cuts out its middle, because names of disks differ
/// at their ends.
pub fn shorten(name: &str, width: usize) -> String {
    if name.width() <= width {
        return name.to_owned();
    }
    let kept = width.saturating_sub(1);
    let start: String = beginning(name.chars(), kept / 3).collect();
    let end: Vec<char> = beginning(name.chars().rev(), kept - kept / 3).collect();
    format!("{start}…{}", end.iter().rev().collect::<String>())
}

/// The first of `chars`, in at most `width` columns.
pub fn beginning(chars: impl Iterator<Item = char>, width: usize) -> impl Iterator<Item = char> {
    let mut taken = 0;
    chars.take_while(move |char| {
        taken += char.width().unwrap_or(0);
        taken <= width
    })
}

/// A text with spaces behind it, `width` columns together.
pub fn padded(text: &str, width: usize) -> String {
    format!("{text}{}", " ".repeat(width.saturating_sub(text.width())))
}

/// The cells of a disk.
pub fn cells(row: &Row) -> [String; 12] {
    [
        // Names are not chosen by this program, so they are escaped: otherwise they could control
        // the terminal.
        row.name.escape_debug().to_string(),
        row.clients.to_string(),
        row.in_flight.to_string(),
        count(row.reads.rate),
        count(row.writes.rate),
        count(row.flushes.rate),
        bytes(row.reads.bytes),
        bytes(row.writes.bytes),
        time(row.all.p50),
        time(row.all.p99),
        row.errors.to_string(),
        bytes(row.allocated as f64),
    ]
}

/// The disks, a line for each.
pub fn as_text(rows: &[Row]) -> String {
    let mut lines: Vec<[String; 12]> = vec![HEADINGS.map(str::to_owned)];
    lines.extend(rows.iter().map(cells));
    let mut widths = [0; 12];
    for line in &lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = cell.width().max(*width);
        }
    }
    let text = |line: &[String; 12]| {
        let name = padded(&line[0], widths[0]);
        let numbers = line.iter().zip(widths).skip(1);
        let numbers = numbers.map(|(cell, width)| format!("{cell:>width$}"));
        std::iter::once(name).chain(numbers).collect::<Vec<_>>().join("  ")
    };
    let waits = rows
        .iter()
        .filter_map(|row| wait(row).map(|wait| format!("{}: {wait}", row.name.escape_debug())));
    lines.iter().map(text).chain(waits).collect::<Vec<_>>().join("\n")
}

/// A description of what a disk waits for: a backing file, or free space on the host.
pub fn wait(row: &Row) -> Option<String> {
    let file =
        |(file, seconds): &(String, u64)| format!("waits {seconds} s for {}", file.escape_debug());
    let held = || format!("{} wait for room", row.held);
    row.wait.as_ref().map(file).or_else(|| (row.held > 0).then(held))
}

/// A rate: whole numbers from 10 on.
pub fn count(rate: f64) -> String {
    match rate {
        0.0 => "0".into(),
        rate if rate < 10.0 => format!("{rate:.1}"),
        rate if rate < 100_000.0 => format!("{rate:.0}"),
        rate => format!("{:.0}k", rate / 1e3),
    }
}

/// Bytes, in the largest unit in which the number is at least 1.
pub fn bytes(bytes: f64) -> String {
    const UNITS: [&str; 6] = ["", "K", "M", "G", "T", "P"];
    let mut unit = 0;
    let mut value = bytes;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{value:.0}"),
        _ if value < 10.0 => format!("{value:.1}{}", UNITS[unit]),
        _ => format!("{value:.0}{}", UNITS[unit]),
    }
}

/// A latency with its unit; a dash for `None`.
pub fn time(time: Option<Duration>) -> String {
    // The last bucket has no bound.
    const UNBOUNDED: Duration = Duration::from_secs(1000);
    match time {
        None => "-".into(),
        Some(time) if time >= UNBOUNDED => "> 134s".into(),
        Some(time) if time < Duration::from_micros(10) => tenths(time.as_secs_f64() * 1e6, "us"),
        Some(time) if time < Duration::from_millis(1) => format!("{}us", time.as_micros()),
        Some(time) if time < Duration::from_millis(10) => tenths(time.as_secs_f64() * 1e3, "ms"),
        Some(time) if time < Duration::from_secs(10) => format!("{}ms", time.as_millis()),
        Some(time) => format!("{}s", time.as_secs()),
    }
}

/// The number with one digit after the point, unless the digit is 0.
fn tenths(value: f64, unit: &str) -> String {
    let text = format!("{value:.1}");
    format!("{}{unit}", text.strip_suffix(".0").unwrap_or(&text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        assert_eq!(
            [count(0.0), count(2.25), count(1234.4), count(250e3)],
            ["0", "2.2", "1234", "250k"]
        );
        assert_eq!([bytes(0.0), bytes(1536.0), bytes(64e6)], ["0", "1.5K", "61M"]);
        let times = [1_250, 96_000, 114_688, 9_000_000, 33_554_432, 134_217_728_000];
        let times = times.map(|time| self::time(Some(Duration::from_nanos(time))));
        assert_eq!(times, ["1.2us", "96us", "114us", "9ms", "33ms", "134s"]);
        assert_eq!(time(None), "-");
        assert_eq!(time(Some(Duration::from_nanos(u64::MAX))), "> 134s");
    }

    #[test]
    fn columns_go_as_a_whole_and_names_stay_apart() {
        let row = |name: &str| Row { name: name.into(), errors: 12_345, ..Row::default() };
        let mut lines = vec![HEADINGS.map(str::to_owned)];
        lines.extend(["customer-a-root", "customer-a-data"].map(|name| cells(&row(name))));
        for width in 20..130 {
            let columns = fit(&lines, &FIRST_TO_GO, width);
            let taken = columns.iter().map(|(_, width)| width + 1).sum::<usize>() - 1;
            assert!(taken <= width, "{width}: {columns:?}");
            assert_eq!(columns[0], (0, 15), "{width}");
            for (column, width) in &columns {
                assert!(
                    lines.iter().all(|line| line[*column].len() <= *width),
                    "{width}: {columns:?}"
                );
            }
        }
        let headings = |width| {
            let columns = fit(&lines, &FIRST_TO_GO, width);
            columns.iter().map(|(column, _)| HEADINGS[*column]).collect::<Vec<_>>()
        };
        assert_eq!(
            headings(60),
            ["DISK", "READ/S", "WRITE/S", "WRITE B/S", "P50", "P99", "ERRORS"]
        );
        assert_eq!(headings(120), HEADINGS);
        assert_eq!(fit(&lines, &FIRST_TO_GO, 9), [(0, 9)]);
    }

    #[test]
    fn a_long_name_loses_its_middle() {
        assert_eq!(shorten("disk", 4), "disk");
        assert_eq!(shorten("/vm/customer-a/root.qcow2", 16), "/vm/c…root.qcow2");
        assert_eq!([shorten("disk", 1), shorten("disk", 0)], ["…", "…"]);
    }

    #[test]
    fn a_table_has_a_line_for_each_disk_and_straight_columns() {
        let row = |name: &str| Row { name: name.into(), ..Row::default() };
        let text = as_text(&[row("a"), row("a\x1b[2Jlong name")]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{text}");
        assert!(!text.contains('\x1b'), "{text}");
    }
}
