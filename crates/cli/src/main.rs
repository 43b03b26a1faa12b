//! The binary. All its code is in the library of this package.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    blockhouse::run()
}
