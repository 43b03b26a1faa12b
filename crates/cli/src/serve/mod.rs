//! `blockhouse serve`: translates the arguments into a description of the server, which
//! `crates/daemon` runs.

mod arguments;
mod export_list;
pub mod groups;
mod nbd_habits;
mod tls_args;

use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::{Path, absolute};
use std::process::ExitCode;

use anyhow::Result;
pub use arguments::Arguments;
use arguments::refuse;
use blockhouse_config::setup::WrongUsage;
use blockhouse_daemon::Service;
use blockhouse_qmp::Qmp;
pub use nbd_habits::parse_aio;
use signal_hook::consts::SIGTERM;
use signal_hook::low_level::raise;

use crate::background::{self, Started};
use crate::{attach, called_as, logging, output};

/// Runs the command.
pub fn run(mut arguments: Arguments, verbose: bool) -> Result<ExitCode> {
    if let Some(uri) = arguments.listed_server() {
        return export_list::run(&uri).map(|()| ExitCode::SUCCESS);
    }
    if let Some(device) = arguments.disconnected() {
        return attach::disconnect_as_qemu_nbd(device).map(|()| ExitCode::SUCCESS);
    }
    arguments.obey_habits();
    arguments.find_snapshot()?;
    arguments.check();
    if let Some((number, named)) = arguments.connected() {
        // The socket's name is new each time: `-d` reads it from the device.
        let socket = named.map_or_else(attach::new_socket, |socket| Ok(absolute(socket)?))?;
        let words = match named {
            Some(_) => background_words(&[]),
            None => background_words(&["-k".into(), socket.clone().into()]),
        };
        return attach::connect_as_qemu_nbd(words, &socket, number);
    }
    if arguments.fork {
        return fork();
    }
    arguments.serve_overlay()?;
    let served = blockhouse_daemon::run(&arguments.setup()?, &Qmp, |service| {
        announce(service, verbose, arguments.in_background);
        match &arguments.vhost_user_blk[..] {
            _ if arguments.in_background => {}
            _ if !arguments.wants_hint() || called_as::is_qemu_nbd() => {}
            // Under a service manager nothing is printed.
            _ if std::env::var_os("NOTIFY_SOCKET").is_some() => {}
            [] => print_hint(service),
            [socket, ..] if verbose || std::io::stderr().is_terminal() => {
                output::tell(&device_hint(socket, arguments.server().queues()));
            }
            _ => {}
        }
    });
    match served.as_ref().err().and_then(|error| error.downcast_ref()) {
        Some(WrongUsage(why)) => refuse(why),
        None => served.map(|()| ExitCode::SUCCESS),
    }
}

/// The arguments of a process in the background that serves the same command line, with `more`
/// options.
fn background_words(more: &[OsString]) -> Vec<OsString> {
    let own = std::process::id().to_string();
    if std::env::var_os("LISTEN_PID").is_some_and(|pid| pid == own.as_str()) {
        refuse("the service manager's sockets are for this process; leave out --fork and -c");
    }
    let mut words = called_as::words();
    let first = called_as::index_of_command(&words).map_or(0, |command| command + 1);
    let mut options = words.split_off(first.min(words.len()));
    let end = options.iter().position(|word| word == "--").unwrap_or(options.len());
    let files = options.split_off(end);
    options.retain(|word| word != "--fork");
    let own = [&[background::OPTION.into()], more].concat();
    words.into_iter().skip(1).chain(own).chain(options).chain(files).collect()
}

/// Starts a process in the background that serves the same command line without `--fork`.
fn fork() -> Result<ExitCode> {
    match background::start(background_words(&[]))? {
        Started::Listens(lines) => {
            if !called_as::is_qemu_nbd() {
                output::print_unless_quiet(&lines)?;
            }
            Ok(ExitCode::SUCCESS)
        }
        // The server has printed the reason.
        Started::Ended(code) => Ok(code),
    }
}

/// Prints that everything listens, and notifies the service manager. If these lines cannot be
/// printed, a server in the foreground continues, and one in the background ends.
fn announce(service: &Service, verbose: bool, in_background: bool) {
    // The findings in the images are logged before anything is served, also by a server that is
    // killed at once.
    logging::flush();
    let mut lines = service.ready_lines(verbose);
    if called_as::is_qemu_nbd() && !in_background {
        lines.clear();
    }
    if in_background {
        // The empty line ends the list of lines.
        lines.push(String::new());
    }
    // An error does not end a server in the foreground, because clients may know the sockets
    // without these lines.
    let written = if lines.is_empty() { Ok(()) } else { output::write(&lines.join("\n")) };
    if in_background && written.is_err() {
        // The command that started this server has ended, so its user does not know that the server
        // runs.
        let _ = raise(SIGTERM);
    }
    service.notify_ready();
}

/// Prints next steps for a user who gave no address.
fn print_hint(service: &Service) {
    if let Some(uri) = service.first_uri() {
        output::tell(&format!(
            "Try: nbdinfo '{uri}'\n     \
             qemu-img info '{uri}'\n     \
             qemu-system-x86_64 -drive file='{uri}',format=raw,if=virtio ...\n\
             Stop with Ctrl-C."
        ));
    }
}

/// QEMU's options for a machine that uses the disk at a vhost-user-blk socket. A comma in an option
/// of QEMU is written twice.
fn device_hint(socket: &Path, queues: u16) -> String {
    let path = socket.display().to_string().replace(',', ",,");
    format!(
        "Try: qemu-system-x86_64 -m 1G -object memory-backend-memfd,id=memory,size=1G,share=on \\\n       \
         -machine q35,memory-backend=memory -chardev 'socket,id=disk,path={path},reconnect=1' \\\n       \
         -device vhost-user-blk-pci,chardev=disk,num-queues={queues} ...\n\
         Stop with Ctrl-C."
    )
}
