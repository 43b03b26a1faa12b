//! The names of formats that options take. Under the name of a QEMU tool they are QEMU's names
//! alone, because scripts find out by the failure which formats a tool has.

use std::any::TypeId;

use blockhouse_disk::ImageFormat;
use clap::Command;
use clap::builder::ValueParser;

use crate::called_as;

/// The name that this program has for the format `vpc`, by the suffix of such files.
const VHD: &str = "vhd";

/// The command. Under the name of a QEMU tool, its options refuse names of formats that QEMU does
/// not have.
pub fn restrict(command: Command) -> Command {
    if called_as::tool().is_some() { with_qemu_names(command) } else { command }
}

fn with_qemu_names(command: Command) -> Command {
    let format = TypeId::of::<ImageFormat>();
    command.mut_args(|option| {
        if option.get_value_parser().type_id() == format {
            option.value_parser(ValueParser::new(parse_qemu))
        } else {
            option
        }
    })
}

/// Parses the name of a format that is an option's value.
///
/// # Errors
/// The reason why there is no such format.
pub fn parse(name: &str) -> Result<ImageFormat, String> {
    if called_as::tool().is_some() { parse_qemu(name) } else { name.parse() }
}

fn parse_qemu(name: &str) -> Result<ImageFormat, String> {
    if name == VHD {
        return Err(format!("there is no format '{name}': QEMU's name is vpc"));
    }
    name.parse()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_format_has_the_name_that_qemu_has_for_it() {
        let command = crate::command().mut_subcommands(with_qemu_names);
        for line in ["info -f vhd a", "convert -O vhd a b", "dd -f vhd if=a of=b"] {
            let parse = |line: &str| {
                let words = std::iter::once("qemu-img").chain(line.split(' '));
                command.clone().try_get_matches_from(words).map_err(|error| error.kind())
            };
            assert_eq!(parse(line).err(), Some(clap::error::ErrorKind::ValueValidation), "{line}");
            assert!(parse(&line.replace("vhd", "vpc")).is_ok(), "{line}");
        }
        assert_eq!(parse("vhd"), parse("vpc"));
    }
}
