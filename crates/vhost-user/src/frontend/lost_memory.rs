//! The log line about memory of a front-end that can no longer be accessed (lost memory).

use blockhouse_engine::{Fault, GuestMemory, MemoryKind, SharedMemory};

/// The log line: the lost memory, the cause, and a remedy.
pub fn describe(fault: Fault, memory: &GuestMemory, inflight: Option<&SharedMemory>) -> String {
    let in_guest = memory.regions().iter().find_map(|region| {
        let address = region.guest + region.memory.offset_of(fault.address())? as u64;
        Some((format!("guest memory at {address:#x}"), region.memory.kind()))
    });
    let in_inflight = || {
        let inflight = inflight?;
        inflight.offset_of(fault.address())?;
        Some(("the memory for in-flight tracking".to_owned(), inflight.kind()))
    };
    let (what, kind) = in_guest.or_else(in_inflight).unzip();
    let what = what.as_deref().unwrap_or("memory that it shared");
    let why = match fault {
        Fault::Hardware { .. } => "is broken on the host (machine check, see the kernel's log)",
        Fault::NoPage { .. } => reason(kind),
    };
    format!("{what} {why}; the device waits for the next front-end")
}

/// The cause of a missing page.
fn reason(kind: Option<MemoryKind>) -> &'static str {
    let Some(kind) = kind else {
        return "has vanished: its file was cut short, or the host has no page left for it";
    };
    match (kind.is_huge(), kind.can_shrink) {
        (false, true) => "has vanished: its file was cut short, or its tmpfs or the host is full",
        (false, false) => "cannot be had: its tmpfs or the host is full",
        (true, true) => {
            "has vanished: its file was cut short, or the host is out of huge pages (HugePages_Free in \
             /proc/meminfo; reserve them at start: QEMU's prealloc=on)"
        }
        (true, false) => {
            "cannot be had: the host is out of huge pages (HugePages_Free in /proc/meminfo; reserve them \
             at start: QEMU's prealloc=on)"
        }
    }
}
