//! The folders of a run's image, state, sockets and log, which are kept if the run finds an error.

use std::path::{Path, PathBuf};

use anyhow::Result;
use fastrand::Rng;
use tempfile::TempDir;

use crate::combination::{CACHES, ENGINES};

/// Lines of the servers' log in the report of a finding.
const LOG_LINES: usize = 6;

/// The common setting of all runs.
pub struct Setting {
    /// The binary.
    pub binary: PathBuf,
    /// Whether servers keep state.
    pub state: State,
    /// A folder on a disk.
    pub disk: PathBuf,
    /// How many servers of each run are killed.
    pub kills: u32,
}

/// Whether servers keep their state in memory that outlives them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// In a folder of the run.
    On,
    /// They keep none.
    Off,
    /// The binary has no such option.
    Absent,
}

/// A wrong behaviour of a server.
pub struct Finding {
    /// The error, with the last lines of the servers' log.
    pub what: String,
    /// The folders with image, state and log.
    pub kept: Vec<PathBuf>,
}

/// The folders of a run, removed when this is dropped.
pub struct Folders {
    images: TempDir,
    memory: TempDir,
}

impl Folders {
    /// New folders, with the image in memory or on a disk.
    pub fn new(setting: &Setting, is_on_disk: bool) -> Result<Self> {
        let memory = Path::new("/dev/shm");
        let images = if is_on_disk { &setting.disk } else { memory };
        let folder = |place: &Path| tempfile::Builder::new().prefix("kill-").tempdir_in(place);
        Ok(Self { images: folder(images)?, memory: folder(memory)? })
    }

    /// The folder of the image.
    pub fn images(&self) -> &Path {
        self.images.path()
    }

    /// The path of a file in memory.
    pub fn in_memory(&self, name: &str) -> PathBuf {
        self.memory.path().join(name)
    }

    /// The options that say where state is kept.
    pub fn state_options(&self, setting: &Setting) -> Vec<String> {
        match setting.state {
            State::On => vec!["--state".into(), self.in_memory("state").display().to_string()],
            State::Off => vec!["--state".into(), "off".into()],
            State::Absent => Vec::new(),
        }
    }

    /// Options of a server with state and a control socket; the other options are random.
    pub fn random_options(&self, setting: &Setting, random: &mut Rng) -> Vec<String> {
        let mut options = self.state_options(setting);
        let mut option = |name: &str, value: &str| options.extend([name.into(), value.into()]);
        option("--cache", CACHES[random.usize(..CACHES.len())]);
        option("--engine", ENGINES[random.usize(..ENGINES.len())]);
        option("--workers", ["1", "2"][random.usize(..2)]);
        option("--control", &self.in_memory("control").display().to_string());
        options
    }

    /// The log of the servers.
    pub fn log(&self) -> PathBuf {
        self.in_memory("log")
    }

    /// Keeps everything for the report of a finding.
    pub fn finding(self, what: &str) -> Finding {
        let said = std::fs::read_to_string(self.log()).unwrap_or_default();
        let lines: Vec<&str> = said.lines().collect();
        let last = lines[lines.len().saturating_sub(LOG_LINES)..].join("\n    ");
        let what = format!("{what}\n  the servers said:\n    {last}");
        Finding { what, kept: vec![self.images.keep(), self.memory.keep()] }
    }
}
