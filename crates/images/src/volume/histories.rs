//! Tests with random histories of a device: servers write to the device and are killed, other
//! programs write to it, and the host reboots or attaches it again. After each history, the verdict
//! whether another program changed the device must be right. Faults planted in the rules must be
//! detected.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use blockhouse_core::{ByteRange, StateMemory};
use blockhouse_disk::{BootId, FlushRecord, ImageIdentity, Owner, StatePage, TrackedFile};
use blockhouse_engine::DeviceWrites;

use super::{Seen, Told, told_by_close, told_by_count};

/// The rule under test: the right one, or one with a planted fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// No fault.
    Right,
    /// A write is counted only when it has completed.
    CountsLate,
    /// Nothing is counted.
    CountsNothing,
    /// Counts of different eras are compared, too.
    MixesEras,
    /// After a kill, the state that an earlier session recorded at its end is compared.
    ForgetsKills,
    /// The kernel's count is read while the page cache has writes that it does not count yet.
    LooksPastCache,
    /// A zeroing counts once, even if the device refuses it.
    CountsZeroesOnce,
}

/// A block device, and its kernel's counts.
struct Device {
    era: u64,
    sectors: u64,
    /// Sectors that are only in the page cache.
    dirty: u64,
    /// Whether the device refuses to zero, and the kernel has not detected that yet.
    refuses_zeroes: bool,
    /// Sectors that other programs have written.
    strange: u64,
}

impl Device {
    fn writes(&mut self, rule: Rule) -> DeviceWrites {
        if rule != Rule::LooksPastCache {
            self.write_out();
        }
        DeviceWrites::of(self.era, self.sectors)
    }

    fn write(&mut self, sectors: u64, is_cached: bool) {
        *(if is_cached { &mut self.dirty } else { &mut self.sectors }) += sectors;
    }

    fn write_out(&mut self) {
        self.sectors += std::mem::take(&mut self.dirty);
    }

    /// Zeroes sectors. If the device refuses, the kernel writes zeros, and counts both.
    fn zero(&mut self, sectors: u64) {
        let is_refused = std::mem::take(&mut self.refuses_zeroes);
        self.sectors += if is_refused { 2 * sectors } else { sectors };
    }

    fn attach_anew(&mut self) {
        (self.era, self.sectors, self.dirty) = (self.era + 0x1_2345_6789_abcd, 0, 0);
    }
}

/// The records of the last session in the side file and the state file.
struct Left {
    closed_at: std::time::Duration,
    sent: Option<u64>,
    /// Sectors that were counted but never sent: another program may write this many unnoticed.
    slack: u64,
}

fn page(device: &mut Device, rule: Rule) -> StatePage {
    let memory = std::iter::repeat_with(AtomicU64::default).take(512).collect::<Vec<_>>();
    let image = ImageIdentity { device: 1, inode: 2, birth: 3 };
    let boot = BootId::current().expect("a host with /proc");
    let owner = Owner { boot, image, path: "/side".into(), process: 1 };
    let page = StatePage::create(Arc::new(memory) as Arc<dyn StateMemory>, &owner);
    page.set_device_writes(device.writes(rule).to_word());
    page
}

/// A session of a server, which ends in order or is killed.
fn serve(device: &mut Device, random: &mut fastrand::Rng, rule: Rule, old: Left) -> Left {
    let page = page(device, rule);
    let record = FlushRecord::new(page.clone(), TrackedFile::Data);
    let (is_cached, mut slack) = (random.bool(), 0);
    for _ in 0..random.usize(0..20) {
        let range = ByteRange::between(0, random.u64(1..9) * 512);
        let (sectors, is_zeroing) = (range.length() / 512, random.u8(..8) == 0);
        let before = page.device_writes();
        match (rule, is_zeroing) {
            (Rule::CountsLate | Rule::CountsNothing, _) => {}
            (Rule::CountsZeroesOnce, _) | (_, false) => record.count(range, 512),
            (_, true) => record.count_zeroing(range, 512),
        }
        let (counted, had) = (page.device_writes() - before, device.sectors + device.dirty);
        let end = random.u8(..20);
        match is_zeroing {
            // The server is killed before the write reaches the device.
            _ if end == 0 => {}
            false => device.write(sectors, is_cached),
            true => {
                device.zero(sectors);
                record.note_zeroed();
            }
        }
        slack += counted.saturating_sub(device.sectors + device.dirty - had);
        if end <= 1 {
            return Left { sent: Some(page.device_writes()), slack, ..old };
        }
        if rule == Rule::CountsLate {
            record.count(range, 512);
        }
    }
    Left { closed_at: device.writes(rule).to_time(), sent: None, slack: 0 }
}

fn told(device: &mut Device, left: &Left, rule: Rule) -> Told {
    let now = device.writes(rule);
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

/// Runs one history. An error names the fault in its verdict.
fn judge(seed: u64, rule: Rule) -> Result<Option<Told>, String> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut device = Device {
        era: random.u64(1..),
        sectors: random.u64(..1 << 30),
        dirty: 0,
        refuses_zeroes: random.bool(),
        strange: 0,
    };
    let closed_at = device.writes(rule).to_time();
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
                device.write(sectors, random.bool());
                device.strange += sectors;
            }
            _ => device.write_out(),
        }
    }
    let told = told(&mut device, &left, rule);
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
    let rules = [
        Rule::CountsLate,
        Rule::CountsNothing,
        Rule::MixesEras,
        Rule::ForgetsKills,
        Rule::LooksPastCache,
        Rule::CountsZeroesOnce,
    ];
    for rule in rules {
        let found = (0..2_000).find_map(|seed| judge(seed, rule).err());
        assert!(found.is_some(), "{rule:?} went unnoticed");
    }
}
