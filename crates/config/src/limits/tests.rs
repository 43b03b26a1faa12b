//! Tests the syntax and the meaning of limits.

use super::*;

#[test]
fn texts_and_objects_mean_the_same() {
    let text: LimitsConfig =
        "iops=5,bps=1K,burst=2.5,burst-seconds=0.5,group=g".parse().expect("limits");
    let object = r#"{"iops":5,"bps":"1K","burst":2.5,"burst-seconds":0.5,"group":"g"}"#;
    let object: LimitsConfig = serde_json::from_str(object).expect("limits");
    assert_eq!(text, object);
    let rates = text.rates().expect("it makes sense");
    assert_eq!(LimitsConfig::of(Some("g".into()), rates), text);
    assert_eq!("off".parse::<LimitsConfig>().map(|off| off.is_off()), Ok(true));
}

#[test]
fn limits_mean_the_same_however_they_are_written() {
    let parse = |text: &str| text.parse::<LimitsConfig>().expect("limits");
    assert!(parse("iops=5,burst=2").means(&parse("burst-seconds=1,burst=2.001,iops=5")));
    assert!(!parse("iops=5").means(&parse("iops=5,group=g")) && !parse("iops=5").is_off());
}

#[test]
fn limits_that_make_no_sense_are_refused() {
    for (text, words) in [
        ("seats=5", "the keys are iops"),
        ("iops", "like iops=1000, or off"),
        ("off,iops=5", "KEY=VALUE"),
        ("burst=2", "add a rate"),
        ("iops=0", "cannot be 0"),
        ("group=", "no value"),
    ] {
        let error = text.parse::<LimitsConfig>().expect_err(text);
        assert!(error.contains(words), "{text}: {error}");
    }
}

fn argument(text: &str) -> Result<RateArgument, String> {
    let mut argument = RateArgument::default();
    for item in text.split(',') {
        let (key, value) = item.split_once('=').expect("a key and a value");
        assert!(argument.take(key, value)?, "{key}");
    }
    argument.finish()
}

fn planned(arguments: &[&str], disks: &[&str]) -> Result<Vec<LimitsConfig>, String> {
    let arguments: Result<Vec<_>, _> = arguments.iter().map(|text| argument(text)).collect();
    let disks: Vec<_> = disks.iter().map(ToString::to_string).collect();
    plan(&arguments?, &disks)
}

/// The plan for each disk: its operations a second, and its group.
fn shown(arguments: &[&str], disks: &[&str]) -> Vec<String> {
    let show = |limits: &LimitsConfig| {
        if limits.is_off() {
            "-".into()
        } else {
            let group = limits.group.as_deref().unwrap_or_default();
            format!("{}{group}", limits.iops.unwrap_or_default())
        }
    };
    planned(arguments, disks).expect("a plan").iter().map(show).collect()
}

#[test]
fn all_keys_are_understood() {
    let all = "iops=1,iops-read=2,iops-write=3,bps=1K,bps-read=1M,bps-write=1.5G,burst=2.5,burst-seconds=0.5";
    let limits = argument(all).and_then(|one| one.limits.rates()).expect("limits");
    let rates = [limits.iops, limits.iops_read, limits.iops_write];
    assert_eq!(rates.map(|rate| rate.map_or(0, NonZeroU64::get)), [1, 2, 3]);
    let rates = [limits.bps, limits.bps_read, limits.bps_write];
    assert_eq!(rates.map(|rate| rate.map_or(0, NonZeroU64::get)), [1 << 10, 1 << 20, 3 << 29]);
    let burst = limits.burst.expect("a burst");
    assert_eq!((burst.factor(), burst.time()), (2.5, Duration::from_millis(500)));
    let limits = argument("bps=1M,burst=3").and_then(|one| one.limits.rates()).expect("limits");
    let burst = limits.burst.expect("a burst");
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
    assert_eq!(shown(&["disk=b,group=g", "iops=5,disk=a.img,group=g"], &disks), ["5g", "5g", "-"]);
}

#[test]
fn rates_that_make_no_sense_are_refused_with_what_would() {
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
    let limits = client_limits(&changes.clients);
    assert_eq!(limits.stall, Some(Duration::from_secs(2)));
    assert_eq!(limits.connections, Limits::default().connections);
}
