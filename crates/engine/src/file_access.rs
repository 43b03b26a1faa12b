//! Putting a ruleset of Landlock (`landlock(7)`) in force on all threads of the process.
//!
//! The kernel restricts the calling thread and those that it starts later. So each other thread is sent a signal, whose
//! handler makes the two calls. Guarantee: where this succeeds, every thread of the process is restricted, also one that
//! was started meanwhile. Reason for the method: kernels before 7.0 have no call for all threads.

use std::collections::HashSet;
use std::ffi::c_int;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long a thread may take to handle the signal. One that blocks it never does.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How often it is asked whether it has.
const RETRY_DELAY: Duration = Duration::from_micros(50);

/// What the handler restricts its thread to.
static RULESET: AtomicI32 = AtomicI32::new(-1);
/// How many threads have handled the signal.
static HANDLED: AtomicU32 = AtomicU32::new(0);
/// The error of one of them, or zero.
static FAILURE: AtomicI32 = AtomicI32::new(0);

/// Restricts all threads to a ruleset, and takes from them the right to gain privileges by executing (`no_new_privs`). The
/// calling thread comes last.
///
/// # Errors
/// The kernel's; `TimedOut` where a thread blocks the signal. Some threads may be restricted then.
pub fn restrict_file_access(ruleset: BorrowedFd<'_>) -> io::Result<()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock();
    RULESET.store(ruleset.as_raw_fd(), Ordering::SeqCst);
    FAILURE.store(0, Ordering::SeqCst);
    let signal = libc::SIGRTMAX() - 1;
    let before = install(signal, on_signal as *const () as usize)?;
    // Where that fails the handler stays: the signal may still wait for a thread, and would end the process.
    restrict_others(signal)?;
    install(signal, before)?;
    match restrict_this_thread(ruleset.as_raw_fd()) {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// Restricts all threads but the calling one.
fn restrict_others(signal: c_int) -> io::Result<()> {
    // SAFETY: neither takes any memory.
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
        // A thread that was started before its starter was restricted shows in the next round.
        if restricted.len() == before {
            return Ok(());
        }
    }
}

/// Whether a thread is one of io_uring's workers (`PF_IO_WORKER` in `<linux/sched.h>`), which runs no code of the process
/// and takes no signal. What it does for a request it does with the rights of the thread that made the request.
fn is_of_kernel(thread: libc::pid_t) -> bool {
    const IO_WORKER: u32 = 0x10;
    // The fields that follow the name (proc_pid_stat(5)); a thread that has ended has none.
    let stat =
        std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap_or_default();
    let flags = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(6));
    flags.and_then(|flags| flags.parse::<u32>().ok()).is_some_and(|flags| flags & IO_WORKER != 0)
}

/// Has a thread restrict itself. False where it has ended.
fn signal_and_wait(process: libc::pid_t, thread: libc::pid_t, signal: c_int) -> io::Result<bool> {
    let handled = HANDLED.load(Ordering::SeqCst);
    // SAFETY: it takes no memory, and the handler of this signal is installed.
    let sent = unsafe { libc::syscall(libc::SYS_tgkill, process, thread, signal) };
    if sent != 0 {
        let error = io::Error::last_os_error();
        return if error.raw_os_error() == Some(libc::ESRCH) { Ok(false) } else { Err(error) };
    }
    let deadline = Instant::now() + TIMEOUT;
    while HANDLED.load(Ordering::SeqCst) == handled {
        if !std::path::Path::new(&format!("/proc/self/task/{thread}")).exists() {
            return Ok(false);
        }
        if Instant::now() >= deadline {
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

/// Installs a handler, or an action like `SIG_DFL`. Gives what was there.
fn install(signal: c_int, handler: usize) -> io::Result<usize> {
    // SAFETY: all-zero is a valid sigaction: the default action, no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = handler;
    action.sa_flags = libc::SA_RESTART;
    let mut before = action;
    // SAFETY: the handler is async-signal-safe, and has the signature of one without SA_SIGINFO; both actions are
    // variables of our own.
    match unsafe { libc::sigaction(signal, &raw const action, &raw mut before) } {
        0 => Ok(before.sa_sigaction),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Async-signal-safe.
extern "C" fn on_signal(_: c_int) {
    // SAFETY: errno belongs to this thread. What was interrupted finds it as it was.
    let errno = unsafe { *libc::__errno_location() };
    let failure = restrict_this_thread(RULESET.load(Ordering::SeqCst));
    if failure != 0 {
        FAILURE.store(failure, Ordering::SeqCst);
    }
    HANDLED.fetch_add(1, Ordering::SeqCst);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Restricts the calling thread; an errno, or zero. Async-signal-safe.
fn restrict_this_thread(ruleset: c_int) -> c_int {
    // SAFETY: neither call takes any memory.
    let result = unsafe {
        match libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) {
            0 => libc::syscall(libc::SYS_landlock_restrict_self, ruleset, 0),
            _ => -1,
        }
    };
    match result {
        0 => 0,
        _ => io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL),
    }
}
