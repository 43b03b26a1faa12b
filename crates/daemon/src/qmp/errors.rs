//! Errors of QMP: a class that programs test, and a line for people. Where QEMU has an error of the
//! kind, its words are used.

use serde_json::{Value, json};

use crate::control::Failure;

/// The class of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// All that are of no other kind.
    Generic,
    /// There is no such command, or not now.
    CommandNotFound,
    /// There is no such job.
    DeviceNotActive,
}

/// Why a command has no result.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct QmpError {
    class: Class,
    desc: String,
}

impl QmpError {
    /// Of the kind of most errors.
    pub(super) fn generic(desc: impl Into<String>) -> Self {
        Self { class: Class::Generic, desc: desc.into() }
    }

    /// There is no such command, or not now.
    pub(super) fn not_found(desc: impl Into<String>) -> Self {
        Self { class: Class::CommandNotFound, desc: desc.into() }
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
