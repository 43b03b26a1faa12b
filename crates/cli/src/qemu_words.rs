//! QEMU's messages for errors. The program prints them when it is called by the name of a QEMU
//! tool, for scripts that match their words.
//!
//! Guarantee: a message has the tool's words for the same failure of the same command. If there are
//! none, only our message is printed.

use blockhouse_core::{Error, ErrorKind};

use crate::called_as::{command_of, tool, words};

/// The messages of QEMU's tools for an error.
#[derive(Debug, PartialEq, Eq)]
pub struct QemuWords {
    /// The words.
    pub text: String,
    /// Whether the text contains all information of this program's message.
    pub is_exact: bool,
}

/// A command line.
struct Typed {
    words: Vec<String>,
    command: String,
}

/// QEMU's message for an error; `None` if it is unknown, or the program is not called by the name
/// of a QEMU tool.
pub fn qemu_words(error: &anyhow::Error) -> Option<QemuWords> {
    tool()?;
    let words: Vec<_> =
        words().into_iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let command = command_of(&words).to_owned();
    Typed { words, command }.said_of(error)
}

impl Typed {
    fn said_of(&self, error: &anyhow::Error) -> Option<QemuWords> {
        let text = format!("{error:#}");
        let exact = |text| QemuWords { text, is_exact: true };
        if let Some((name, why)) = of_options(&text) {
            return Some(exact(format!("Could not open '{name}': {why}")));
        }
        if let Some(text) = self.of_command(&text) {
            return Some(exact(text));
        }
        if let Some((_, chain)) = text.split_once("the backing files form a loop: ") {
            let name = chain.split(';').next()?.rsplit(" -> ").next()?;
            return Some(exact(format!("Backing file '{name}' creates an infinite loop.")));
        }
        let error: &Error = error.chain().find_map(|cause| cause.downcast_ref())?;
        if let Some(text) = self.of_chain(&text) {
            return Some(exact(text));
        }
        let path = error.path()?;
        let name = path.strip_suffix(".part").unwrap_or(path);
        if let Some(words) = of_creation(&text) {
            return Some(exact(format!("{name}: {words}")));
        }
        let Some(reason) = reason(error, self.is_to_write(path)) else {
            let text = format!("Could not open '{path}': Invalid argument");
            return (error.kind() == ErrorKind::Corrupt)
                .then_some(QemuWords { text, is_exact: false });
        };
        Some(exact(self.placed(name, &reason, &text)))
    }

    /// The reason, in the sentence that the command prints for the file.
    fn placed(&self, name: &str, reason: &str, text: &str) -> String {
        let image = text.split_once(": cannot open its backing file: ").map(|(image, _)| image);
        let is_target = self.words.last().is_some_and(|last| last == name) && self.words.len() > 3;
        let is_made = self.words.get(2..).is_some_and(|rest| rest.iter().any(|word| word == name));
        match (&*self.command, image) {
            ("create", Some(image)) => format!("{image}: {reason}\nCould not open backing image."),
            ("rebase", Some(_)) => format!("Could not open new backing file '{name}': {reason}"),
            ("create", None) if is_made => {
                format!("{name}: {}", reason.replacen("Could not open", "Could not create", 1))
            }
            ("convert", _) if is_target && !self.has("-n") => {
                let mut formats = self.words.iter().skip_while(|word| *word != "-O");
                let format = formats.nth(1).map_or("raw", String::as_str);
                let reason = reason.replacen("Could not open", "Could not create", 1);
                format!("{name}: error while converting {format}: {reason}")
            }
            ("serve", _) => format!("Failed to blk_new_open '{name}': {reason}"),
            _ => format!("Could not open '{}': {reason}", self.as_typed(name)),
        }
    }

    /// The options that name this image, or its name. QEMU prints options as they were typed.
    fn as_typed<'a>(&'a self, name: &'a str) -> &'a str {
        let options = self.words.iter().find(|word| {
            word.split(',').any(|part| part.strip_prefix("file.filename=") == Some(name))
        });
        options.map_or(name, String::as_str)
    }

    fn has(&self, word: &str) -> bool {
        self.words.iter().any(|typed| typed == word)
    }

    /// The message for a file further down the chain that cannot be opened.
    fn of_chain(&self, text: &str) -> Option<String> {
        let (_, mut rest) = text.split_once(BEHIND)?;
        let mut images = Vec::new();
        loop {
            let (chain, error) = rest.split_once(": ")?;
            images.extend(chain.split(" -> "));
            rest = error;
            // The error of a chain that begins with a backing file.
            let Some(below) = rest.strip_prefix(BEHIND) else { break };
            rest = below;
        }
        let (name, why) = rest.split_once(": ")?;
        // The file was opened, but its lock or its image was not.
        images.pop_if(|last| *last == name);
        let reason = if why.contains("the image is locked") {
            let in_use = |lock| {
                format!("Failed to get {lock} lock\nIs another process using the image [{name}]?")
            };
            // QEMU opens the base for reading first, beside other readers.
            if self.command == "commit" && why.contains("keeping others from") {
                return Some(in_use("\"write\""));
            }
            in_use("shared \"write\"")
        } else if why.contains("No such file or directory") {
            format!("Could not open '{name}': No such file or directory")
        } else if why.contains("Permission denied") {
            format!("Could not open '{name}': Permission denied")
        } else {
            same(why)?.to_owned()
        };
        if self.command == "info" {
            return Some(format!("Could not open '{name}': {reason}"));
        }
        let first = images.first()?;
        let left_out =
            |image: &&str| image.strip_prefix('(')?.strip_suffix(" more)")?.parse::<usize>().ok();
        let count: usize = images.iter().map(|image| left_out(image).unwrap_or(1)).sum();
        let behind = "Could not open backing file: ".repeat(count);
        Some(format!("Could not open '{}': {behind}{reason}", self.as_typed(first)))
    }

    /// Whether the command would change the image of this name.
    fn is_to_write(&self, image: &str) -> bool {
        const CHANGES: [&str; 6] = ["resize", "commit", "rebase", "amend", "snapshot", "bitmap"];
        const READS: [&str; 5] = ["check", "compare", "info", "map", "measure"];
        if READS.contains(&&*self.command) {
            return false;
        }
        let changes = CHANGES.contains(&&*self.command);
        changes || self.words.last().is_some_and(|last| self.words.len() > 3 && last == image)
    }

    /// The message for a failure that only this command can have.
    fn of_command(&self, text: &str) -> Option<String> {
        let has = |part: &str| text.contains(part);
        match &*self.command {
            "convert" | "measure" if has("has no snapshot '") => {
                Some("Failed to load snapshot: Can't find snapshot".to_owned())
            }
            "convert" if has("was not saved by its last writer, and lacks changes") => {
                let name = quoted(text, ": bitmap '")?;
                Some(format!(
                    "Cannot copy inconsistent bitmap '{name}'\nTry --skip-broken-bitmaps, or use 'qemu-img bitmap --remove' to \
                     delete it"
                ))
            }
            "convert" if has("image has no bitmaps") => {
                Some("Source lacks bitmap support".to_owned())
            }
            "serve" => {
                let bitmap = quoted(text, "has no bitmap '");
                let bitmap = bitmap.map(|name| format!("Bitmap '{name}' is not found"));
                let is_missing = has("has no snapshot '");
                bitmap.or(is_missing.then(|| "Failed to load snapshot: Can't find snapshot".into()))
            }
            "snapshot" => self.of_snapshot(text),
            "bitmap" => self.of_bitmap(text),
            "resize" => of_resize(text),
            "commit" if has(": has no backing file") => {
                Some("Image does not have a backing file".to_owned())
            }
            "commit" if has("no backing file of this name is behind it") => {
                let name = self.words.iter().skip_while(|word| *word != "-b").nth(1)?;
                let (image, _) = text.split_once(": no backing file of this name")?;
                Some(format!("Did not find '{name}' in the backing chain of '{image}'"))
            }
            "amend" => of_amendment(text),
            _ => None,
        }
    }

    fn of_snapshot(&self, text: &str) -> Option<String> {
        if let Some(name) = quoted(text, "has no snapshot '") {
            return Some(if self.has("-a") {
                format!(
                    "Could not apply snapshot '{name}': Failed to load snapshot: No such file or directory"
                )
            } else {
                format!("Could not delete snapshot '{name}': snapshot not found")
            });
        }
        let is_impossible =
            text.contains("image has no snapshots") || text.contains("images can only be read");
        let name = self.words.iter().skip_while(|word| *word != "-c").nth(1);
        name.filter(|_| is_impossible)
            .map(|name| format!("Could not create snapshot '{name}': Operation not supported"))
    }

    fn of_bitmap(&self, text: &str) -> Option<String> {
        let name = self.words.last()?;
        let first = ["remove", "clear", "enable", "disable", "merge"];
        let first = first.into_iter().find(|flag| self.has(&format!("--{flag}")));
        let (operation, why) = if text.contains("is there already") {
            ("add", format!("Bitmap already exists: {name}"))
        } else if text.contains("a bitmap's granularity is a power of two") {
            ("add", "Granularity must be power of 2 and at least 512".to_owned())
        } else if let Some(missing) = quoted(text, "has no bitmap '") {
            (first?, format!("Dirty bitmap '{missing}' not found"))
        } else {
            let (_, sizes) = text.split_once("bitmaps of disks of ")?;
            let (sizes, _) = sizes.split_once(" bytes cannot be merged")?;
            let (target, source) = sizes.split_once(" and ")?;
            let sizes = format!("destination size is {target}, source size is {source}");
            ("merge", format!("Bitmaps are of different sizes ({sizes}) and can't be merged"))
        };
        Some(format!("Operation {operation} on bitmap {name} failed: {why}"))
    }
}

/// The options, or the JSON, that name no image, and QEMU's reason.
fn of_options(text: &str) -> Option<(&str, String)> {
    if let Some((name, why)) = text.split_once(": there is no format '") {
        let (format, _) = why.split_once('\'')?;
        return Some((name, format!("Unknown driver '{format}'")));
    }
    if let Some((name, _)) = text.split_once(": which file is missing") {
        return Some((name, "A block device must be specified for \"file\"".to_owned()));
    }
    let (name, why) = text.split_once(": no JSON: ")?;
    let why = if why.starts_with("EOF") { "premature EOI" } else { "invalid keyword" };
    Some((name, format!("Could not parse the JSON options: JSON parse error, {why}")))
}

/// The text between `before` and the next quote.
fn quoted<'a>(text: &'a str, before: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(before)?;
    rest.split_once('\'').map(|(name, _)| name)
}

fn of_resize(text: &str) -> Option<String> {
    let said = if text.contains("would become shorter") {
        "Use the --shrink option to perform a shrink operation.\nqemu-img: warning: Shrinking an image will delete all \
         data beyond the shrunken image's end. Before performing such an operation, make sure there is no important data \
         there."
    } else if text.contains("images can only be read") {
        "Image format driver does not support resize"
    } else if text.contains("resizing a block device is not supported here") {
        "Cannot resize device files"
    } else if text.contains(" and cannot lose ") {
        "New image size must be positive"
    } else if text.contains("cannot make a disk with sectors") {
        "The new size must be a multiple of 512"
    } else {
        return None;
    };
    Some(said.to_owned())
}

fn of_amendment(text: &str) -> Option<String> {
    if let Some((secret, _)) = text.split_once(" is of a key to ") {
        let doing = if secret == "old-secret" { "activating" } else { "erasing" };
        return Some(format!("'{secret}' must not be given when {doing} keyslots"));
    }
    const OF_CREATION: [&str; 5] =
        ["cluster_size", "preallocation", "extended_l2", "compression_type", "nocow"];
    if text.contains("gives it another backing file") {
        let said = "Cannot amend the backing file\nYou can use 'qemu-img rebase' instead.";
        return Some(said.to_owned());
    }
    if let Some((before, _)) = text.split_once(" image has no options that can be changed") {
        let format = before.rsplit(' ').next()?;
        return Some(format!("Format driver '{format}' does not support option amendment"));
    }
    let (before, _) = text.split_once(" cannot change in place")?;
    match before.rsplit(' ').next()? {
        "data_file" => {
            let said = "data-file can only be set for images that use an external data file";
            Some(said.to_owned())
        }
        name if OF_CREATION.contains(&name) => Some(format!(
            "Invalid parameter '{name}'\nThis option is only supported for image creation"
        )),
        _ => None,
    }
}

/// The text of an error of a file below the first one of a chain, before the names of the files.
const BEHIND: &str = "cannot open what is behind ";

/// Whether the error is one of a file below the first one of a chain, or of the whole chain.
pub fn is_of_chain(error: &Error) -> bool {
    let text = error.to_string();
    text.contains(BEHIND) || text.contains("the backing files form a loop")
}

/// This program's texts, and QEMU's texts for the same error.
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
    ("is no LUKS container", "Volume is not in LUKS format"),
];

fn same(text: &str) -> Option<&'static str> {
    SAME.iter().find(|(ours, _)| text.contains(ours)).map(|(_, theirs)| *theirs)
}

/// The message of QEMU for unknown features: their names from the image, and the bits of the
/// features without a name.
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

/// This program's reasons why an image cannot be created, and qemu-img's texts for the same
/// reasons.
const CREATION: &[(&str, &str)] = &[
    (
        "has refcounts of 16 bits",
        "Different refcount widths than 16 bits require compatibility level 1.1 or above (use version=v3 or greater)",
    ),
    (
        "the disk is too large for clusters of this size",
        "The image size is too large for file format 'qcow2' (try using a larger cluster size)",
    ),
    (
        "compresses with zlib only",
        "Non-zlib compression type is only supported with compatibility level 1.1 and above (use version=v3 or greater)",
    ),
    (
        "has neither lazy refcounts nor subclusters",
        "Lazy refcounts only supported with compatibility level 1.1 and above (use version=v3 or greater)",
    ),
    (
        "subclusters need clusters of 16 KiB or more",
        "Extended L2 entries are only supported with cluster sizes of at least 16384 bytes",
    ),
];

/// qemu-img's reason why an image cannot be created.
fn of_creation(text: &str) -> Option<&'static str> {
    CREATION.iter().find(|(ours, _)| text.contains(ours)).map(|(_, theirs)| *theirs)
}

/// QEMU's reason why a file cannot be opened.
fn reason(error: &Error, to_write: bool) -> Option<String> {
    const ENOENT: i32 = 2;
    const EACCES: i32 = 13;
    let (path, text) = (error.path()?, error.to_string());
    let name = path.strip_suffix(".part").unwrap_or(path);
    if let Some(features) = unknown_features(&text) {
        return Some(features);
    }
    if let Some((_, why)) = text.split_once("cannot connect: ") {
        let (why, _) = why.split_once(" (os error").unwrap_or((why, ""));
        return Some(format!("Failed to connect to '{}': {why}", server_of(path)));
    }
    if text.contains("this is a directory, pipe or device") {
        return Some(format!("'file' driver requires '{path}' to be a regular file"));
    }
    if text.contains("is encrypted, and no key was named") {
        let qcow2 = std::fs::File::open(path).is_ok_and(|file| {
            let mut magic = [0; 4];
            std::io::Read::read_exact(&mut &file, &mut magic).is_ok() && magic == *b"QFI\xfb"
        });
        let parameter = if qcow2 { "encrypt.key-secret" } else { "key-secret" };
        return Some(format!("Parameter '{parameter}' is required for cipher"));
    }
    match error.kind() {
        ErrorKind::Locked => {
            let lock = if to_write { "\"write\" lock" } else { "shared \"write\" lock" };
            Some(format!("Failed to get {lock}\nIs another process using the image [{name}]?"))
        }
        _ if error.errno() == ENOENT => {
            Some(format!("Could not open '{name}': No such file or directory"))
        }
        _ if error.errno() == EACCES => Some(format!("Could not open '{name}': Permission denied")),
        _ => same(&text).map(str::to_owned),
    }
}

/// The socket or the host and port of an export's URI.
fn server_of(uri: &str) -> String {
    if let Some((_, socket)) = uri.split_once("socket=") {
        return socket.split('&').next().unwrap_or(socket).to_owned();
    }
    let rest = uri.split_once("://").map_or(uri, |(_, rest)| rest);
    let server = rest.split('/').next().unwrap_or(rest);
    let has_port = server.rsplit(']').next().is_some_and(|end| end.contains(':'));
    if has_port { server.to_owned() } else { format!("{server}:10809") }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    fn said(line: &str, error: impl Into<anyhow::Error>) -> String {
        let words: Vec<_> = line.split(' ').map(str::to_owned).collect();
        let command = command_of(&words).to_owned();
        let said = Typed { words, command }.said_of(&error.into());
        said.map(|words| words.text).unwrap_or_default()
    }

    #[test]
    fn errors_have_the_words_that_scripts_look_for() {
        let missing = || Error::host("cannot open", std::io::Error::from_raw_os_error(2)).on("a");
        let locked = || Error::new(ErrorKind::Locked, "is in use").on("a");
        let refused = Error::host("cannot connect", std::io::Error::from_raw_os_error(111));
        assert_eq!(
            said("qemu-img info nbd://h/x", refused.on("nbd://h/x")),
            "Could not open 'nbd://h/x': Failed to connect to 'h:10809': Connection refused"
        );
        for (line, error, words) in [
            ("qemu-img resize a 1M", locked(), "Failed to get \"write\" lock\nIs another"),
            ("qemu-img info a", locked(), "shared \"write\" lock"),
            ("qemu-img info a", missing(), "Could not open 'a': Could not open 'a': No such"),
            ("qemu-img create -f raw a 1M", missing(), "a: Could not create 'a': No such"),
            (
                "qemu-img convert -O raw b a",
                missing(),
                "a: error while converting raw: Could not create 'a': No such",
            ),
        ] {
            let said = said(line, error);
            assert!(said.contains(words), "{line}: {said}");
        }
        assert_eq!(said("qemu-img info a", Error::new(ErrorKind::NoSpace, "full").on("a")), "");
    }

    #[test]
    fn commands_have_words_of_their_own() {
        for (line, error, words) in [
            (
                "qemu-img bitmap --add a b",
                "a: the bitmap 'b' is there already",
                "Operation add on bitmap b failed: Bitmap already exists: b",
            ),
            (
                "qemu-img bitmap --remove a b",
                "a: has no bitmap 'b'",
                "Operation remove on bitmap b failed: Dirty bitmap 'b' not found",
            ),
            (
                "qemu-img snapshot -d s a",
                "a: has no snapshot 's'",
                "Could not delete snapshot 's': snapshot not found",
            ),
            (
                "qemu-img commit a",
                "a: has no backing file; name an overlay",
                "Image does not have a backing file",
            ),
            (
                "qemu-img amend -o cluster_size=4k a",
                "a: cluster_size cannot change in place",
                "Invalid parameter 'cluster_size'\nThis option is only supported for image creation",
            ),
        ] {
            assert_eq!(said(line, anyhow::anyhow!(error)), words, "{line}");
        }
        let locked = |doing: &str| {
            let what = "cannot open what is behind a: b: the image is locked: process 1 is ";
            Error::new(ErrorKind::Locked, format!("{what}{doing}"))
        };
        let words = "Failed to get shared \"write\" lock\nIs another process using the image [b]?";
        for line in ["qemu-img commit a", "qemu-img convert -O raw a c", "qemu-img check a"] {
            let behind = format!("Could not open 'a': Could not open backing file: {words}");
            assert_eq!(said(line, locked("writing to it")), behind, "{line}");
        }
        for (chain, count) in [
            ("a -> b", 1),
            ("a: cannot open what is behind c -> b", 2),
            ("a -> c -> (3 more) -> d -> b", 6),
        ] {
            let what = format!("cannot open what is behind {chain}: b: not a qcow2 image");
            let behind = "Could not open backing file: ".repeat(count);
            assert_eq!(
                said("qemu-img check a", Error::new(ErrorKind::Corrupt, what)),
                format!("Could not open 'a': {behind}Image is not in qcow2 format")
            );
        }
        assert_eq!(
            said("qemu-img commit a", locked("keeping others from writing to it")),
            "Failed to get \"write\" lock\nIs another process using the image [b]?"
        );
        let behind = Error::new(
            ErrorKind::InvalidInput,
            "cannot open what is behind a -> b: c: cannot open: No such file or directory (os error 2)",
        );
        assert_eq!(
            said("qemu-img check a", behind),
            "Could not open 'a': Could not open backing file: Could not open backing file: Could not open 'c': No such \
             file or directory"
        );
    }
}
