//! Starts jobs: streams, commits and mirrors, with their common arguments.

use std::path::Path;
use std::rc::Rc;

use blockhouse_engine::is_same_file;
use serde_json::{Value, json};

use super::arguments::{Arguments, is_well_formed};
use super::context::Context;
use super::errors::{QmpError, Returned};
use super::job_list::find;
use super::state::JobTraits;

/// `block-stream`: of the whole backing chain, or of the images above a base.
pub(super) async fn stream(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let why = "a stream keeps the base of 'base' or 'base-node', by its own name";
    ["bottom", "backing-file", "snapshot-file"]
        .iter()
        .try_for_each(|name| given.only(name, &[], why))?;
    let (base, base_node) = (given.some_text("base")?, given.some_text("base-node")?);
    let base = match (base, base_node) {
        (Some(_), Some(_)) => {
            let why = "'base' and 'base-node' cannot be specified at the same time";
            return Err(QmpError::generic(why));
        }
        (None, Some(node)) => {
            let device = given.text("device")?;
            given.put_back("device", &device);
            Some(base_of(context, &device, &node)?)
        }
        (base, None) => base,
    };
    start(context, given, ("stream", json!({ "base": base }))).await
}

/// The image name of a node in the backing chain of a device.
fn base_of(context: &Context, device: &str, node: &str) -> Result<String, QmpError> {
    let ChainOf { nodes, files, .. } = ChainOf::new(context, device)?;
    let place = nodes.iter().position(|own| own == node);
    let Some(depth) = place.filter(|depth| *depth > 0) else {
        return Err(if context.has_node(node) {
            QmpError::generic(format!("Node '{node}' is not a backing image of '{device}'"))
        } else {
            QmpError::no_node("", node)
        });
    };
    let name = files.get(depth).cloned();
    name.ok_or_else(|| QmpError::generic(format!("Node '{node}' has no file name")))
}

/// `block-commit`: of the disk's image into its backing file, or of images of its backing chain.
pub(super) async fn commit(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let (base, top) = (given.some_text("base")?, given.some_text("top")?);
    let (base_node, top_node) = (given.some_text("base-node")?, given.some_text("top-node")?);
    let backing_file = given.some_text("backing-file")?;
    let device = given.text("device")?;
    given.put_back("device", &device);
    context.check_root(&context.disk(&device)?)?;
    let chain = ChainOf::new(context, &device)?;
    let top = match (top, top_node) {
        (Some(_), Some(_)) => {
            return Err(QmpError::generic("'top-node' and 'top' are mutually exclusive"));
        }
        (Some(top), None) => {
            let why = || QmpError::generic(format!("Top image file {top} not found"));
            chain.depth_of_file(&top, 0).ok_or_else(why)?
        }
        (None, Some(node)) => chain.depth_of_node(context, &node, 0)?,
        (None, None) => 0,
    };
    let base = match (base, base_node) {
        (Some(_), Some(_)) => {
            return Err(QmpError::generic("'base-node' and 'base' are mutually exclusive"));
        }
        (Some(base), None) => {
            let why = || QmpError::generic(format!("Can't find '{base}' in the backing chain"));
            chain.depth_of_file(&base, top + 1).ok_or_else(why)?
        }
        (None, Some(node)) => chain.depth_of_node(context, &node, top)?,
        // QEMU commits to the end of the chain.
        (None, None) => chain.files.len() - 1,
    };
    // The job refuses an image without a backing file.
    if base == top && chain.files.len() > 1 {
        return Err(QmpError::generic("cannot commit an image into itself"));
    }
    if top > 0 {
        let [top, base] = [top, base].map(|depth| &chain.files[depth]);
        let params = json!({ "top": top, "base": base, "backing-file": backing_file });
        return start(context, given, ("commit", params)).await;
    }
    if backing_file.is_some() {
        let why = "'backing-file' specified, but 'top' is the active layer";
        return Err(QmpError::generic(why));
    }
    if base > 1 {
        let why = "the image of the disk is committed into its backing file here: 'base' or 'base-node' names that, or 'top' \
                   an image behind it";
        return Err(QmpError::generic(why));
    }
    start(context, given, ("commit", json!({}))).await
}

/// The images of a disk, with their nodes.
struct ChainOf {
    device: String,
    /// The paths of the images, from the disk's own image down.
    files: Vec<String>,
    nodes: Vec<String>,
}

impl ChainOf {
    fn new(context: &Context, device: &str) -> Result<Self, QmpError> {
        let name = context.disk(device)?;
        let disk = context.running.disks().find(&name);
        let disk = disk.ok_or_else(|| QmpError::no_node(device, device))?;
        let layer = |depth| disk.layer_at(depth).map(|layer| layer.name.to_owned());
        let files = (0..).map_while(layer).collect();
        let nodes = context.state.borrow().nodes_of(&name);
        let nodes = nodes.into_iter().map(|node| node.name).collect();
        Ok(Self { device: device.to_owned(), files, nodes })
    }

    /// The depth of the image of this path, if it is at least `from`. The disk's image has depth 0.
    fn depth_of_file(&self, path: &str, from: usize) -> Option<usize> {
        let is_it = |file: &String| is_same_file(Path::new(file), Path::new(path));
        self.files.iter().skip(from).position(is_it).map(|found| from + found)
    }

    /// The depth of a node's image, if it is at least `from`.
    fn depth_of_node(&self, context: &Context, node: &str, from: usize) -> Result<usize, QmpError> {
        let own = self.nodes.iter().position(|own| own == node);
        let found = own.or_else(|| (node == self.device).then_some(0));
        match found.filter(|depth| *depth >= from && *depth < self.files.len()) {
            Some(depth) => Ok(depth),
            None if context.has_node(node) => {
                Err(QmpError::generic(format!("'{node}' is not in this backing file chain")))
            }
            None => Err(QmpError::no_node("", node)),
        }
    }
}

/// `blockdev-mirror`: to the disk of another node.
pub(super) async fn mirror(context: &Rc<Context>, mut given: Arguments) -> Returned {
    let (device, target) = (given.text("device")?, given.text("target")?);
    let modes = ["top", "full", "none", "bitmap", "incremental"];
    let sync = given.needed_word("sync", &modes)?;
    let mode = given.word("copy-mode", &["background", "write-blocking"])?;
    given.only("replaces", &[], "the disk goes on in the target")?;
    // Ignored: the job has a granularity and a buffer size of its own.
    given.some_unsigned("granularity")?;
    given.some_unsigned("buf-size")?;
    let mut job = JobArguments::take(&mut given)?;
    job.is_blocking = mode == Some("write-blocking");
    given.end()?;
    let (disk, target_disk) = (context.disk(&device)?, context.disk(&target)?);
    if disk == target_disk {
        return Err(QmpError::generic("Can't mirror node into itself"));
    }
    context.check_root(&disk)?;
    context.check_alone(&device, &disk)?;
    context.check_not_lower(&target, &target_disk)?;
    // With `top` the target has the same backing content, so a copy of the whole disk is correct,
    // too.
    if sync != "top" {
        check_whole(context, &disk, sync)?;
    }
    job.check(context).await?;
    let mode = if job.is_blocking { "write-blocking" } else { "background" };
    let params = json!({
        "kind": "mirror",
        "disk": disk,
        "target-disk": target_disk,
        "job": job.name,
        "speed": job.speed,
        "mode": mode,
    });
    start_all(context, std::slice::from_ref(&job), ("job.start", params)).await
}

/// Refuses to copy less than all of a disk.
pub(super) fn check_whole(context: &Context, disk: &str, sync: &str) -> Result<(), QmpError> {
    let disk = context.running.disks().find(disk);
    let stands_alone = disk.is_some_and(|disk| disk.layer_at(1).is_none());
    match sync {
        "full" => Ok(()),
        "top" if stands_alone => Ok(()),
        _ => Err(QmpError::generic(format!(
            "Parameter 'sync' is not possible here: all of a disk is copied, and not '{sync}'"
        ))),
    }
}

/// Starts a job of one node, with these parameters and those that all jobs have.
async fn start(
    context: &Rc<Context>,
    mut given: Arguments,
    (kind, mut params): (&str, Value),
) -> Returned {
    let device = given.text("device")?;
    given.flag("backing-mask-protocol", false)?;
    let job = JobArguments::take(&mut given)?;
    given.end()?;
    let disk = context.disk(&device)?;
    job.check(context).await?;
    params["kind"] = json!(kind);
    params["disk"] = json!(disk);
    params["job"] = json!(job.name);
    params["speed"] = json!(job.speed);
    start_all(context, std::slice::from_ref(&job), ("job.start", params)).await
}

/// The arguments that all jobs have.
pub(super) struct JobArguments {
    /// The job's name.
    pub(super) name: String,
    /// Bytes a second; 0: no limit.
    pub(super) speed: u64,
    /// Whether the job leaves the list when it ends.
    pub(super) auto_dismiss: bool,
    auto_finalize: bool,
    is_blocking: bool,
}

impl JobArguments {
    /// Takes these arguments from the arguments of a command.
    pub(super) fn take(given: &mut Arguments) -> Result<Self, QmpError> {
        let name = given.some_text("job-id")?.unwrap_or_default();
        let speed = given.some_unsigned("speed")?.unwrap_or_default();
        for name in ["on-error", "on-source-error", "on-target-error"] {
            given.only(name, &[json!("report")], "a job that fails ends")?;
        }
        // Ignored: jobs insert no filter node.
        given.some_text("filter-node-name")?;
        let auto_finalize = given.flag("auto-finalize", true)?;
        let auto_dismiss = given.flag("auto-dismiss", true)?;
        Ok(Self { name, speed, auto_dismiss, auto_finalize, is_blocking: false })
    }

    /// Refuses a job name that is malformed or in use.
    pub(super) async fn check(&self, context: &Context) -> Result<(), QmpError> {
        let Self { name, .. } = self;
        if !is_well_formed(name) {
            return Err(QmpError::generic(format!("Invalid job ID '{name}'")));
        }
        match find(context, name).await? {
            Some(_) => Err(QmpError::generic(format!("Job ID '{name}' already in use"))),
            None => Ok(()),
        }
    }
}

/// Starts jobs by one call.
pub(super) async fn start_all(
    context: &Rc<Context>,
    jobs: &[JobArguments],
    (method, params): (&str, Value),
) -> Returned {
    let is_asked_to_complete =
        params["kind"] == "mirror" || params["kind"] == "commit" && params["top"].is_null();
    if !is_asked_to_complete && jobs.iter().any(|job| !job.auto_finalize) {
        let why = "Parameter 'auto-finalize' is not possible here: this job finalizes itself";
        return Err(QmpError::generic(why));
    }
    jobs.iter().try_for_each(|job| check_unused(context, &job.name))?;
    // The traits are set before the jobs can end.
    for JobArguments { name, auto_dismiss, auto_finalize, is_blocking, .. } in jobs {
        let traits = JobTraits {
            auto_dismiss: *auto_dismiss,
            auto_finalize: *auto_finalize,
            pending: None,
            is_started: false,
            is_blocking: *is_blocking,
        };
        context.state.borrow_mut().jobs.insert(name.clone(), traits);
    }
    if let Err(error) = context.call(method, params).await {
        jobs.iter().for_each(|job| _ = context.state.borrow_mut().jobs.remove(&job.name));
        return Err(error);
    }
    for JobArguments { name, .. } in jobs {
        if let Some(traits) = context.state.borrow_mut().jobs.get_mut(name) {
            traits.is_started = true;
        }
        // For a job that has ended already, all events were sent.
        if find(context, name).await?.is_some_and(|job| job.status() != "concluded") {
            context.events.tell_begin(name);
        }
    }
    Ok(json!({}))
}

/// Refuses the name of a job that another client starts, or has started since the arguments were
/// checked.
pub(super) fn check_unused(context: &Context, job: &str) -> Result<(), QmpError> {
    forget_dismissed(context);
    let state = context.state.borrow();
    if state.jobs.contains_key(job) || state.creations.contains_key(job) {
        return Err(QmpError::generic(format!("Job ID '{job}' already in use")));
    }
    Ok(())
}

/// Forgets jobs that were dismissed at the control socket.
fn forget_dismissed(context: &Context) {
    let listed = context.running.jobs().list();
    let mut state = context.state.borrow_mut();
    let pulls: Vec<_> = state.pulls.keys().cloned().collect();
    let is_listed =
        |name: &String| listed.iter().any(|job| job.name == *name) || pulls.contains(name);
    state.jobs.retain(|name, job| !job.is_started || is_listed(name));
}
