//! Long options that qemu-img of QEMU 10 has beside its short ones, for callers of that name. They
//! become the short ones, because some have the names of other options of this program.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// A command, its long option, and the short one with the same meaning.
const OPTIONS: [(&str, &str, &str); 31] = [
    ("amend", "--cache", "-t"),
    ("bench", "--cache", "-t"),
    ("check", "--cache", "-T"),
    ("commit", "--cache", "-t"),
    ("commit", "--drop", "-d"),
    ("commit", "--rate", "-r"),
    ("compare", "--a-format", "-f"),
    ("compare", "--b-format", "-F"),
    ("compare", "--cache", "-T"),
    ("convert", "--copy-range-offloading", "-C"),
    ("convert", "--oob-writes", "-W"),
    ("convert", "--output-format", "-O"),
    ("convert", "--parallel", "-m"),
    ("convert", "--rate", "-r"),
    ("convert", "--source-cache", "-T"),
    ("convert", "--source-image-opts", "--image-opts"),
    ("convert", "--source-snapshot", "-l"),
    ("convert", "--target-cache", "-t"),
    ("convert", "--target-format", "-O"),
    ("convert", "--target-options", "-o"),
    ("create", "--backing-unsafe", "-u"),
    ("dd", "--output-format", "-O"),
    ("rebase", "--backing-cache", "-T"),
    ("rebase", "--backing-unsafe", "-u"),
    ("rebase", "--cache", "-t"),
    ("rebase", "--force-share", "-U"),
    ("snapshot", "--apply", "-a"),
    ("snapshot", "--create", "-c"),
    ("snapshot", "--delete", "-d"),
    ("snapshot", "--force-share", "-U"),
    ("snapshot", "--list", "-l"),
];

/// The command line of `command` with short options in place of these long ones. `--NAME=VALUE`
/// becomes two words.
pub fn shortened(command: &str, words: &[OsString]) -> Vec<OsString> {
    let of_command: Vec<_> = OPTIONS.iter().filter(|(of, ..)| command == *of).collect();
    let mut are_options = true;
    let shorten = |word: &OsString| {
        are_options &= *word != *"--";
        let bytes = word.as_bytes();
        let end = bytes.iter().position(|byte| *byte == b'=').unwrap_or(bytes.len());
        let long = of_command.iter().find(|(_, long, _)| long.as_bytes() == &bytes[..end]);
        let Some((_, _, short)) = long.filter(|_| are_options) else { return vec![word.clone()] };
        let value = bytes.get(end + 1..).map(|value| OsString::from_vec(value.to_vec()));
        [Some(OsString::from(short)), value].into_iter().flatten().collect()
    };
    words.iter().flat_map(shorten).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shortened_line(command: &str, line: &str) -> String {
        let words: Vec<_> = line.split(' ').map(OsString::from).collect();
        let words = shortened(command, &words);
        words.join(" ".as_ref()).into_string().expect("a text")
    }

    #[test]
    fn long_options_of_a_command_become_short() {
        for (command, line, expected) in [
            ("convert", "convert --parallel 4 --target-format=raw a", "convert -m 4 -O raw a"),
            ("commit", "commit --drop --cache=none a", "commit -d -t none a"),
            ("check", "-T x check --cache none a", "-T x check -T none a"),
            ("info", "info --cache none", "info --cache none"),
            ("snapshot", "snapshot --create= -- --list", "snapshot -c  -- --list"),
        ] {
            assert_eq!(shortened_line(command, line), expected);
        }
    }
}
