//! Memory that vanishes: what reads of it return, which domain fails, and what stays unaffected.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicU64, Ordering};

use super::*;

const PAGE: usize = 4096;

fn file(pages: usize) -> OwnedFd {
    let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, (pages * PAGE) as u64).unwrap();
    file
}

fn map(file: &OwnedFd, pages: usize, domain: &Arc<FaultDomain>) -> Mapping {
    Mapping::of(file, 0, pages * PAGE, PAGE, domain).unwrap()
}

/// The first value of a page.
fn value(mapping: &Mapping, page: usize) -> &AtomicU64 {
    assert!(page * PAGE < mapping.length());
    // SAFETY: inside of the mapping, aligned, and used as an atomic only.
    unsafe { AtomicU64::from_ptr(mapping.start().as_ptr().add(page * PAGE).cast()) }
}

fn load(mapping: &Mapping, page: usize) -> u64 {
    value(mapping, page).load(Ordering::Relaxed)
}

#[test]
fn what_vanishes_reads_as_zeros_and_marks_its_domain_only() {
    let (cut, kept) = (file(3), file(3));
    let (domain, other) = (FaultDomain::unconnected(), FaultDomain::unconnected());
    let (mapping, neighbour) = (map(&cut, 3, &domain), map(&kept, 3, &other));
    for page in 0..3 {
        value(&mapping, page).store(7, Ordering::Relaxed);
        value(&neighbour, page).store(8, Ordering::Relaxed);
    }
    rustix::fs::ftruncate(&cut, PAGE as u64).unwrap();
    assert_eq!((load(&mapping, 0), domain.has_failed(), domain.fault()), (7, false, None));
    assert_eq!(load(&mapping, 2), 0);
    let address = mapping.start().addr().get() + 2 * PAGE;
    assert_eq!((domain.has_failed(), domain.fault()), (true, Some(Fault::NoPage { address })));
    value(&mapping, 1).store(5, Ordering::Relaxed);
    assert_eq!(
        (load(&mapping, 0), load(&mapping, 1)),
        (7, 5),
        "only pages that are gone are replaced"
    );
    assert_eq!(domain.fault().map(Fault::address), Some(address), "the first fault is kept");
    assert_eq!((load(&neighbour, 2), other.has_failed()), (8, false));
    drop(mapping);
    assert_eq!(load(&neighbour, 0), 8);
}

#[test]
fn a_fault_shuts_the_connection_down() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let domain = FaultDomain::of_connection(ours);
    let cut = file(1);
    let mapping = map(&cut, 1, &domain);
    rustix::fs::ftruncate(&cut, 0).unwrap();
    let waiting = std::thread::spawn(move || std::io::Read::read(&mut theirs, &mut [0]).unwrap());
    assert_eq!(load(&mapping, 0), 0);
    assert_eq!(waiting.join().unwrap(), 0, "a thread that waits on it is woken");
}

#[test]
fn threads_fault_while_others_map_and_unmap() {
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    let (domain, cut) = (FaultDomain::unconnected(), file(4));
                    let mapping = map(&cut, 4, &domain);
                    let whole = map(&cut, 1, &domain);
                    value(&whole, 0).store(3, Ordering::Relaxed);
                    rustix::fs::ftruncate(&cut, PAGE as u64).unwrap();
                    assert_eq!((load(&mapping, 3), load(&mapping, 0)), (0, 3));
                    assert!(domain.has_failed());
                }
            });
        }
    });
}

/// Runs `test`, which normal runs ignore, in a process of its own.
fn alone(test: &str) -> ExitStatus {
    let binary = std::env::current_exe().unwrap();
    let path = format!("mapping::tests::{test}");
    let mut command = Command::new(binary);
    command.args(["--exact", &path, "--ignored", "--nocapture"]);
    command.output().unwrap().status
}

#[test]
fn a_domain_has_a_bounded_number_of_mappings() {
    let (domain, other) = (FaultDomain::unconnected(), FaultDomain::unconnected());
    let file = file(1);
    let map_in = |domain| Mapping::of(&file, 0, PAGE, PAGE, domain);
    let mut all: Vec<_> =
        (0..fault_domain::MAX_DOMAIN_MAPPINGS).map(|_| map_in(&domain).unwrap()).collect();
    assert_eq!(map_in(&domain).unwrap_err().kind(), io::ErrorKind::QuotaExceeded);
    drop(map_in(&other).unwrap());
    all.pop();
    drop(map_in(&domain).unwrap());
    all.push(map_in(&domain).unwrap());
    assert!(map_in(&domain).is_err());
}

/// How many mappings the kernel has for these addresses.
fn kernel_mappings(mapping: &Mapping) -> usize {
    let start = mapping.start().addr().get();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ends = |line: &str| {
        let (from, to) = line.split(' ').next()?.split_once('-')?;
        let number = |text| usize::from_str_radix(text, 16).ok();
        Some((number(from)?, number(to)?))
    };
    let is_in = |(from, to): &(usize, usize)| *from < start + mapping.length() && start < *to;
    maps.lines().filter_map(ends).filter(is_in).count()
}

#[test]
fn many_lost_pages_divide_a_mapping_a_bounded_number_of_times() {
    let pages = 4 * fault_domain::MAX_REPLACED_PAGES as usize;
    let (domain, cut) = (FaultDomain::unconnected(), file(pages));
    let (mapping, other) = (map(&cut, pages, &domain), map(&cut, pages, &domain));
    rustix::fs::ftruncate(&cut, 0).unwrap();
    for page in (0..pages / 2).step_by(2) {
        assert_eq!(load(&mapping, page), 0);
    }
    assert!(kernel_mappings(&mapping) > 100, "each page by itself at first");
    for page in 0..pages {
        assert_eq!((load(&mapping, page), load(&other, page)), (0, 0));
    }
    assert_eq!((kernel_mappings(&mapping), kernel_mappings(&other)), (1, 1));
}

#[test]
fn a_lost_page_is_replaced_where_there_can_be_no_further_mapping() {
    assert!(alone("loses_a_page_at_the_limit_of_mappings").success());
}

#[test]
#[ignore = "uses up its process's mappings"]
fn loses_a_page_at_the_limit_of_mappings() {
    const ROOM: usize = 1 << 19;
    let (domain, cut) = (FaultDomain::unconnected(), file(5));
    let mapping = map(&cut, 5, &domain);
    rustix::fs::ftruncate(&cut, 0).unwrap();
    leave_no_core();
    let kind = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping, which nothing else uses.
    let room = unsafe {
        rustix::mm::mmap_anonymous(ptr::null_mut(), ROOM * PAGE, ProtFlags::empty(), kind).unwrap()
    };
    let protect = |page: usize| {
        // SAFETY: a page of the mapping above, which nothing refers to.
        unsafe {
            let page = room.cast::<u8>().add(page * PAGE).cast();
            rustix::mm::mprotect(page, PAGE, rustix::mm::MprotectFlags::READ)
        }
    };
    // Each changed page adds two mappings, until the limit leaves room for one at most.
    let full = (1..ROOM / 2).find(|&count| protect(2 * count).is_err());
    // If the kernel allows more mappings than this test makes, the limit is not tested. Otherwise
    // the first page, at the edge of the mapping, uses up the last one.
    if full.is_some() {
        let _ = protect(0);
    }
    assert_eq!((load(&mapping, 2), domain.has_failed()), (0, true));
    // SAFETY: as above. This frees mappings for the end of the test.
    unsafe { rustix::mm::munmap(room, ROOM * PAGE).unwrap() };
}

#[test]
fn a_fault_elsewhere_has_the_default_action() {
    assert_eq!(alone("touches_memory_that_is_not_registered").signal(), Some(libc::SIGBUS));
}

#[test]
#[ignore = "ends its process"]
fn touches_memory_that_is_not_registered() {
    let (domain, cut) = (FaultDomain::unconnected(), file(1));
    let mapping = map(&cut, 1, &domain);
    registry::MAPPINGS.remove(&mapping.registration);
    rustix::fs::ftruncate(&cut, 0).unwrap();
    leave_no_core();
    load(&mapping, 0);
}

fn leave_no_core() {
    let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    rustix::process::setrlimit(rustix::process::Resource::Core, none).unwrap();
}

#[test]
fn a_signal_that_is_sent_has_the_default_action() {
    assert_eq!(alone("is_sent_the_signal").signal(), Some(libc::SIGBUS));
}

#[test]
#[ignore = "ends its process"]
fn is_sent_the_signal() {
    let (domain, cut) = (FaultDomain::unconnected(), file(1));
    let _mapping = map(&cut, 1, &domain);
    leave_no_core();
    let own = rustix::process::getpid();
    rustix::process::kill_process(own, rustix::process::Signal::BUS).unwrap();
    // The kernel may deliver the signal to another thread.
    std::thread::sleep(std::time::Duration::from_secs(20));
}

#[test]
fn a_report_of_broken_memory_leaves_the_handler_in_place() {
    assert!(alone("child_with_a_report_of_broken_memory").success());
}

#[test]
#[ignore = "a signal that ends its process if the handler is wrong"]
fn child_with_a_report_of_broken_memory() {
    let (domain, cut) = (FaultDomain::unconnected(), file(1));
    let mapping = map(&cut, 1, &domain);
    // SAFETY: all-zero is a valid siginfo_t; the kernel reads it, and sends the signal to this
    // process.
    let sent = unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        (info.si_signo, info.si_code) = (libc::SIGBUS, 5);
        let (process, thread) = (libc::getpid(), libc::gettid());
        libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, libc::SIGBUS, &raw const info)
    };
    assert_eq!(sent, 0);
    assert!(!domain.has_failed());
    rustix::fs::ftruncate(&cut, 0).unwrap();
    assert_eq!((load(&mapping, 0), domain.has_failed()), (0, true));
}
