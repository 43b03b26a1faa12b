//! The system calls that a server may make once everything is open: an allow-list for all threads
//! (`seccomp(2)`, TSYNC), which new threads inherit.
//!
//! A call has one of three results:
//!
//! - allowed, for some calls with some arguments only: no memory becomes executable, a new task is
//!   a thread of this process, a socket has a family and a type that are needed, sends do not
//!   connect, signals go to this process itself;
//! - EPERM, for everything else. Reason: a library may try a call and continue without it, and that
//!   must not cost a guest its disk. New rings are among these calls, because a new ring has no
//!   restrictions;
//! - the end of the process (SIGSYS), for calls that only an attacker makes: to execute a program,
//!   to trace or read another process, to load code into the kernel, to leave the namespaces or the
//!   root.
//!
//! `clone3` answers ENOSYS, because a filter cannot see its flags: the C library then calls
//! `clone`.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use blockhouse_engine::SYS_CACHESTAT;
use libc::{c_long, *};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter_all_threads,
};

use super::needs::Needs;

/// System calls that are allowed with all arguments.
const ALWAYS: &[c_long] = &[
    // Files that are open.
    SYS_read,
    SYS_write,
    SYS_readv,
    SYS_writev,
    SYS_pread64,
    SYS_pwrite64,
    SYS_preadv,
    SYS_preadv2,
    SYS_pwritev,
    SYS_pwritev2,
    SYS_lseek,
    SYS_fsync,
    SYS_fdatasync,
    SYS_sync_file_range,
    SYS_splice,
    SYS_pipe2,
    SYS_CACHESTAT,
    SYS_fallocate,
    SYS_ftruncate,
    SYS_fadvise64,
    SYS_fstat,
    SYS_fstatfs,
    SYS_dup,
    SYS_dup3,
    SYS_close,
    // Metadata of paths, and the removal of socket files and state files.
    SYS_newfstatat,
    SYS_statx,
    SYS_readlinkat,
    SYS_faccessat,
    SYS_faccessat2,
    SYS_getcwd,
    SYS_unlinkat,
    SYS_renameat,
    SYS_renameat2,
    // Sockets that are open.
    SYS_accept4,
    SYS_recvmsg,
    SYS_recvfrom,
    SYS_shutdown,
    SYS_getsockopt,
    SYS_setsockopt,
    SYS_getsockname,
    SYS_getpeername,
    // Engines and events.
    SYS_io_uring_enter,
    SYS_io_setup,
    SYS_io_destroy,
    SYS_io_submit,
    SYS_io_getevents,
    SYS_epoll_ctl,
    SYS_epoll_pwait,
    SYS_epoll_pwait2,
    SYS_eventfd2,
    SYS_ppoll,
    SYS_futex,
    // Memory.
    SYS_munmap,
    SYS_mremap,
    SYS_madvise,
    SYS_brk,
    SYS_memfd_create,
    // Threads, signals, time.
    SYS_set_robust_list,
    SYS_rseq,
    SYS_sched_yield,
    SYS_sched_getaffinity,
    SYS_gettid,
    SYS_getpid,
    SYS_exit,
    SYS_exit_group,
    SYS_rt_sigaction,
    SYS_rt_sigprocmask,
    SYS_rt_sigreturn,
    SYS_sigaltstack,
    SYS_restart_syscall,
    SYS_clock_gettime,
    SYS_clock_nanosleep,
    SYS_nanosleep,
    SYS_gettimeofday,
    SYS_getrandom,
    SYS_uname,
    SYS_geteuid,
    SYS_getuid,
    SYS_getegid,
    SYS_getgid,
];

/// Older system calls that are allowed with all arguments, if the architecture still has them.
#[cfg(target_arch = "x86_64")]
const ALWAYS_OLD: &[c_long] = &[
    SYS_stat,
    SYS_lstat,
    SYS_readlink,
    SYS_access,
    SYS_unlink,
    SYS_rename,
    SYS_epoll_wait,
    SYS_poll,
];
#[cfg(not(target_arch = "x86_64"))]
const ALWAYS_OLD: &[c_long] = &[];

/// System calls that open files by their paths.
const OPENS: &[c_long] = &[SYS_openat, SYS_openat2, SYS_getdents64];
#[cfg(target_arch = "x86_64")]
const OPENS_OLD: &[c_long] = &[SYS_open];
#[cfg(not(target_arch = "x86_64"))]
const OPENS_OLD: &[c_long] = &[];

/// System calls for opening more disks, for finding the data file of a disk, and for keeping the
/// keys of encrypted disks out of the swap device.
const CHANGES: &[c_long] = &[SYS_mkdirat, SYS_statfs, SYS_flock, SYS_mlock, SYS_fgetxattr];

/// System calls for listening at further sockets.
const LISTENS: &[c_long] = &[SYS_bind, SYS_listen, SYS_connect];

/// System calls for connecting to another server, whose name is looked up first.
const CONNECTS: &[c_long] = &[SYS_connect, SYS_bind, SYS_recvmmsg, SYS_epoll_create1];

/// More calls for connections of Ceph's library, which ends the process if one of them fails.
#[cfg(target_arch = "x86_64")]
const CONNECTS_OLD: &[c_long] = &[SYS_epoll_create];
#[cfg(not(target_arch = "x86_64"))]
const CONNECTS_OLD: &[c_long] = &[];

/// System calls that confine the process once more, after it has taken over from another process.
const CONFINES: &[c_long] = &[
    SYS_landlock_create_ruleset,
    SYS_landlock_add_rule,
    SYS_landlock_restrict_self,
    SYS_capget,
    SYS_capset,
];

/// System calls that create the rings for ublk commands.
const MAKES_RINGS: &[c_long] = &[SYS_io_uring_setup, SYS_io_uring_register];

/// The allowed commands of `fcntl`: copies of descriptors, flags, locks, sizes of pipes, seals.
/// `F_SETOWN` is not allowed, because it is a way to send any signal to any process.
const FILE_CONTROLS: &[c_int] = &[
    F_DUPFD,
    F_DUPFD_CLOEXEC,
    F_GETFD,
    F_SETFD,
    F_GETFL,
    F_SETFL,
    F_GETLK,
    F_SETLK,
    F_SETLKW,
    F_OFD_GETLK,
    F_OFD_SETLK,
    F_OFD_SETLKW,
    F_GETPIPE_SZ,
    F_SETPIPE_SZ,
    F_ADD_SEALS,
    F_GET_SEALS,
];

/// The bits of a mode that are not permissions: set-user-ID, set-group-ID and sticky.
const SPECIAL_MODE: u64 = 0o7000;
/// The bits of a socket's type that are not flags.
const SOCKET_TYPE: u64 = 0xf;
/// A user for `chown` that leaves the owner as it is.
const SAME_USER: u64 = u32::MAX as u64;

/// System calls that only an attacker makes.
const DEADLY: &[c_long] = &[
    SYS_execve,
    SYS_execveat,
    SYS_ptrace,
    SYS_process_vm_readv,
    SYS_process_vm_writev,
    SYS_pidfd_getfd,
    SYS_kcmp,
    SYS_bpf,
    SYS_perf_event_open,
    SYS_userfaultfd,
    SYS_init_module,
    SYS_finit_module,
    SYS_delete_module,
    SYS_kexec_load,
    SYS_mount,
    SYS_umount2,
    SYS_pivot_root,
    SYS_chroot,
    SYS_setns,
    SYS_unshare,
    SYS_open_by_handle_at,
    SYS_open_tree,
    SYS_move_mount,
    SYS_fsopen,
    SYS_fsmount,
    SYS_reboot,
    SYS_swapon,
];

/// Registrations of rings (`<linux/io_uring.h>`) that the engine makes while it runs: those of
/// `engine/driver/ring_restrictions`.
const REGISTRATIONS: &[u64] = &[1, 3, 4, 5, 6, 13, 15, 16];

/// `BLKDISCARD` of `<linux/fs.h>`, which takes a range.
const BLKDISCARD: u64 = 0x1277;
/// `BLKSSZGET`, `BLKBSZGET`, `BLKPBSZGET`: sizes of blocks.
const BLOCK_SIZES: [u64; 3] = [0x1268, 0x8008_1270, 0x127b];
/// `PR_SET_VMA` of `<linux/prctl.h>`: a name for memory.
const SET_VMA: u64 = 0x5356_4d41;

/// How many system calls a server with these needs may make, including those whose arguments are
/// filtered.
pub(crate) fn allowed_count(needs: Needs) -> usize {
    rules(needs).map_or(0, |rules| count(&rules).iter().sum())
}

/// How many calls are allowed with all arguments, and with some.
fn count(rules: &Rules) -> [usize; 2] {
    // An earlier filter decides this call.
    let allowed = rules.iter().filter(|(call, _)| **call != SYS_clone3);
    let (always, sometimes): (Vec<_>, Vec<_>) = allowed.partition(|(_, rules)| rules.is_empty());
    [always.len(), sometimes.len()]
}

/// Installs the filters on all threads, and sets `no_new_privs`: executing a program then grants no
/// privileges.
///
/// # Errors
/// The kernel's error, or the architecture is unknown.
pub(super) fn restrict(needs: Needs) -> Result<()> {
    let deadly = DEADLY.iter().map(|call| (*call, Vec::new())).collect();
    apply(deadly, SeccompAction::Allow, SeccompAction::KillProcess)?;
    let clone3 = [(SYS_clone3, Vec::new())].into();
    apply(clone3, SeccompAction::Allow, SeccompAction::Errno(ENOSYS as u32))?;
    restrict_further(needs)
}

/// Adds the filter of `needs`. A process that takes over has called [`restrict`] before. The filter
/// allows a further filter only if `needs` has `takes_over`.
///
/// # Errors
/// The errors of [`restrict`].
pub(super) fn restrict_further(needs: Needs) -> Result<()> {
    apply(rules(needs)?, SeccompAction::Errno(EPERM as u32), SeccompAction::Allow)
}

fn apply(rules: Rules, otherwise: SeccompAction, matching: SeccompAction) -> Result<()> {
    let architecture = std::env::consts::ARCH.try_into().context("this processor")?;
    let filter = SeccompFilter::new(rules, otherwise, matching, architecture)?;
    Ok(apply_filter_all_threads(&BpfProgram::try_from(filter)?)?)
}

type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

/// The allowed system calls.
fn rules(needs: Needs) -> Result<Rules> {
    let mut rules = filtered(needs)?;
    let lists = [
        (ALWAYS, true),
        (ALWAYS_OLD, true),
        // An earlier filter decides this call.
        (&[SYS_clone3], true),
        (OPENS, needs.opens),
        (OPENS_OLD, needs.opens),
        (CHANGES, needs.changes || needs.takes_over),
        (CONFINES, needs.takes_over),
        // The sockets of the source; the kernel then names this process to their clients.
        (&[SYS_listen], needs.takes_over),
        (MAKES_RINGS, needs.takes_ublk),
        (LISTENS, needs.listens),
        (CONNECTS, needs.connects),
        (CONNECTS_OLD, needs.connects),
    ];
    let wanted = lists.into_iter().filter(|(_, is_wanted)| *is_wanted);
    rules.extend(wanted.flat_map(|(list, _)| list).map(|call| (*call, Vec::new())));
    Ok(rules)
}

/// The system calls that are allowed with some arguments only.
fn filtered(needs: Needs) -> Result<Rules> {
    let own = u64::from(std::process::id());
    let executable = PROT_EXEC as u64;
    let thread = (CLONE_VM | CLONE_THREAD) as u64;
    let namespaces = CLONE_NEWNS
        | CLONE_NEWCGROUP
        | CLONE_NEWUTS
        | CLONE_NEWIPC
        | CLONE_NEWUSER
        | CLONE_NEWPID
        | CLONE_NEWNET;
    let task = thread | namespaces as u64;
    let controls = [BLKDISCARD, FIONBIO, TIOCOUTQ, FIONREAD, TCGETS].into_iter().chain(BLOCK_SIZES);
    let equals = |argument, values: Vec<u64>| {
        let rule = |value| one(argument, SeccompCmpOp::Eq, value);
        values.into_iter().map(rule).collect::<Result<Vec<_>>>()
    };
    let mut rules = Rules::from([
        (SYS_mmap, vec![one(2, SeccompCmpOp::MaskedEq(executable), 0)?]),
        (SYS_mprotect, vec![one(2, SeccompCmpOp::MaskedEq(executable), 0)?]),
        (SYS_clone, vec![one(0, SeccompCmpOp::MaskedEq(task), thread)?]),
        (SYS_prctl, equals(0, vec![PR_SET_NAME as u64, PR_GET_NAME as u64, SET_VMA])?),
        (SYS_ioctl, equals(1, controls.collect())?),
        (SYS_io_uring_register, equals(1, REGISTRATIONS.to_vec())?),
        // A pair of datagram sockets could send to other sockets.
        (SYS_socketpair, vec![all(vec![is(0, AF_UNIX as u64)?, has_type(SOCK_STREAM)?])?]),
        (SYS_fcntl, equals(1, FILE_CONTROLS.iter().map(|what| *what as u64).collect())?),
        // With this flag a send would connect.
        (SYS_sendto, vec![one(3, no_bits(MSG_FASTOPEN as u64), 0)?]),
        (SYS_sendmsg, vec![one(2, no_bits(MSG_FASTOPEN as u64), 0)?]),
        (SYS_tgkill, equals(0, vec![own])?),
        // A limit may be read, but not set.
        (SYS_prlimit64, vec![long(2, 0)?]),
    ]);
    if needs.listens || needs.connects {
        rules.insert(SYS_socket, sockets(needs)?);
    }
    if needs.listens {
        // The mode and the group of a socket's file, which Landlock does not control.
        let mode = |argument| one(argument, no_bits(SPECIAL_MODE), 0);
        rules.insert(SYS_fchmod, vec![mode(1)?]);
        rules.insert(SYS_fchmodat, vec![mode(2)?]);
        let by_descriptor = condition(4, SeccompCmpOp::Eq, AT_EMPTY_PATH as u64)?;
        rules.insert(SYS_fchownat, vec![all(vec![is(2, SAME_USER)?, by_descriptor])?]);
    }
    if needs.connects {
        rules.insert(SYS_sendmmsg, vec![one(3, no_bits(MSG_FASTOPEN as u64), 0)?]);
    }
    if needs.takes_over {
        // `SECCOMP_SET_MODE_FILTER`.
        rules.insert(SYS_seccomp, equals(0, vec![1])?);
        let privileges = one(0, SeccompCmpOp::Eq, PR_SET_NO_NEW_PRIVS as u64)?;
        rules.entry(SYS_prctl).or_default().push(privileges);
    }
    if needs.takes_ublk {
        // Signal 0, which checks that a process exists.
        rules.insert(SYS_kill, equals(1, vec![0])?);
    }
    if cfg!(debug_assertions) {
        // In tests a process kills itself.
        rules.entry(SYS_kill).or_default().extend(equals(0, vec![own])?);
    }
    Ok(rules)
}

/// The sockets that may be created: streams and datagrams, and the netlink socket from which a name
/// lookup reads the addresses of this host.
fn sockets(needs: Needs) -> Result<Vec<SeccompRule>> {
    let mut rules = Vec::new();
    for family in [AF_UNIX, AF_INET, AF_INET6] {
        for kind in [SOCK_STREAM, SOCK_DGRAM] {
            rules.push(all(vec![is(0, family as u64)?, has_type(kind)?])?);
        }
    }
    if needs.connects {
        rules.push(all(vec![is(0, AF_NETLINK as u64)?, is(2, NETLINK_ROUTE as u64)?])?);
    }
    Ok(rules)
}

/// A condition on 32 bits of an argument.
fn condition(argument: u8, comparison: SeccompCmpOp, value: u64) -> Result<SeccompCondition> {
    Ok(SeccompCondition::new(argument, SeccompCmpArgLen::Dword, comparison, value)?)
}

/// The condition that an argument has this value.
fn is(argument: u8, value: u64) -> Result<SeccompCondition> {
    condition(argument, SeccompCmpOp::Eq, value)
}

/// The condition that the second argument is this type of socket, with any flags.
fn has_type(kind: c_int) -> Result<SeccompCondition> {
    condition(1, SeccompCmpOp::MaskedEq(SOCKET_TYPE), kind as u64)
}

/// A comparison that holds, for the value 0, if none of these bits is set.
fn no_bits(bits: u64) -> SeccompCmpOp {
    SeccompCmpOp::MaskedEq(bits)
}

/// The rule that all of these conditions hold.
fn all(conditions: Vec<SeccompCondition>) -> Result<SeccompRule> {
    Ok(SeccompRule::new(conditions)?)
}

/// The rule with one condition on 32 bits of an argument.
fn one(argument: u8, comparison: SeccompCmpOp, value: u64) -> Result<SeccompRule> {
    all(vec![condition(argument, comparison, value)?])
}

/// The rule that all 64 bits of an argument have this value.
fn long(argument: u8, value: u64) -> Result<SeccompRule> {
    let condition =
        SeccompCondition::new(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, value)?;
    Ok(SeccompRule::new(vec![condition])?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn everything() -> Needs {
        let (opens, changes, listens, connects, guests) = (true, true, true, true, true);
        Needs { opens, changes, listens, connects, guests, ..Needs::default() }
    }

    #[test]
    fn what_is_not_needed_is_not_allowed() {
        let narrow = rules(Needs::default()).expect("rules");
        let wide = rules(everything()).expect("rules");
        for call in [SYS_openat, SYS_socket, SYS_connect, SYS_bind, SYS_fchmod] {
            assert!(!narrow.contains_key(&call) && wide.contains_key(&call), "{call}");
        }
        for rules in [narrow, wide] {
            for call in DEADLY.iter().chain(&[SYS_io_uring_setup, SYS_setuid, SYS_fchown]) {
                assert!(!rules.contains_key(call), "{call}");
            }
        }
        assert!(allowed_count(Needs::default()) < allowed_count(everything()));
    }

    /// The table of docs/security.md is written by hand.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn the_document_says_how_many_calls_are_allowed() {
        let document = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/security.md");
        let text = std::fs::read_to_string(document).expect("a part of the project");
        let remote = Needs { opens: true, connects: true, ..Needs::default() };
        for (process, needs) in [
            ("`blockhouse serve`", Needs::default()),
            ("`blockhouse serve nbds://...`", remote),
            ("`blockhouse serve --control`", everything()),
        ] {
            let [always, mut sometimes] = count(&rules(needs).expect("rules"));
            // `kill`, which only debug builds allow to these processes.
            sometimes -= usize::from(cfg!(debug_assertions));
            let row = format!("| {process} | {always} | {sometimes} | {} |", always + sometimes);
            assert!(text.contains(&row), "docs/security.md must have the line {row}");
        }
    }

    #[test]
    fn every_set_of_needs_makes_a_filter() {
        let takes_over = Needs { takes_over: true, takes_ublk: true, ..everything() };
        for needs in [Needs::default(), everything(), takes_over] {
            let architecture = std::env::consts::ARCH.try_into().expect("a known processor");
            let (deny, allow) = (SeccompAction::Errno(1), SeccompAction::Allow);
            let filter =
                SeccompFilter::new(rules(needs).expect("rules"), deny, allow, architecture);
            BpfProgram::try_from(filter.expect("a filter"))
                .expect("a program that is short enough");
        }
    }
}
