//! Standard output and standard error: the one place where commands print.
//!
//! Guarantees: a result that standard output does not take is an error, with one line and a failure status;
//! where its reader is gone (`info | head -1`) the process ends without a word, as by SIGPIPE. No failure
//! of standard error ends the process. A standard output that is closed at the start counts as /dev/null,
//! because the runtime of Rust opens that in its place.

use std::fmt;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use signal_hook::consts::SIGPIPE;
use tracing::Level;

use crate::logging;

/// Whether only errors and what was asked for are printed.
static QUIET: AtomicBool = AtomicBool::new(false);

/// Prints only errors and what was asked for from now on (`--quiet`).
pub fn be_quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

/// Whether only errors and what was asked for are printed.
pub fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Standard output is a pipe that no process reads any more.
#[derive(Debug)]
pub struct ReaderGone;

impl fmt::Display for ReaderGone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nothing reads standard output")
    }
}

/// Writes `text` and an end of line to standard output: the result of a command.
///
/// # Errors
/// The kernel's, ENOSPC for example. A pipe without a reader is [`ReaderGone`].
pub fn print(text: &str) -> Result<()> {
    write(text).map_err(|error| {
        let is_gone = error.kind() == io::ErrorKind::BrokenPipe;
        let error = anyhow::Error::new(error);
        match is_gone {
            true => error.context(ReaderGone),
            false => error.context("standard output: cannot write the result"),
        }
    })
}

/// As [`print()`], for a result that the exit status tells as well: not with `--quiet`.
///
/// # Errors
/// As [`print()`].
pub fn print_unless_quiet(text: &str) -> Result<()> {
    if is_quiet() { Ok(()) } else { print(text) }
}

/// Writes `text` and an end of line to standard output.
///
/// # Errors
/// The kernel's.
pub fn write(text: &str) -> io::Result<()> {
    let mut output = io::stdout().lock();
    writeln!(output, "{text}")?;
    output.flush()
}

/// Writes `text` and an end of line to standard error. A failure is ignored: there is no other place
/// to report it.
pub fn tell(text: &str) {
    logging::tell(text, Level::INFO);
}

/// As [`tell`], for what ends the command.
pub fn tell_error(text: &str) {
    logging::tell(text, Level::ERROR);
}

/// Passes on what another process of this program has said on its standard error. A failure is ignored, as by [`tell`].
pub fn pass_on(bytes: &[u8]) {
    let _ = io::stderr().write_all(bytes);
}

/// Ends the process by SIGPIPE, as the kernel ends one that does not ignore that signal. A shell sees
/// status 141.
pub fn end_by_sigpipe() -> ! {
    // It returns only if the signal is blocked.
    let _ = signal_hook::low_level::emulate_default_handler(SIGPIPE);
    signal_hook::low_level::exit(128 + SIGPIPE)
}
