//! Runs a check for many seeds, different ones in each run, and prints how to replay a failure.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::ops;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use parking_lot::Mutex;

use crate::{Report, Rng};

/// The variable with one seed to run alone, which replays a failure.
const ONE: &str = "BLOCKHOUSE_SIM_SEED";

/// The variable with the number of seeds to run (from 0 on), or their range (`FIRST..END`), instead
/// of the test's own number of random seeds.
const MANY: &str = "BLOCKHOUSE_SIM_SEEDS";

/// The variable by which tests run one in this many of their own number of random seeds, and never
/// fewer than [`FEWEST`]. Seeds differ in each run, so that many runs explore what one would.
const SHARE: &str = "BLOCKHOUSE_SIM_ONE_SEED_IN";

/// Seeds that `BLOCKHOUSE_SIM_ONE_SEED_IN` leaves to a test: enough for every kind of image that
/// some of them choose by the seed.
const FEWEST: u64 = 20;

/// Tests check randomly chosen moments; with this variable they check only one in this many of
/// them, so that more seeds take the same time.
const FEWER: &str = "BLOCKHOUSE_SIM_ONE_MOMENT_IN";

/// Which seeds a run uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeedSelection {
    /// As many random seeds as each test says.
    Default,
    /// One seed, to replay a failure (`BLOCKHOUSE_SIM_SEED`).
    One,
    /// Other seeds than the tests choose, usually many more (`BLOCKHOUSE_SIM_SEEDS`).
    Range,
}

impl SeedSelection {
    /// The selection that the environment variables make.
    pub fn of_this_run() -> Self {
        if std::env::var_os(ONE).is_some() {
            Self::One
        } else if std::env::var_os(MANY).is_some() {
            Self::Range
        } else {
            Self::Default
        }
    }
}

/// Whether a test checks this moment. True at random for one in `count` moments, or one in `count`
/// times `BLOCKHOUSE_SIM_ONE_MOMENT_IN`.
pub fn is_looked_at(random: &mut Rng, count: u32) -> bool {
    static FEWER_BY: OnceLock<u32> = OnceLock::new();
    let fewer_by = FEWER_BY.get_or_init(|| one_in(FEWER));
    random.u32(..count.saturating_mul(*fewer_by)) == 0
}

/// The number in the environment `variable`: 1 if it is not set.
fn one_in(variable: &str) -> u32 {
    std::env::var(variable).map_or(1, |words| {
        let number = words.trim().parse().ok().filter(|number| *number > 0);
        number.unwrap_or_else(|| panic!("{variable} is no number from 1 on: {words}"))
    })
}

/// Runs `check` for `count` random seeds on all cores and adds up the reports. `package` and `test`
/// name the calling test on cargo's command line.
///
/// # Panics
/// If a seed fails: with the smallest such seed, its violation, and the command that replays it.
pub fn for_seeds(
    package: &str,
    test: &str,
    count: u64,
    check: impl Fn(u64) -> Result<Report, String> + Sync,
) -> Report {
    let seeds = chosen(count);
    let next = AtomicU64::new(seeds.start);
    let total = Mutex::new(Report::default());
    let failure: Mutex<Option<(u64, String)>> = Mutex::new(None);
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end || failure.lock().is_some() {
                return;
            }
            let outcome = with_seed_on_panic(package, test, seed, || check(seed));
            match outcome {
                Ok(report) => {
                    let mut total = total.lock();
                    *total = total.and(report);
                }
                Err(words) => {
                    let mut failure = failure.lock();
                    if failure.as_ref().is_none_or(|(other, _)| seed < *other) {
                        *failure = Some((seed, words));
                    }
                }
            }
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    if let Some((seed, words)) = failure.into_inner() {
        panic!("seed {seed}: {words}\n{}", replay(package, test, seed));
    }
    let total = Report { seeds: seeds.end - seeds.start, ..total.into_inner() };
    eprintln!("{test}: seeds {}..{}, {total:?}", seeds.start, seeds.end);
    total
}

fn with_seed_on_panic<T>(package: &str, test: &str, seed: u64, run: impl FnOnce() -> T) -> T {
    struct OnPanic<F: Fn()>(F);
    impl<F: Fn()> Drop for OnPanic<F> {
        fn drop(&mut self) {
            if thread::panicking() {
                (self.0)();
            }
        }
    }
    let _say = OnPanic(|| eprintln!("{}", replay(package, test, seed)));
    run()
}

fn replay(package: &str, test: &str, seed: u64) -> String {
    let fewer =
        std::env::var(FEWER).map_or_else(|_| String::new(), |words| format!("{FEWER}={words} "));
    format!("replay with: {fewer}{ONE}={seed} cargo test -p {package} {test}")
}

fn chosen(count: u64) -> ops::Range<u64> {
    let number = |words: &str| words.trim().parse::<u64>().ok();
    if let Ok(one) = std::env::var(ONE) {
        let seed = number(&one).unwrap_or_else(|| panic!("{ONE} is no number: {one}"));
        return seed..seed + 1;
    }
    let Ok(many) = std::env::var(MANY) else {
        // Different seeds in each run. The first seed has 32 bits, so that the range cannot
        // overflow and a seed is short enough to type.
        let first = RandomState::new().build_hasher().finish() >> 32;
        let share = count / u64::from(one_in(SHARE));
        return first..first + share.max(count.min(FEWEST));
    };
    let range = match many.split_once("..") {
        Some((first, end)) => number(first).zip(number(end)),
        None => number(&many).map(|end| (0, end)),
    };
    let (first, end) = range.unwrap_or_else(|| panic!("{MANY} is neither N nor A..B: {many}"));
    first..end
}
