//! Measures limits: four disks, two over NBD and two over vhost-user-blk, in a group of 2000
//! operations a second for five seconds. Prints for each run the sum a second, Jain's index and the
//! server's processor time.
//!
//!     cargo run --release -p blockhouse-tests --bin limit_shares -- [RUNS]
#![forbid(unsafe_code)]

use std::time::Duration;

use blockhouse_tests::shared_limit::FourDisks;
use blockhouse_tests::{Scratch, processor_time};

#[expect(clippy::print_stdout, reason = "it is what the program is for")]
fn main() {
    let runs = std::env::args().nth(1).and_then(|count| count.parse().ok()).unwrap_or(3);
    for workers in [1, 2] {
        for run in 0..runs {
            let scratch = Scratch::new();
            let disks = FourDisks::serve(&scratch, workers, Some("iops=2000,group=all"));
            let before = processor_time(disks.pid());
            let done = disks.read(16, |done| done.time >= Duration::from_secs(5));
            let used = processor_time(disks.pid()) - before;
            let rate = done.sum() as f64 / done.time.as_secs_f64();
            println!(
                "workers {workers} run {run}: {:?} in {:?}: {rate:.1} a second, Jain {:.6}, server {:.1} % of a \
                 processor",
                done.reads,
                done.time,
                done.jain(),
                100.0 * used.as_secs_f64() / done.time.as_secs_f64()
            );
            disks.stop();
        }
    }
}
