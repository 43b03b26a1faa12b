//! Packages of Debian's backports, beside those of the system's own sources, which stay as they
//! are.
//!
//! All of QEMU's packages must have one version: if `qemu-utils` came from backports, installing
//! the emulator from the system's sources would remove it.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::process::{apt_get, run};
use crate::workspace::Workspace;

/// Where the keys of Debian's archive are.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The first release of Debian that has QEMU 10, the oldest one that the tests are written for.
const RELEASE_WITH_QEMU: u32 = 13;

/// Package lists that include Debian's backports.
pub struct Backports {
    /// The name for `apt-get install --target-release`.
    suite: String,
    folder: PathBuf,
}

impl Backports {
    /// Fetches the lists and keeps them in the target folder, which nothing else writes to.
    ///
    /// # Errors
    /// The system is not Debian, or the lists cannot be fetched.
    pub fn fetch() -> Result<Self> {
        let folder = Workspace::find()?.target().join("tools/apt");
        let codename = os_release("VERSION_CODENAME").context("backports are for Debian")?;
        let suite = format!("{codename}-backports");
        std::fs::create_dir_all(folder.join("lists/partial"))?;
        std::fs::create_dir_all(folder.join("cache/archives/partial"))?;
        let line = format!("deb [signed-by={KEYRING}] http://deb.debian.org/debian {suite} main\n");
        std::fs::write(folder.join("sources.list"), line)?;
        let backports = Self { suite, folder };
        run(backports.apt_get(&["update"]))?;
        Ok(backports)
    }

    /// `apt-get install`, which prefers the versions of backports.
    pub fn install(&self) -> Command {
        self.apt_get(&["install", "--target-release", &self.suite])
    }

    /// `apt-get` with these lists.
    pub fn apt_get(&self, args: &[&str]) -> Command {
        let mut command = apt_get(args);
        for (key, name) in [
            ("Dir::Etc::SourceList", "sources.list"),
            ("Dir::State::Lists", "lists"),
            ("Dir::Cache", "cache"),
        ] {
            let mut option = OsStr::new(key).to_owned();
            option.push("=");
            option.push(self.folder.join(name));
            command.arg("--option").arg(option);
        }
        command
    }
}

/// Whether this system's own packages of QEMU are too old, and backports have newer ones.
pub fn have_newer_qemu() -> bool {
    let release = os_release("VERSION_ID").and_then(|version| version.parse::<u32>().ok());
    release.is_some_and(|release| release < RELEASE_WITH_QEMU)
}

/// A value in Debian's own description; `None` on other systems.
fn os_release(key: &str) -> Option<String> {
    let text = std::fs::read_to_string("/etc/os-release").ok()?;
    let value = |key: &str| {
        text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('=')).map(unquoted)
    };
    value("ID").filter(|id| id == "debian").and_then(|_| value(key))
}

fn unquoted(text: &str) -> String {
    text.trim_matches('"').to_owned()
}
