//! A split virtqueue in a guest's memory (virtio 1.2, section 2.7): rings, descriptors and chains
//! of them.
//!
//! This module does not interpret requests. The driver may be hostile; `split_ring` and [`chain`]
//! explain the checks.

mod broken;
pub mod chain;
mod descriptor;
mod split_ring;

pub use broken::Broken;
pub use chain::Chain;
pub use descriptor::{
    Buffers, DESCRIPTOR_BYTES, Descriptor, INDIRECT, MAX_CHAIN, MAX_ENTRIES, NEXT, WRITE,
};
pub use split_ring::{EventIndex, RingAddresses, SplitRing};
