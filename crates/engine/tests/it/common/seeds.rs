//! Random tests: a seed decides everything, and a failure says how to see it again.

use fastrand::Rng;

/// One seed to run alone: how a failure is replayed.
const ONE: &str = "BLOCKHOUSE_ENGINE_SEED";

/// Runs `test` of the file `module` for `count` seeds.
pub fn for_seeds(module: &str, test: &str, count: u64, run: impl Fn(&mut Rng)) {
    let one = std::env::var(ONE).ok().map(|seed| seed.parse().expect("a seed is a number"));
    let seeds = one.map_or(0..count, |seed: u64| seed..seed + 1);
    for seed in seeds {
        let replay = format!(
            "replay with: {ONE}={seed} cargo test -p blockhouse-engine --test it {module}::{test}"
        );
        let _words = OnPanic(replay);
        run(&mut Rng::with_seed(seed));
    }
}

struct OnPanic(String);

impl Drop for OnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.0);
        }
    }
}
