//! `blockhouse __generate FOLDER`: files for packages that are made from the definition of the
//! command line.
//!
//! Guarantee: the files describe exactly the options of this program, because they are made from
//! the definition by which it parses. The files depend on nothing else, so they are the same on
//! each machine. The command is hidden from the help, because it is only for packagers and for
//! `cargo xtask dist`.
//!
//! | file | content |
//! | --- | --- |
//! | `man/blockhouse.1`, `man/blockhouse-serve.1`, ... | a man page for each command |
//! | `completions/blockhouse.bash`, `_blockhouse`, `blockhouse.fish` | completions of shells |
//! | `options.md` | the option reference |
//! | `control.schema.json` | the schema of the control socket |

mod man;
mod options;
mod values;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::builder::Resettable;
use clap::{Arg, Command, Id};
use clap_complete::Shell;

/// The name of the command.
const WORD: &str = "__generate";

/// The folder, if the command line has this command.
pub fn folder(words: impl Iterator<Item = OsString>) -> Option<PathBuf> {
    let words: Vec<_> = words.skip(1).take(3).collect();
    match &words[..] {
        // An option is not taken as the folder; the parser then reports an unknown command.
        [word, folder] if word == WORD && !folder.as_encoded_bytes().starts_with(b"-") => {
            Some(folder.into())
        }
        _ => None,
    }
}

/// Makes all files from `command`. Existing files are replaced.
///
/// # Errors
/// A file cannot be written; the error has its path.
pub fn run(folder: &Path, mut command: Command) -> Result<()> {
    command = command.disable_help_subcommand(true);
    command.build();
    let man = make_folder(folder, "man")?;
    for (name, page) in man::pages(&command)? {
        write(&man.join(name), &page)?;
    }
    let completions = make_folder(folder, "completions")?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let name = match shell {
            Shell::Zsh => "_blockhouse",
            Shell::Fish => "blockhouse.fish",
            _ => "blockhouse.bash",
        };
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut without_hidden(&command), "blockhouse", &mut script);
        write(&completions.join(name), &script)?;
    }
    let schema = format!("{:#}\n", blockhouse_daemon::control::schema());
    write(&folder.join("control.schema.json"), schema.as_bytes())?;
    write(&folder.join("options.md"), options::reference(&command).as_bytes())
}

/// The command without hidden options, which completions would offer. Names live as long as the
/// process, because `Command` requires that.
fn without_hidden(command: &Command) -> Command {
    let name: &'static str = command.get_name().to_owned().leak();
    // clap adds these two arguments to each command again.
    let is_made_anew = |argument: &&Arg| ["help", "version"].contains(&argument.get_id().as_str());
    let shown = |argument: &&Arg| !argument.is_hide_set() && !is_made_anew(argument);
    let mut copy = Command::new(name).disable_help_subcommand(true);
    if command.get_version().is_some() {
        copy = copy.version(env!("CARGO_PKG_VERSION"));
    }
    if let Some(about) = command.get_about() {
        copy = copy.about(about.clone());
    }
    let arguments = command.get_arguments().filter(shown);
    // `required_unless_present` may name a hidden argument, which the copy does not have, so it is
    // reset.
    let complete = |argument| {
        values::complete(argument, command).required_unless_present(Resettable::<Id>::Reset)
    };
    copy.args(arguments.map(complete)).subcommands(command.get_subcommands().map(without_hidden))
}

fn make_folder(base: &Path, name: &str) -> Result<PathBuf> {
    let folder = base.join(name);
    fs::create_dir_all(&folder)
        .with_context(|| format!("{}: cannot make the folder", folder.display()))?;
    Ok(folder)
}

fn write(path: &Path, content: &[u8]) -> Result<()> {
    fs::write(path, content).with_context(|| format!("{}: cannot write", path.display()))
}
