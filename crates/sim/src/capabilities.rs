//! The default capabilities of test storages.

use blockhouse_core::{
    Alignment, Capabilities, Fua, FuaCost, GroupCommit, Offload, ReadAfterDiscard, WriteCache,
};

/// A volatile write cache, native FUA, byte alignment; no operation for zeros or discards.
pub const PLAIN_CAPABILITIES: Capabilities = Capabilities {
    fua: Fua::Native,
    fua_cost: FuaCost::NoFlush,
    write_cache: WriteCache::Volatile,
    group_commit: GroupCommit::Never,
    alignment: Alignment::BYTE,
    write_zeroes: Offload::Unavailable,
    prepare_zeroes: Offload::Unavailable,
    discard: Offload::Unavailable,
    read_after_discard: ReadAfterDiscard::Undefined,
};
