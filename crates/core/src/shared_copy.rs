//! Copies from and to memory that another process may change during the copy: a guest's memory.
//!
//! By Rust's memory model, `memcpy` on such memory is a data race: its accesses are not atomic, so
//! the compiler may assume that the memory does not change. The functions here have no data race in
//! that model. Each is defined as a sequence of `Relaxed` [`AtomicU8`] accesses, one or two for
//! each byte of the shared memory (on processors other than x86-64, of aligned words if both sides
//! are aligned). The other side is private memory and is accessed as usual. An inline `asm!` block
//! must behave like a sequence of Rust operations that its author names (the Rust reference, "Rules
//! for inline assembly"). The author names the sequence above: no instruction of the loops below
//! tears a byte, or reads bytes that it has written. So each copied byte has a value that some
//! process stored there. There is no order between bytes, nor between two copies of the same byte.
//! So a caller that must not read a value twice copies it once and then uses the copy.
//!
//! Cost: from 512 bytes on, that of `memcpy` (`cargo bench -p blockhouse-core --bench
//! shared_copy`). The loops use vector instructions and not `rep movsb`, which falls to 1 GB/s on
//! Zen 3 if the target's offset in its page is a little above the source's (the C library's
//! `memcpy` uses `rep movsb` there and is as slow).
//!
//! Memory may vanish during a copy (its file is truncated): the copy then continues with zeros, and
//! [`IoVector::is_intact`](crate::IoVector::is_intact) reports the loss. Private memory never needs
//! this module.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// Bytes of one vector register of the widest loop.
const VECTOR: usize = 32;

/// Copies out of shared memory into private memory.
///
/// # Safety
/// `source` is valid for reads of `length` bytes, and all changes of them in this process during
/// the call are made atomically or through this module. `target` is valid for writes of `length`
/// bytes that nothing else accesses. Source and target do not overlap.
pub unsafe fn copy_from_shared(source: *const u8, target: *mut u8, length: usize) {
    // SAFETY: what the caller guarantees.
    unsafe { copy_any(source, target, length, Side::Source) }
}

/// Copies private memory into shared memory.
///
/// # Safety
/// As for [`copy_from_shared`], with the roles exchanged: the source does not change during the
/// call, and all accesses to the target in this process are made atomically or through this module.
pub unsafe fn copy_to_shared(source: *const u8, target: *mut u8, length: usize) {
    // SAFETY: what the caller guarantees.
    unsafe { copy_any(source, target, length, Side::Target) }
}

/// Sets bytes of shared memory.
///
/// # Safety
/// As for the target of [`copy_to_shared`].
pub unsafe fn fill_shared(target: *mut u8, byte: u8, length: usize) {
    // The pattern stays in the processor's L1 cache, so that only the loop's stores take time.
    let pattern = [byte; 2048];
    let mut done = 0;
    while done < length {
        let count = pattern.len().min(length - done);
        // SAFETY: inside of the caller's range; the pattern is our own.
        unsafe { copy_to_shared(pattern.as_ptr(), target.add(done), count) };
        done += count;
    }
}

/// Which side of a copy is shared.
#[derive(Clone, Copy)]
enum Side {
    Source,
    Target,
}

/// Copies any number of bytes, one side of which is shared.
///
/// # Safety
/// As for [`copy_from_shared`] or [`copy_to_shared`].
#[inline]
unsafe fn copy_any(source: *const u8, target: *mut u8, length: usize, shared: Side) {
    // SAFETY: what the caller guarantees; all accesses lie inside of the two ranges.
    unsafe {
        if length >= VECTOR {
            return copy(source, target, length, shared);
        }
        for at in 0..length {
            copy_byte(source.add(at), target.add(at), shared);
        }
    }
}

/// # Safety
/// As for [`copy_from_shared`] or [`copy_to_shared`].
unsafe fn copy_byte(source: *const u8, target: *mut u8, shared: Side) {
    // SAFETY: what the caller guarantees. `from_ptr` takes a pointer to mutable memory. Shared
    // memory is mutable, and the load stores nothing.
    unsafe {
        match shared {
            Side::Source => target.write(AtomicU8::from_ptr(source.cast_mut()).load(Relaxed)),
            Side::Target => AtomicU8::from_ptr(target).store(source.read(), Relaxed),
        }
    }
}

/// Copies at least [`VECTOR`] bytes, one side of which is shared.
///
/// # Safety
/// As for [`copy_from_shared`] or [`copy_to_shared`].
#[cfg(target_arch = "x86_64")]
unsafe fn copy(source: *const u8, target: *mut u8, length: usize, _: Side) {
    // SAFETY: what the caller guarantees, and the processor has the instructions.
    unsafe {
        if std::arch::is_x86_feature_detected!("avx") {
            x86_64::copy_avx(source, target, length);
        } else {
            x86_64::copy_sse2(source, target, length);
        }
    }
}

/// The loops. Each copies whole blocks, then whole vectors, then the last `vector` bytes, some of
/// which it has copied before. The sequence of accesses that defines a copy may access a byte
/// twice.
#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::asm;

    /// A function that copies at least `$vector` bytes, with registers of `$vector` bytes; a block
    /// is four registers.
    macro_rules! copy_loop {
        (
            $(#[$attribute:meta])*
            $name:ident: $register:literal by $mov:literal, vector $vector:literal at 0,
            $vector2:literal, $vector3:literal, block $block:literal, then $end:literal,
            changed $($changed:tt)+
        ) => {
            $(#[$attribute])*
            pub(super) unsafe fn $name(source: *const u8, target: *mut u8, length: usize) {
                let (blocks, vectors) = (length / $block, length % $block / $vector);
                // SAFETY: the caller guarantees both ranges. The blocks and vectors lie inside of
                // them one after the other. The last access ends at the ranges' ends and begins
                // inside, because `length` is at least one vector. No other memory is accessed, the
                // stack is not, and all registers that change are named: those of the loop, and all
                // that `vzeroupper` changes (a register of 512 bits is changed with its lower
                // part). The accesses to the shared side are as described in the module's page. The
                // caller has checked that the processor has the instructions.
                unsafe {
                    asm!(
                        "test {blocks}, {blocks}",
                        "jz 3f",
                        "2:",
                        concat!($mov, " ", $register, "0, [{s}]"),
                        concat!($mov, " ", $register, "1, [{s} + ", $vector, "]"),
                        concat!($mov, " ", $register, "2, [{s} + ", $vector2, "]"),
                        concat!($mov, " ", $register, "3, [{s} + ", $vector3, "]"),
                        concat!($mov, " [{t}], ", $register, "0"),
                        concat!($mov, " [{t} + ", $vector, "], ", $register, "1"),
                        concat!($mov, " [{t} + ", $vector2, "], ", $register, "2"),
                        concat!($mov, " [{t} + ", $vector3, "], ", $register, "3"),
                        // `sub` of -128 replaces `add` of 128, because only -128 fits into one byte
                        // of the instruction.
                        concat!("sub {s}, -", $block),
                        concat!("sub {t}, -", $block),
                        "dec {blocks}",
                        "jnz 2b",
                        "3:",
                        "test {vectors}, {vectors}",
                        "jz 5f",
                        "4:",
                        concat!($mov, " ", $register, "0, [{s}]"),
                        concat!($mov, " [{t}], ", $register, "0"),
                        concat!("add {s}, ", $vector),
                        concat!("add {t}, ", $vector),
                        "dec {vectors}",
                        "jnz 4b",
                        "5:",
                        concat!($mov, " ", $register, "0, [{s_end} - ", $vector, "]"),
                        concat!($mov, " [{t_end} - ", $vector, "], ", $register, "0"),
                        $end,
                        s = inout(reg) source => _,
                        t = inout(reg) target => _,
                        blocks = inout(reg) blocks => _,
                        vectors = inout(reg) vectors => _,
                        s_end = in(reg) source.add(length),
                        t_end = in(reg) target.add(length),
                        $(out($changed) _,)+
                        options(nostack),
                    );
                }
            }
        };
    }

    copy_loop!(
        /// # Safety
        /// As for [`super::copy`]; the processor has AVX.
        #[target_feature(enable = "avx")]
        copy_avx: "ymm" by "vmovdqu", vector 32 at 0, 64, 96, block 128, then "vzeroupper",
        changed "ymm0" "ymm1" "ymm2" "ymm3" "ymm4" "ymm5" "ymm6" "ymm7" "ymm8" "ymm9" "ymm10" "ymm11"
        "ymm12" "ymm13" "ymm14" "ymm15"
    );

    copy_loop!(
        /// # Safety
        /// As for [`super::copy`]. Every x86-64 processor has these instructions.
        copy_sse2: "xmm" by "movdqu", vector 16 at 0, 32, 48, block 64, then "",
        changed "xmm0" "xmm1" "xmm2" "xmm3"
    );
}

/// Copies at least [`VECTOR`] bytes, one side of which is shared: by words where both sides are
/// aligned, else by bytes. The same memory is accessed by words and by bytes at the same time only
/// if the guest gives overlapping memory to two requests.
///
/// # Safety
/// As for [`copy_from_shared`] or [`copy_to_shared`].
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy(source: *const u8, target: *mut u8, length: usize, shared: Side) {
    use std::sync::atomic::AtomicUsize;

    const WORD: usize = size_of::<usize>();
    let aligned = (source.addr() | target.addr()).is_multiple_of(WORD);
    let words = if aligned { length / WORD * WORD } else { 0 };
    // SAFETY: inside of the caller's ranges, words only where they are aligned, and atomic on the
    // shared side.
    unsafe {
        for at in (0..words).step_by(WORD) {
            let (from, to) = (source.add(at).cast::<usize>(), target.add(at).cast::<usize>());
            match shared {
                Side::Source => to.write(AtomicUsize::from_ptr(from.cast_mut()).load(Relaxed)),
                Side::Target => AtomicUsize::from_ptr(to).store(from.read(), Relaxed),
            }
        }
        for at in words..length {
            copy_byte(source.add(at), target.add(at), shared);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Copy = unsafe fn(*const u8, *mut u8, usize);

    /// Copies lengths around every boundary of the loops, at several alignments, and checks that
    /// the bytes before and after the target do not change.
    fn copies_exactly(copy: Copy, least: usize) {
        let source: Vec<u8> = (0..1024).map(|index| (index % 251) as u8 + 1).collect();
        for length in (least..300).chain([511, 512, 513, 640]) {
            for (from, to) in [(0, 0), (1, 0), (0, 1), (16, 0), (0, 16), (31, 33)] {
                let mut target = vec![0; 1024];
                // SAFETY: both vectors are longer than offset and length together.
                unsafe { copy(source[from..].as_ptr(), target[to..].as_mut_ptr(), length) };
                assert_eq!(target[to..to + length], source[from..from + length]);
                assert!(target[..to].iter().chain(&target[to + length..]).all(|&byte| byte == 0));
            }
        }
    }

    #[test]
    fn every_length_is_copied_and_nothing_around_it() {
        copies_exactly(copy_from_shared, 0);
        copies_exactly(copy_to_shared, 0);
        #[cfg(target_arch = "x86_64")]
        {
            copies_exactly(sse2, VECTOR);
            if std::arch::is_x86_feature_detected!("avx") {
                copies_exactly(avx, VECTOR);
            }
        }
    }

    /// As [`x86_64::copy_sse2`].
    #[cfg(target_arch = "x86_64")]
    unsafe fn sse2(source: *const u8, target: *mut u8, length: usize) {
        // SAFETY: what the caller guarantees.
        unsafe { x86_64::copy_sse2(source, target, length) }
    }

    /// As [`x86_64::copy_avx`].
    #[cfg(target_arch = "x86_64")]
    unsafe fn avx(source: *const u8, target: *mut u8, length: usize) {
        // SAFETY: what the caller guarantees.
        unsafe { x86_64::copy_avx(source, target, length) }
    }

    #[test]
    fn every_length_is_filled_and_nothing_around_it() {
        for length in [0, 1, 31, 32, 33, 2047, 2048, 2049, 5000] {
            let mut target = vec![1; length + 2];
            // SAFETY: the vector is longer than that from its second byte on.
            unsafe { fill_shared(target[1..].as_mut_ptr(), 7, length) };
            assert_eq!((target[0], target[length + 1]), (1, 1));
            assert!(target[1..=length].iter().all(|&byte| byte == 7));
        }
    }
}
