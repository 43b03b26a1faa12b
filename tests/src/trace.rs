//! System calls of a server, from strace.

use std::path::{Path, PathBuf};

use crate::Scratch;

/// The log of strace, which traces system calls while they happen.
pub struct Trace {
    log: PathBuf,
    /// The words before the server's command line.
    pub wrapper: Vec<String>,
}

/// One system call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The name.
    pub name: String,
    /// The text between its parentheses.
    pub arguments: String,
    /// The result.
    pub result: String,
}

impl Trace {
    /// Traces `calls` (names, with commas) that concern `file`; `options` are strace's own.
    pub fn of(scratch: &Scratch, file: &Path, calls: &str, options: &[&str]) -> Self {
        Self::start(
            scratch,
            calls,
            &[&["-P", file.to_str().expect("a plain name")], options].concat(),
        )
    }

    /// Traces `calls` (names, with commas) on all files; `options` are strace's own.
    pub fn start(scratch: &Scratch, calls: &str, options: &[&str]) -> Self {
        let log = scratch.path("trace");
        let expression = format!("trace={calls}");
        // -D: the tracer is a grandchild, so that the process we start is the server itself.
        let wrapper = ["strace", "-D", "-f", "-qq", "-o", log.to_str().expect("a plain name")];
        let wrapper = wrapper.into_iter().chain(["-e", "signal=none", "-e", &expression]);
        let wrapper = wrapper.chain(options.iter().copied());
        let wrapper = wrapper.chain(["--"]).map(str::to_owned).collect();
        Self { log, wrapper }
    }

    /// All calls so far. A call whose effects are visible is among them, because the server
    /// continues only after strace has written the line.
    ///
    /// # Panics
    /// When a line is not understood.
    pub fn calls(&self) -> Vec<Call> {
        let log = std::fs::read_to_string(&self.log).expect("strace writes its log");
        let mut open: Vec<(&str, &str)> = Vec::new();
        let mut calls = Vec::new();
        for line in log.lines() {
            let (thread, text) = line.split_once(char::is_whitespace).expect("a thread's id");
            let text = text.trim_start();
            // Lines about exits and signals.
            if text.starts_with("+++") || text.starts_with("---") {
                continue;
            }
            if let Some(beginning) = text.strip_suffix(" <unfinished ...>") {
                open.push((thread, beginning));
            } else if let Some(end) = text.strip_prefix("<... ") {
                let end = end.split_once(" resumed>").expect("the end of a call").1;
                let index = open.iter().position(|(other, _)| *other == thread);
                let (_, beginning) = open.swap_remove(index.expect("the beginning of the call"));
                calls.push(parse(&format!("{beginning}{end}")));
            } else {
                calls.push(parse(text));
            }
        }
        calls
    }

    /// The calls that are made while `action` runs.
    pub fn during(&self, action: impl FnOnce()) -> Vec<Call> {
        let before = self.calls().len();
        action();
        self.calls().split_off(before)
    }
}

fn parse(text: &str) -> Call {
    let parts = text.split_once('(').and_then(|(name, rest)| {
        let (arguments, result) = rest.rsplit_once(" = ")?;
        let arguments = arguments.trim_end().strip_suffix(')').unwrap_or(arguments);
        Some(Call { name: name.into(), arguments: arguments.into(), result: result.into() })
    });
    parts.unwrap_or_else(|| panic!("strace wrote what is no call: {text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_taken_apart() {
        let call = parse("pwritev2(3, [{iov_base=\"a = b)\", iov_len=6}], 1, 0, RWF_DSYNC) = 6");
        assert_eq!(call.name, "pwritev2");
        assert!(call.arguments.ends_with("0, RWF_DSYNC"));
        assert_eq!(call.result, "6");
        assert_eq!(parse("fsync(3)     = -1 EIO (Input/output error)").arguments, "3");
    }
}
