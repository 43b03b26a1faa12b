//! Options of a subcommand, defined only when the parser finds the subcommand in the command line.
//!
//! Reason: to define the options of all commands takes longer than to load the program, and each
//! run needs only one command. Invariant: a deferred definition is used only to parse a valid
//! command line. Help, errors and man pages are made from the complete definition ([`at_once`]).

use std::cell::Cell;

use clap::{ArgMatches, Args, Command, Error, FromArgMatches};

use crate::format_names;

thread_local! {
    /// Whether the options are defined at once.
    static AT_ONCE: Cell<bool> = const { Cell::new(false) };
}

/// The command that `define` makes, with the options of each subcommand.
pub fn at_once(define: impl FnOnce() -> Command) -> Command {
    AT_ONCE.set(true);
    let command = define();
    AT_ONCE.set(false);
    command
}

/// The arguments of a command, defined when the parser finds the command.
pub struct Deferred<A>(pub A);

impl<A: FromArgMatches> FromArgMatches for Deferred<A> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        A::from_arg_matches(matches).map(Self)
    }

    fn from_arg_matches_mut(matches: &mut ArgMatches) -> Result<Self, Error> {
        A::from_arg_matches_mut(matches).map(Self)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        self.0.update_from_arg_matches(matches)
    }
}

impl<A: Args> Args for Deferred<A> {
    fn augment_args(command: Command) -> Command {
        let define = |command| format_names::restrict(A::augment_args(command));
        if AT_ONCE.get() { define(command) } else { command.defer(define) }
    }

    fn augment_args_for_update(command: Command) -> Command {
        A::augment_args_for_update(command)
    }
}
