//! Snapshots as they are told: to people as a table, to programs with the keys of `qemu-img info`.

use std::time::{Duration, SystemTime};

use blockhouse_daemon::control::Listed;
use blockhouse_daemon::size;

/// As JSON.
pub fn as_json(snapshots: &[Listed]) -> String {
    let value = serde_json::to_value(snapshots).expect("plain values");
    format!("{value:#}")
}

/// As `qemu-img snapshot -l` prints them, for scripts that cut its columns: two lines of headings, ids, names, bytes of the
/// machine's state, dates (here in UTC), the machine's clock, instruction counts. Nothing where there are none.
pub fn as_qemu_table(snapshots: &[Listed]) -> String {
    if snapshots.is_empty() {
        return String::new();
    }
    let line = |cells: [&str; 6]| {
        let [id, name, state, date, clock, count] = cells;
        format!("{id:<9} {name:<16} {state:>8}{date:>20}{clock:>13}{count:>11}")
    };
    let headings = ["ID", "TAG", "VM SIZE", "DATE", "VM CLOCK", "ICOUNT"];
    let lines = snapshots.iter().map(|one| {
        let [id, name] = [&one.id, &one.name].map(|text| text.escape_debug().to_string());
        let clock = clock(Duration::new(one.vm_clock_sec, one.vm_clock_nsec));
        let count = one.icount.map(|count| count.to_string()).unwrap_or_default();
        line([&id, &name, &size::show(one.vm_state_size), &date(one.date_sec), &clock, &count])
    });
    let before = ["Snapshot list:".to_owned(), line(headings)];
    before.into_iter().chain(lines).collect::<Vec<_>>().join("\n")
}

/// Seconds since 1970 as a date and time in UTC. Days are counted in years that begin in March, of which 400 have
/// 146,097, because leap days are at their ends then.
fn date(seconds: u64) -> String {
    let days = seconds / 86_400 + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}")
}

/// As a table; nothing where there are none.
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
        // Ids and names come from the image: escaped, they cannot control the terminal.
        let [id, name] = [&one.id, &one.name].map(|text| text.escape_debug().to_string());
        let clock = clock(Duration::new(one.vm_clock_sec, one.vm_clock_nsec));
        line(&id, &name, &one.vm_state_size.to_string(), &age, &clock)
    });
    std::iter::once(heading).chain(lines).collect::<Vec<_>>().join("\n")
}

/// The two largest units.
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
    fn dates_are_those_of_the_calendar() {
        for (seconds, expected) in [
            (0, "1970-01-01 00:00:00"),
            (951_782_399, "2000-02-28 23:59:59"),
            (951_782_400, "2000-02-29 00:00:00"),
            (1_795_379_197, "2026-11-22 20:26:37"),
            (4_107_542_400, "2100-03-01 00:00:00"),
        ] {
            assert_eq!(date(seconds), expected);
        }
    }

    #[test]
    fn times_are_told_in_units_that_fit() {
        assert_eq!(age(59), "59 s");
        assert_eq!(age(3 * 60 + 4), "3 min 4 s");
        assert_eq!(age(2 * 86_400 + 5 * 3600 + 9), "2 d 5 h");
        assert_eq!(clock(Duration::from_millis(3_723_045)), "01:02:03.045");
    }
}
