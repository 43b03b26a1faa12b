//! The processor time of a server.

use std::time::Duration;

use rustix::process::Pid;

/// The processor time of all threads of a process.
///
/// # Panics
/// The process does not run, or the kernel counts no time.
pub fn processor_time(pid: Pid) -> Duration {
    let path = format!("/proc/{}/task", pid.as_raw_nonzero());
    let tasks = std::fs::read_dir(path).expect("the process runs");
    let nanoseconds = tasks.map(|task| {
        let path = task.expect("a folder").path().join("schedstat");
        let line = std::fs::read_to_string(path).expect("a kernel that counts");
        line.split(' ').next().and_then(|word| word.parse::<u64>().ok()).expect("nanoseconds")
    });
    Duration::from_nanos(nanoseconds.sum())
}
