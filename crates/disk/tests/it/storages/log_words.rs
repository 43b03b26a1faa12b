//! The words of a redo log, as `crates/format/src/qcow2/tables/redo` says what they mean.

pub const MAGIC: usize = 0;
pub const HEAD: usize = 2;
pub const TAIL: usize = 3;
pub const FIRST_RECORD: usize = 8;
pub const WORDS_PER_RECORD: usize = 4;

/// In a record's second word: the kinds "set" and "zero, keeping the host cluster", and what tells
/// them apart.
pub const KIND_SHIFT: u32 = 32;
pub const SET: u64 = 1;
pub const ZERO_KEEPING_HOST: u64 = 2;
