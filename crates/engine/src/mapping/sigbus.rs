//! The handler of SIGBUS: a fault in another process's memory ends the connection that depends on
//! it, and nothing else.
//!
//! The handler runs in the thread that touched the page, in the middle of a load, a store or a
//! copy. So it takes no lock, allocates no memory, and touches no shared memory. When it returns,
//! the processor repeats the access, which then finds a page of zeros. The first faults replace one
//! page each: the other pages may be intact, and the kernel may be about to read a guest's data
//! from them. If many pages of a domain are lost, or a page cannot be replaced alone, the whole
//! mapping is replaced: single replaced pages divide it, and the kernel limits a process's
//! mappings. From then on, the kernel's transfers from this mapping read zeros; their requests are
//! never acknowledged, as the domain has failed.
//!
//! A report of broken memory that nothing has read (`BUS_MCEERR_AO`) is ignored: the kernel has
//! removed the page, and a later access to it raises its own fault. The report is not passed to the
//! earlier handler, because that handler would take the report for a fault and restore the default
//! action. The next fault in a guest's memory would then end the process.
//!
//! A fault elsewhere, and a signal that was sent (`kill -BUS`), are passed to the handler of SIGBUS
//! that was installed before, or else to the default action. The standard library installs such a
//! handler to report stack overflows.

use std::ffi::c_int;
use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;

use rustix::mm::{MapFlags, ProtFlags};

use super::fault_domain::{Fault, FaultDomain};
use super::registry::{MAPPINGS, Pages};

/// Codes of `siginfo_t` (`<asm-generic/siginfo.h>`): no page at the address, or a page whose memory
/// is broken and was accessed.
const BUS_ADRERR: c_int = 2;
const BUS_MCEERR_AR: c_int = 4;
/// Memory is broken, and nothing has read it (`vm.memory_failure_early_kill`).
const BUS_MCEERR_AO: c_int = 5;

/// The earlier handler of the signal. Stored before our handler is installed.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// A handler with the signal's details (`SA_SIGINFO`).
type InfoHandler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut libc::c_void);
type PlainHandler = extern "C" fn(c_int);

/// Installs the handler, once for the process.
///
/// # Errors
/// The kernel's error.
pub(super) fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let install = || {
        let code = |error: io::Error| error.raw_os_error().unwrap_or(libc::EINVAL);
        PREVIOUS.get_or_init(|| current().unwrap_or_else(|_| default_action()));
        let mut action = default_action();
        let handler: InfoHandler = on_fault;
        action.sa_sigaction = handler as usize;
        // The handler runs on the alternative stack, because the earlier handler may need that
        // stack.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        set(&action).map_err(code)
    };
    INSTALLED.get_or_init(install).map_err(io::Error::from_raw_os_error)
}

fn default_action() -> libc::sigaction {
    // SAFETY: all-zero is a valid sigaction: the default action, no flags, an empty mask.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// The current action. Async-signal-safe.
fn current() -> io::Result<libc::sigaction> {
    let mut action = default_action();
    // SAFETY: a null pointer queries without a change; the result goes to a variable of our own.
    match unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut action) } {
        0 => Ok(action),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Async-signal-safe.
fn set(action: &libc::sigaction) -> io::Result<()> {
    // SAFETY: the action is the default one, or our handler with the signature that its flags
    // demand.
    match unsafe { libc::sigaction(libc::SIGBUS, action, ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

extern "C" fn on_fault(signal: c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel gives both to a handler with `SA_SIGINFO`, valid until it returns; the
    // address is valid for the codes with which it is used. errno belongs to this thread.
    let (code, address, errno) =
        unsafe { ((*info).si_code, (*info).si_addr().addr(), *libc::__errno_location()) };
    let fault = match code {
        BUS_MCEERR_AO => return,
        BUS_ADRERR => Some(Fault::NoPage { address }),
        BUS_MCEERR_AR => Some(Fault::Hardware { address }),
        _ => None,
    };
    if !fault.is_some_and(recover) {
        pass_on(signal, code, info, context);
    }
    // SAFETY: as above. The interrupted code finds its errno unchanged.
    unsafe { *libc::__errno_location() = errno };
}

/// Makes the repeated access find zeros. Returns whether that succeeded.
fn recover(fault: Fault) -> bool {
    let Some((pages, domain)) = MAPPINGS.find(fault.address()) else { return false };
    // SAFETY: this thread touches the mapping, so the thread keeps the mapping, and the mapping its
    // domain.
    let domain = unsafe { &*domain };
    let is_first = !domain.has_failed();
    domain.fail(fault);
    let replaced = replace(pages, fault.address(), domain);
    if is_first {
        domain.disconnect();
    }
    replaced
}

/// Replaces the page at `address`, or its whole mapping, by zeros.
fn replace(pages: Pages, address: usize, domain: &FaultDomain) -> bool {
    let page = || put_zeros(pages.page_of(address), pages.page);
    // Replacing the whole mapping adds no mapping to the process's count.
    let whole = || put_zeros(pages.start, pages.length);
    if domain.may_replace_page() {
        page() || whole()
    } else {
        // The kernel may lack memory for the whole if it does not overcommit.
        whole() || page()
    }
}

/// Replaces whole pages of one mapping by zeros. Fails if the kernel has no memory, or if the
/// process would exceed its limit of mappings.
fn put_zeros(start: usize, length: usize) -> bool {
    let start = ptr::without_provenance_mut(start);
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let kind = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
    // SAFETY: whole pages of a mapping that exists and that this thread owns. Their bytes are never
    // referred to, only loaded and stored, and may change at any time.
    let replaced = unsafe { rustix::mm::mmap_anonymous(start, length, access, kind) }.is_ok();
    // SAFETY: the same pages. Data of the guest may be read into them as into the mapping before,
    // so they are left out of core files too.
    let _ = unsafe { rustix::mm::madvise(start, length, rustix::mm::Advice::LinuxDontDump) };
    replaced
}

/// Handles the signal as if this handler were not installed.
fn pass_on(signal: c_int, code: c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let previous = PREVIOUS.get().copied().unwrap_or_else(default_action);
    // A fault has a positive code, a signal that was sent has not.
    let was_sent = code <= 0;
    match previous.sa_sigaction {
        libc::SIG_IGN if was_sent => return,
        // A fault cannot be ignored: the access is repeated, and the default action follows.
        libc::SIG_DFL | libc::SIG_IGN => {
            let _ = set(&default_action());
        }
        handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: a handler installed with this flag has this signature.
            let handler = unsafe { std::mem::transmute::<usize, InfoHandler>(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: a handler installed without the flag has this signature.
            let handler = unsafe { std::mem::transmute::<usize, PlainHandler>(handler) };
            handler(signal);
        }
    }
    // The earlier handler may have set the default action (the standard library's does that). A
    // fault then triggers it when the access is repeated; a sent signal must be sent again.
    if was_sent && current().is_ok_and(|action| action.sa_sigaction == libc::SIG_DFL) {
        // SAFETY: async-signal-safe; the signal is pending until we return.
        unsafe { libc::raise(signal) };
    }
}
