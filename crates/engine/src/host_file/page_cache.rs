//! Whether bytes of a file are in the host's page cache.

use blockhouse_core::ByteRange;

use crate::driver::file::File;

/// `cachestat` of `<asm-generic/unistd.h>`, the same number on all architectures (Linux 6.5).
pub const SYS_CACHESTAT: libc::c_long = 451;
/// Bytes of a page where pages are smallest. With larger pages, a range is reported as not cached.
const PAGE: u64 = 4096;

/// `struct cachestat` of `<linux/mman.h>`: pages in the cache, and four counts of other kinds.
#[derive(Default)]
#[repr(C)]
struct CacheStat {
    cached: u64,
    others: [u64; 4],
}

/// Whether all bytes of a range, which is not empty, are in the page cache. `false` on an older
/// kernel, on a kernel that reports this only to the file's owner, and on a file system that cannot
/// read without waiting.
pub(super) fn has_all(file: &File, range: ByteRange) -> bool {
    let pages = range.end().div_ceil(PAGE) - range.offset() / PAGE;
    let (asked, mut found) = ([range.offset(), range.length()], CacheStat::default());
    // SAFETY: the call reads two 64-bit numbers, offset and length, and writes one `CacheStat`;
    // both live until it returns.
    let result =
        unsafe { libc::syscall(SYS_CACHESTAT, file.raw(), asked.as_ptr(), &raw mut found, 0_u32) };
    // The count includes pages that readahead is still filling, in order, so the first and last
    // byte are checked.
    result == 0
        && found.cached >= pages
        && can_be_read(file, range.offset())
        && can_be_read(file, range.end() - 1)
}

/// Whether the byte at `offset` can be read without waiting.
fn can_be_read(file: &File, offset: u64) -> bool {
    let mut byte = 0_u8;
    let vector = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    // SAFETY: the vector names one byte, which lives until the call returns.
    let read =
        unsafe { libc::preadv2(file.raw(), &raw const vector, 1, offset as i64, libc::RWF_NOWAIT) };
    read == 1
}
