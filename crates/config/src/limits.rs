//! The syntax of limits: of disks and groups of disks in the configuration, in control requests and
//! after `--limit`; of NBD clients in the configuration and after `--limit`.
//!
//! A disk has at most one set of limits. Disks whose limits name the same group share them.

use std::num::NonZeroU64;
use std::str::FromStr;
use std::time::Duration;

use blockhouse_disk::{Burst, MAX_RATE, RateLimits};
use blockhouse_nbd::Limits;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::size;
use crate::text_fields::{Size, some_size};

/// Limits on rates. A rate that is left out is unlimited. All limits that are given apply at once.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct LimitsConfig {
    /// The group of disks that share the limits fairly. Left out, the disk has them for itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Operations a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Reads a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_read: Option<u64>,
    /// Writes a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_write: Option<u64>,
    /// Bytes a second: a number, or a text like "100M".
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "some_size")]
    #[schemars(with = "Option<Size>")]
    pub bps: Option<u64>,
    /// Bytes read a second.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "some_size")]
    #[schemars(with = "Option<Size>")]
    pub bps_read: Option<u64>,
    /// Bytes written a second.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "some_size")]
    #[schemars(with = "Option<Size>")]
    pub bps_write: Option<u64>,
    /// The factor of a burst, from 1 to 1000: after a rest, this many times the rates are allowed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<f64>,
    /// The length of a burst in seconds. Left out: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst_seconds: Option<f64>,
}

impl LimitsConfig {
    /// Sets a `KEY=VALUE` of the command line. Returns `false` if there is no such key.
    ///
    /// # Errors
    /// The value is invalid for the key, or the key was given before.
    pub fn take(&mut self, key: &str, value: &str) -> Result<bool, String> {
        let rate = match key {
            "iops" => &mut self.iops,
            "iops-read" => &mut self.iops_read,
            "iops-write" => &mut self.iops_write,
            "bps" => &mut self.bps,
            "bps-read" => &mut self.bps_read,
            "bps-write" => &mut self.bps_write,
            "burst" => return once(&mut self.burst, key, parse_number(key, value)?),
            "burst-seconds" => {
                return once(&mut self.burst_seconds, key, parse_number(key, value)?);
            }
            "group" => return once(&mut self.group, key, name(key, value)?),
            _ => return Ok(false),
        };
        once(rate, key, parse_rate(key, value)?)
    }

    /// The limits.
    ///
    /// # Errors
    /// A rate is 0 or too high, or a burst is invalid or without a rate.
    pub fn rates(&self) -> Result<RateLimits, String> {
        let limits = RateLimits {
            iops: rate("iops", self.iops)?,
            iops_read: rate("iops-read", self.iops_read)?,
            iops_write: rate("iops-write", self.iops_write)?,
            bps: rate("bps", self.bps)?,
            bps_read: rate("bps-read", self.bps_read)?,
            bps_write: rate("bps-write", self.bps_write)?,
            burst: None,
        };
        if limits.is_unlimited() && (self.burst.is_some() || self.burst_seconds.is_some()) {
            return Err("burst is a number of times the rates; add a rate, like iops=1000".into());
        }
        Ok(RateLimits { burst: self.limits_of_burst()?, ..limits })
    }

    /// Whether there are no limits.
    pub fn is_off(&self) -> bool {
        *self == Self::default()
    }

    /// Whether both mean the same, however they are written.
    pub fn means(&self, other: &Self) -> bool {
        self.group == other.group && self.rates() == other.rates()
    }

    /// Checks the values.
    ///
    /// # Errors
    /// As [`rates`](Self::rates); a group without a name.
    pub fn check(&self) -> Result<(), String> {
        match self.group.as_deref() {
            Some("") => Err("group has no value".into()),
            _ => self.rates().map(drop),
        }
    }

    /// The configuration of these limits, of a disk or of a group.
    pub fn of(group: Option<String>, limits: RateLimits) -> Self {
        let rate = |rate: Option<NonZeroU64>| rate.map(NonZeroU64::get);
        Self {
            group,
            iops: rate(limits.iops),
            iops_read: rate(limits.iops_read),
            iops_write: rate(limits.iops_write),
            bps: rate(limits.bps),
            bps_read: rate(limits.bps_read),
            bps_write: rate(limits.bps_write),
            burst: limits.burst.map(|burst| burst.factor()),
            burst_seconds: limits.burst.map(|burst| burst.time().as_secs_f64()),
        }
    }

    fn limits_of_burst(&self) -> Result<Option<Burst>, String> {
        let Some(factor) = self.burst else {
            return match self.burst_seconds {
                None => Ok(None),
                Some(_) => Err("burst-seconds needs burst, how many times the rates".into()),
            };
        };
        let time = match self.burst_seconds {
            None => Burst::DEFAULT_TIME,
            Some(seconds) => Duration::try_from_secs_f64(seconds)
                .map_err(|_| format!("burst-seconds={seconds}: write a number of seconds"))?,
        };
        Burst::new(factor, time).map(Some).map_err(|why| format!("burst={factor}: {why}"))
    }
}

impl FromStr for LimitsConfig {
    type Err = String;

    /// Reads `KEY=VALUE,...`, or `off`.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut options = Self::default();
        if text == "off" {
            return Ok(options);
        }
        for item in text.split(',') {
            let (key, value) =
                item.split_once('=').ok_or("write KEY=VALUE,..., like iops=1000, or off")?;
            if !options.take(key, value)? {
                return Err(format!("'{key}' is unknown; the keys are {KEYS}"));
            }
        }
        options.check().map(|()| options)
    }
}

/// The keys, for the error about an unknown key.
const KEYS: &str =
    "iops, iops-read, iops-write, bps, bps-read, bps-write, burst, burst-seconds, group";

/// Sets a value that may be given once.
///
/// # Errors
/// The value is set already.
fn once<T>(slot: &mut Option<T>, key: &str, value: T) -> Result<bool, String> {
    match slot.replace(value) {
        None => Ok(true),
        Some(_) => Err(format!("{key} is there twice; give it once")),
    }
}

/// A name, which must not be empty.
fn name(key: &str, value: &str) -> Result<String, String> {
    match value {
        "" => Err(format!("{key} has no value")),
        _ => Ok(value.to_owned()),
    }
}

fn parse_rate(key: &str, value: &str) -> Result<u64, String> {
    if key.starts_with("bps") {
        size::parse(value).map_err(|why| format!("{key}={value}: {why}"))
    } else {
        value.parse().map_err(|_| format!("{key}={value}: write a number of operations a second"))
    }
}

fn parse_number(key: &str, value: &str) -> Result<f64, String> {
    name(key, value)?.parse().map_err(|_| format!("{key}={value}: write a number, like 2 or 1.5"))
}

fn rate(key: &str, value: Option<u64>) -> Result<Option<NonZeroU64>, String> {
    let Some(value) = value else { return Ok(None) };
    match NonZeroU64::new(value) {
        Some(rate) if value <= MAX_RATE => Ok(Some(rate)),
        Some(_) => Err(format!("{key}={value}: the most is {MAX_RATE} a second")),
        None => Err(format!("{key} cannot be 0; leave it out for no limit")),
    }
}

/// The rates of one `--limit`, and the disks that they are for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RateArgument {
    disks: Vec<String>,
    limits: LimitsConfig,
}

impl RateArgument {
    /// Sets a `KEY=VALUE`. Returns `false` if the key does not belong to the limits of disks.
    ///
    /// # Errors
    /// The value is invalid for the key, or the key was given before.
    fn take(&mut self, key: &str, value: &str) -> Result<bool, String> {
        if key == "disk" {
            self.disks.push(name(key, value)?);
            return Ok(true);
        }
        self.limits.take(key, value)
    }

    /// Checks the keys together.
    ///
    /// # Errors
    /// A value is invalid, or there is neither a rate nor a group.
    fn finish(self) -> Result<Self, String> {
        if self.limits.rates()?.is_unlimited() && self.limits.group.is_none() {
            Err("disk needs a rate, like iops=1000, or a group".into())
        } else {
            Ok(self)
        }
    }

    fn group(&self) -> Option<&str> {
        self.limits.group.as_deref()
    }
}

/// The limits of disks with these names, in their order.
///
/// An argument with `disk` keys applies to those disks; one without applies to all disks that no
/// other argument names. Without a group, each of these disks has the limits for itself.
///
/// # Errors
/// A name matches no disk or several; a disk has two sets of limits, a group none or two; an
/// argument without `disk` keys finds no other disk.
pub fn plan(arguments: &[RateArgument], disks: &[String]) -> Result<Vec<LimitsConfig>, String> {
    let mut planned: Vec<Option<&RateArgument>> = vec![None; disks.len()];
    for argument in arguments {
        for name in &argument.disks {
            let index = find(name, disks)?;
            if planned[index].replace(argument).is_some() {
                return Err(format!("the disk '{name}' has two --limit of rates; make them one"));
            }
        }
    }
    let mut of_all = arguments.iter().filter(|argument| argument.disks.is_empty());
    if let (Some(argument), second) = (of_all.next(), of_all.next()) {
        if second.is_some() {
            return Err(
                "two --limit of rates are for all disks; add disk=NAME, or make them one".into()
            );
        }
        let others = planned.iter_mut().filter(|planned| planned.is_none());
        let count = others.map(|planned| *planned = Some(argument)).count();
        if count == 0 {
            return Err(
                "a --limit of rates without disk=NAME is for the other disks, but each disk has its own"
                    .into(),
            );
        }
    }
    let limits = |argument: Option<&RateArgument>| match argument {
        None => Ok(LimitsConfig::default()),
        Some(argument) => match argument.group() {
            None => Ok(argument.limits.clone()),
            Some(group) => limits_of(group, arguments),
        },
    };
    planned.into_iter().map(limits).collect()
}

/// The limits that one argument gives to a group.
fn limits_of(group: &str, arguments: &[RateArgument]) -> Result<LimitsConfig, String> {
    let has_rates = |limits: &&LimitsConfig| limits.rates().is_ok_and(|one| !one.is_unlimited());
    let of_group = arguments.iter().filter(|argument| argument.group() == Some(group));
    let mut limits = of_group.map(|argument| &argument.limits).filter(has_rates);
    match (limits.next(), limits.next()) {
        (Some(limits), None) => Ok(limits.clone()),
        (None, _) => Err(format!("no --limit with group={group} has a rate, like iops=1000")),
        (Some(_), Some(_)) => Err(format!(
            "two --limit with group={group} have rates; give them in one, and only disk=NAME,group={group} in the \
             others"
        )),
    }
}

/// The disk of this name, or the only disk whose name without its extension is this one.
fn find(name: &str, disks: &[String]) -> Result<usize, String> {
    if let Some(index) = disks.iter().position(|disk| disk == name) {
        return Ok(index);
    }
    let is_stem = |disk: &str| disk.rsplit_once('.').is_some_and(|(stem, _)| stem == name);
    let stems: Vec<_> = (0..disks.len()).filter(|&index| is_stem(&disks[index])).collect();
    let list = |indices: &[usize]| {
        let quoted: Vec<_> = indices.iter().map(|&index| format!("'{}'", disks[index])).collect();
        quoted.join(", ")
    };
    match stems[..] {
        [index] => Ok(index),
        [] => Err(format!(
            "disk={name}: no disk is called so; there is {}",
            list(&(0..disks.len()).collect::<Vec<_>>())
        )),
        _ => Err(format!("disk={name} may be {}; write the whole name", list(&stems))),
    }
}

/// The value of one `--limit`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LimitArgument {
    /// The limits of NBD clients.
    pub clients: Vec<Limit>,
    /// The limits of disks.
    pub rates: Option<RateArgument>,
}

/// Reads `KEY=VALUE,...`.
///
/// # Errors
/// A key is unknown, or a value is invalid for its key or together with the others.
pub fn parse(text: &str) -> Result<LimitArgument, String> {
    let mut argument = LimitArgument::default();
    let (mut rates, mut has_rates) = (RateArgument::default(), false);
    for item in text.split(',') {
        let (key, value) = item.split_once('=').ok_or("write KEY=VALUE, like stall=30")?;
        if rates.take(key, value)? {
            has_rates = true
        } else {
            argument.clients.push(parse_one(key, value)?)
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
    /// Bytes of data in flight, for all clients together.
    Memory(u64),
    /// The time to choose an export.
    Handshake(Duration),
    /// How long a client may make no progress while it receives replies or sends a request.
    Stall(Option<Duration>),
    /// How long a client may send no request.
    Idle(Option<Duration>),
    /// After how much silence the kernel probes the client (TCP keepalive).
    Keepalive(Option<Duration>),
    /// How long clients may still receive replies when the server stops.
    Stop(Duration),
}

impl FromStr for Limit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (key, value) = text.split_once('=').ok_or("write KEY=VALUE, like stall=30")?;
        parse_one(key, value)
    }
}

/// The longest time of a limit: ten years.
const MAX_TIME: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Reads one `KEY=VALUE` of NBD clients.
///
/// # Errors
/// The key is unknown, or the value is invalid for it.
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

/// The default limits with these changes. The last change with a key counts.
pub fn client_limits(changes: &[Limit]) -> Limits {
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
mod tests;
