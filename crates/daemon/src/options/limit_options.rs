//! Limits of a disk or a group as people describe them: in the configuration, in requests, and
//! after `--limit`.

use std::num::NonZeroU64;
use std::str::FromStr;
use std::time::Duration;

use blockhouse_disk::{Burst, MAX_RATE, RateLimits};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::options::size;
use crate::options::text_fields::{Size, some_size};

/// The limits of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskThrottle {
    /// The group that shares them; `None`: the disk has them for itself.
    pub group: Option<String>,
    /// The limits; the same for all disks of a group.
    pub limits: RateLimits,
}

/// Limits on rates. What is left out is not limited; all that is given holds at once.
#[derive(Clone, Debug, Default, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct LimitOptions {
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
    /// How many times these rates may be reached after a rest, from 1 to 1000.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<f64>,
    /// For how many seconds. Left out: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst_seconds: Option<f64>,
}

impl LimitOptions {
    /// Takes a `KEY=VALUE` of the command line in. `false` if there is no such key.
    ///
    /// # Errors
    /// When the value makes no sense for the key, or the key was there before.
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
    /// A rate that is 0 or too high, a burst that makes no sense, or that is one of no rate.
    pub fn limits(&self) -> Result<RateLimits, String> {
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

    /// The throttle of a disk with these limits; `None`: no limits.
    ///
    /// # Errors
    /// As [`limits`](Self::limits).
    pub fn throttle(&self) -> Result<Option<DiskThrottle>, String> {
        if self.group.as_deref() == Some("") {
            return Err("group has no value".into());
        }
        let (group, limits) = (self.group.clone(), self.limits()?);
        let is_needed = group.is_some() || !limits.is_unlimited();
        Ok(is_needed.then_some(DiskThrottle { group, limits }))
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

impl From<&DiskThrottle> for LimitOptions {
    fn from(throttle: &DiskThrottle) -> Self {
        let limits = throttle.limits;
        let rate = |rate: Option<NonZeroU64>| rate.map(NonZeroU64::get);
        Self {
            group: throttle.group.clone(),
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
}

impl FromStr for LimitOptions {
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
        options.throttle().map(|_| options)
    }
}

/// The keys, as they are listed where one is unknown.
pub const KEYS: &str =
    "iops, iops-read, iops-write, bps, bps-read, bps-write, burst, burst-seconds, group";

/// Puts a value in, once.
///
/// # Errors
/// There is one.
fn once<T>(slot: &mut Option<T>, key: &str, value: T) -> Result<bool, String> {
    match slot.replace(value) {
        None => Ok(true),
        Some(_) => Err(format!("{key} is there twice; give it once")),
    }
}

/// A name that is not empty.
///
/// # Errors
/// It is.
pub fn name(key: &str, value: &str) -> Result<String, String> {
    match value {
        "" => Err(format!("{key} has no value")),
        _ => Ok(value.to_owned()),
    }
}

fn parse_rate(key: &str, value: &str) -> Result<u64, String> {
    match key.starts_with("bps") {
        true => size::parse(value).map_err(|why| format!("{key}={value}: {why}")),
        false => value
            .parse()
            .map_err(|_| format!("{key}={value}: write a number of operations a second")),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_objects_mean_the_same() {
        let text: LimitOptions =
            "iops=5,bps=1K,burst=2.5,burst-seconds=0.5,group=g".parse().expect("limits");
        let object = r#"{"iops":5,"bps":"1K","burst":2.5,"burst-seconds":0.5,"group":"g"}"#;
        let object: LimitOptions = serde_json::from_str(object).expect("limits");
        assert_eq!(text, object);
        let throttle = text.throttle().expect("it makes sense").expect("it limits");
        assert_eq!(LimitOptions::from(&throttle), text);
        assert_eq!("off".parse::<LimitOptions>().map(|off| off.throttle()), Ok(Ok(None)));
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (text, words) in [
            ("seats=5", "the keys are iops"),
            ("iops", "like iops=1000, or off"),
            ("off,iops=5", "KEY=VALUE"),
            ("burst=2", "add a rate"),
            ("iops=0", "cannot be 0"),
            ("group=", "no value"),
        ] {
            let error = text.parse::<LimitOptions>().expect_err(text);
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
