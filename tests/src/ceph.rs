//! A Ceph cluster for the tests of this process: `tests/ceph/cluster` starts it, and ends it when
//! this process ends.

use std::io::{BufRead, BufReader, Write};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, OnceLock, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::need;
use crate::{Outcome, run, tool};

/// The programs of the cluster.
const PROGRAMS: &[&str] = &["ceph-mon", "ceph-osd", "ceph", "ceph-authtool", "monmaptool", "rbd"];

/// A cluster with a pool "rbd".
pub struct Ceph {
    folder: PathBuf,
    script: Mutex<Script>,
}

/// The script and its answers.
struct Script {
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    _process: Child,
}

/// The one cluster of this process. Tests that disturb it lock it for themselves.
fn cluster() -> &'static Result<RwLock<Ceph>, String> {
    static CLUSTER: OnceLock<Result<RwLock<Ceph>, String>> = OnceLock::new();
    let there_is_all = || need::tools(PROGRAMS).and_then(|()| need::qemu_driver("rbd"));
    CLUSTER.get_or_init(|| there_is_all().map(|()| RwLock::new(Ceph::start())))
}

/// The cluster, in working order.
pub fn ceph() -> Result<RwLockReadGuard<'static, Ceph>, String> {
    let cluster = cluster().as_ref().map_err(Clone::clone)?;
    // A poisoned lock is usable: the changes of a test that failed were undone.
    Ok(cluster.read().unwrap_or_else(|poisoned| poisoned.into_inner()))
}

/// The cluster, for a test that disturbs it; no other test uses it meanwhile.
pub fn ceph_alone() -> Result<CephAlone, String> {
    let cluster = cluster().as_ref().map_err(Clone::clone)?;
    let ceph = cluster.write().unwrap_or_else(|poisoned| poisoned.into_inner());
    Ok(CephAlone { ceph, osd: Osd::Runs, has_monitor: true })
}

/// The cluster, locked for one test. The test's changes to the cluster are undone at its end, also
/// when it fails.
pub struct CephAlone {
    ceph: RwLockWriteGuard<'static, Ceph>,
    osd: Osd,
    has_monitor: bool,
}

/// The state of the only OSD.
#[derive(PartialEq, Eq)]
enum Osd {
    Runs,
    IsFrozen,
    IsStopped,
}

impl Deref for CephAlone {
    type Target = Ceph;

    fn deref(&self) -> &Ceph {
        &self.ceph
    }
}

impl CephAlone {
    /// Stops the OSD in order, with its data written to its folder.
    pub fn stop_osd(&mut self) {
        self.ceph.tell("osd stop");
        self.osd = Osd::IsStopped;
    }

    /// Stops the OSD's answers, as on a host that hangs.
    pub fn freeze_osd(&mut self) {
        self.osd = Osd::IsFrozen;
        self.ceph.tell("osd freeze");
    }

    /// Stops the whole cluster: the OSD as `stop_osd` does, and then the monitor.
    pub fn stop_cluster(&mut self) {
        self.stop_osd();
        self.ceph.tell("mon stop");
        self.has_monitor = false;
    }

    /// Starts the cluster again, with its data.
    pub fn restore(&mut self) {
        if !std::mem::replace(&mut self.has_monitor, true) {
            self.ceph.tell("mon start");
        }
        match std::mem::replace(&mut self.osd, Osd::Runs) {
            Osd::Runs => {}
            Osd::IsFrozen => self.ceph.tell("osd thaw"),
            Osd::IsStopped => self.ceph.tell("osd start"),
        }
    }
}

impl Drop for CephAlone {
    fn drop(&mut self) {
        self.restore();
    }
}

impl Ceph {
    fn start() -> Self {
        let folder = tempfile::Builder::new().prefix("bhceph").tempdir_in("/tmp");
        // The script removes the folder.
        let folder = folder.expect("a folder for the cluster").keep();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("ceph/cluster");
        let mut command = Command::new(script);
        command.arg(&folder).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().expect("the script of the cluster");
        let commands = process.stdin.take().expect("standard input is a pipe");
        let answers = BufReader::new(process.stdout.take().expect("standard output is a pipe"));
        let script = Mutex::new(Script { commands, answers, _process: process });
        let ceph = Self { folder, script };
        ceph.hear("ready");
        ceph
    }

    /// The configuration file of its clients.
    pub fn configuration(&self) -> PathBuf {
        self.folder.join("ceph.conf")
    }

    /// Another configuration file, with additional lines for clients.
    pub fn configuration_with(&self, name: &str, lines: &str) -> PathBuf {
        let usual = std::fs::read_to_string(self.configuration()).expect("the configuration");
        let path = self.folder.join(name);
        let text = usual.replace("[client]\n", &format!("[client]\n{lines}\n"));
        std::fs::write(&path, text).expect("a configuration");
        path
    }

    /// The location of an image of the pool "rbd", for our own command lines.
    pub fn location(&self, image: &str) -> String {
        format!("rbd:rbd/{image}?conf={}", self.configuration().display())
    }

    /// The same for QEMU's programs.
    pub fn qemu_location(&self, image: &str) -> String {
        format!("rbd:rbd/{image}:conf={}", self.configuration().display())
    }

    /// Runs Ceph's tool for images with these arguments.
    pub fn rbd(&self, words: &[&str]) -> Outcome {
        run(tool("rbd").env("CEPH_CONF", self.configuration()).args(words))
    }

    /// Runs Ceph's tool for clusters with these arguments.
    pub fn ceph(&self, words: &[&str]) -> Outcome {
        let mut command = tool("ceph");
        run(command
            .env("CEPH_CONF", self.configuration())
            .args(["--connect-timeout", "20"])
            .args(words))
    }

    fn tell(&self, command: &str) {
        let told =
            writeln!(self.script.lock().expect("no test has failed in it").commands, "{command}");
        told.expect("the script of the cluster runs");
        self.hear("done");
    }

    #[track_caller]
    fn hear(&self, expected: &str) {
        let mut line = String::new();
        let mut script = self.script.lock().expect("no test has failed in it");
        script.answers.read_line(&mut line).expect("the script of the cluster runs");
        assert_eq!(line.trim(), expected, "the cluster failed: see {}", self.folder.display());
    }
}
