//! Commands and options of other programs that this command line does not have. The error of wrong
//! usage names this program's own spelling.

use std::num::ParseIntError;

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// A command, what was typed after it, and what to type.
type Habit = (&'static str, &'static [&'static str], &'static str);

/// Commands that this program does not have.
const COMMANDS: &[(&str, &str)] = &[
    ("connect", "'blockhouse attach IMAGE' makes a block device of an image"),
    ("start", "'blockhouse serve IMAGE' serves it, with --fork in the background"),
    ("run", "'blockhouse serve IMAGE' serves it, with --fork in the background"),
    ("stop", "Ctrl-C or SIGTERM stops a server: 'kill PROCESS', or 'systemctl stop UNIT'"),
    (
        "status",
        "'blockhouse ctl SOCKET exports' or 'blockhouse top SOCKET', of a server with --control",
    ),
    (
        "list",
        "'blockhouse ctl SOCKET disks', of a server with --control, or 'blockhouse snapshot list IMAGE'",
    ),
];

/// Options that this program does not have.
const OPTIONS: &[Habit] = &[("serve", &["--tls-authz"], "--tls-allow EXPORT=NAME")];

/// Adds the right spelling to an error of usage.
pub fn explain(error: clap::Error, arguments: &[String]) -> clap::Error {
    match plain_reason(&error, arguments) {
        Some((kind, why)) => {
            clap::Error::raw(kind, format!("{why}\n\nFor more information, try '--help'.\n"))
        }
        None => explain_habit(error, arguments),
    }
}

/// A message that replaces the parser's message, for digits and for a word that is no command.
fn plain_reason(error: &clap::Error, arguments: &[String]) -> Option<(ErrorKind, String)> {
    let context = |kind| error.get(kind).map(ToString::to_string);
    match error.kind() {
        ErrorKind::ValueValidation => {
            let source = std::error::Error::source(error)?;
            source.downcast_ref::<std::num::ParseIntError>()?;
            let (value, option) =
                (context(ContextKind::InvalidValue)?, context(ContextKind::InvalidArg)?);
            let why =
                format!("invalid value '{value}' for '{option}': write a whole number, like 4");
            Some((ErrorKind::ValueValidation, why))
        }
        ErrorKind::ArgumentConflict => {
            // In 'snapshot WORD IMAGE', the parser has treated WORD as the image.
            let image = context(ContextKind::InvalidSubcommand)?;
            let at = arguments.iter().position(|word| *word == image)?;
            no_command(arguments, arguments.get(at.checked_sub(1)?)?)
        }
        ErrorKind::UnknownArgument => no_command(arguments, &context(ContextKind::InvalidArg)?),
        _ => None,
    }
}

/// The message that a word is no command, if the last command that was typed requires a subcommand.
fn no_command(arguments: &[String], word: &str) -> Option<(ErrorKind, String)> {
    let root = crate::command();
    let (mut command, mut names) = (&root, Vec::new());
    for typed in arguments.iter().skip(1).take_while(|typed| *typed != word) {
        if let Some(found) = command.find_subcommand(typed) {
            command = found;
            names.push(found.get_name());
        }
    }
    let is_expected = command.has_subcommands() && !names.is_empty() && !word.starts_with('-');
    let why = format!(
        "there is no command '{word}' of {names}; 'blockhouse {names} --help' lists those that there are",
        names = names.join(" ")
    );
    is_expected.then_some((ErrorKind::InvalidSubcommand, why))
}

fn explain_habit(error: clap::Error, arguments: &[String]) -> clap::Error {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    let tip = match error.kind() {
        ErrorKind::InvalidSubcommand => context(ContextKind::InvalidSubcommand)
            .and_then(|word| COMMANDS.iter().find(|(name, _)| *name == word).map(|(_, tip)| *tip)),
        ErrorKind::UnknownArgument => {
            context(ContextKind::InvalidArg).and_then(|word| tip_for(arguments, &word))
        }
        _ => None,
    };
    match tip {
        Some(tip) => with_tip(error, tip),
        None => error,
    }
}

fn tip_for(arguments: &[String], option: &str) -> Option<&'static str> {
    let option = option.split('=').next().unwrap_or(option);
    let mut habits = OPTIONS.iter().filter(|(_, options, _)| options.contains(&option));
    let is_typed =
        |command: &str| command.is_empty() || arguments.iter().any(|word| word == command);
    habits.find(|(command, ..)| is_typed(command)).map(|(.., tip)| *tip)
}

fn with_tip(mut error: clap::Error, tip: &str) -> clap::Error {
    let tips = vec![StyledStr::from(tip.to_owned())];
    // Removes the suggestion "a similar argument exists".
    error.remove(ContextKind::SuggestedArg);
    error.remove(ContextKind::SuggestedSubcommand);
    error.remove(ContextKind::TrailingArg);
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
    error
}

/// A number as `strtol` reads it, which ignores leading blanks.
///
/// # Errors
/// The text is no number.
pub fn number(text: &str) -> Result<u32, ParseIntError> {
    text.trim_start().parse()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(line: &str) -> String {
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let error = crate::command().try_get_matches_from(&words).expect_err("wrong usage");
        explain(error, &words).to_string()
    }

    #[test]
    fn habits_are_answered_with_the_right_spelling() {
        for (line, tip) in [
            ("blockhouse serve --tls-authz a disk.img", "--tls-allow"),
            ("blockhouse connect disk.img", "blockhouse attach IMAGE"),
            ("blockhouse start disk.img", "blockhouse serve IMAGE"),
            (
                "blockhouse serve disk.img --workers many",
                "'many' for '--workers <N>': write a whole number",
            ),
            ("blockhouse convert -m many a b", "write a whole number"),
            ("blockhouse snapshot take disk.qcow2", "no command 'take' of snapshot"),
            ("blockhouse ctl control xyzzy", "'blockhouse ctl --help'"),
            ("blockhouse ctl control job m finish", "no command 'finish' of ctl job"),
            ("blockhouse ctl control disks all", "unexpected argument 'all'"),
            ("blockhouse info ctl all", "unexpected argument 'all'"),
        ] {
            let message = message(line);
            assert!(message.contains(tip), "{line}: {message}");
            assert!(!message.contains("similar"), "{line}: {message}");
        }
    }

    #[test]
    fn no_habit_is_an_option_that_is_there() {
        for (name, options, tip) in OPTIONS.iter().filter(|(name, ..)| !name.is_empty()) {
            let command = crate::command();
            let command = command.find_subcommand(name).expect("a command");
            for option in *options {
                let is_option = |argument: &clap::Arg| {
                    let short = argument.get_short_and_visible_aliases().unwrap_or_default();
                    let long = argument.get_long_and_visible_aliases().unwrap_or_default();
                    short.iter().any(|short| *option == format!("-{short}"))
                        || long.iter().any(|long| *option == format!("--{long}"))
                };
                assert!(!command.get_arguments().any(is_option), "{name} {option}: {tip}");
            }
        }
    }
}
