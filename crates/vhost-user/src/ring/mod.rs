//! A split virtqueue in a guest's memory (virtio 1.2, section 2.7): rings, descriptors and chains
//! of them.
//!
//! Nothing here knows what a request means. The driver may be hostile: see `split_ring` and
//! [`chain`].

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
