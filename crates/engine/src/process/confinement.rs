//! Restricts all threads of the process: access to files and ports (Landlock, `landlock(7)`), and
//! the capabilities of root (`capabilities(7)`).
//!
//! The kernel restricts only the calling thread and the threads that it starts later. So every
//! other thread gets a signal, whose handler makes the calls. Guarantee: on success every thread of
//! the process is restricted, including threads started meanwhile. Reason for the method:
//! capabilities have no call for all threads, and Landlock has none before Linux 7.0.

use std::collections::HashSet;
use std::ffi::c_int;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long a thread may take to handle the signal.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long a thread may sleep with the signal blocked. Threads block signals briefly when they
/// start others. A thread that keeps the signal blocked, as in Ceph's library, never handles it.
const BLOCKED_TIMEOUT: Duration = Duration::from_millis(100);
/// Interval of the checks whether a thread has handled the signal.
const RETRY_DELAY: Duration = Duration::from_micros(50);

/// The ruleset that the handler applies to its thread, or -1.
static RULESET: AtomicI32 = AtomicI32::new(-1);
/// The capabilities that the handler leaves to its thread.
static CAPABILITIES: AtomicU64 = AtomicU64::new(u64::MAX);
/// How many threads have handled the signal.
static HANDLED: AtomicU32 = AtomicU32::new(0);
/// The errno of a thread that failed, or zero.
static FAILURE: AtomicI32 = AtomicI32::new(0);

/// The rights that are left to a process.
#[derive(Clone, Copy, Debug)]
pub struct Confinement<'a> {
    /// A Landlock ruleset; `None` leaves access to files and ports unchanged.
    pub ruleset: Option<BorrowedFd<'a>>,
    /// A bit for each capability (`<linux/capability.h>`) that the process may keep.
    pub capabilities: u64,
}

/// Confines all threads irrevocably, and sets `no_new_privs`, so that no executed program gains
/// privileges. The calling thread is restricted last.
///
/// # Errors
/// The kernel's error; `TimedOut` if a thread blocks the signal, or does not handle it in 5
/// seconds. Some threads may then be restricted already.
pub fn confine(confinement: Confinement<'_>) -> io::Result<()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock();
    let ruleset = confinement.ruleset.map_or(-1, |ruleset| ruleset.as_raw_fd());
    RULESET.store(ruleset, Ordering::SeqCst);
    CAPABILITIES.store(confinement.capabilities, Ordering::SeqCst);
    FAILURE.store(0, Ordering::SeqCst);
    let signal = libc::SIGRTMAX() - 1;
    let before = install(signal, on_signal as *const () as usize)?;
    // If a thread cannot be restricted, the handler stays installed. Reason: without a handler, a
    // signal that is still pending for a thread would end the process.
    restrict_others(signal)?;
    install(signal, before)?;
    match restrict_this_thread() {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// Restricts all threads but the calling one.
fn restrict_others(signal: c_int) -> io::Result<()> {
    // SAFETY: neither call uses any memory.
    let (process, own) = unsafe { (libc::getpid(), libc::gettid()) };
    let mut restricted = HashSet::from([own]);
    loop {
        let before = restricted.len();
        for thread in std::fs::read_dir("/proc/self/task")? {
            let name = thread?.file_name();
            let thread = name.to_str().and_then(|name| name.parse::<libc::pid_t>().ok());
            let is_new = |thread: &i32| !restricted.contains(thread) && !is_of_kernel(*thread);
            let Some(thread) = thread.filter(is_new) else { continue };
            if signal_and_wait(process, thread, signal)? {
                restricted.insert(thread);
            }
        }
        // The next iteration finds threads that another thread started before it was restricted.
        if restricted.len() == before {
            return Ok(());
        }
    }
}

/// Whether a thread is one of io_uring's workers (`PF_IO_WORKER` in `<linux/sched.h>`), which runs
/// no code of the process and handles no signal. It carries out each request with the rights of the
/// thread that made the request.
fn is_of_kernel(thread: libc::pid_t) -> bool {
    const IO_WORKER: u32 = 0x10;
    // Reads the fields after the name (proc_pid_stat(5)). An ended thread has none.
    let stat =
        std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap_or_default();
    let flags = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(6));
    flags.and_then(|flags| flags.parse::<u32>().ok()).is_some_and(|flags| flags & IO_WORKER != 0)
}

/// Makes a thread restrict itself. Returns false if the thread has ended.
fn signal_and_wait(process: libc::pid_t, thread: libc::pid_t, signal: c_int) -> io::Result<bool> {
    let handled = HANDLED.load(Ordering::SeqCst);
    // SAFETY: it takes no memory, and the handler of this signal is installed.
    let sent = unsafe { libc::syscall(libc::SYS_tgkill, process, thread, signal) };
    if sent != 0 {
        let error = io::Error::last_os_error();
        return if error.raw_os_error() == Some(libc::ESRCH) { Ok(false) } else { Err(error) };
    }
    let deadline = Instant::now() + TIMEOUT;
    let mut blocked_since = None;
    while HANDLED.load(Ordering::SeqCst) == handled {
        let Ok(status) = std::fs::read_to_string(format!("/proc/self/task/{thread}/status")) else {
            return Ok(false);
        };
        let now = Instant::now();
        blocked_since = sleeps_and_blocks(&status, signal).then(|| blocked_since.unwrap_or(now));
        if now >= deadline || blocked_since.is_some_and(|since| now - since >= BLOCKED_TIMEOUT) {
            let what = format!("thread {thread} blocks signals");
            return Err(io::Error::new(io::ErrorKind::TimedOut, what));
        }
        std::thread::sleep(RETRY_DELAY);
    }
    match FAILURE.load(Ordering::SeqCst) {
        0 => Ok(true),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// Whether `status` (proc_pid_status(5)) is of a thread that sleeps and blocks the signal.
fn sleeps_and_blocks(status: &str, signal: c_int) -> bool {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let blocked = field("SigBlk:").and_then(|mask| u64::from_str_radix(mask, 16).ok());
    let is_asleep = field("State:").is_some_and(|state| state.starts_with('S'));
    is_asleep && blocked.is_some_and(|mask| mask >> (signal - 1) & 1 != 0)
}

/// Installs a handler, or an action such as `SIG_DFL`. Returns the previous one.
fn install(signal: c_int, handler: usize) -> io::Result<usize> {
    // SAFETY: all-zero is a valid sigaction: the default action, no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = handler;
    action.sa_flags = libc::SA_RESTART;
    let mut before = action;
    // SAFETY: the handler is async-signal-safe, and has the signature of one without SA_SIGINFO;
    // both actions are variables of our own.
    match unsafe { libc::sigaction(signal, &raw const action, &raw mut before) } {
        0 => Ok(before.sa_sigaction),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Async-signal-safe.
extern "C" fn on_signal(_: c_int) {
    // SAFETY: errno belongs to this thread. The interrupted code finds it unchanged.
    let errno = unsafe { *libc::__errno_location() };
    let failure = restrict_this_thread();
    if failure != 0 {
        FAILURE.store(failure, Ordering::SeqCst);
    }
    HANDLED.fetch_add(1, Ordering::SeqCst);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Restricts the calling thread. Returns an errno, or zero. Async-signal-safe.
fn restrict_this_thread() -> c_int {
    let ruleset = RULESET.load(Ordering::SeqCst);
    // SAFETY: neither call uses any memory.
    let restricted = unsafe {
        match libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) {
            0 if ruleset >= 0 => libc::syscall(libc::SYS_landlock_restrict_self, ruleset, 0),
            other => other.into(),
        }
    };
    match restricted {
        0 if keep_capabilities(CAPABILITIES.load(Ordering::SeqCst)) => 0,
        _ => io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL),
    }
}

/// The header for `capget` and `capset`: it selects this thread, and two halves of 32 bits.
#[repr(C)]
struct CapabilityHeader {
    version: u32,
    thread: c_int,
}

/// Bits of one half of the capabilities.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct CapabilityBits {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Reduces the calling thread's capabilities to `kept`, and clears the inheritable ones. Returns
/// false, with errno set, if the kernel refuses. `capset` is called only if that changes anything,
/// because a service manager's seccomp filter may forbid it. Async-signal-safe.
fn keep_capabilities(kept: u64) -> bool {
    const VERSION_3: u32 = 0x2008_0522;
    let mut header = CapabilityHeader { version: VERSION_3, thread: 0 };
    let mut halves = [CapabilityBits::default(); 2];
    // SAFETY: the kernel reads and may write the header, and stores two halves; both are variables
    // of our own.
    if unsafe { libc::syscall(libc::SYS_capget, &raw mut header, halves.as_mut_ptr()) } != 0 {
        return false;
    }
    let before = halves;
    for (half, kept) in halves.iter_mut().zip([kept as u32, (kept >> 32) as u32]) {
        half.permitted &= kept;
        half.effective &= kept;
        half.inheritable = 0;
    }
    if halves == before {
        return true;
    }
    // SAFETY: the kernel reads the header and two halves, as above.
    unsafe { libc::syscall(libc::SYS_capset, &raw mut header, halves.as_ptr()) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_asked_no_longer_when_it_sleeps_with_the_signal_blocked() {
        let status = |state: &str, mask: &str| {
            format!("Name:\tone\nState:\t{state}\nSigPnd:\t0000000000000000\nSigBlk:\t{mask}\n")
        };
        // Signal 63 is bit 62.
        let (all, all_others) = ("fffffffe7ffbfeff", "bfffffffffffffff");
        assert!(sleeps_and_blocks(&status("S (sleeping)", all), 63));
        assert!(!sleeps_and_blocks(&status("R (running)", all), 63));
        assert!(!sleeps_and_blocks(&status("S (sleeping)", all_others), 63));
        assert!(!sleeps_and_blocks("", 63));
    }

    #[test]
    fn the_kernel_tells_which_signals_a_thread_blocks() {
        let signal = libc::SIGRTMAX() - 1;
        let (ask, asked) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            // SAFETY: an all-zero set is memory for a set; both calls stay within it.
            unsafe {
                let mut set: libc::sigset_t = MaybeUninit::zeroed().assume_init();
                libc::sigfillset(&raw mut set);
                libc::pthread_sigmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut());
                ask.send(libc::gettid()).unwrap();
            }
            // Sleeps until the other end is dropped.
            let _ = ended.recv();
        });
        let path = format!("/proc/self/task/{}/status", asked.recv().unwrap());
        while !sleeps_and_blocks(&std::fs::read_to_string(&path).unwrap(), signal) {
            std::thread::yield_now();
        }
        drop(end);
        thread.join().unwrap();
    }
}
