//! Chores that anyone can run.
#![forbid(unsafe_code)]

fn main() {}
