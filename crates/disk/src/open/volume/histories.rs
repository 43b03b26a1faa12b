//! Devices that servers write to and are killed on, strangers write to, and hosts restart or attach
//! anew: the statement whether such changes happened is never wrong, whatever happens when. And
//! tests that wrong rules would be found out.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use blockhouse_core::{ByteRange, StateMemory};
use blockhouse_engine::DeviceWrites;

use super::{Seen, Told, told_by_close, told_by_count};
use crate::state::{BootId, FlushRecord, ImageIdentity, Owner, StatePage, TrackedFile};

/// The planted faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// Nothing.
    Right,
    /// A write is counted when it has completed.
    CountsLate,
    /// Nothing is counted.
    CountsNothing,
    /// Counts of another era are compared, too.
    MixesEras,
    /// A note at the end of an earlier session is compared after a kill.
    ForgetsKills,
}

/// A block device, and what its kernel counts.
struct Device {
    era: u64,
    sectors: u64,
    /// Sectors that only a server has written, without recording them.
    strange: u64,
}

impl Device {
    fn writes(&self) -> DeviceWrites {
        DeviceWrites::of(self.era, self.sectors)
    }

    fn attach_anew(&mut self) {
        (self.era, self.sectors) = (self.era + 0x1_2345_6789_abcd, 0);
    }
}

/// The records of the last session in the side file and the state file.
struct Left {
    closed_at: std::time::Duration,
    sent: Option<u64>,
    /// Sectors that were counted and never sent: a stranger may write this many unnoticed.
    slack: u64,
}

fn page(device: &Device) -> StatePage {
    let memory = std::iter::repeat_with(AtomicU64::default).take(512).collect::<Vec<_>>();
    let image = ImageIdentity { device: 1, inode: 2, birth: 3 };
    let boot = BootId::current().expect("a host with /proc");
    let owner = Owner { boot, image, path: "/side".into(), process: 1 };
    let page = StatePage::create(Arc::new(memory) as Arc<dyn StateMemory>, &owner);
    page.set_device_writes(device.writes().to_word());
    page
}

/// A session of a server, which ends in order or is killed.
fn serve(device: &mut Device, random: &mut fastrand::Rng, rule: Rule, old: Left) -> Left {
    let page = page(device);
    let record = FlushRecord::new(page.clone(), TrackedFile::Data);
    let mut slack = 0;
    for _ in 0..random.usize(0..20) {
        let range = ByteRange::between(0, random.u64(1..9) * 512);
        let sectors = range.length() / 512;
        if !matches!(rule, Rule::CountsLate | Rule::CountsNothing) {
            record.count(range, 512);
        }
        match random.u8(..20) {
            // Killed before the write reached the device, and after.
            0 => {
                slack += if rule == Rule::CountsLate { 0 } else { sectors };
                return Left { sent: Some(page.device_writes()), slack, ..old };
            }
            1 => {
                device.sectors += sectors;
                return Left { sent: Some(page.device_writes()), slack, ..old };
            }
            _ => device.sectors += sectors,
        }
        if rule == Rule::CountsLate {
            record.count(range, 512);
        }
    }
    Left { closed_at: device.writes().to_time(), sent: None, slack: 0 }
}

fn told(device: &Device, left: &Left, rule: Rule) -> Told {
    let now = device.writes();
    match (left.sent, rule) {
        (Some(_), Rule::ForgetsKills) | (None, _) if rule != Rule::MixesEras => {
            told_by_close(left.closed_at, Seen::Writes(now.to_time()))
        }
        (Some(sent), Rule::MixesEras) => {
            let count = |word: u64| word & ((1 << 40) - 1);
            Told::of(count(now.to_word()) <= count(sent))
        }
        (Some(sent), _) => told_by_count(sent, now.to_word()),
        (None, _) => told_by_close(left.closed_at, Seen::Writes(now.to_time())),
    }
}

/// The fault in the verdicts of one history.
fn judge(seed: u64, rule: Rule) -> Result<Option<Told>, String> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut device = Device { era: random.u64(1..), sectors: random.u64(..1 << 30), strange: 0 };
    let closed_at = device.writes().to_time();
    let mut left = Left { closed_at, sent: None, slack: 0 };
    for _ in 0..random.usize(1..4) {
        left = serve(&mut device, &mut random, rule, left);
        if left.sent.is_some() {
            break;
        }
    }
    let mut is_anew = false;
    for _ in 0..random.usize(0..3) {
        match random.u8(..3) {
            0 => {
                device.attach_anew();
                is_anew = true;
            }
            1 => {
                let sectors = random.u64(1..9);
                device.sectors += sectors;
                device.strange += sectors;
            }
            _ => {}
        }
    }
    let told = told(&device, &left, rule);
    match told {
        Told::Unchanged if device.strange > left.slack => {
            Err(format!("{} sectors went unnoticed", device.strange))
        }
        Told::Unchanged if is_anew => Err("the device was attached anew".into()),
        Told::Changed if device.strange == 0 => Err("a server's own changes are strange".into()),
        Told::Nothing if !is_anew => Err("nothing is told, and the kernel counts".into()),
        told => Ok(Some(told)),
    }
}

#[test]
fn what_is_told_of_strangers_is_never_wrong() {
    let (mut unchanged, mut changed, mut nothing) = (0, 0, 0);
    for seed in 0..20_000 {
        match judge(seed, Rule::Right).unwrap_or_else(|why| panic!("seed {seed}: {why}")) {
            Some(Told::Unchanged) => unchanged += 1,
            Some(Told::Changed) => changed += 1,
            Some(Told::Nothing) => nothing += 1,
            None => {}
        }
    }
    assert!(
        unchanged > 2_000 && changed > 2_000 && nothing > 2_000,
        "{unchanged} {changed} {nothing}"
    );
}

#[test]
fn wrong_rules_are_found_out() {
    let rules = [Rule::CountsLate, Rule::CountsNothing, Rule::MixesEras, Rule::ForgetsKills];
    for rule in rules {
        let found = (0..2_000).find_map(|seed| judge(seed, rule).err());
        assert!(found.is_some(), "{rule:?} went unnoticed");
    }
}
