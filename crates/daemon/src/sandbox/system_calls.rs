//! The system calls of a server that has everything open: an allow-list, put on all threads (`seccomp(2)`, TSYNC), which
//! later ones inherit.
//!
//! Three answers:
//!
//! - allowed, for some calls with some arguments only: no memory becomes executable, a new task is a thread of this
//!   process, a socket has a family that is needed, signals go to this process itself;
//! - EPERM, for everything else. Reason: a library may try a call and do without, and a guest must not lose its disk over
//!   that. New rings are among these calls, because a new ring has no restrictions;
//! - the end of the process (SIGSYS), for what only an attacker calls: to execute a program, to trace or read another
//!   process, to load code into the kernel, to leave the namespaces or the root.
//!
//! `clone3` answers ENOSYS, because a filter cannot see its flags: the C library then calls `clone`.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use libc::{c_long, *};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, apply_filter_all_threads,
};

use super::needs::Needs;

/// Allowed with all arguments.
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
    SYS_fallocate,
    SYS_ftruncate,
    SYS_fadvise64,
    SYS_fstat,
    SYS_fstatfs,
    SYS_fcntl,
    SYS_dup,
    SYS_dup3,
    SYS_close,
    // What is known of paths, and the end of sockets' and state files.
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
    SYS_sendmsg,
    SYS_recvfrom,
    SYS_sendto,
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

/// As [`ALWAYS`], where the architecture still has them.
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

/// To open files by their paths.
const OPENS: &[c_long] = &[SYS_openat, SYS_openat2, SYS_getdents64];
#[cfg(target_arch = "x86_64")]
const OPENS_OLD: &[c_long] = &[SYS_open];
#[cfg(not(target_arch = "x86_64"))]
const OPENS_OLD: &[c_long] = &[];

/// To open further disks.
const CHANGES: &[c_long] = &[SYS_mkdirat, SYS_statfs, SYS_flock];

/// To listen at further sockets, whose files get a mode and a group.
const LISTENS: &[c_long] =
    &[SYS_bind, SYS_listen, SYS_connect, SYS_fchmod, SYS_fchmodat, SYS_fchownat];

/// To connect to another server, whose name is looked up first.
const CONNECTS: &[c_long] =
    &[SYS_connect, SYS_bind, SYS_sendmmsg, SYS_recvmmsg, SYS_pipe2, SYS_epoll_create1];

/// What only an attacker calls.
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
/// `engine/ring_restrictions`.
const REGISTRATIONS: &[u64] = &[1, 3, 4, 5, 6, 13, 15, 16];

/// `BLKDISCARD` of `<linux/fs.h>`, whose argument is no size.
const BLKDISCARD: u64 = 0x1277;
/// `BLKSSZGET`, `BLKBSZGET`, `BLKPBSZGET`: sizes of blocks.
const BLOCK_SIZES: [u64; 3] = [0x1268, 0x8008_1270, 0x127b];
/// `PR_SET_VMA` of `<linux/prctl.h>`: a name for memory.
const SET_VMA: u64 = 0x5356_4d41;

/// How many system calls a server with these needs may make, those among them whose arguments are filtered included.
pub(crate) fn allowed_count(needs: Needs) -> usize {
    rules(needs).map_or(0, |rules| rules.len())
}

/// Puts the filters on all threads, and takes from them the right to gain privileges by executing (`no_new_privs`).
///
/// # Errors
/// The kernel's, and an architecture that is not known.
pub(super) fn restrict(needs: Needs) -> Result<()> {
    let deadly = DEADLY.iter().map(|call| (*call, Vec::new())).collect();
    let filters = [
        (deadly, SeccompAction::Allow, SeccompAction::KillProcess),
        (
            [(SYS_clone3, Vec::new())].into(),
            SeccompAction::Allow,
            SeccompAction::Errno(ENOSYS as u32),
        ),
        // The last one, because it allows no further filter.
        (rules(needs)?, SeccompAction::Errno(EPERM as u32), SeccompAction::Allow),
    ];
    let architecture = std::env::consts::ARCH.try_into().context("this processor")?;
    for (rules, otherwise, matching) in filters {
        let filter = SeccompFilter::new(rules, otherwise, matching, architecture)?;
        apply_filter_all_threads(&BpfProgram::try_from(filter)?)?;
    }
    Ok(())
}

type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

/// What is allowed.
fn rules(needs: Needs) -> Result<Rules> {
    let mut rules = filtered(needs)?;
    let lists = [
        (ALWAYS, true),
        (ALWAYS_OLD, true),
        // The filter before answers.
        (&[SYS_clone3], true),
        (OPENS, needs.opens),
        (OPENS_OLD, needs.opens),
        (CHANGES, needs.changes),
        (LISTENS, needs.listens),
        (CONNECTS, needs.connects),
    ];
    let wanted = lists.into_iter().filter(|(_, is_wanted)| *is_wanted);
    rules.extend(wanted.flat_map(|(list, _)| list).map(|call| (*call, Vec::new())));
    Ok(rules)
}

/// What is allowed with some arguments only.
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
    let mut families = Vec::new();
    if needs.listens || needs.connects {
        families.extend([AF_UNIX, AF_INET, AF_INET6]);
    }
    if needs.connects {
        // The look-up of a name asks which addresses this host has.
        families.push(AF_NETLINK);
    }
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
        (SYS_socketpair, equals(0, vec![AF_UNIX as u64])?),
        (SYS_tgkill, equals(0, vec![own])?),
        // To ask for a limit, not to set one.
        (SYS_prlimit64, vec![long(2, 0)?]),
    ]);
    if !families.is_empty() {
        let families = families.into_iter().map(|family| family as u64).collect();
        rules.insert(SYS_socket, equals(0, families)?);
    }
    if cfg!(debug_assertions) {
        // Tests have a process kill itself.
        rules.insert(SYS_kill, equals(0, vec![own])?);
    }
    Ok(rules)
}

/// A condition on 32 bits of an argument.
fn one(argument: u8, comparison: SeccompCmpOp, value: u64) -> Result<SeccompRule> {
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, comparison, value)?;
    Ok(SeccompRule::new(vec![condition])?)
}

/// That all of an argument has this value.
fn long(argument: u8, value: u64) -> Result<SeccompRule> {
    let condition =
        SeccompCondition::new(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, value)?;
    Ok(SeccompRule::new(vec![condition])?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Needs {
        Needs { opens: true, changes: true, listens: true, connects: true, guests: true }
    }

    #[test]
    fn what_is_not_needed_is_not_allowed() {
        let narrow = rules(Needs::default()).expect("rules");
        let wide = rules(all()).expect("rules");
        for call in [SYS_openat, SYS_socket, SYS_connect, SYS_bind, SYS_fchmod] {
            assert!(!narrow.contains_key(&call) && wide.contains_key(&call), "{call}");
        }
        for rules in [narrow, wide] {
            for call in DEADLY.iter().chain(&[SYS_io_uring_setup, SYS_setuid, SYS_fchown]) {
                assert!(!rules.contains_key(call), "{call}");
            }
        }
        assert!(allowed_count(Needs::default()) < allowed_count(all()));
    }

    #[test]
    fn every_set_of_needs_makes_a_filter() {
        for needs in [Needs::default(), all()] {
            let architecture = std::env::consts::ARCH.try_into().expect("a known processor");
            let (deny, allow) = (SeccompAction::Errno(1), SeccompAction::Allow);
            let filter =
                SeccompFilter::new(rules(needs).expect("rules"), deny, allow, architecture);
            BpfProgram::try_from(filter.expect("a filter"))
                .expect("a program that is short enough");
        }
    }
}
