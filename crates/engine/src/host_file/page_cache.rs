//! Pages of the host's page cache by reference.

use std::os::fd::BorrowedFd;

use blockhouse_core::ByteRange;
use rustix::pipe::{SpliceFlags, splice};

use crate::driver::file::File;

/// `cachestat` of `<asm-generic/unistd.h>`, the same number on all architectures (Linux 6.5).
const SYS_CACHESTAT: libc::c_long = 451;
/// Bytes of a page where it is smallest. With larger ones, a range looks as if it were not cached.
const PAGE: u64 = 4096;

/// `struct cachestat` of `<linux/mman.h>`: pages in the cache, and four counts of other kinds.
#[derive(Default)]
#[repr(C)]
struct CacheStat {
    cached: u64,
    others: [u64; 4],
}

/// Puts references to the pages of a range into a pipe, if all of them are in the page cache:
/// another one would have to be read, and the thread would wait. Returns how many bytes it has put
/// there.
pub(super) fn lend(file: &File, range: ByteRange, pipe: BorrowedFd<'_>) -> usize {
    if !is_cached(file, range) {
        return 0;
    }
    let (mut offset, mut put) = (range.offset(), 0);
    let length = range.length() as usize;
    while put < length {
        // A failed one is found out by the read in its place.
        match splice(file, Some(&mut offset), pipe, None, length - put, SpliceFlags::NONBLOCK) {
            Ok(0) | Err(_) => break,
            Ok(moved) => put += moved,
        }
    }
    put
}

/// Whether all pages of a range are in the page cache. An older kernel, and one that tells only the
/// file's owner, say no.
fn is_cached(file: &File, range: ByteRange) -> bool {
    let pages = range.end().div_ceil(PAGE) - range.offset() / PAGE;
    let (asked, mut found) = ([range.offset(), range.length()], CacheStat::default());
    // SAFETY: the call reads two 64-bit numbers, offset and length, and writes one `CacheStat`;
    // both live until it returns.
    let result =
        unsafe { libc::syscall(SYS_CACHESTAT, file.raw(), asked.as_ptr(), &raw mut found, 0_u32) };
    result == 0 && found.cached >= pages
}
