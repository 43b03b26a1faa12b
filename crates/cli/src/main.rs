//! `blockhouse`: disk images for virtual machines.
//!
//! Exit status: 0 done, 1 the operation failed (one line on standard error says what, where, why and
//! what to do), 2 wrong usage; `check` has those of `qemu-img check`.
#![forbid(unsafe_code)]

mod check;
mod create;
mod create_options;
mod image_file;
mod info;
mod logging;
mod map;
mod qcow2_facts;
mod resize;
mod serve;
mod size;
mod sockets;
mod vhost_user;
mod workers;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Serve and manage the disk images of virtual machines.
#[derive(Parser)]
#[command(name = "blockhouse", version, about, max_term_width = 100)]
struct Arguments {
    /// Say more on standard error and in the ready lines.
    #[arg(short, long, global = true)]
    verbose: bool,

    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve images to virtual machines and tools until SIGTERM or SIGINT.
    Serve(serve::Arguments),
    /// Make a new image.
    Create(create::Arguments),
    /// Look for errors in an image.
    Check(check::Arguments),
    /// Tell what an image is and how it would be served.
    Info(info::Arguments),
    /// Tell which parts of an image have data, and where.
    Map(map::Arguments),
    /// Make an image longer.
    Resize(resize::Arguments),
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    logging::start(arguments.verbose);
    let done = |()| ExitCode::SUCCESS;
    let result = match arguments.command {
        Command::Serve(serve) => serve::run(serve, arguments.verbose).map(done),
        Command::Check(check) => check::run(check),
        Command::Create(create) => create::run(create).map(done),
        Command::Info(info) => info::run(info).map(done),
        Command::Map(map) => map::run(map).map(done),
        Command::Resize(resize) => resize::run(resize).map(done),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("blockhouse: {error:#}");
            ExitCode::FAILURE
        }
    }
}
