//! The commands, each with the methods of the control socket that it requires.

use std::rc::Rc;

use blockhouse_config::control_socket::Answers;
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use serde_json::{Value, json};
use signal_hook::consts::SIGTERM;
use signal_hook::low_level::raise;

use super::arguments::Arguments;
use super::context::Context;
use super::errors::Returned;
use super::{
    activity, backups, bitmaps, blockdev, creation, exports, jobs, node_list, nodes, objects,
    overlays, query, reopening, schema, snapshots, starting, transaction,
};

/// The command that a client must send first.
pub(super) const NEGOTIATION: &str = "qmp_capabilities";

/// Not a method's name: a command that calls it exists only on sockets that answer all methods.
const EVERYTHING: &str = "everything";

/// A command.
pub(super) struct Command {
    name: &'static str,
    /// The methods that a socket must answer to have it.
    calls: &'static [&'static str],
    /// Executes the command.
    pub(super) run: Run,
}

type Run = for<'a> fn(&'a Rc<Context>, Arguments) -> LocalBoxFuture<'a, Returned>;

/// The command of this name, if this socket has it.
pub(super) fn find(answers: &Answers, name: &str) -> Option<&'static Command> {
    COMMANDS.iter().find(|command| command.name == name && is_there(answers, command))
}

/// Whether a socket that answers some methods has a command.
fn is_there(answers: &Answers, command: &Command) -> bool {
    command.calls.iter().all(|method| answers.has(method))
}

/// The names of all commands that this socket has.
fn names(answers: &Answers) -> Value {
    let there = COMMANDS.iter().filter(|command| is_there(answers, command));
    there.map(|command| json!({ "name": command.name })).collect()
}

macro_rules! command {
    ($name:literal, [$($call:expr),*], $run:path) => {
        Command { name: $name, calls: &[$($call),*], run: |context, arguments| $run(context, arguments).boxed_local() }
    };
    // A command for the job that the arguments name.
    ($name:literal, [$($call:expr),*], $run:path, $find_job:path) => {
        Command { name: $name, calls: &[$($call),*], run: |context, arguments| {
            async { $run(context, &$find_job(context, arguments).await?).await }.boxed_local()
        } }
    };
}

#[rustfmt::skip]
const COMMANDS: &[Command] = &[
    // Never executed here: the session handles it.
    command!("qmp_capabilities", [], query_commands),
    command!("query-version", [], query_version),
    command!("query-commands", [], query_commands),
    command!("query-qmp-schema", [], query_schema),
    command!("quit", [EVERYTHING], quit),
    command!("query-named-block-nodes", ["disk.list", "limit.get", "bitmap.list", "snapshot.list"], node_list::nodes),
    command!("query-block", [], query::devices),
    command!("query-blockstats", ["disk.stats"], query::stats),
    command!("blockdev-add", ["disk.open", "disk.close"], blockdev::add),
    command!("blockdev-del", ["disk.open", "disk.close"], blockdev::delete),
    command!("blockdev-create", ["image.create", "job.list", "disk.open", "disk.close"], creation::create),
    command!("blockdev-reopen", ["disk.set", "limit.set"], reopening::reopen),
    command!("blockdev-set-active", ["disk.set"], activity::set_active),
    command!("object-add", ["disk.open"], objects::add),
    command!("object-del", ["disk.open"], objects::delete),
    command!("block_resize", ["disk.resize"], nodes::resize),
    command!("block-set-write-threshold", ["disk.set"], nodes::set_write_threshold),
    command!("change-backing-file", ["disk.set"], nodes::change_backing_file),
    command!("query-block-exports", ["export.list"], exports::query),
    command!("block-export-add", ["export.add"], exports::add),
    command!("block-export-del", ["export.list", "export.remove"], exports::delete),
    command!("nbd-server-start", ["socket.add"], exports::start_server),
    command!("nbd-server-add", ["export.add"], exports::add_to_server),
    command!("nbd-server-remove", ["export.list", "export.remove"], exports::remove_from_server),
    command!("nbd-server-stop", ["export.list", "export.remove", "socket.remove"], exports::stop_server),
    command!("blockdev-snapshot", ["disk.fork", "disk.open", "disk.close"], overlays::use_node),
    command!("blockdev-snapshot-sync", ["disk.fork", "disk.open"], overlays::create),
    command!("blockdev-snapshot-internal-sync", ["snapshot.list", "snapshot.create"], snapshots::create),
    command!("blockdev-snapshot-delete-internal-sync", ["snapshot.list", "snapshot.delete"], snapshots::delete),
    command!("block-dirty-bitmap-add", ["bitmap.list", "bitmap.add"], bitmaps::add),
    command!("block-dirty-bitmap-remove", ["bitmap.list", "bitmap.remove"], bitmaps::remove),
    command!("block-dirty-bitmap-clear", ["bitmap.list", "bitmap.clear"], bitmaps::clear),
    command!("block-dirty-bitmap-enable", ["bitmap.list", "bitmap.enable"], bitmaps::enable),
    command!("block-dirty-bitmap-disable", ["bitmap.list", "bitmap.disable"], bitmaps::disable),
    command!("block-dirty-bitmap-merge", ["bitmap.list", "bitmap.merge", "disk.transaction"], bitmaps::merge),
    command!("x-debug-block-dirty-bitmap-sha256", ["bitmap.list"], bitmaps::digest),
    command!("query-jobs", ["job.list"], jobs::query),
    command!("query-block-jobs", ["job.list"], jobs::query_block_jobs),
    command!("block-stream", ["job.list", "job.start"], starting::stream),
    command!("block-commit", ["job.list", "job.start"], starting::commit),
    command!("blockdev-mirror", ["job.list", "job.start"], starting::mirror),
    command!("blockdev-backup", ["job.list", "bitmap.list", "disk.transaction", "backup.end"], backups::start),
    command!("job-cancel", ["job.list", "job.cancel"], jobs::cancel, jobs::of_id),
    command!("job-complete", ["job.list", "job.complete"], jobs::complete, jobs::of_id),
    command!("job-dismiss", ["job.list", "job.dismiss"], jobs::dismiss, jobs::of_id),
    command!("job-finalize", ["job.list", "job.complete"], jobs::finalize, jobs::of_id),
    command!("job-pause", ["job.list", "job.pause"], jobs::pause, jobs::of_id),
    command!("job-resume", ["job.list", "job.resume"], jobs::resume, jobs::of_id),
    command!("block-job-cancel", ["job.list", "job.cancel"], jobs::cancel_block_job),
    command!("block-job-complete", ["job.list", "job.complete"], jobs::complete, jobs::of_device),
    command!("block-job-dismiss", ["job.list", "job.dismiss"], jobs::dismiss, jobs::of_block_id),
    command!("block-job-finalize", ["job.list", "job.complete"], jobs::finalize, jobs::of_block_id),
    command!("block-job-pause", ["job.list", "job.pause"], jobs::pause, jobs::of_device),
    command!("block-job-resume", ["job.list", "job.resume"], jobs::resume, jobs::of_device),
    command!("block-job-set-speed", ["job.list", "job.set-speed"], jobs::set_speed),
    command!("transaction", ["bitmap.list", "bitmap.add", "bitmap.remove", "bitmap.clear", "bitmap.enable", "bitmap.disable", "bitmap.merge", "disk.transaction", "job.list", "backup.end", "disk.fork", "disk.open", "disk.close", "snapshot.list", "snapshot.create"], transaction::run),
];

async fn query_version(_: &Rc<Context>, arguments: Arguments) -> Returned {
    arguments.end().map(|()| query::version())
}

async fn query_commands(context: &Rc<Context>, arguments: Arguments) -> Returned {
    arguments.end().map(|()| names(&context.answers))
}

async fn query_schema(context: &Rc<Context>, arguments: Arguments) -> Returned {
    let is_there = |name: &str| find(&context.answers, name).is_some();
    arguments.end().map(|()| schema::schema(is_there))
}

/// Ends the server as SIGTERM does. Jobs end first, so that clients receive their events.
async fn quit(context: &Rc<Context>, arguments: Arguments) -> Returned {
    arguments.end()?;
    jobs::cancel_all(context).await;
    // The main thread waits for signals. `raise` fails only for invalid signals.
    let _ = raise(SIGTERM);
    Ok(json!({}))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use blockhouse_config::control_socket::all_methods;

    #[test]
    fn commands_are_told_once_and_call_methods_that_there_are() {
        let names: BTreeSet<_> = COMMANDS.iter().map(|command| command.name).collect();
        assert_eq!(names.len(), COMMANDS.len());
        let methods: BTreeSet<_> = all_methods().chain([EVERYTHING]).collect();
        for command in COMMANDS {
            assert!(command.calls.iter().all(|call| methods.contains(call)), "{}", command.name);
        }
    }

    #[test]
    fn a_read_only_socket_has_no_command_that_changes_something() {
        let told = names(&Answers::Reading);
        let told = told.as_array().expect("a list").iter().map(|one| one["name"].as_str());
        let told: Vec<_> = told.flatten().collect();
        let only_tells = |name: &&&str| {
            name.starts_with("query-") || name.ends_with("finalize") || name.ends_with("-sha256")
        };
        let mut told_of = told.iter().filter(|name| **name != NEGOTIATION);
        assert!(told_of.all(|name| only_tells(&name)), "{told:?}");
        assert!(
            told.contains(&"query-named-block-nodes") && find(&Answers::Reading, "quit").is_none()
        );
        assert!(
            find(&Answers::All, "quit").is_some() && find(&Answers::All, "drive-mirror").is_none()
        );
    }

    #[test]
    fn each_command_is_told_and_each_type_is_there() {
        let schema = schema::schema(|_| true);
        let entities = schema.as_array().expect("a list");
        let of_kind = |kind: &str| -> BTreeSet<&str> {
            let entities = entities.iter().filter(|entity| entity["meta-type"] == kind);
            entities.filter_map(|entity| entity["name"].as_str()).collect()
        };
        let commands = COMMANDS.iter().map(|command| command.name).collect();
        assert_eq!(of_kind("command"), commands);
        let names: BTreeSet<_> =
            entities.iter().filter_map(|entity| entity["name"].as_str()).collect();
        let mut used = vec!["Nothing"];
        for entity in entities {
            let own = ["arg-type", "ret-type", "element-type"].map(|key| entity[key].as_str());
            used.extend(own.into_iter().flatten());
            for list in ["members", "variants"] {
                let members = entity[list].as_array().into_iter().flatten();
                used.extend(members.filter_map(|member| member["type"].as_str()));
            }
        }
        let missing: Vec<_> = used.into_iter().filter(|name| !names.contains(name)).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }
}
