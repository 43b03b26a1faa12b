//! The context of commands: calls of the control socket's methods, and QMP's own state.

use std::cell::RefCell;
use std::sync::Arc;

use blockhouse_config::control_socket::Answers;
use blockhouse_config::disk::DiskConfig;
use blockhouse_daemon::Running;
use blockhouse_daemon::control::{Gate, call};
use blockhouse_daemon::events::Subscription;
use blockhouse_disk::Access;
use blockhouse_images::FilePart;
use futures_channel::oneshot;
use futures_util::future::Shared;
use serde_json::Value;

use super::broadcast::Broadcast;
use super::errors::{QmpError, busy_behind};
use super::state::State;

/// Resolves when the server ends.
pub(super) type Stopped = Shared<oneshot::Receiver<()>>;

/// The context that the clients of a QMP socket share, on the socket's loop.
pub(super) struct Context {
    /// The running server.
    pub(super) running: Arc<Running>,
    /// The methods of the control socket that commands may call.
    pub(super) answers: Answers,
    /// The id of the command line's object that sets up the server's TLS.
    pub(super) tls_object: Option<String>,
    /// Whether images may refer to any file and server, as in QEMU.
    pub(super) follows_names: bool,
    /// QMP's own state, besides the server's.
    pub(super) state: RefCell<State>,
    /// The receivers of events.
    pub(super) events: Broadcast,
    /// The server's events.
    pub(super) happening: Subscription,
    /// Holds commands off while the server is handed over.
    pub(super) gate: Arc<Gate>,
    /// Whether the server ends.
    pub(super) stopped: Stopped,
}

impl Context {
    /// Calls a method as a client of the control socket does.
    pub(super) async fn call(&self, method: &str, params: Value) -> Result<Value, QmpError> {
        self.answers.check(method).map_err(QmpError::generic)?;
        let is_cancelled = || self.stopped.peek().is_some();
        Ok(call(&self.running, &self.answers, method, params, &is_cancelled).await?)
    }

    /// Opens a disk by the parameters of `disk.open`, `inactive`, `protected` (whether a disk that
    /// may be written to is read-only until it is reopened), and the `part` of a file: an object
    /// with `offset` and `size`, or null.
    pub(super) async fn open(&self, mut params: Value) -> Result<(), QmpError> {
        let mut take = |key| params.as_object_mut().and_then(|members| members.remove(key));
        let is_inactive = take("inactive") == Some(Value::Bool(true));
        let is_protected = take("protected") == Some(Value::Bool(true));
        let part = take("part").filter(|part| !part.is_null()).map(|part| FilePart {
            offset: part["offset"].as_u64().unwrap_or_default(),
            size: part["size"].as_u64(),
        });
        if !is_inactive && !is_protected && part.is_none() {
            return self.call("disk.open", params).await.map(drop);
        }
        self.answers.check("disk.open").map_err(QmpError::generic)?;
        let setup: DiskConfig =
            serde_json::from_value(params).map_err(|why| QmpError::generic(why.to_string()))?;
        let setup =
            DiskConfig { is_inactive, part, ..setup }.checked().map_err(QmpError::generic)?;
        let access = if is_protected { Access::ReadOnly } else { Access::ReadWrite };
        let opened = self.running.open_and_serve(setup, access).await;
        opened.map(drop).map_err(QmpError::failed)
    }

    /// The disk whose chain has a format node of this name, and the node's depth in the chain.
    pub(super) fn find_node(&self, node: &str) -> Option<(String, usize)> {
        let state = self.state.borrow();
        let (disk, depth) = state.place_of(node)?;
        self.running.disks().find(disk).map(|_| (disk.to_owned(), depth))
    }

    /// The disk whose top node, or filter, is `node`.
    ///
    /// # Errors
    /// There is no such node, or it is the file or a backing file below another node, and cannot be
    /// used by itself. `device` is only for the error text.
    pub(super) fn disk_of(&self, device: &str, node: &str) -> Result<String, QmpError> {
        let state = self.state.borrow();
        if let Some((disk, depth)) = self.find_node(node) {
            return match depth {
                0 => Ok(disk),
                _ => Err(used_by(node, "backing file", state.top_of(&disk))),
            };
        }
        if let Some(filter) = state.filters.get(node) {
            return Ok(filter.disk.clone());
        }
        match state.user_of(node).filter(|user| self.find_node(user).is_some()) {
            Some(user) => Err(used_by(node, "file", user)),
            None => Err(QmpError::no_node(device, node)),
        }
    }

    /// As [`disk_of`](Self::disk_of), for a command with one argument for devices and nodes.
    pub(super) fn disk(&self, name: &str) -> Result<String, QmpError> {
        self.disk_of(name, name)
    }

    /// The disk that an export of a node serves. `device` is only for the error text.
    pub(super) fn served_disk(&self, device: &str, node: &str) -> Result<String, QmpError> {
        let disk = self.disk_of(device, node)?;
        let state = self.state.borrow();
        if let Some(pull) = state.pull_to(&disk) {
            return Ok(pull.frozen.clone());
        }
        match state.lower_of(&disk) {
            Some(lower) => Err(QmpError::generic(format!(
                "Node '{node}' stands on '{lower}', which changes: it is served when a backup is made to it (blockdev-backup with sync 'none')"
            ))),
            None => Ok(disk),
        }
    }

    /// Refuses to change or replace the image of a disk's node that is the backing node of another
    /// disk.
    pub(super) fn check_not_lower(&self, node: &str, disk: &str) -> Result<(), QmpError> {
        let state = self.state.borrow();
        state.upper_of(disk).map_or(Ok(()), |user| Err(busy_behind(node, user)))
    }

    /// As [`check_not_lower`](Self::check_not_lower), with QEMU's error for the device of a job.
    pub(super) fn check_root(&self, disk: &str) -> Result<(), QmpError> {
        match self.state.borrow().upper_of(disk) {
            Some(_) => Err(QmpError::generic("Need a root block node")),
            None => Ok(()),
        }
    }

    /// Refuses to copy a disk whose backing content is another node, because the disk has only its
    /// own data.
    pub(super) fn check_alone(&self, node: &str, disk: &str) -> Result<(), QmpError> {
        match self.state.borrow().lower_of(disk) {
            Some(lower) => Err(QmpError::generic(format!(
                "Node '{node}' stands on '{lower}', which changes, and is not copied: copy '{lower}'"
            ))),
            None => Ok(()),
        }
    }

    /// Whether there is a node of this name.
    pub(super) fn has_node(&self, name: &str) -> bool {
        let state = self.state.borrow();
        let is_known = state.files.contains_key(name)
            || state.filters.contains_key(name)
            || state.left.contains(name);
        drop(state);
        is_known || self.find_node(name).is_some()
    }

    /// Records that a job is no longer listed, and sends its status `null`.
    pub(super) fn forget_job(&self, job: &str) {
        self.events.tell_status(job, "null");
        self.state.borrow_mut().jobs.remove(job);
    }

    /// The name of the disk of a new node: the node's name, with a number if another disk has that
    /// name.
    pub(super) fn disk_name(&self, node: &str) -> String {
        let numbered = (2..).map(|number: u64| format!("{node}.{number}"));
        let mut names = std::iter::once(node.to_owned()).chain(numbered);
        names.find(|name| self.running.disks().find(name).is_none()).expect("an endless list")
    }
}

fn used_by(node: &str, what: &str, user: &str) -> QmpError {
    QmpError::generic(format!(
        "Node '{node}' is the {what} below '{user}', and is not used without it: use '{user}'"
    ))
}
