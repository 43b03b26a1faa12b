//! How many operations and bytes a second disks may have: what is written, and for which disks it holds.
//!
//! Every disk has one throttle at most. Disks whose throttles name the same group share one limit.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::Storage;
use blockhouse_disk::{Burst, Disk, MAX_RATE, RateLimits, ThrottleGroup};

use crate::size;

/// The limits of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskThrottle {
    /// The group that shares them; `None`: the disk has them for itself.
    pub group: Option<String>,
    /// The limits; the same for all disks of a group.
    pub limits: RateLimits,
}

/// What one `--limit` says of rates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RateArgument {
    disks: Vec<String>,
    group: Option<String>,
    limits: RateLimits,
    burst: Option<String>,
    burst_seconds: Option<String>,
}

/// The keys of rates, as they are listed where a key is unknown.
pub const RATE_KEYS: &str =
    "iops, iops-read, iops-write, bps, bps-read, bps-write, burst, burst-seconds, group, disk";

impl RateArgument {
    /// Takes a `KEY=VALUE` in. `false` if the key is none of rates.
    ///
    /// # Errors
    /// When the value makes no sense for the key, or the key was there before.
    pub fn take(&mut self, key: &str, value: &str) -> Result<bool, String> {
        let limits = &mut self.limits;
        let rate = match key {
            "iops" => &mut limits.iops,
            "iops-read" => &mut limits.iops_read,
            "iops-write" => &mut limits.iops_write,
            "bps" => &mut limits.bps,
            "bps-read" => &mut limits.bps_read,
            "bps-write" => &mut limits.bps_write,
            "burst" => return once(&mut self.burst, key, name(key, value)?),
            "burst-seconds" => return once(&mut self.burst_seconds, key, name(key, value)?),
            "group" => return once(&mut self.group, key, name(key, value)?),
            "disk" => {
                self.disks.push(name(key, value)?);
                return Ok(true);
            }
            _ => return Ok(false),
        };
        once(rate, key, parse_rate(key, value)?)
    }

    /// Checks that its keys make sense together.
    ///
    /// # Errors
    /// Where they do not.
    pub fn finish(mut self) -> Result<Self, String> {
        let has_burst = self.burst.is_some() || self.burst_seconds.is_some();
        match (self.limits.is_unlimited(), &self.group) {
            (true, _) if has_burst => {
                return Err(
                    "burst is a number of times the rates; add a rate, like iops=1000".into()
                );
            }
            (true, None) => return Err("disk needs a rate, like iops=1000, or a group".into()),
            _ => {}
        }
        self.limits.burst = parse_burst(self.burst.as_deref(), self.burst_seconds.as_deref())?;
        Ok(self)
    }
}

fn once<T>(slot: &mut Option<T>, key: &str, value: T) -> Result<bool, String> {
    match slot.replace(value) {
        None => Ok(true),
        Some(_) => Err(format!("{key} is there twice; give each limit a --limit of its own")),
    }
}

fn name(key: &str, value: &str) -> Result<String, String> {
    match value {
        "" => Err(format!("{key} has no value")),
        _ => Ok(value.to_owned()),
    }
}

fn parse_rate(key: &str, value: &str) -> Result<NonZeroU64, String> {
    let rate = match key.starts_with("bps") {
        true => size::parse(value).map_err(|why| format!("{key}={value}: {why}"))?,
        false => value
            .parse()
            .map_err(|_| format!("{key}={value}: write a number of operations a second"))?,
    };
    match NonZeroU64::new(rate) {
        Some(rate) if rate.get() <= MAX_RATE => Ok(rate),
        Some(_) => Err(format!("{key}={value}: the most is {MAX_RATE} a second")),
        None => Err(format!("{key} cannot be 0; leave it out for no limit")),
    }
}

fn parse_burst(burst: Option<&str>, seconds: Option<&str>) -> Result<Option<Burst>, String> {
    let Some(text) = burst else {
        return match seconds {
            None => Ok(None),
            Some(_) => Err("burst-seconds needs burst, how many times the rates".into()),
        };
    };
    let number = |key: &str, text: &str| {
        text.parse::<f64>().map_err(|_| format!("{key}={text}: write a number, like 2 or 1.5"))
    };
    let time = match seconds {
        None => Burst::DEFAULT_TIME,
        Some(text) => Duration::try_from_secs_f64(number("burst-seconds", text)?)
            .map_err(|_| format!("burst-seconds={text}: write a number of seconds"))?,
    };
    Burst::new(number("burst", text)?, time).map(Some).map_err(|why| format!("burst={text}: {why}"))
}

/// The throttles of disks with these names, in their order.
///
/// An argument with `disk` keys holds for those disks, another one for all disks that no other argument names. Without a
/// group each of them has the limits for itself.
///
/// # Errors
/// Where an argument names no disk or several, a disk has two throttles, or a group has no limits or two.
pub fn plan(
    arguments: &[RateArgument],
    disks: &[String],
) -> Result<Vec<Option<DiskThrottle>>, String> {
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
                "a --limit of rates without disk=NAME is for the other disks, and there are none"
                    .into(),
            );
        }
    }
    let throttle = |argument: Option<&RateArgument>| {
        let argument = argument?;
        let limits = match &argument.group {
            None => Ok(argument.limits),
            Some(group) => limits_of(group, arguments),
        };
        Some(limits.map(|limits| DiskThrottle { group: argument.group.clone(), limits }))
    };
    planned.into_iter().map(|argument| throttle(argument).transpose()).collect()
}

/// The limits that one argument gives to a group.
fn limits_of(group: &str, arguments: &[RateArgument]) -> Result<RateLimits, String> {
    let of_group = arguments.iter().filter(|argument| argument.group.as_deref() == Some(group));
    let mut limits = of_group.map(|argument| argument.limits).filter(|one| !one.is_unlimited());
    match (limits.next(), limits.next()) {
        (Some(limits), None) => Ok(limits),
        (None, _) => Err(format!("no --limit with group={group} has a rate, like iops=1000")),
        (Some(_), Some(_)) => Err(format!(
            "two --limit with group={group} have rates; give them in one, and only disk=NAME,group={group} in the \
             others"
        )),
    }
}

/// The disk of this name, or the only one whose name is it but for its extension.
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

/// Puts the limits of a disk in force that was just opened. `others` are the disks that are open, with their throttles.
pub(crate) fn apply<'a, S: Storage>(
    throttle: &DiskThrottle,
    disk: &Disk<S>,
    others: impl IntoIterator<Item = (Option<&'a DiskThrottle>, &'a Disk<S>)>,
) {
    let is_same = |other: &DiskThrottle| other.group.is_some() && other.group == throttle.group;
    let shared = others
        .into_iter()
        .filter(|(other, _)| other.is_some_and(is_same))
        .find_map(|(_, disk)| disk.throttle_group());
    let group = shared.unwrap_or_else(|| ThrottleGroup::new(throttle.limits));
    disk.join_throttle_group(&group);
}

/// Puts the limits of disks in force that were opened together.
pub(crate) fn apply_all<S: Storage>(throttles: &[Option<&DiskThrottle>], disks: &[Arc<Disk<S>>]) {
    for (index, (throttle, disk)) in throttles.iter().zip(disks).enumerate() {
        if let Some(throttle) = throttle {
            let others = throttles[..index].iter().copied().zip(disks.iter().map(|disk| &**disk));
            apply(throttle, disk, others);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn argument(text: &str) -> Result<RateArgument, String> {
        let mut argument = RateArgument::default();
        for item in text.split(',') {
            let (key, value) = item.split_once('=').expect("a key and a value");
            assert!(argument.take(key, value)?, "{key}");
        }
        argument.finish()
    }

    fn planned(arguments: &[&str], disks: &[&str]) -> Result<Vec<Option<DiskThrottle>>, String> {
        let arguments: Result<Vec<_>, _> = arguments.iter().map(|text| argument(text)).collect();
        let disks: Vec<_> = disks.iter().map(ToString::to_string).collect();
        plan(&arguments?, &disks)
    }

    /// What is planned for each disk: its operations a second, and its group.
    fn shown(arguments: &[&str], disks: &[&str]) -> Vec<String> {
        let show = |throttle: &Option<DiskThrottle>| match throttle {
            None => "-".into(),
            Some(DiskThrottle { group, limits }) => {
                let rate = limits.iops.map_or(0, NonZeroU64::get);
                format!("{rate}{}", group.as_deref().unwrap_or_default())
            }
        };
        planned(arguments, disks).expect("a plan").iter().map(show).collect()
    }

    #[test]
    fn all_keys_are_understood() {
        let all = "iops=1,iops-read=2,iops-write=3,bps=1K,bps-read=1M,bps-write=1.5G,burst=2.5,burst-seconds=0.5";
        let limits = argument(all).expect("limits").limits;
        let rates = [limits.iops, limits.iops_read, limits.iops_write];
        assert_eq!(rates.map(|rate| rate.map_or(0, NonZeroU64::get)), [1, 2, 3]);
        let rates = [limits.bps, limits.bps_read, limits.bps_write];
        assert_eq!(rates.map(|rate| rate.map_or(0, NonZeroU64::get)), [1 << 10, 1 << 20, 3 << 29]);
        let burst = limits.burst.expect("a burst");
        assert_eq!((burst.factor(), burst.time()), (2.5, Duration::from_millis(500)));
        let burst = argument("bps=1M,burst=3").expect("limits").limits.burst.expect("a burst");
        assert_eq!(burst.time(), Duration::from_secs(1));
    }

    #[test]
    fn a_limit_is_for_the_disks_that_it_names_or_for_the_others() {
        let disks = ["a.img", "b.img", "c.img"];
        assert_eq!(shown(&["iops=5"], &disks), ["5", "5", "5"]);
        assert_eq!(shown(&["iops=5,disk=b"], &disks), ["-", "5", "-"]);
        assert_eq!(shown(&["iops=5,disk=b", "iops=9"], &disks), ["9", "5", "9"]);
        assert_eq!(shown(&["iops=5,group=g"], &disks), ["5g", "5g", "5g"]);
        assert_eq!(shown(&["iops=5,disk=a,disk=c,group=g"], &disks), ["5g", "-", "5g"]);
        assert_eq!(
            shown(&["disk=b,group=g", "iops=5,disk=a.img,group=g"], &disks),
            ["5g", "5g", "-"]
        );
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_what_would() {
        let disks = ["a.img", "a.raw", "b.img"];
        for (arguments, words) in [
            (&["iops=0"][..], "cannot be 0"),
            (&["iops=2K"], "a number of operations"),
            (&["bps=fast"], "is no unit"),
            (&["iops=9999999999999999"], "the most is"),
            (&["iops=1,iops=2"], "twice"),
            (&["burst=2"], "add a rate"),
            (&["iops=1,burst-seconds=2"], "burst-seconds needs burst"),
            (&["iops=1,burst=0.5"], "from 1 to 1000"),
            (&["iops=1,burst=5000"], "from 1 to 1000"),
            (&["iops=1,burst=nan"], "from 1 to 1000"),
            (&["iops=1,burst=2,burst-seconds=-1"], "a number of seconds"),
            (&["iops=1,burst=2,burst-seconds=1e9"], "86400 seconds at most"),
            (&["iops=1,group="], "no value"),
            (&["disk=b"], "needs a rate"),
            (&["iops=1,disk=c"], "there is 'a.img', 'a.raw', 'b.img'"),
            (&["iops=1,disk=a"], "may be 'a.img', 'a.raw'"),
            (&["iops=1,disk=b", "iops=1,disk=b.img"], "two --limit of rates"),
            (&["iops=1", "bps=1"], "two --limit of rates are for all"),
            (&["iops=1,disk=b,group=g", "bps=1,disk=a.img,group=g"], "in one"),
            (&["disk=b,group=g"], "group=g has a rate"),
            (&["iops=1,disk=b,disk=a.img,disk=a.raw", "iops=1"], "there are none"),
        ] {
            let error = planned(arguments, &disks).expect_err(words);
            assert!(error.contains(words), "{arguments:?}: {error}");
        }
    }
}
