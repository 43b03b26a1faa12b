//! The messages of QEMU's tools about wrong usage. Printed under the tools' names, for scripts that
//! look for these messages.
//!
//! Guarantee: a text of QEMU replaces ours only if QEMU prints that text for the same mistake.

use std::ffi::OsString;

use blockhouse_config::size;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::called_as::{self, Tool};

/// A mistake on the command line.
struct Mistake<'a> {
    /// The command; empty without one.
    command: &'a str,
    /// The argument, such as `--format <FORMAT>`, or the word that is no argument.
    argument: String,
    value: String,
    /// The required arguments that are missing.
    missing: Vec<String>,
    /// The last word of the command line, and the one before it.
    last: &'a str,
    last_but_one: &'a str,
}

/// The message that replaces an error of the parser. Only under the names of QEMU's tools.
pub fn of_error(error: &clap::Error, typed: &[OsString]) -> Option<String> {
    let tool = called_as::tool()?;
    let typed: Vec<_> = typed.iter().map(|word| word.to_str().unwrap_or_default()).collect();
    let said = of(tool, error, &typed)?;
    Some(match said.strip_prefix('\0') {
        Some(with_command) => with_command.to_owned(),
        None => format!("{}: {said}", called_as::own_name()),
    })
}

fn of(tool: Tool, error: &clap::Error, typed: &[&str]) -> Option<String> {
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.clone(),
        Some(ContextValue::Strings(texts)) => texts.join(" "),
        _ => String::new(),
    };
    let last = |index: usize| typed.iter().rev().nth(index).copied().unwrap_or_default();
    let mistake = Mistake {
        command: typed_command(typed),
        argument: text(ContextKind::InvalidArg),
        value: text(ContextKind::InvalidValue),
        missing: match error.get(ContextKind::InvalidArg) {
            Some(ContextValue::Strings(texts)) => texts.clone(),
            _ => Vec::new(),
        },
        last: last(0),
        last_but_one: last(1),
    };
    if tool == Tool::Nbd {
        return mistake.of_server(error.kind());
    }
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let word = text(ContextKind::InvalidSubcommand);
            Some(format!("Command not found: {word}\nTry 'qemu-img --help' for more info"))
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => {
            Some("Not enough arguments\nTry 'qemu-img --help' for more info".to_owned())
        }
        ErrorKind::UnknownArgument => Some(mistake.of_unknown()),
        ErrorKind::MissingRequiredArgument => mistake.of_missing(),
        ErrorKind::ArgumentConflict => mistake.of_conflict(),
        ErrorKind::ValueValidation | ErrorKind::InvalidValue => mistake.of_value(),
        _ => None,
    }
}

/// The command as it was typed: the `bench` of qemu-img is a command of another name here.
fn typed_command<'a>(words: &[&'a str]) -> &'a str {
    let command = called_as::command_of(words);
    let typed = words.iter().find(|word| **word == command).copied().unwrap_or_default();
    typed.strip_prefix("qemu-").filter(|name| *name == "bench").unwrap_or(typed)
}

impl Mistake<'_> {
    /// Adds the line that names `--help`, as QEMU does.
    fn with_try(&self, what: &str) -> String {
        let command = if self.command.is_empty() { "" } else { " " };
        format!("{what}\nTry 'qemu-img{command}{} --help' for more info", self.command)
    }

    fn of_server(&self, kind: ErrorKind) -> Option<String> {
        let (value, argument) = (&self.value, &*self.argument);
        let option = argument.split(' ').next().unwrap_or_default();
        let what = match (kind, option) {
            (ErrorKind::UnknownArgument, _) => {
                let what = unknown_option(argument)?;
                return Some(format!(
                    "{what}\nqemu-nbd: Try `qemu-nbd --help' for more information."
                ));
            }
            (ErrorKind::MissingRequiredArgument, _) => "Invalid number of arguments".to_owned(),
            (_, "--description") => {
                return Some(format!("export description '{value}' too long"));
            }
            (_, "--format") => {
                let image = self.last;
                return Some(format!("Failed to blk_new_open '{image}': Unknown driver '{value}'"));
            }
            (_, "--cache") => return Some(format!("Invalid cache mode `{value}'")),
            (_, "--aio") => return Some(format!("Invalid aio mode '{value}'")),
            (_, "--discard") => return Some(format!("Invalid discard mode `{value}'")),
            (_, "--shared") => return Some(format!("Invalid shared device number '{value}'")),
            (_, "--detect-zeroes") => {
                let why = format!("invalid parameter value: {value}");
                return Some(format!("Failed to parse detect_zeroes mode: {why}"));
            }
            _ => return None,
        };
        Some(format!("{what}\nTry `qemu-nbd --help' for more information."))
    }

    /// The message for an unknown option, or for a surplus word.
    fn of_unknown(&self) -> String {
        let Some(what) = unknown_option(&self.argument) else {
            return match self.command {
                "create" => self.with_try(&format!("Unexpected argument: {}", self.argument)),
                "resize" => self.with_try("Extra argument(s) in command line"),
                _ => self
                    .of_images()
                    .unwrap_or_else(|| format!("unexpected argument: {}", self.argument)),
            };
        };
        // The message begins with the name of the command instead of the program's name.
        let program = match self.command {
            "" => "qemu-img".to_owned(),
            "qemu-storage-daemon" => self.command.to_owned(),
            command => format!("qemu-img {command}"),
        };
        format!("\0{}", self.with_try(&format!("{program}: {what}")))
    }

    /// The message for missing images of a command.
    fn of_images(&self) -> Option<String> {
        Some(match self.command {
            "info" | "map" | "check" | "snapshot" | "rebase" | "amend" | "commit" | "bench" => {
                self.with_try("Expecting one image file name")
            }
            "compare" => self.with_try("Expecting two image file names"),
            "resize" => self.with_try("Expecting image file name and size"),
            "bitmap" => "Expecting filename and bitmap name".to_owned(),
            "convert" => "Must specify image file name".to_owned(),
            "measure" => "Either --size N or one filename must be specified.".to_owned(),
            "dd" => "Must specify both input and output files".to_owned(),
            _ => return None,
        })
    }

    fn of_missing(&self) -> Option<String> {
        let is_missing = |name: &str| self.missing.iter().any(|one| one.contains(name));
        if is_missing("--no-create") {
            return Some("--target-is-zero requires use of -n flag".to_owned());
        }
        if is_missing("--bitmaps") {
            return Some("Use of --skip-broken-bitmaps requires --bitmaps".to_owned());
        }
        if self.command == "amend" && is_missing("--options") {
            return Some(self.with_try("Must specify options (-o)"));
        }
        if self.command == "bitmap" && is_missing("--add") {
            let flags = "--add, --remove, --clear, --enable, --disable, or --merge";
            return Some(format!("Need at least one of {flags}"));
        }
        self.of_images()
    }

    fn of_conflict(&self) -> Option<String> {
        let is_of = |name: &str| self.argument.contains(name);
        match self.command {
            "snapshot" => Some(self.with_try("Cannot mix '-l', '-a', '-c', '-d'")),
            "measure" if is_of("--size") => {
                Some("--size N cannot be used together with a filename.".to_owned())
            }
            "check" | "bench"
                if ["--force-share", "--repair", "--write"].into_iter().any(is_of) =>
            {
                let image = self.last;
                let why = "force-share=on can only be used with read-only images";
                Some(format!("Could not open '{image}': {why}"))
            }
            "convert" if is_of("--no-create") || is_of("--options") => {
                Some("-o has no effect when skipping image creation".to_owned())
            }
            _ => None,
        }
    }

    fn of_value(&self) -> Option<String> {
        let (value, command) = (&*self.value, self.command);
        let unknown = |image: &str| format!("Could not open '{image}': Unknown driver '{value}'");
        let argument = self.argument.split([' ', '<', '[', '.']).find(|word| !word.is_empty())?;
        Some(match argument.trim_end_matches([']', '>']) {
            "--format" if ["create", "amend"].contains(&command) && self.last_but_one == "-o" => {
                // No image is named: the options of the format are asked for.
                format!("Unknown file format '{value}'")
            }
            "--source-format" if command == "dd" => {
                let operands = [self.last_but_one, self.last];
                unknown(operands.iter().find_map(|word| word.strip_prefix("if=")).unwrap_or(""))
            }
            "--format" if ["resize", "bitmap"].contains(&command) => unknown(self.last_but_one),
            "--format" | "--target-format" => match command {
                "create" => {
                    let image = if size::parse(self.last).is_ok() { self.last_but_one } else { self.last };
                    format!("{image}: Unknown file format '{value}'")
                }
                "convert" | "measure" => format!("Unknown file format '{value}'"),
                "dd" => "Unknown file format".to_owned(),
                _ => unknown(self.last),
            },
            "--source-format" => unknown(self.last_but_one),
            "--backing-format" if command == "rebase" => format!("Invalid format name: '{value}'"),
            "--backing-format" if command == "create" => {
                format!("{}: Unknown driver '{value}'\nCould not open backing image.", self.last)
            }
            "SIZE" if command == "resize" => {
                "Parameter 'size' expects a non-negative number below 2^64\nOptional suffix k, M, G, T, P or E means \
                 kilo-, mega-, giga-, tera-, peta-\nand exabytes, respectively."
                    .to_owned()
            }
            "SIZE" | "--size" => of_size(value),
            "--cache" => format!("Invalid cache option: {value}"),
            "-T" => format!("Invalid source cache option: {value}"),
            "--rate-limit" => format!("Invalid rate limit specified: '{value}'."),
            "--sparse-size" => {
                format!("Invalid buffer size for sparse output specified: '{value}'.")
            }
            "--output" => {
                self.with_try(&format!("--output expects 'human' or 'json' not '{value}'"))
            }
            "--repair" => {
                self.with_try(&format!("--repair (-r) expects 'leaks' or 'all' not '{value}'"))
            }
            "--preallocation" => format!("Invalid preallocation mode '{value}'"),
            "--object" => of_object(value)?,
            "OPERAND=VALUE" => of_operand(value)?,
            _ => return None,
        })
    }
}

/// The message of getopt(3) for an unknown option; `None` if `argument` is no option.
fn unknown_option(argument: &str) -> Option<String> {
    match argument.strip_prefix('-')? {
        long if long.starts_with('-') => Some(format!("unrecognized option '{argument}'")),
        short => Some(format!("invalid option -- '{}'", short.chars().next()?)),
    }
}

/// The message for a text that is no number of bytes.
fn of_size(value: &str) -> String {
    let number = value.trim_end_matches(['k', 'K', 'M', 'G', 'T', 'P', 'E']);
    // QEMU takes a fraction only with a unit, and no exponent.
    let is_part_of_byte = number.contains('.') && number == value;
    let is_number = number.parse::<f64>().is_ok() && !number.contains(['e', 'E']);
    if is_number && !is_part_of_byte {
        format!("Invalid image size specified. Must be between 0 and {}.", i64::MAX)
    } else {
        format!("Invalid image size specified: '{value}'.")
    }
}

fn of_operand(operand: &str) -> Option<String> {
    const MAX_BLOCK: i32 = i32::MAX;
    let (name, value) = operand.split_once('=')?;
    Some(match (name, value) {
        ("bs", "0") => format!("Invalid bs specified. Must be between 1 and {MAX_BLOCK}."),
        ("bs" | "count" | "skip" | "isize", value) => {
            format!("Invalid {name} specified: '{value}'.")
        }
        _ => format!("unrecognized operand {name}"),
    })
}

fn of_object(text: &str) -> Option<String> {
    match text.strip_prefix("secret") {
        Some(rest) if !rest.contains(",file=") && !rest.contains(",data=") => {
            Some("Either 'file' or 'data' must be provided".to_owned())
        }
        Some(_) => None,
        None => {
            let kind = text.split(',').next()?;
            Some(format!("Parameter 'qom-type' does not accept value '{kind}'"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(line: &str) -> String {
        let typed: Vec<&str> = line.split(' ').collect();
        let error = crate::command().try_get_matches_from(&typed).expect_err("wrong usage");
        of(Tool::Img, &error, &typed).unwrap_or_default().replace('\0', "")
    }

    #[test]
    fn wrong_usage_has_the_words_of_qemu_img() {
        for (line, words) in [
            (
                "qemu-img info",
                "Expecting one image file name\nTry 'qemu-img info --help' for more info",
            ),
            ("qemu-img info --nope a", "qemu-img info: unrecognized option '--nope'"),
            ("qemu-img convert -s x a b", "qemu-img convert: invalid option -- 's'"),
            ("qemu-img nope", "Command not found: nope"),
            ("qemu-img qemu-bench -z a", "qemu-img bench: invalid option -- 'z'"),
            ("qemu-img qemu-bench", "Expecting one image file name"),
            ("qemu-img create -f nope a.img 1M", "a.img: Unknown file format 'nope'"),
            ("qemu-img info -f nope a.img", "Could not open 'a.img': Unknown driver 'nope'"),
            ("qemu-img convert -f nope a b", "Could not open 'a': Unknown driver 'nope'"),
            ("qemu-img create -f nope -o help", "Unknown file format 'nope'"),
            ("qemu-img resize -f nope a 1M", "Could not open 'a': Unknown driver 'nope'"),
            ("qemu-img dd -f nope if=a of=b", "Could not open 'a': Unknown driver 'nope'"),
            ("qemu-img create a 1X", "Invalid image size specified: '1X'."),
            ("qemu-img create a 1.5", "Invalid image size specified: '1.5'."),
            ("qemu-img create a 8E", "Must be between 0 and 9223372036854775807."),
            ("qemu-img create a 1M 2M", "Unexpected argument: 2M"),
            ("qemu-img resize a 1M 2M", "Extra argument(s) in command line"),
            ("qemu-img check -r nope a", "--repair (-r) expects 'leaks' or 'all' not 'nope'"),
            ("qemu-img snapshot -l -c x a", "Cannot mix '-l', '-a', '-c', '-d'"),
            ("qemu-img check -r leaks -U a", "Could not open 'a': force-share=on can only be"),
            ("qemu-img bitmap a b", "Need at least one of --add"),
            ("qemu-img dd if=a of=b seek=1", "unrecognized operand seek"),
            ("qemu-img convert -t nope a b", "Invalid cache option: nope"),
        ] {
            assert!(said(line).contains(words), "{line}: {}", said(line));
        }
    }
}
