//! What users of qemu-img and qemu-nbd type by habit and this command line spells otherwise: wrong usage all the same, and
//! the line says what to type.

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// A command, what was typed after it, and what to type.
type Habit = (&'static str, &'static [&'static str], &'static str);

/// Commands that are not there.
const COMMANDS: &[(&str, &str)] =
    &[("connect", "'blockhouse serve IMAGE', then 'nbd-client -unix SOCKET /dev/nbd0'")];

/// Options that are not there.
const OPTIONS: &[Habit] = &[
    (
        "convert",
        &["--salvage"],
        "without it: what cannot be read ends the copy, and --resume goes on with it",
    ),
    ("convert", &["-C"], "leave it out"),
    ("serve", &["-p", "--port", "-b", "--bind"], "--nbd nbd://ADDRESS:PORT/NAME"),
    ("serve", &["-c", "--connect"], "serve without it, then 'nbd-client -unix SOCKET /dev/nbd0'"),
    ("serve", &["--aio"], "--engine io_uring|linux-aio|threads"),
    ("serve", &["-n", "--nocache"], "--cache none"),
    ("serve", &["--tls-creds", "--tls-authz"], "--tls-certificates DIR or --tls-psk FILE"),
    ("convert", &["--target-image-opts"], "name the target by its path or URI"),
];

/// Adds to an error of usage what to type instead.
pub fn explain(error: clap::Error, arguments: &[String]) -> clap::Error {
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
    // Not "a similar argument exists".
    error.remove(ContextKind::SuggestedArg);
    error.remove(ContextKind::SuggestedSubcommand);
    error.remove(ContextKind::TrailingArg);
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
    error
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
            ("blockhouse convert --salvage a b", "--resume"),
            ("blockhouse serve -p 10810 disk.img", "nbd://ADDRESS:PORT"),
            ("blockhouse serve --aio=native disk.img", "--engine"),
            ("blockhouse connect disk.img", "nbd-client"),
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
