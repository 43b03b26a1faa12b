//! The vocabulary of Blockhouse: requests, extents, durability, errors, aligned buffers, the Storage trait.
