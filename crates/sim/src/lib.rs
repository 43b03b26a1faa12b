//! A deterministic storage that reorders, tears, delays, fails and crashes by seed.
#![forbid(unsafe_code)]
