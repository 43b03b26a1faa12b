//! Lists of snapshots: for people as a table, for programs with the keys of `qemu-img info`.

use std::time::{Duration, SystemTime};

use blockhouse_config::size;
use blockhouse_daemon::control::Listed;
use blockhouse_engine::local_time;

/// The snapshots as JSON.
pub fn as_json(snapshots: &[Listed]) -> String {
    let value = serde_json::to_value(snapshots).expect("plain values");
    crate::json_text::pretty(&value)
}

/// The snapshots as `qemu-img snapshot -l` prints them, for scripts that split its columns. Two
/// lines of headings, then ids, names, bytes of the machine's state, dates, the machine's clock and
/// instruction counts. Empty without snapshots.
pub fn as_qemu_table(snapshots: &[Listed]) -> String {
    if snapshots.is_empty() {
        return String::new();
    }
    let line = |cells: [&str; 6]| {
        let [id, name, state, date, clock, count] = cells;
        format!("{id:<7} {name:<16} {state:>8} {date:>19} {clock:>15} {count:>10}")
    };
    let headings = ["ID", "TAG", "VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT"];
    let lines = snapshots.iter().map(|one| {
        let [id, name] = [&one.id, &one.name].map(|text| text.escape_debug().to_string());
        let clock = format!("00{}", clock(Duration::new(one.vm_clock_sec, one.vm_clock_nsec)));
        let count = one.icount.map_or_else(|| "--".to_owned(), |count| count.to_string());
        line([&id, &name, &size::show(one.vm_state_size), &date(one.date_sec), &clock, &count])
    });
    let before = ["Snapshot list:".to_owned(), line(headings)];
    before.into_iter().chain(lines).collect::<Vec<_>>().join("\n")
}

/// Seconds since 1970 as a date and time in the user's time zone (TZ).
pub fn date(seconds: u64) -> String {
    let [year, month, day, hour, minute, second] = local_time(seconds).unwrap_or_default();
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}")
}

/// The snapshots as a table; empty without snapshots.
pub fn as_text(snapshots: &[Listed]) -> String {
    if snapshots.is_empty() {
        return String::new();
    }
    let line = |id: &str, name: &str, state: &str, age: &str, clock: &str| {
        format!("{id:<9} {name:<24} {state:>14} {age:>12} {clock:>14}")
    };
    let heading = line("ID", "NAME", "VM STATE", "AGE", "VM CLOCK");
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let lines = snapshots.iter().map(|one| {
        let age = age(now.as_secs().saturating_sub(one.date_sec));
        // Ids and names come from the image, so they are escaped: otherwise they could control the
        // terminal.
        let [id, name] = [&one.id, &one.name].map(|text| text.escape_debug().to_string());
        let clock = clock(Duration::new(one.vm_clock_sec, one.vm_clock_nsec));
        line(&id, &name, &one.vm_state_size.to_string(), &age, &clock)
    });
    std::iter::once(heading).chain(lines).collect::<Vec<_>>().join("\n")
}

/// An age, in its two largest units.
fn age(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match () {
        () if days > 0 => format!("{days} d {} h", hours % 24),
        () if hours > 0 => format!("{hours} h {} min", minutes % 60),
        () if minutes > 0 => format!("{minutes} min {} s", seconds % 60),
        () => format!("{seconds} s"),
    }
}

fn clock(clock: Duration) -> String {
    let (seconds, milliseconds) = (clock.as_secs(), clock.subsec_millis());
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    format!("{hours:02}:{minutes:02}:{:02}.{milliseconds:03}", seconds % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_in_units_that_fit() {
        assert_eq!(age(59), "59 s");
        assert_eq!(age(3 * 60 + 4), "3 min 4 s");
        assert_eq!(age(2 * 86_400 + 5 * 3600 + 9), "2 d 5 h");
        assert_eq!(clock(Duration::from_millis(3_723_045)), "01:02:03.045");
    }
}
