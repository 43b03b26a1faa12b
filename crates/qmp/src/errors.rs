//! Errors of QMP: a class for programs, and a line for people. If QEMU has the same error, the text
//! is QEMU's.

use serde_json::{Value, json};

use blockhouse_daemon::control::Failure;

/// The class of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// All errors without a class of their own.
    Generic,
    /// The command does not exist, or cannot be used at the moment.
    CommandNotFound,
    /// The job does not exist.
    DeviceNotActive,
}

/// The failure of a command.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct QmpError {
    class: Class,
    desc: String,
}

impl QmpError {
    /// An error without a class of its own.
    pub(super) fn generic(desc: impl Into<String>) -> Self {
        Self { class: Class::Generic, desc: desc.into() }
    }

    /// The command does not exist, or cannot be used at the moment.
    pub(super) fn not_found(desc: impl Into<String>) -> Self {
        Self { class: Class::CommandNotFound, desc: desc.into() }
    }

    /// The server failed to do something.
    pub(super) fn failed(error: anyhow::Error) -> Self {
        Failure::from(error).into()
    }

    /// No block job has this name.
    pub(super) fn no_job(name: &str) -> Self {
        Self { class: Class::DeviceNotActive, desc: format!("Block job '{name}' not found") }
    }

    /// No node has this name.
    pub(super) fn no_node(device: &str, node: &str) -> Self {
        Self::generic(format!("Cannot find device='{device}' nor node-name='{node}'"))
    }

    /// The line for people.
    pub(super) fn desc(&self) -> &str {
        &self.desc
    }

    /// The member `error` of an answer.
    pub(super) fn to_json(&self) -> Value {
        let class = match self.class {
            Class::Generic => "GenericError",
            Class::CommandNotFound => "CommandNotFound",
            Class::DeviceNotActive => "DeviceNotActive",
        };
        json!({ "class": class, "desc": self.desc })
    }
}

/// The failure of a call of the control socket.
impl From<Failure> for QmpError {
    fn from(failure: Failure) -> Self {
        Self::generic(failure.message)
    }
}

/// The result of a command.
pub(super) type Returned = Result<Value, QmpError>;

/// The error for a node that is the backing node of `user`, in QEMU's words.
pub(super) fn busy_behind(name: &str, user: &str) -> QmpError {
    QmpError::generic(format!("Node '{name}' is busy: node is used as backing hd of '{user}'"))
}
