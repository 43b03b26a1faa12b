//! The exports that clients of a socket can find, by name.
//!
//! Guarantee: a client learns of and opens the exports of its own socket's set and no others, by any
//! option of the handshake. Reason: a socket's permissions keep one guest from another's disk.

use std::sync::Arc;

use blockhouse_core::{BLOCK_ALIGNMENT, Storage};
use blockhouse_disk::Disk;
use parking_lot::RwLock;

use crate::handshake::{ExportInfo, ExportLookup};
use crate::proto::{MAX_PAYLOAD, MAX_STRING};

/// A disk under a name.
pub struct Export<S: Storage> {
    /// What clients call it: at most 4096 bytes without NUL. May be empty.
    pub name: String,
    /// A line for people; empty for none.
    pub description: String,
    /// The disk.
    pub disk: Arc<Disk<S>>,
}

impl<S: Storage> Clone for Export<S> {
    fn clone(&self) -> Self {
        let Self { name, description, disk } = self;
        let (name, description) = (name.clone(), description.clone());
        Self { name, description, disk: Arc::clone(disk) }
    }
}

/// Why an export cannot be added.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExportError {
    /// There is one already.
    #[error("an export named \"{0}\" exists already; choose another name")]
    Exists(String),
    /// The protocol cannot carry the text.
    #[error("the {what} of an export has {why}; choose another")]
    Unfit {
        /// Name or description.
        what: &'static str,
        /// What is wrong with it.
        why: &'static str,
    },
}

/// The exports that one or several sockets offer, in the order of their addition. The first is also
/// the default one, which clients mean by the empty name. Clones are the same set.
pub struct Exports<S: Storage>(Arc<RwLock<Vec<Export<S>>>>);

impl<S: Storage> Clone for Exports<S> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S: Storage> Default for Exports<S> {
    fn default() -> Self {
        Self::new()
    }
}

impl<S: Storage> Exports<S> {
    /// An empty set.
    pub fn new() -> Self {
        Self(Arc::new(RwLock::new(Vec::new())))
    }

    /// Offers a disk.
    ///
    /// # Errors
    /// When there is an export of this name, or the protocol cannot carry its texts.
    pub fn add(&self, export: Export<S>) -> Result<(), ExportError> {
        for (what, text) in [("name", &export.name), ("description", &export.description)] {
            if text.len() > MAX_STRING {
                return Err(ExportError::Unfit { what, why: "more than 4096 bytes" });
            }
            if text.contains('\0') {
                return Err(ExportError::Unfit { what, why: "a NUL character" });
            }
        }
        let mut exports = self.0.write();
        if exports.iter().any(|other| other.name == export.name) {
            return Err(ExportError::Exists(export.name));
        }
        exports.push(export);
        Ok(())
    }

    /// Offers a disk no longer. Connections to it go on.
    pub fn remove(&self, name: &str) -> Option<Export<S>> {
        let mut exports = self.0.write();
        let index = exports.iter().position(|export| export.name == name)?;
        Some(exports.remove(index))
    }

    /// The export that a client means by this name.
    pub(super) fn get(&self, name: &str) -> Option<Export<S>> {
        let exports = self.0.read();
        let named = exports.iter().find(|export| export.name == name);
        named.or_else(|| exports.first().filter(|_| name.is_empty())).cloned()
    }
}

impl<S: Storage> ExportLookup for Exports<S> {
    fn find(&self, name: &str) -> Option<ExportInfo> {
        self.get(name).map(|export| info_of(&export))
    }

    fn list(&self) -> Vec<ExportInfo> {
        self.0.read().iter().map(info_of).collect()
    }
}

fn info_of<S: Storage>(export: &Export<S>) -> ExportInfo {
    let alignment = export.disk.alignment().offset;
    ExportInfo {
        name: export.name.clone(),
        description: export.description.clone(),
        size: export.disk.size(),
        access: export.disk.access(),
        preferred_block: alignment.clamp(BLOCK_ALIGNMENT as u32, MAX_PAYLOAD),
    }
}
