//! Memory with special properties: a guest's, which other processes share, and keys' pages, which
//! are not swapped.

pub(crate) mod guest_memory;
pub(crate) mod locked;
