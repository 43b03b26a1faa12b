//! Man pages: one for each command, in section 1.

use anyhow::Result;
use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, italic, roman};

use crate::examples::{self, Example, join};

/// The name and the content of each page. `command` is built.
///
/// # Errors
/// None in practice: pages are written to memory.
pub(super) fn pages(command: &Command) -> Result<Vec<(String, Vec<u8>)>> {
    let mut all = Vec::new();
    add(command, "", &mut all)?;
    let names: Vec<String> = all.iter().map(|(name, _)| name.clone()).collect();
    for (name, page) in &mut all {
        see_also(name, &names).to_writer(page)?;
    }
    Ok(all)
}

fn add(command: &Command, path: &str, all: &mut Vec<(String, Vec<u8>)>) -> Result<()> {
    let man = Man::new(command.clone());
    let mut page = title(&man.get_filename()).into_bytes();
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    exit_status(path).to_writer(&mut page)?;
    examples_of(path).to_writer(&mut page)?;
    all.push((man.get_filename(), page));
    for command in command.get_subcommands() {
        add(command, &join(path, command.get_name()), all)?;
    }
    Ok(())
}

/// The title line. It has no date, so that the page is the same every day.
fn title(filename: &str) -> String {
    let name = filename.trim_end_matches(".1").to_uppercase();
    format!(".TH {name} 1 \"\" \"blockhouse {}\" \"Blockhouse\"\n", env!("CARGO_PKG_VERSION"))
}

fn exit_status(path: &str) -> Roff {
    let rows: &[(&str, &str)] = match path {
        "check" => &[
            ("0", "No errors were found, or all were repaired."),
            ("1", "The check could not be made, or the command line is wrong."),
            ("2", "The image is corrupt."),
            ("3", "The image has leaked clusters, and no other errors."),
            ("63", "The format has nothing to check; as qemu-img: or to repair."),
        ],
        "compare" => &[
            ("0", "The images have the same content."),
            ("1", "They differ."),
            ("2", "An image could not be opened, or the command line is wrong."),
            ("3", "The images could not be compared."),
            ("4", "An image could not be read."),
        ],
        _ => &[
            ("0", "Done."),
            ("1", "Failed: one line on standard error says what, where, why, and what to do."),
            ("2", "The command line is wrong."),
        ],
    };
    let mut roff = Roff::new();
    roff.control("SH", ["EXIT STATUS"]);
    for (status, meaning) in rows {
        roff.control("TP", []);
        roff.text([bold(*status)]);
        roff.text([roman(*meaning)]);
    }
    roff
}

fn examples_of(path: &str) -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", ["EXAMPLES"]);
    for Example { purpose, line } in examples::of(path) {
        roff.control("TP", []);
        roff.text([roman(*purpose)]);
        roff.text([bold(*line)]);
    }
    roff
}

/// The related pages: of the parent command, and of the subcommands.
fn see_also(name: &str, names: &[String]) -> Roff {
    let stem = name.trim_end_matches(".1");
    let parent = stem.rsplit_once('-').map(|(parent, _)| format!("{parent}.1"));
    let below = format!("{stem}-");
    let is_near = |other: &&String| {
        let is_child = |rest: &str| !rest.contains('-');
        Some(*other) == parent.as_ref() || other.strip_prefix(&below).is_some_and(is_child)
    };
    let near = names.iter().filter(is_near).map(|other| other.trim_end_matches(".1"));
    let others = near.chain(["qemu-img", "qemu-nbd"]);
    let mut words: Vec<Inline> = Vec::new();
    for other in others {
        if !words.is_empty() {
            words.push(roman(", "));
        }
        words.extend([italic(other), roman(if other == "qemu-nbd" { "(8)" } else { "(1)" })]);
    }
    let mut roff = Roff::new();
    roff.control("SH", ["SEE ALSO"]);
    roff.text(words);
    roff
}
