//! Standard output and standard error: the one place where commands print.
//!
//! Guarantees: if a result cannot be written to standard output, the command prints one line and
//! ends with a failure status. If the reader of a pipe has closed it (`info | head -1`), the
//! command ends silently with success, because the reader needs no more output. No failure of
//! standard error ends the process. A standard output that is closed at the start is treated as
//! /dev/null, because Rust's runtime opens /dev/null in its place.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use signal_hook::consts::SIGPIPE;
use tracing::Level;

use crate::called_as;
use crate::logging;
use crate::{qemu_usage, qemu_words};

/// Whether only errors and requested results are printed.
static QUIET: AtomicBool = AtomicBool::new(false);

/// Prints only errors and requested results from now on (`--quiet`).
pub fn be_quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

/// Whether only errors and requested results are printed.
pub fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Writes `text` and an end of line to standard output: the result of a command. It is no error if
/// the reader has closed the pipe (`--help | grep -q WORD`).
///
/// # Errors
/// Errors of the kernel, for example ENOSPC.
pub fn print(text: &str) -> Result<()> {
    match write(text) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(anyhow::Error::new(error).context("standard output: cannot write the result"))
        }
        _ => Ok(()),
    }
}

/// As [`print()`], for one line of an endless stream. If the reader has closed the pipe, the
/// process ends.
///
/// # Errors
/// As [`print()`].
pub fn print_of_stream(text: &str) -> Result<()> {
    match write(text) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => end_by_sigpipe(),
        written => written.context("standard output: cannot write the result"),
    }
}

/// As [`print()`], for a result that the exit status reports too. Prints nothing with `--quiet`.
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

/// Writes `text` and an end of line to standard error. A failure is ignored, because there is no
/// other place to report it.
pub fn tell(text: &str) {
    logging::tell(text, Level::INFO);
}

/// As [`tell`], for a message that ends the command.
pub fn tell_error(text: &str) {
    logging::tell(text, Level::ERROR);
}

/// Prints why the command has failed. Under the name of a QEMU tool, a program that reads standard
/// error gets only the tool's message if it has the same meaning; a user at a terminal gets both
/// messages.
pub fn tell_failure(error: &anyhow::Error) {
    let words = qemu_words::qemu_words(error);
    let is_enough = words.as_ref().is_some_and(|words| words.is_exact);
    if !is_enough || io::stderr().is_terminal() {
        tell_error(&format!("{}: {error:#}", called_as::own_name()));
    }
    if let Some(words) = words {
        tell_error(&format!("{}: {}", called_as::own_name(), words.text));
    }
}

/// Prints what is wrong with the command line. Under the name of a QEMU tool, prints the tool's
/// message as [`tell_failure`] does.
pub fn tell_wrong_usage(error: &clap::Error) {
    let words = qemu_usage::of_error(error, &called_as::words());
    if words.is_none() || io::stderr().is_terminal() {
        let _ = error.print();
    }
    if let Some(words) = words {
        tell_error(&words);
    }
}

/// Forwards what another process of this program has written to its standard error. A failure is
/// ignored, as by [`tell`].
pub fn pass_on(bytes: &[u8]) {
    let _ = io::stderr().write_all(bytes);
}

/// Ends the process by SIGPIPE, as the kernel ends a process that does not ignore the signal. A
/// shell sees status 141.
pub fn end_by_sigpipe() -> ! {
    // The call returns only if the signal is blocked.
    let _ = signal_hook::low_level::emulate_default_handler(SIGPIPE);
    signal_hook::low_level::exit(128 + SIGPIPE)
}
