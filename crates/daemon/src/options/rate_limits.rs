//! How many operations and bytes a second disks may have: what is written, and for which disks it
//! holds.
//!
//! Every disk has one throttle at most. Disks whose throttles name the same group share one limit.

use blockhouse_disk::RateLimits;

use crate::options::limit_options::{DiskThrottle, LimitOptions, name};

/// The rates of one `--limit`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RateArgument {
    disks: Vec<String>,
    options: LimitOptions,
    limits: RateLimits,
}

impl RateArgument {
    /// Takes a `KEY=VALUE` in. `false` if the key is none of rates.
    ///
    /// # Errors
    /// When the value makes no sense for the key, or the key was there before.
    pub fn take(&mut self, key: &str, value: &str) -> Result<bool, String> {
        if key == "disk" {
            self.disks.push(name(key, value)?);
            return Ok(true);
        }
        self.options.take(key, value)
    }

    /// Checks that its keys make sense together.
    ///
    /// # Errors
    /// Where they do not.
    pub fn finish(mut self) -> Result<Self, String> {
        self.limits = self.options.limits()?;
        match self.limits.is_unlimited() && self.options.group.is_none() {
            true => Err("disk needs a rate, like iops=1000, or a group".into()),
            false => Ok(self),
        }
    }

    fn group(&self) -> Option<&str> {
        self.options.group.as_deref()
    }
}

/// The throttles of disks with these names, in their order.
///
/// An argument with `disk` keys holds for those disks, another one for all disks that no other
/// argument names. Without a group each of them has the limits for itself.
///
/// # Errors
/// Where an argument names no disk or several, a disk has two throttles, or a group has no limits
/// or two.
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
                "a --limit of rates without disk=NAME is for the other disks, but each disk has its own"
                    .into(),
            );
        }
    }
    let throttle = |argument: Option<&RateArgument>| {
        let argument = argument?;
        let limits = match argument.group() {
            None => Ok(argument.limits),
            Some(group) => limits_of(group, arguments),
        };
        let group = argument.group().map(ToOwned::to_owned);
        Some(limits.map(|limits| DiskThrottle { group, limits }))
    };
    planned.into_iter().map(|argument| throttle(argument).transpose()).collect()
}

/// The limits that one argument gives to a group.
fn limits_of(group: &str, arguments: &[RateArgument]) -> Result<RateLimits, String> {
    let of_group = arguments.iter().filter(|argument| argument.group() == Some(group));
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

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;
    use std::time::Duration;

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

    /// The plan for each disk: its operations a second, and its group.
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
            (&["iops=1,disk=b,disk=a.img,disk=a.raw", "iops=1"], "each disk has its own"),
        ] {
            let error = planned(arguments, &disks).expect_err(words);
            assert!(error.contains(words), "{arguments:?}: {error}");
        }
    }
}
