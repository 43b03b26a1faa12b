//! Black-box tests: the binary against foreign tools.
#![forbid(unsafe_code)]
