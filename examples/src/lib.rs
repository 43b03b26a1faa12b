//! The guide to using Blockhouse as a library, which is `docs/library.md` of the repository.
#![doc = include_str!("../../docs/library.md")]
#![forbid(unsafe_code)]
