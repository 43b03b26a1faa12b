//! The name that this program is called by. Under the name of a QEMU tool it behaves as that tool,
//! because callers depend on the tool's exit statuses and on its texts on standard output and
//! error.
//!
//! Guarantees: under such a name wrong usage ends with status 1, and an existing image is
//! overwritten if the tool does so. The tool's error texts, which scripts look for, are printed on
//! lines after this program's own texts.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::OnceLock;

use anyhow::{Result, bail};
use blockhouse_engine::NewFile;

use crate::qemu_long_options::shortened;
use crate::version::VERSION;

/// The version of QEMU's tools whose texts and options are reproduced.
const QEMU_VERSION: &str = "10.0.2";

/// The name of QEMU's storage daemon, and of our command that replaces it.
const STORAGE_DAEMON: &str = "qemu-storage-daemon";

/// A tool of QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tool {
    /// qemu-img: all commands on images.
    Img,
    /// qemu-nbd: the server.
    Nbd,
    /// qemu-io; only its `--version` is supported.
    Io,
    /// The storage daemon, which QMP clients configure.
    StorageDaemon,
}

impl Tool {
    fn by_name(program: &Path) -> Option<Self> {
        let name = program.file_name()?.to_str()?;
        Some(match name.strip_prefix("blockhouse-").unwrap_or(name) {
            "qemu-img" => Self::Img,
            "qemu-nbd" => Self::Nbd,
            "qemu-io" => Self::Io,
            STORAGE_DAEMON => Self::StorageDaemon,
            _ => return None,
        })
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Img => "qemu-img",
            Self::Nbd => "qemu-nbd",
            Self::Io => "qemu-io",
            Self::StorageDaemon => STORAGE_DAEMON,
        }
    }

    /// The command that the tool's name stands for; `None` if the command is a word of its own.
    pub fn implied_command(self) -> Option<&'static str> {
        match self {
            Self::Nbd => Some("serve"),
            Self::StorageDaemon => Some(STORAGE_DAEMON),
            Self::Img | Self::Io => None,
        }
    }

    /// The output of `--version`, in QEMU's form.
    pub fn version(self) -> String {
        let word = if self == Self::Nbd { "" } else { "version " };
        format!("{} {word}{QEMU_VERSION} (blockhouse {VERSION})", self.as_str())
    }
}

/// The tool whose name this program is called by; `None` if it is called by its own name.
pub fn tool() -> Option<Tool> {
    static TOOL: OnceLock<Option<Tool>> = OnceLock::new();
    *TOOL.get_or_init(|| Tool::by_name(Path::new(&std::env::args_os().next()?)))
}

/// Whether the program is called qemu-img. If so, an existing target is overwritten.
pub fn is_qemu_img() -> bool {
    tool() == Some(Tool::Img)
}

/// How new images are made. Under a QEMU tool's name other users may read new images, because
/// callers pass images to programs of other users.
pub fn new_file() -> NewFile {
    NewFile { is_for_all: tool().is_some(), ..NewFile::default() }
}

/// Whether the program is called qemu-nbd. If so, it does not print the addresses that it serves.
pub fn is_qemu_nbd() -> bool {
    tool() == Some(Tool::Nbd)
}

/// The exit status of wrong usage. For `check` it is always qemu-img's 1, because 2 means that the
/// image is corrupt. For a wrong value of an option of `compare` it is always qemu-img's 2, because
/// 1 means that the images differ.
pub fn wrong_usage_status(kind: Option<clap::error::ErrorKind>) -> i32 {
    use clap::error::ErrorKind::{InvalidValue, ValueValidation};
    let words = words();
    match kind {
        Some(InvalidValue | ValueValidation) if command_of(&words) == "compare" => 2,
        _ if tool().is_some() || is_check(&words) => 1,
        _ => 2,
    }
}

/// Whether this command line is of the command `check`.
fn is_check(words: &[OsString]) -> bool {
    command_of(words) == "check"
}

/// The command in a command line; empty if it has none.
pub fn command_of<Word: AsRef<OsStr>>(words: &[Word]) -> &str {
    let command = index_of_command(words).map(|index| words[index].as_ref());
    command.and_then(OsStr::to_str).unwrap_or_default()
}

/// The index of the command in a command line.
pub fn index_of_command<Word: AsRef<OsStr>>(words: &[Word]) -> Option<usize> {
    const WITH_VALUES: [&str; 3] = ["--log-format", "--trace", "-T"];
    let mut rest = words.iter().map(AsRef::as_ref).enumerate().skip(1);
    while let Some((index, word)) = rest.next() {
        if WITH_VALUES.iter().any(|option| word == *option) {
            rest.next();
        } else if !word.as_encoded_bytes().starts_with(b"-") {
            return Some(index);
        }
    }
    None
}

/// Whether this word occurs in the command line, also as a value or the name of a file.
pub fn has_word(command: &str) -> bool {
    words().iter().any(|word| word == command)
}

/// The name that lines on standard error begin with.
pub fn own_name() -> &'static str {
    let is_daemon = || std::env::args_os().nth(1).is_some_and(|word| word == STORAGE_DAEMON);
    match tool() {
        Some(tool) => tool.as_str(),
        None if is_daemon() => STORAGE_DAEMON,
        None => "blockhouse",
    }
}

/// The words of the command line, translated to this program's own commands: qemu-nbd becomes
/// `serve`, the storage daemon `qemu-storage-daemon`, and the `bench` of qemu-img `qemu-bench`,
/// because the own command `bench` measures the machine.
pub fn words() -> Vec<OsString> {
    let mut words: Vec<_> = std::env::args_os().collect();
    if is_qemu_nbd() && !words.is_empty() {
        words = words_of_nbd(&words);
    }
    if is_qemu_img() {
        words = shortened(command_of(&words), &words);
        if let Some(index) = index_of_command(&words).filter(|index| words[*index] == "bench") {
            words[index] = "qemu-bench".into();
        }
    }
    if let Some(command) = tool().and_then(Tool::implied_command) {
        words.insert(1, command.into());
    }
    words
}

/// The options of qemu-nbd whose next word is their value.
const NBD_WITH_VALUES: [&str; 37] = [
    "-p",
    "--port",
    "-o",
    "--offset",
    "-b",
    "--bind",
    "-k",
    "--socket",
    "-f",
    "--format",
    "--object",
    "-e",
    "--shared",
    "-x",
    "--export-name",
    "-D",
    "--description",
    "-P",
    "--partition",
    "-B",
    "--bitmap",
    "-l",
    "--load-snapshot",
    "--cache",
    "--aio",
    "--discard",
    "--detect-zeroes",
    "--tls-creds",
    "--tls-hostname",
    "--tls-authz",
    "-T",
    "--trace",
    "--pid-file",
    "--selinux-label",
    "--handshake-limit",
    "-c",
    "--connect",
];

/// The long options of qemu-nbd that have no value.
const NBD_FLAGS: [&str; 12] = [
    "--allocation-depth",
    "--disconnect",
    "--fork",
    "--help",
    "--image-opts",
    "--list",
    "--nocache",
    "--persistent",
    "--read-only",
    "--snapshot",
    "--verbose",
    "--version",
];

/// The long option of qemu-nbd that this word abbreviates, with its value; `None` for other words.
/// No other option may begin alike, as in getopt_long(3).
fn whole_nbd_option(word: &OsStr) -> Option<String> {
    let word = word.to_str().filter(|word| word.len() > 2)?;
    let (name, value) = word.find('=').map_or((word, ""), |index| word.split_at(index));
    let known = || NBD_WITH_VALUES.iter().chain(&NBD_FLAGS);
    let mut begun = known().filter(|option| option.starts_with(name));
    let found = begun.next().filter(|_| !known().any(|option| *option == name))?;
    begun.next().is_none().then(|| format!("{found}{value}"))
}

/// The words of qemu-nbd, with whole options and two changes. `-v`, which keeps qemu-nbd in the
/// foreground, is removed: `serve` stays there by default, and `serve -c` never does. `--snapshot`
/// becomes `-s`, because the option `--snapshot` of `serve` has a value. Values of other options
/// and the words after `--` are not changed.
fn words_of_nbd(words: &[OsString]) -> Vec<OsString> {
    let ours = nbd_words(words).filter_map(|(word, is_value)| match word.to_str() {
        Some("-v" | "--verbose") if !is_value => None,
        Some("--snapshot") if !is_value => Some("-s".into()),
        _ => Some(word),
    });
    ours.collect()
}

/// The words of a qemu-nbd command line, with whole options. `true` for the value of an option, and
/// for all words after `--`, which are no options.
fn nbd_words(words: &[OsString]) -> impl Iterator<Item = (OsString, bool)> {
    let (mut is_value, mut has_ended) = (false, false);
    words.iter().map(move |word| {
        let is_kept = is_value || has_ended;
        let whole = if is_kept { None } else { whole_nbd_option(word) };
        let word = whole.map_or_else(|| word.clone(), OsString::from);
        is_value = !is_kept && NBD_WITH_VALUES.iter().any(|option| word == *option);
        has_ended |= !is_kept && word == "--";
        (word, is_kept)
    })
}

/// The output of `--version` or `-V` under the name of a QEMU tool; `None` for other command lines.
/// qemu-nbd accepts the option at any position.
pub fn version() -> Option<String> {
    let words: Vec<_> = std::env::args_os().collect();
    let is_asked = match tool()? {
        Tool::Nbd => nbd_asks_version(&words),
        _ => words.get(1).is_some_and(|word| is_version(word)),
    };
    is_asked.then(|| tool().map(Tool::version)).flatten()
}

/// Fails under the name qemu-io, because its command language is not implemented: the commands of
/// this program's own name, such as `create`, would act on its words otherwise.
///
/// # Errors
/// The program is called qemu-io.
pub fn refuse_commands_of_qemu_io() -> Result<()> {
    if tool() == Some(Tool::Io) {
        bail!("only --version of qemu-io is supported; use QEMU's own qemu-io");
    }
    Ok(())
}

fn is_version(word: &OsStr) -> bool {
    word == "--version" || word == "-V"
}

/// Whether an option of a qemu-nbd command line asks for the version.
fn nbd_asks_version(words: &[OsString]) -> bool {
    nbd_words(words).any(|(word, is_value)| !is_value && is_version(&word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_is_the_first_word_that_is_no_option() {
        let is = |line: &str| is_check(&line.split(' ').map(OsString::from).collect::<Vec<_>>());
        for line in ["b check", "b -v --log-format json check x", "b --quiet check --nope"] {
            assert!(is(line), "{line}");
        }
        for line in ["b", "b info check", "b --log-format check info", "b -T check"] {
            assert!(!is(line), "{line}");
        }
    }

    #[test]
    fn words_of_qemu_nbd_that_are_no_values_become_ours() {
        let ours = |line: &str| {
            let words: Vec<_> = line.split(' ').map(OsString::from).collect();
            let words = words_of_nbd(&words).into_iter().map(|word| word.into_string().unwrap());
            words.collect::<Vec<_>>().join(" ")
        };
        for (line, expected) in [
            ("nbd -v -t x --verbose", "nbd -t x"),
            ("nbd -x -v -t -D --verbose x", "nbd -x -v -t -D --verbose x"),
            ("nbd -t --snapshot x", "nbd -t -s x"),
            ("nbd -v -- -v", "nbd -- -v"),
            ("nbd --share 2 --snap --verb --desc -v x", "nbd --shared 2 -s --description -v x"),
            (
                "nbd --pers --off=1M --tls x --s -- --f",
                "nbd --persistent --offset=1M --tls x --s -- --f",
            ),
        ] {
            assert_eq!(ours(line), expected);
        }
        let asks =
            |line: &str| nbd_asks_version(&line.split(' ').map(OsString::from).collect::<Vec<_>>());
        assert!(asks("nbd --version") && asks("nbd --vers") && asks("nbd --pid-file=x -e 2 -V"));
        assert!(!asks("nbd -D --version x") && !asks("nbd -- --version"));
        let line = ["img", "-T", "bench", "bench", "x"];
        assert_eq!(index_of_command(&line), Some(3));
    }

    #[test]
    fn tools_are_told_by_their_names() {
        for (name, tool) in [
            ("/usr/bin/qemu-img", Some(Tool::Img)),
            ("blockhouse-qemu-img", Some(Tool::Img)),
            ("./qemu-nbd", Some(Tool::Nbd)),
            ("qemu-io", Some(Tool::Io)),
            ("qemu-storage-daemon", Some(Tool::StorageDaemon)),
            ("blockhouse", None),
            ("qemu-img-old", None),
        ] {
            assert_eq!(Tool::by_name(Path::new(name)), tool, "{name}");
        }
        assert!(Tool::Img.version().starts_with("qemu-img version 10.0"));
        assert!(Tool::Nbd.version().starts_with("qemu-nbd 10.0"));
    }
}
