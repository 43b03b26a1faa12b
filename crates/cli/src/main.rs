//! The binary. All of it is in the library of this package.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    blockhouse::run()
}
