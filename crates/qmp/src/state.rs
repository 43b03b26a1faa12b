//! QMP's own state: the clients' names of exports and jobs, and the address of their NBD server.
//!
//! An export or a job made by the command line or the control socket is listed under its name
//! there. All of this state belongs to the loop of the QMP socket, and ends with the process: after
//! an upgrade the new process lists exports under their addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use blockhouse_images::ClientTls;
use blockhouse_nbd::uri::Address;
use serde_json::{Map, Value, json};

/// The suffix of the name of the node below a disk, unless a client has named that node.
const PROTOCOL_SUFFIX: &str = "-file";

/// An export that a client of QMP has asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NamedExport {
    /// The id.
    pub(super) id: String,
    /// The export's address in `export.list`.
    pub(super) address: String,
    /// The node that the client has named.
    pub(super) node: String,
    /// Whether the node may be inactive.
    pub(super) allows_inactive: bool,
}

/// A node of a file that a client has added.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct FileNode {
    /// The file.
    pub(super) path: String,
    /// The parameters of `Context::open` for the file as a raw disk.
    pub(super) params: Value,
    /// The format node above it.
    pub(super) user: Option<String>,
    /// Whether the node is removed together with `user`.
    pub(super) is_implicit: bool,
}

/// A node of a format: of the image of a disk, or of a backing file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FormatNode {
    /// The name.
    pub(super) name: String,
    /// Whether a client has added it, and may remove it.
    pub(super) is_owned: bool,
    /// The parameters of `Context::open`, if its image was a disk of its own before.
    pub(super) params: Option<Value>,
}

impl FormatNode {
    /// A node that a client has added.
    pub(super) fn owned(name: &str) -> Self {
        Self { name: name.to_owned(), is_owned: true, params: None }
    }
}

/// A backup that clients read.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Pull {
    /// The disk that is backed up, and stays in use.
    pub(super) disk: String,
    /// The disk of the target's node. Its clients are served the frozen disk instead.
    pub(super) target: String,
    /// The frozen disk: the content at the start of the backup.
    pub(super) frozen: String,
    /// `None` while it runs, then `Some(None)` if it was ended, or the reason of its failure. A
    /// backup that has ended is listed until it is dismissed.
    pub(super) end: Option<Option<String>>,
}

/// A filter on a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Filter {
    /// The disk.
    pub(super) disk: String,
    /// The throttle group whose limits it has; `None` for a `raw` node.
    pub(super) group: Option<String>,
    /// Whether it is for reading only, whatever its disk is.
    pub(super) is_read_only: bool,
    /// Whether the disk is closed when the filter is removed.
    pub(super) is_implicit: bool,
}

/// The NBD server that a client has started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NbdServer {
    /// The address.
    pub(super) address: Address,
    /// The object with its certificates or keys, if clients must use TLS.
    pub(super) tls: Option<String>,
}

/// A completion that a client begins by `job-finalize`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pending {
    /// The job waits for it.
    Waits {
        /// Whether the job completes as a copy.
        is_copy: bool,
    },
    /// The client has begun it: the job can no longer be cancelled.
    Finalized,
}

/// The automatic steps of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct JobTraits {
    /// Whether the job leaves the list when it ends.
    pub(super) auto_dismiss: bool,
    /// Whether the job completes at once when it is asked to, and does not wait for `job-finalize`.
    pub(super) auto_finalize: bool,
    /// The completion of a job without `auto_finalize` that was asked to complete.
    pub(super) pending: Option<Pending>,
    /// Whether the job has been started; false while the request to start it runs.
    pub(super) is_started: bool,
    /// Whether the guest's changes wait for their copy.
    pub(super) is_blocking: bool,
}

/// An object.
#[derive(Debug)]
pub(super) enum Object {
    /// A thread of exports.
    IoThread,
    /// A key.
    Secret {
        /// The file that has it.
        path: PathBuf,
        /// The descriptor that keeps the file alive, if it is private memory of this process.
        memory: Option<OwnedFd>,
    },
    /// Limits: the parameters of `limit.set` without the group.
    ThrottleGroup(Map<String, Value>),
    /// The certificates or keys of the server's TLS.
    ServerTls,
    /// The certificates or keys for connections to other servers.
    ClientTls(ClientTls),
}

/// QMP's own state.
#[derive(Debug, Default)]
pub(super) struct State {
    /// The NBD server, if a client has started it.
    pub(super) nbd_server: Option<NbdServer>,
    /// The exports, in the order in which they were added.
    pub(super) exports: Vec<NamedExport>,
    /// The nodes of each disk, by the disk's name: the node of its image, then the nodes of its
    /// backing files. A disk without an entry has one node, with the disk's name.
    pub(super) chains: BTreeMap<String, Vec<FormatNode>>,
    /// The parameters of `Context::open` of the disks that clients have added.
    pub(super) opened: BTreeMap<String, Value>,
    /// The nodes of images that a job has taken out of their disk's chain. The images are closed,
    /// and clients remove the nodes, as in QEMU.
    pub(super) left: BTreeSet<String>,
    /// The other open nodes that are the backing content of nodes, which are targets of backups of
    /// them, by the upper node's name.
    pub(super) over: BTreeMap<String, String>,
    /// Backups that clients read, by the name of their job.
    pub(super) pulls: BTreeMap<String, Pull>,
    /// Creations of images, by the name of their job: `None` while the job runs, then `Some(None)`
    /// for success, or the reason of the failure.
    pub(super) creations: BTreeMap<String, Option<Option<String>>>,
    /// Nodes of files, by name.
    pub(super) files: BTreeMap<String, FileNode>,
    /// The number of nodes that this server has named.
    pub(super) implicit_nodes: u64,
    /// Filters, by name.
    pub(super) filters: BTreeMap<String, Filter>,
    /// Objects, by name.
    pub(super) objects: BTreeMap<String, Object>,
    /// The key files of deleted secrets that nodes may need, with the memory that they are.
    pub(super) deleted_secrets: Vec<(PathBuf, OwnedFd)>,
    /// The number of commands in progress.
    pub(super) commands: usize,
    /// Nodes of files that have a write threshold, by the disk's name.
    pub(super) write_thresholds: BTreeMap<String, String>,
    /// The traits of jobs that clients have started, by name.
    pub(super) jobs: BTreeMap<String, JobTraits>,
}

impl State {
    /// The id of the export at this address.
    pub(super) fn id_of(&self, address: &str) -> String {
        let named = self.exports.iter().find(|export| export.address == address);
        named.map_or_else(|| address.to_owned(), |export| export.id.clone())
    }

    /// The node of an export: the filter that the client has named, or the node of the disk's
    /// image.
    pub(super) fn node_of<'a>(&'a self, address: &str, disk: &'a str) -> &'a str {
        let named = self.exports.iter().find(|export| export.address == address);
        let filter = named.filter(|export| self.filters.contains_key(&export.node));
        filter.map_or_else(|| self.top_of(disk), |export| &export.node)
    }

    /// The nodes of a disk: the node of its image, then the nodes of backing files that have names.
    pub(super) fn nodes_of(&self, disk: &str) -> Vec<FormatNode> {
        let own = || vec![FormatNode::owned(disk)];
        self.chains.get(disk).cloned().unwrap_or_else(own)
    }

    /// The node of a disk's image.
    pub(super) fn top_of<'a>(&'a self, disk: &'a str) -> &'a str {
        self.chains.get(disk).and_then(|nodes| nodes.first()).map_or(disk, |node| &node.name)
    }

    /// The disk that has a node of this name, and the depth of the node's image in the chain. An
    /// unknown name stands for a disk of that name, which need not be open.
    pub(super) fn place_of<'a>(&'a self, node: &'a str) -> Option<(&'a str, usize)> {
        let of = |nodes: &[FormatNode]| nodes.iter().position(|one| one.name == node);
        let mut chains = self.chains.iter();
        let named = chains.find_map(|(disk, nodes)| Some((disk.as_str(), of(nodes)?)));
        named.or_else(|| (!self.chains.contains_key(node)).then_some((node, 0)))
    }

    /// Puts a node above the nodes of a disk, which has got an overlay.
    pub(super) fn push_top(&mut self, disk: &str, node: FormatNode) {
        let mut nodes = self.nodes_of(disk);
        nodes.insert(0, node);
        self.chains.insert(disk.to_owned(), nodes);
    }

    /// Removes the top node of a disk that now uses its backing file, if the backing file has a
    /// node.
    pub(super) fn pop_top(&mut self, disk: &str) {
        self.leave_out(disk, |nodes| 0..usize::from(nodes > 1));
    }

    /// The other open node that is the backing content of a node of the disk's chain.
    pub(super) fn lower_of(&self, disk: &str) -> Option<&String> {
        self.nodes_of(disk).iter().find_map(|node| self.over.get(&node.name))
    }

    /// A node whose backing content is the disk's node, or a filter on that.
    pub(super) fn upper_of(&self, disk: &str) -> Option<&String> {
        let is_lower = |name: &str| {
            name == self.top_of(disk) || self.filters.get(name).is_some_and(|one| one.disk == disk)
        };
        self.over.iter().find(|(_, lower)| is_lower(lower)).map(|(upper, _)| upper)
    }

    /// Records that a node is gone. Nodes over it stay incomplete, but keep no later node of this
    /// name in use.
    fn note_closed(&mut self, name: &str) {
        let lower = self.over.values_mut().filter(|lower| *lower == name);
        lower.for_each(|lower| lower.push_str(" (closed)"));
    }

    /// Gives a disk the nodes of `target`, to whose image it has moved; `target` is not a disk any
    /// more.
    pub(super) fn move_to(&mut self, disk: &str, target: &str) {
        let nodes = self.nodes_of(target);
        // The copy is complete, and needs no content of another node.
        nodes.iter().for_each(|node| _ = self.over.remove(&node.name));
        self.left.extend(self.nodes_of(disk).into_iter().map(|node| node.name));
        self.chains.remove(target);
        self.chains.insert(disk.to_owned(), nodes);
        if let Some(params) = self.opened.remove(target) {
            self.opened.insert(disk.to_owned(), params);
        }
    }

    /// Records whether a disk, its backing files, and the files below their nodes are active when
    /// they are opened again.
    pub(super) fn note_activity(&mut self, disk: &str, is_active: bool) {
        let top = self.top_of(disk).to_owned();
        let behind = self.chains.get(disk).into_iter().flatten().map(|node| node.name.clone());
        let files: Vec<_> =
            std::iter::once(top).chain(behind).map(|node| self.file_of(&node)).collect();
        let chain = self.chains.get_mut(disk).into_iter().flatten();
        let changed = chain.filter_map(|node| node.params.as_mut());
        for params in self.opened.get_mut(disk).into_iter().chain(changed) {
            params["inactive"] = (!is_active).into();
        }
        for file in files {
            if let Some(file) = self.files.get_mut(&file) {
                file.params["inactive"] = (!is_active).into();
            }
        }
    }

    /// Records whether a disk is made read-only when it is opened again. It may be the disk of a
    /// file's node. The kernel opens it for writing nevertheless, so that it can be made writable.
    pub(super) fn note_access(&mut self, disk: &str, is_read_only: bool) {
        let file = self.top_of(disk).to_owned();
        let file = self.files.get_mut(&file).map(|file| &mut file.params);
        for params in self.opened.get_mut(disk).into_iter().chain(file) {
            params["protected"] = is_read_only.into();
        }
    }

    /// Forgets the nodes of a disk that a client of the control socket has closed.
    pub(super) fn forget_disk(&mut self, disk: &str) {
        for FormatNode { name, .. } in self.nodes_of(disk) {
            self.over.remove(&name);
            self.note_closed(&name);
            self.files.remove(&name);
            if let Some((file, _)) = self.take_back_file(&name) {
                self.files.remove(&file);
            }
        }
        self.chains.remove(disk);
        self.opened.remove(disk);
        while let Some(name) = self.filter_on(disk).map(|(name, _)| name.to_owned()) {
            self.note_closed(&name);
            self.filters.remove(&name);
        }
        self.release_secrets();
    }

    /// Closes the memory of deleted secrets, except of those that nodes need to be opened again.
    /// Does nothing while a command runs, because it may have closed a node that it opens again.
    pub(super) fn release_secrets(&mut self) {
        if self.commands > 0 {
            return;
        }
        let chains = self.chains.values().flatten().filter_map(|node| node.params.as_ref());
        let params: Vec<_> = self.opened.values().chain(chains).collect();
        let files = || params.iter().filter_map(|params| params["key-files"].as_array()).flatten();
        self.deleted_secrets.retain(|(path, _)| files().any(|file| *file == json!(path)));
    }

    /// Forgets the node of an image that a job has taken out of a chain.
    pub(super) fn forget_left(&mut self, node: &str) {
        self.left.remove(node);
        self.over.remove(node);
        if let Some((file, _)) = self.take_back_file(node) {
            self.files.remove(&file);
            self.left.insert(file);
        }
    }

    /// The backup whose frozen disk is served instead of this disk.
    pub(super) fn pull_to(&self, target: &str) -> Option<&Pull> {
        self.pulls.values().find(|pull| pull.target == target && pull.end.is_none())
    }

    /// Takes nodes out of a disk's chain. `depths` returns their range for the number of nodes. A
    /// node that a client has added stays until the client removes it.
    pub(super) fn leave_out(&mut self, disk: &str, depths: impl FnOnce(usize) -> Range<usize>) {
        if let Some(nodes) = self.chains.get_mut(disk) {
            let Range { start, end } = depths(nodes.len());
            let end = end.min(nodes.len());
            let taken = nodes.drain(start.min(end)..end);
            self.left.extend(taken.filter(|node| node.is_owned).map(|node| node.name));
        }
    }

    /// The filter on a disk.
    pub(super) fn filter_on(&self, disk: &str) -> Option<(&str, &Filter)> {
        let mut filters = self.filters.iter();
        let found = filters.find(|(_, filter)| filter.disk == disk);
        found.map(|(name, filter)| (name.as_str(), filter))
    }

    /// The address of the export with this id.
    pub(super) fn address_of(&self, id: &str) -> String {
        let named = self.exports.iter().find(|export| export.id == id);
        named.map_or_else(|| id.to_owned(), |export| export.address.clone())
    }

    /// Forgets an export that is no longer served. Returns its id.
    pub(super) fn forget_export(&mut self, address: &str) -> String {
        let id = self.id_of(address);
        self.exports.retain(|export| export.address != address);
        id
    }

    /// The name of the node below a format node.
    pub(super) fn file_of(&self, node: &str) -> String {
        let mut files = self.files.iter();
        let named = files.find(|(_, file)| file.user.as_deref() == Some(node));
        named.map_or_else(|| format!("{node}{PROTOCOL_SUFFIX}"), |(name, _)| name.clone())
    }

    /// The format node above a file's node.
    pub(super) fn user_of<'a>(&'a self, node: &'a str) -> Option<&'a str> {
        match self.files.get(node) {
            Some(file) => file.user.as_deref(),
            None => node.strip_suffix(PROTOCOL_SUFFIX),
        }
    }

    /// Detaches the file's node from a format node that was removed. Returns the file's node, if it
    /// stays.
    pub(super) fn take_back_file(&mut self, node: &str) -> Option<(String, FileNode)> {
        let name = self.file_of(node);
        let file = self.files.get_mut(&name)?;
        file.user = None;
        let file = file.clone();
        if file.is_implicit {
            self.files.remove(&name);
            return None;
        }
        Some((name, file))
    }

    /// The completion of a job that waits for `job-finalize`, or was finalized.
    pub(super) fn pending(&self, job: &str) -> Option<Pending> {
        self.jobs.get(job).and_then(|traits| traits.pending)
    }

    /// Whether a job completes without `job-finalize`.
    pub(super) fn auto_finalizes(&self, job: &str) -> bool {
        self.jobs.get(job).is_none_or(|traits| traits.auto_finalize)
    }

    /// Whether a job leaves the list when it ends.
    pub(super) fn auto_dismisses(&self, job: &str) -> bool {
        self.jobs.get(job).is_some_and(|traits| traits.auto_dismiss)
    }
}
