//! Memory that is more than bytes: a guest's, which another process shares, and pages that are
//! never swapped.

pub(crate) mod guest_memory;
pub(crate) mod locked;
pub(crate) mod registered_buffer_count;
