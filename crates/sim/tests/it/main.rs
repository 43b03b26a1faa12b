//! The simulated storage against what it says of itself.
#![forbid(unsafe_code)]

mod disk;
mod restarts;
mod self_check;
