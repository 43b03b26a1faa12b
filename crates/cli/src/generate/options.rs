//! The option reference in Markdown: every command with its arguments, options, defaults and
//! examples.

use clap::{Arg, Command};

use crate::examples::{self, Example, join};

/// Columns of a line of text.
const WIDTH: usize = 110;

/// The page. `command` is built.
pub(super) fn reference(command: &Command) -> String {
    let mut page = String::from(
        "# Options\n\n\
         Every command with its arguments and options, as `--help` has them. This page is made from the definition of the\n\
         command line.\n",
    );
    add(command, "", &mut page);
    page
}

fn add(command: &Command, path: &str, page: &mut String) {
    let title = format!("blockhouse {path}");
    page.push_str(&format!("\n## {}\n\n", title.trim_end()));
    let about = command.get_long_about().or(command.get_about());
    page.push_str(&paragraphs(&about.map(ToString::to_string).unwrap_or_default(), ""));
    let usage = command.clone().render_usage().to_string();
    page.push_str(&format!(
        "\n    {}\n",
        usage.trim_start_matches("Usage: ").replace('\n', "\n    ")
    ));
    let is_root = path.is_empty();
    let is_told = |argument: &&Arg| {
        let is_everywhere =
            ["help", "version", "verbose", "quiet"].contains(&argument.get_id().as_str());
        !argument.is_hide_set() && (is_root || !is_everywhere)
    };
    let told: Vec<_> = command.get_arguments().filter(is_told).collect();
    let (arguments, options): (Vec<&Arg>, Vec<&Arg>) =
        told.into_iter().partition(|argument| argument.is_positional());
    for argument in arguments.into_iter().chain(options) {
        page.push('\n');
        page.push_str(&item(argument));
    }
    let examples = examples::of(path);
    if !examples.is_empty() {
        page.push_str("\n```sh\n");
        for Example { purpose, line } in examples {
            page.push_str(&format!("# {purpose}\n{line}\n"));
        }
        page.push_str("```\n");
    }
    for command in command.get_subcommands().filter(|command| !command.is_hide_set()) {
        add(command, &join(path, command.get_name()), page);
    }
}

/// An argument, its meaning, and its default.
fn item(argument: &Arg) -> String {
    let help = argument.get_long_help().or(argument.get_help());
    let mut text = help.map(ToString::to_string).unwrap_or_default();
    let mut more = Vec::new();
    // The default of a flag is omitted, because it has no information.
    if argument.get_action().takes_values() {
        let defaults = argument.get_default_values().iter().map(|value| value.to_string_lossy());
        let defaults: Vec<_> = defaults.map(|value| format!("`{value}`")).collect();
        let values: Vec<_> = argument.get_possible_values();
        let values: Vec<_> = values.iter().map(|value| format!("`{}`", value.get_name())).collect();
        for (title, list) in [("One of", values), ("Default", defaults)] {
            if !list.is_empty() {
                more.push(format!("{title}: {}.", list.join(", ")));
            }
        }
    }
    if !more.is_empty() {
        text.push_str(&format!("\n\n{}", more.join(" ")));
    }
    format!("- `{}`\n{}", name(argument), paragraphs(&text, "  "))
}

/// The argument as the user types it: `-f, --format <FORMAT>`.
fn name(argument: &Arg) -> String {
    let long = argument.to_string();
    match argument.get_short() {
        Some(short) if argument.get_long().is_some() => format!("-{short}, {long}"),
        _ => long,
    }
}

/// Text in lines of at most [`WIDTH`] columns after `indent`, with its empty lines.
fn paragraphs(text: &str, indent: &str) -> String {
    let paragraphs = text.split("\n\n").map(|paragraph| wrap(paragraph, indent));
    paragraphs.collect::<Vec<_>>().join("\n")
}

fn wrap(paragraph: &str, indent: &str) -> String {
    let mut lines = Vec::new();
    let mut line = indent.to_owned();
    for word in paragraph.split_whitespace() {
        let is_first = line.len() == indent.len();
        if !is_first && line.len() + 1 + word.len() > WIDTH {
            lines.push(std::mem::replace(&mut line, indent.to_owned()));
        }
        if line.len() > indent.len() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.push(line);
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_wrapped_and_keeps_its_paragraphs() {
        let long = "word ".repeat(40);
        let text = paragraphs(&format!("{long}\n\nend"), "  ");
        assert!(text.lines().all(|line| line.len() <= WIDTH), "{text}");
        assert!(text.ends_with("word\n\n  end\n"), "{text}");
        assert_eq!(text.matches("word").count(), 40);
    }
}
