//! The values that completions offer for an option, and the options for which they offer files.
//!
//! Guarantee: each offered word is accepted, because the option's own parser decides. A new value
//! of any option only has to be added to [`WORDS`].

use std::any::TypeId;
use std::path::PathBuf;

use blockhouse_config::user_options::{GroupName, UserName};
use clap::builder::PossibleValuesParser;
use clap::error::ErrorKind;
use clap::{Arg, Command, ValueHint};

/// Words that are values of options.
const WORDS: &[&str] = &[
    "raw",
    "qcow2",
    "luks",
    "vmdk",
    "vdi",
    "vpc",
    "vhdx", // formats
    "none",
    "writeback",
    "writethrough",
    "directsync",
    "unsafe", // cache modes
    "auto",
    "io_uring",
    "linux-aio",
    "threads", // engines
    "unmap",
    "ignore",
    "on",
    "off",
    "leaks",
    "all",
    "metadata",
    "falloc",
    "full",
    "zlib",
    "zstd",
];

/// A word that is not a value of any option. An option that accepts this word accepts any text.
const NO_WORD: &str = "no.such.word";

/// The option of `command` for completions: with the words that the option accepts, or with a hint
/// if there are none.
pub(super) fn complete(argument: &Arg, command: &Command) -> Arg {
    let argument = argument.clone();
    let is_flag = argument.get_num_args().is_some_and(|count| !count.takes_values());
    let is_plain = argument.get_action().takes_values()
        && !is_flag
        && argument.get_possible_values().is_empty();
    let Some(name) = argument.get_long().filter(|_| is_plain) else { return argument };
    let value_names = argument.get_value_names().unwrap_or_default().iter();
    let is_path = argument.get_value_parser().type_id() == TypeId::of::<PathBuf>()
        || value_names.clone().any(|name| name.contains("FILE") || name.contains("PATH"));
    if is_path {
        let is_folder = value_names.clone().any(|name| name.as_str() == "DIR");
        let hint = if is_folder { ValueHint::DirPath } else { ValueHint::AnyPath };
        return argument.value_hint(hint);
    }
    let words: Vec<_> = if is_name_of_this_host(argument.get_value_parser().type_id())
        || accepts(command, name, NO_WORD)
    {
        Vec::new()
    } else {
        WORDS.iter().filter(|word| accepts(command, name, word)).collect()
    };
    if words.is_empty() {
        argument.value_hint(ValueHint::Other)
    } else {
        argument.value_parser(PossibleValuesParser::new(words))
    }
}

/// Whether the values are users or groups, which differ between hosts.
fn is_name_of_this_host(kind: impl PartialEq<TypeId>) -> bool {
    kind == TypeId::of::<UserName>() || kind == TypeId::of::<GroupName>()
}

/// Whether the option accepts the word, even if the command lacks other arguments then.
fn accepts(command: &Command, option: &str, word: &str) -> bool {
    let line = [command.get_name().to_owned(), format!("--{option}={word}")];
    let refusals = [ErrorKind::ValueValidation, ErrorKind::InvalidValue];
    match command.clone().try_get_matches_from(line) {
        Ok(_) => true,
        Err(error) => !refusals.contains(&error.kind()),
    }
}
