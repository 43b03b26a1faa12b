//! `--limit KEY=VALUE,...`: what NBD clients may take of a server, and how many operations and
//! bytes a second disks may have.

use std::str::FromStr;
use std::time::Duration;

use blockhouse_nbd::Limits;

use crate::options::limit_options::KEYS;
use crate::options::rate_limits::RateArgument;
use crate::options::size;

/// The value of one `--limit`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LimitArgument {
    /// Of NBD clients.
    pub clients: Vec<Limit>,
    /// Of disks.
    pub rates: Option<RateArgument>,
}

/// Reads `KEY=VALUE,...`.
///
/// # Errors
/// When a key is unknown, or a value makes no sense for it or with the others.
pub fn parse(text: &str) -> Result<LimitArgument, String> {
    let mut argument = LimitArgument::default();
    let (mut rates, mut has_rates) = (RateArgument::default(), false);
    for item in text.split(',') {
        let (key, value) = item.split_once('=').ok_or("write KEY=VALUE, like stall=30")?;
        match rates.take(key, value)? {
            true => has_rates = true,
            false => argument.clients.push(parse_one(key, value)?),
        }
    }
    argument.rates = has_rates.then(|| rates.finish()).transpose()?;
    Ok(argument)
}

/// One `KEY=VALUE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Connections at once.
    Clients(usize),
    /// Bytes of data in flight, for all together.
    Memory(u64),
    /// The time to choose an export.
    Handshake(Duration),
    /// How long a client may stand still while it receives or sends.
    Stall(Option<Duration>),
    /// How long it may ask for nothing.
    Idle(Option<Duration>),
    /// After how much silence the kernel asks for a sign of life.
    Keepalive(Option<Duration>),
    /// How long clients may go on receiving when the server stops.
    Stop(Duration),
}

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (key, value) = text.split_once('=').ok_or("write KEY=VALUE, like stall=30")?;
        parse_one(key, value)
    }
}

/// No limit in seconds is longer: ten years.
const MAX_TIME: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Reads one `KEY=VALUE` of NBD clients.
///
/// # Errors
/// When the key is unknown or the value makes no sense for it.
fn parse_one(key: &str, value: &str) -> Result<Limit, String> {
    let some = |time: Option<Duration>| time.ok_or_else(|| format!("{key} cannot be off"));
    Ok(match key {
        "clients" => match value.parse() {
            Ok(count @ 1..=1_000_000) => Limit::Clients(count),
            _ => return Err("clients is a number from 1 to 1000000".into()),
        },
        "memory" => match size::parse(value)? {
            0 => return Err("memory cannot be 0".into()),
            bytes => Limit::Memory(bytes),
        },
        "handshake" => Limit::Handshake(some(time(key, value)?)?),
        "stall" => Limit::Stall(time(key, value)?),
        "idle" => Limit::Idle(time(key, value)?),
        "keepalive" => match time(key, value)? {
            Some(time) if time < Duration::from_secs(4) || time > Duration::from_secs(32767) => {
                return Err("keepalive is off, or from 4 to 32767 seconds".into());
            }
            time => Limit::Keepalive(time),
        },
        "stop" => Limit::Stop(some(time(key, value)?)?),
        _ => {
            return Err(format!(
                "'{key}' is unknown; the keys are clients, memory, handshake, stall, idle, keepalive, stop, and of \
                 disks {KEYS}, disk"
            ));
        }
    })
}

/// A time in seconds, or in the unit that follows; `None` for off.
fn time(key: &str, value: &str) -> Result<Option<Duration>, String> {
    let wrong = || format!("{key}={value}: write seconds, 500ms, 30s, 5m or 2h");
    if value == "off" {
        return Ok(None);
    }
    let digits = value.len() - value.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = value.split_at(digits);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let milliseconds = match unit {
        "ms" => 1,
        "" | "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(wrong()),
    };
    let time = Duration::from_millis(number.checked_mul(milliseconds).ok_or_else(wrong)?);
    match time {
        _ if time.is_zero() => Err(format!("{key} cannot be 0; off is no limit")),
        _ if time > MAX_TIME => Err(wrong()),
        _ => Ok(Some(time)),
    }
}

/// The default limits with these changes; of several with one key the last counts.
pub fn limits(changes: &[Limit]) -> Limits {
    let mut limits = Limits::default();
    for change in changes {
        match *change {
            Limit::Clients(count) => limits.connections = count,
            Limit::Memory(bytes) => {
                limits.bytes_of_all = usize::try_from(bytes).unwrap_or(usize::MAX / 2);
            }
            Limit::Handshake(time) => limits.handshake = time,
            Limit::Stall(time) => limits.stall = time,
            Limit::Idle(time) => limits.idle = time,
            Limit::Keepalive(time) => limits.keepalive = time,
            Limit::Stop(time) => limits.drain = time,
        }
    }
    limits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_units_are_understood() {
        let seconds = |count| Some(Duration::from_secs(count));
        for (text, limit) in [
            ("clients=1000", Limit::Clients(1000)),
            ("memory=64M", Limit::Memory(64 << 20)),
            ("stall=off", Limit::Stall(None)),
            ("stall=90", Limit::Stall(seconds(90))),
            ("idle=2h", Limit::Idle(seconds(7200))),
            ("keepalive=5m", Limit::Keepalive(seconds(300))),
            ("handshake=250ms", Limit::Handshake(Duration::from_millis(250))),
            ("stop=10s", Limit::Stop(Duration::from_secs(10))),
        ] {
            let argument = LimitArgument { clients: vec![limit], rates: None };
            assert_eq!(parse(text), Ok(argument), "{text}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_what_would() {
        for (text, words) in [
            ("clients", "KEY=VALUE"),
            ("clients=0", "from 1"),
            ("clients=many", "from 1"),
            ("memory=0", "cannot be 0"),
            ("seats=5", "the keys are clients, memory"),
            ("stall=0", "off is no limit"),
            ("stall=5d", "500ms, 30s"),
            ("stall=", "500ms, 30s"),
            ("idle=99999999999999999999", "500ms, 30s"),
            ("idle=9999999999999999", "500ms, 30s"),
            ("stop=off", "cannot be off"),
            ("handshake=off", "cannot be off"),
            ("keepalive=1", "from 4"),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn the_last_of_a_key_counts_and_the_rest_stays() {
        let changes = parse("stall=1,iops=100,stall=2").expect("limits");
        assert!(changes.rates.is_some());
        let limits = limits(&changes.clients);
        assert_eq!(limits.stall, Some(Duration::from_secs(2)));
        assert_eq!(limits.connections, Limits::default().connections);
    }
}
