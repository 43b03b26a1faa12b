//! The name that this program is called by: under those of QEMU's tools it is called by programs that go on by exit
//! statuses and by words on standard output and error.
//!
//! Guarantees: under such a name wrong usage ends with 1, an image that exists is overwritten as there, and an error has
//! the words that scripts look for on lines after our own.

use std::ffi::OsString;
use std::path::Path;
use std::sync::OnceLock;

use blockhouse_core::{Error, ErrorKind};

use crate::version::VERSION;

/// The version of QEMU's tools whose words and options these are.
const QEMU_VERSION: &str = "10.0.2";

/// The name of QEMU's storage daemon, and of the command that is one.
const STORAGE_DAEMON: &str = "qemu-storage-daemon";

/// A tool of QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tool {
    /// All commands on images.
    Img,
    /// The server.
    Nbd,
    /// Only its version is printed.
    Io,
    /// The server that clients of QMP tell what to serve.
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

    /// The output of `--version`, in QEMU's form.
    pub fn version(self) -> String {
        let word = if self == Self::Nbd { "" } else { "version " };
        format!("{} {word}{QEMU_VERSION} (blockhouse {VERSION})", self.as_str())
    }
}

/// The tool whose name this program has; `None` under its own.
pub fn tool() -> Option<Tool> {
    static TOOL: OnceLock<Option<Tool>> = OnceLock::new();
    *TOOL.get_or_init(|| Tool::by_name(Path::new(&std::env::args_os().next()?)))
}

/// Whether qemu-img is meant: a target that exists is overwritten.
pub fn is_qemu_img() -> bool {
    tool() == Some(Tool::Img)
}

/// Whether qemu-nbd is meant: it says nothing of what it serves.
pub fn is_qemu_nbd() -> bool {
    tool() == Some(Tool::Nbd)
}

/// The exit status of wrong usage. That of `check` is qemu-img's, whose 2 says that the image is corrupt.
pub fn wrong_usage_status() -> i32 {
    if tool().is_some() || is_check(&words()) { 1 } else { 2 }
}

/// Whether the command of these words is `check`.
fn is_check(words: &[OsString]) -> bool {
    const WITH_VALUES: [&str; 3] = ["--log-format", "--trace", "-T"];
    let mut words = words.iter().skip(1);
    while let Some(word) = words.next() {
        if WITH_VALUES.iter().any(|option| word == option) {
            words.next();
        } else if !word.as_encoded_bytes().starts_with(b"-") {
            return word == "check";
        }
    }
    false
}

/// Whether the words have this one, the name of a command.
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

/// The words of the command line as if under our own name: qemu-nbd is `serve`.
pub fn words() -> Vec<OsString> {
    let mut words: Vec<_> = std::env::args_os().collect();
    if is_qemu_nbd() && !words.is_empty() {
        // Its -v keeps it in the foreground, where it is anyway, and says nothing.
        words.retain(|word| word != "-v" && word != "--verbose");
        words.insert(1, "serve".into());
    }
    if tool() == Some(Tool::StorageDaemon) && !words.is_empty() {
        words.insert(1, STORAGE_DAEMON.into());
    }
    words
}

/// The output where only the version is asked for under a name of QEMU's.
pub fn version() -> Option<String> {
    let word = std::env::args_os().nth(1)?;
    (word == "--version" || word == "-V").then(|| tool().map(Tool::version)).flatten()
}

/// What QEMU's tools say of an error.
#[derive(Debug, PartialEq, Eq)]
pub struct QemuWords {
    /// Their words.
    pub text: String,
    /// Whether they say all that ours do.
    pub is_exact: bool,
}

/// The words of QEMU's tools for an error, for scripts that look for them.
pub fn qemu_words(error: &anyhow::Error) -> Option<QemuWords> {
    tool()?;
    let error: &Error = error.chain().find_map(|cause| cause.downcast_ref())?;
    let path = error.path()?;
    let mut said = words_of(error, is_to_write(path))?;
    // QEMU says the options as they were typed.
    let typed = words().into_iter().filter_map(|word| word.into_string().ok());
    let options = typed
        .into_iter()
        .find(|word| word.split(',').any(|part| part.strip_prefix("file.filename=") == Some(path)));
    if let Some(options) = options {
        let (before, after) =
            (format!("Could not open '{path}'"), format!("Could not open '{options}'"));
        said.text = said.text.replacen(&before, &after, 1);
    }
    Some(said)
}

/// Whether the command would change the image of this name.
fn is_to_write(image: &str) -> bool {
    const CHANGES: [&str; 6] = ["resize", "commit", "rebase", "amend", "snapshot", "bitmap"];
    let words = words();
    let changes = words.iter().any(|word| CHANGES.iter().any(|change| word == change));
    changes || words.last().is_some_and(|last| words.len() > 3 && last == image)
}

/// Our words, and those that QEMU's tools have for the same.
const SAME: &[(&str, &str)] = &[
    ("not a qcow2 image", "Image is not in qcow2 format"),
    ("is no qcow2 image", "Image is not in qcow2 format"),
    ("is no VHD image", "invalid VPC image"),
    ("is no VDI image", "Image not in VDI format"),
    ("no sparse extent of a VMDK", "invalid VMDK image descriptor"),
    ("not a LUKS container", "Volume is not in LUKS format"),
    ("does not say where its keys are", "Missing CRYPTO header for crypt method 2"),
    ("entries exceeds 32 MiB", "Image is too big"),
    ("1 needed", "L1 table is too small"),
];

/// What QEMU says of features that are not known: their names in the image, and the bits of those without.
fn unknown_features(text: &str) -> Option<String> {
    let (_, list) = text.split_once("needs the unknown feature")?;
    let list = list.trim_start_matches('s').split(" at offset").next()?;
    let (mut names, mut nameless) = (Vec::new(), 0_u64);
    for one in list.split(", ") {
        match one.trim().split_once(" ('") {
            Some((_, name)) => names.push(name.trim_end_matches("')").to_owned()),
            None => nameless |= 1 << one.trim().parse::<u32>().ok().filter(|&bit| bit < 64)?,
        }
    }
    if nameless != 0 {
        names.push(format!("Unknown incompatible feature: {nameless:x}"));
    }
    Some(format!("Unsupported qcow2 feature(s): {}", names.join(", ")))
}

/// Our words for why no image is made, and those of qemu-img.
const CREATION: &[(&str, &str)] = &[
    (
        "has refcounts of 16 bits",
        "Different refcount widths than 16 bits require compatibility level 1.1 or above (use version=v3 or greater)",
    ),
    (
        "the disk is too large for clusters of this size",
        "The image size is too large for file format 'qcow2' (try using a larger cluster size)",
    ),
];

/// The words of qemu-img for why no image is made.
fn of_creation(text: &str) -> Option<&'static str> {
    CREATION.iter().find(|(ours, _)| text.contains(ours)).map(|(_, theirs)| *theirs)
}

fn words_of(error: &Error, to_write: bool) -> Option<QemuWords> {
    const ENOENT: i32 = 2;
    const EACCES: i32 = 13;
    let (name, text) = (error.path()?, error.to_string());
    let exact = |text| Some(QemuWords { text, is_exact: true });
    if let Some(words) = of_creation(&text) {
        return exact(format!("{name}: {words}"));
    }
    if let Some(features) = unknown_features(&text) {
        return exact(format!("Could not open '{name}': {features}"));
    }
    let why = match error.kind() {
        ErrorKind::Locked => {
            let lock = if to_write { "\"write\" lock" } else { "shared \"write\" lock" };
            format!("Failed to get {lock}\nIs another process using the image [{name}]?")
        }
        _ if error.errno() == ENOENT => {
            format!("Could not open '{name}': No such file or directory")
        }
        _ if error.errno() == EACCES => format!("Could not open '{name}': Permission denied"),
        _ => match SAME.iter().find(|(ours, _)| text.contains(ours)) {
            Some((_, theirs)) => (*theirs).to_owned(),
            None if error.kind() == ErrorKind::Corrupt => {
                let text = format!("Could not open '{name}': Invalid argument");
                return Some(QemuWords { text, is_exact: false });
            }
            None => return None,
        },
    };
    exact(format!("Could not open '{name}': {why}"))
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

    #[test]
    fn unknown_features_have_their_names_or_bits() {
        let words = unknown_features(
            "a: the image needs the unknown features 61, 62 ('x'), 63 at offset 72",
        );
        let expected =
            "Unsupported qcow2 feature(s): x, Unknown incompatible feature: a000000000000000";
        assert_eq!(words.as_deref(), Some(expected));
        let words = unknown_features("a: the image needs the unknown feature 5 ('y') at offset 72");
        assert_eq!(words.as_deref(), Some("Unsupported qcow2 feature(s): y"));
    }

    #[test]
    fn errors_have_the_words_that_scripts_look_for() {
        let words = |error: Error, to_write| {
            words_of(&error.on("a"), to_write).map(|words| words.text).unwrap_or_default()
        };
        let locked = || Error::new(ErrorKind::Locked, "is in use");
        assert!(words(locked(), true).contains("Failed to get \"write\" lock"));
        assert!(words(locked(), false).contains("Is another process using the image [a]?"));
        let missing = Error::host("cannot open", std::io::Error::from_raw_os_error(2));
        assert!(
            words(missing, false).starts_with("Could not open 'a': Could not open 'a': No such")
        );
        assert_eq!(words(Error::new(ErrorKind::NoSpace, "is full"), true), "");
    }
}
