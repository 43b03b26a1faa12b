//! Crashes while one task runs, at every operation of the disks that it uses.

use blockhouse_sim::{Sim, SimDisk, Task};

/// Steps until `task` has completed, and calls `judge` whenever one of `disks` has begun or
/// completed an operation: `judge` crashes the disks, and says what is wrong with what is left.
///
/// Returns the task's output, and how often `judge` was called.
///
/// # Errors
/// The error of `judge`, or that `task` waits for ever.
pub fn at_every_operation<T>(
    sim: &Sim,
    disks: &[&SimDisk],
    task: &Task<T>,
    mut judge: impl FnMut() -> Result<(), String>,
) -> Result<(T, u64), String> {
    let mut last = Vec::new();
    let mut calls = 0;
    loop {
        if let Some(output) = task.output() {
            return Ok((output, calls));
        }
        if !sim.step() {
            return Err("the task waits for ever".to_owned());
        }
        let counts: Vec<_> = disks.iter().map(|disk| disk.counts()).collect();
        if counts != last {
            last = counts;
            calls += 1;
            judge()?;
        }
    }
}
