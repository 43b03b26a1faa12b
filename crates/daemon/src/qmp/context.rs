//! What commands are carried out with: calls of the control socket, and what QMP knows beside them.

use std::cell::RefCell;
use std::sync::Arc;

use futures_channel::oneshot;
use futures_util::future::Shared;
use serde_json::Value;

use super::broadcast::Broadcast;
use super::errors::QmpError;
use super::state::State;
use crate::control::{Gate, call};
use crate::control_socket::Answers;
use crate::events::Subscription;
use crate::running::Running;

/// Ends when the server does.
pub(super) type Stopped = Shared<oneshot::Receiver<()>>;

/// A QMP socket's clients share this, on its loop.
pub(super) struct Context {
    /// What runs.
    pub(super) running: Arc<Running>,
    /// The methods of the control socket that commands may call.
    pub(super) answers: Answers,
    /// The object of the command line that has the server's TLS.
    pub(super) tls_object: Option<String>,
    /// Whether images may name any file and server, as in QEMU.
    pub(super) follows_names: bool,
    /// What QMP knows beside what runs.
    pub(super) state: RefCell<State>,
    /// Who is told of events.
    pub(super) events: Broadcast,
    /// What happens.
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

    /// The disk that a node belongs to: a disk's name is that of its format node.
    ///
    /// # Errors
    /// There is no such node, or it is the one below, which has no use by itself. `device` is for the words of the error.
    pub(super) fn disk_of(&self, device: &str, node: &str) -> Result<String, QmpError> {
        if self.running.find(node).is_some() {
            return Ok(node.to_owned());
        }
        let state = self.state.borrow();
        if let Some(filter) = state.filters.get(node) {
            return Ok(filter.disk.clone());
        }
        match state.user_of(node).filter(|disk| self.running.find(disk).is_some()) {
            Some(disk) => Err(QmpError::generic(format!(
                "Node '{node}' is the file below '{disk}', and is not used without it: use '{disk}'"
            ))),
            None => Err(QmpError::no_node(device, node)),
        }
    }

    /// As [`disk_of`](Self::disk_of), where a command has one name for devices and nodes.
    pub(super) fn disk(&self, name: &str) -> Result<String, QmpError> {
        self.disk_of(name, name)
    }
}
