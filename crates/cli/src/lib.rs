//! `blockhouse`: disk images for virtual machines.
//!
//! This crate is the command line. `main.rs` only calls this crate. Reason: a library crate can be
//! compiled while the compiler is still optimizing the crates below it. Programs that need disks as
//! a library use the lower crates: `docs/library.md` in the repository lists them, and `examples/`
//! has complete programs.
//!
//! Exit status: 0 done, 1 the operation failed (one line on standard error says what, where, why
//! and what to do), 2 wrong usage, 3 a bitmap lacks changes; for `check` and `compare` those of
//! `qemu-img`.
#![forbid(unsafe_code)]
// `output` prints to standard error, and does not panic if a write fails.
#![warn(clippy::print_stderr)]

mod amend;
mod attach;
mod background;
mod backup;
mod bench;
mod bitmap;
mod block_size_args;
mod called_as;
mod check;
mod check_words;
mod commit;
mod compare;
mod convert;
mod copy_target;
mod create;
mod create_options;
mod create_setting;
mod ctl;
mod dd;
mod deferred;
mod examples;
mod foreign_create;
mod foreign_options;
mod foreign_target;
mod format_names;
mod formatting;
mod generate;
mod habits;
mod hold_args;
mod image_args;
mod image_opts;
mod info;
mod json_text;
mod logging;
mod luks_info;
mod map;
mod measure;
mod open_args;
mod output;
mod parallel;
mod phases;
mod pipe;
mod progress;
mod qemu_bench;
mod qemu_chain;
mod qemu_help;
mod qemu_info;
mod qemu_long_options;
mod qemu_refusals;
mod qemu_usage;
mod qemu_words;
mod rate;
mod rebase;
mod resize;
mod restore;
mod secret_object;
mod serve;
mod side_file_args;
mod snapshot;
mod snapshot_list;
mod snapshot_name;
mod storage_daemon;
mod tls_object;
mod top;
mod unfinished;
mod upgrade;
mod version;
mod vmdk_copy;
mod vmdk_files;
mod vmstate;

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::sync::Arc;

use blockhouse_core::{Error, ErrorKind};
use blockhouse_daemon::control::{LACKS_CHANGES as LACKS_CHANGES_CODE, RpcError};

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use deferred::Deferred;
use logging::{Delivery, LogFormat};
use tracing::Level;
use version::VERSION;

/// Serve and manage the disk images of virtual machines.
#[derive(Parser)]
#[command(name = "blockhouse", version = VERSION, about, max_term_width = 100)]
struct Arguments {
    /// Say more on standard error and in the ready lines.
    #[arg(short, long, global = true, display_order = 900, action = clap::ArgAction::Count)]
    verbose: u8,
    /// The format of messages on standard error: text, or json, one object a line with time, level,
    /// target, message and fields. A server's text messages begin with the time; systemd's journal
    /// gets them with their fields instead.
    #[arg(
        long,
        global = true,
        display_order = 902,
        value_enum,
        default_value = "text",
        value_name = "FORMAT",
        hide_possible_values = true
    )]
    log_format: LogFormat,

    /// Print errors and requested output only: no progress, and no result that the exit status also
    /// gives.
    #[arg(short, long, global = true, display_order = 901)]
    quiet: bool,

    /// For qemu-img's users; no effect, because there are no trace events here.
    #[arg(short = 'T', long, hide = true, value_name = "PATTERN")]
    trace: Option<String>,

    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure the gain of each optimization on this machine.
    Bench(Deferred<bench::Arguments>),
    /// Serve images to virtual machines and tools until SIGTERM or SIGINT.
    Serve(Deferred<Box<serve::Arguments>>),
    /// Make an image a block device of this host, served in the background.
    Attach(Deferred<attach::AttachArguments>),
    /// Remove a block device that 'attach' has made.
    Detach(Deferred<attach::DetachArguments>),
    /// Create a new image.
    Create(Deferred<create::Arguments>),
    /// Copy an image into another format.
    Convert(Deferred<convert::Arguments>),
    /// Copy a part of an image, as dd does.
    Dd(Deferred<dd::Arguments>),
    /// Tell whether two images have the same content.
    Compare(Deferred<compare::Arguments>),
    /// Look for errors in an image.
    Check(Deferred<check::Arguments>),
    /// Show the properties of an image and how it would be served.
    Info(Deferred<info::Arguments>),
    /// Show which parts of an image have data, and where.
    Map(Deferred<map::Arguments>),
    /// Show how long the file of a new image would be.
    Measure(Deferred<measure::Arguments>),
    /// Make an image longer or shorter.
    Resize(Deferred<resize::Arguments>),
    /// Change options of an image in place.
    Amend(Deferred<amend::Arguments>),
    /// Write an image's data into its backing file.
    Commit(Deferred<commit::Arguments>),
    /// Give an image another backing file.
    Rebase(Deferred<rebase::Arguments>),
    /// List, take, apply, delete and rename the snapshots inside an image.
    Snapshot(Deferred<snapshot::Arguments>),
    /// List, add, remove, clear, enable, disable and merge the bitmaps of changes inside an image.
    Bitmap(Deferred<bitmap::Arguments>),
    /// Copy a disk, or its changes, to a qcow2 image.
    Backup(Deferred<backup::Arguments>),
    /// Copy a backup, with its backing files, to a disk, and compare the two.
    Restore(Deferred<restore::Arguments>),
    /// Control a running server: show and change its disks, exports and jobs.
    Ctl(Deferred<Box<ctl::Arguments>>),
    /// Show the activity of a running server, live in the terminal.
    Top(Deferred<top::Arguments>),
    /// Hand a server's disks and clients over to another process, for example a newer version.
    Upgrade(Deferred<upgrade::Arguments>),
    /// Store a VM's state in a snapshot, or load it from one.
    Vmstate(Deferred<vmstate::Arguments>),
    /// Send requests to an image, and measure their time: 'qemu-img bench'.
    #[command(hide = true)]
    QemuBench(Deferred<qemu_bench::Arguments>),
    /// Serve images by the options and commands of qemu-storage-daemon.
    QemuStorageDaemon(Deferred<storage_daemon::Arguments>),
}

/// The complete definition of the command line, with groups of options and examples.
fn command() -> clap::Command {
    let command = examples::add_to(serve::groups::apply(deferred::at_once(Arguments::command)));
    if !called_as::is_qemu_nbd() {
        return command;
    }
    // Scripts look for the options of qemu-nbd in its help.
    command.mut_subcommand("serve", |serve| serve.mut_args(|option| option.hide(false)))
}

/// Under the name of a QEMU tool, the last one of repeated options counts, as in that tool.
fn with_habits(command: clap::Command) -> clap::Command {
    command.args_override_self(called_as::tool().is_some())
}

fn parse() -> Result<Arguments, clap::Error> {
    let words = called_as::words();
    let mut command = with_habits(Arguments::command());
    let matches = command.try_get_matches_from_mut(&words).or_else(|_| {
        // Help and errors are printed from the definition with all options and examples.
        command = with_habits(self::command());
        command.try_get_matches_from_mut(&words)
    });
    let matches = matches.map_err(|error| {
        let words: Vec<_> = words.iter().map(|word| word.to_string_lossy().into()).collect();
        habits::explain(error, &words)
    })?;
    Arguments::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

/// Carries out the command line of this process, and returns its exit status.
pub fn run() -> ExitCode {
    if let Some(folder) = generate::folder(std::env::args_os()) {
        return finish(generate::run(&folder, command()).map(|()| ExitCode::SUCCESS));
    }
    if std::env::args_os().nth(1).is_some_and(|word| word == blockhouse_daemon::LAUNCH_WORD) {
        return finish(blockhouse_daemon::launch().map(|()| ExitCode::SUCCESS));
    }
    // With a handler for SIGXFSZ, a write past the limit of a file's size fails with an error.
    // Without one, the signal would end the process.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    if let Some(version) = called_as::version() {
        return finish(output::print(&version).map(|()| ExitCode::SUCCESS));
    }
    if let Err(error) = called_as::refuse_commands_of_qemu_io() {
        return finish(Err(error));
    }
    let arguments = match parse() {
        Ok(arguments) => arguments,
        // `--help` and `--version` are results. On a terminal clap prints them, with colours.
        Err(help) if !help.use_stderr() && !io::stdout().is_terminal() => {
            let text = help.to_string();
            let text = match called_as::command_of(&called_as::words()) {
                "" => qemu_help::of_program(text.trim_end()),
                command => qemu_help::of_command(command, text.trim_end()),
            };
            return finish(output::print(&text).map(|()| ExitCode::SUCCESS));
        }
        Err(error) if error.use_stderr() => {
            output::tell_wrong_usage(&error);
            std::process::exit(called_as::wrong_usage_status(Some(error.kind())));
        }
        Err(help) => help.exit(),
    };
    let delivery = match arguments.command {
        Command::Serve(_) | Command::QemuStorageDaemon(_) => Delivery::Queued,
        _ => Delivery::Direct,
    };
    let is_verbose = arguments.verbose > 0;
    let level = match arguments.command {
        _ if is_verbose => Level::DEBUG,
        // Like QEMU's programs, they log only warnings and errors.
        Command::QemuStorageDaemon(_) => Level::WARN,
        Command::Serve(_) if called_as::is_qemu_nbd() => Level::WARN,
        _ => Level::INFO,
    };
    logging::start(level, arguments.log_format, delivery);
    if arguments.quiet {
        output::be_quiet();
    }
    let done = |()| ExitCode::SUCCESS;
    let result = match arguments.command {
        Command::Serve(Deferred(serve)) => serve::run(*serve, is_verbose),
        Command::Amend(Deferred(amend)) => amend::run(&amend).map(done),
        Command::Attach(Deferred(arguments)) => attach::attach(&arguments),
        Command::Detach(Deferred(arguments)) => attach::detach(&arguments).map(done),
        Command::Backup(Deferred(backup)) => backup::run(backup).map(done),
        Command::Bitmap(Deferred(bitmap)) => bitmap::run(bitmap).map(done),
        Command::Bench(Deferred(bench)) => bench::run(&bench).map(done),
        Command::QemuBench(Deferred(bench)) => qemu_bench::run(&bench).map(done),
        Command::Check(Deferred(check)) => check::run(&check),
        Command::Compare(Deferred(compare)) => compare::run(&compare),
        Command::Convert(Deferred(convert)) => convert::run(convert).map(done),
        Command::Create(Deferred(create)) => create::run(create).map(done),
        Command::Ctl(Deferred(ctl)) => ctl::run(*ctl).map(done),
        Command::Dd(Deferred(dd)) => dd::run(&dd).map(done),
        Command::Info(Deferred(info)) => info::run(&info).map(done),
        Command::Map(Deferred(map)) => map::run(&map).map(done),
        Command::Measure(Deferred(measure)) => measure::run(measure).map(done),
        Command::Resize(Deferred(resize)) => resize::run(&resize).map(done),
        Command::Restore(Deferred(restore)) => restore::run(&restore).map(done),
        Command::Commit(Deferred(commit)) => commit::run(commit).map(done),
        Command::Rebase(Deferred(rebase)) => rebase::run(rebase).map(done),
        Command::Snapshot(Deferred(snapshot)) => snapshot::run(snapshot).map(done),
        Command::Top(Deferred(top)) => top::run(&top).map(done),
        Command::Upgrade(Deferred(upgrade)) => upgrade::run(upgrade).map(done),
        Command::Vmstate(Deferred(vmstate)) => vmstate::run(vmstate).map(done),
        Command::QemuStorageDaemon(Deferred(arguments)) => storage_daemon::run(&arguments),
    };
    finish(result)
}

/// The exit status for a bitmap that lacks changes, so that a backup program then makes a full
/// backup. qemu-img has no such status.
const LACKS_CHANGES: u8 = 3;

fn failure_status(error: &anyhow::Error) -> ExitCode {
    let kind = error.downcast_ref::<Error>().map(Error::kind);
    let code = error.downcast_ref::<RpcError>().map(|error| error.code);
    let lacks = kind == Some(ErrorKind::LacksChanges) || code == Some(LACKS_CHANGES_CODE);
    if lacks && !called_as::is_qemu_img() {
        ExitCode::from(LACKS_CHANGES)
    } else {
        ExitCode::FAILURE
    }
}

/// The exit status, with a line for an error.
fn finish(result: anyhow::Result<ExitCode>) -> ExitCode {
    let code = match result {
        Ok(code) => code,
        Err(error) => {
            output::tell_failure(&error);
            failure_status(&error)
        }
    };
    logging::finish();
    code
}
