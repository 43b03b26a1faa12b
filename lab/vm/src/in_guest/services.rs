//! Our package on a Debian system, as docs/install.md describes: it is installed, a unit that its
//! socket starts serves an image, is inspected, restarted, killed and upgraded; a configuration
//! serves many disks; and the package is removed.
//!
//! Evidence: clients read what they wrote, the service manager and the journal say what they
//! should, and at the end the system has the same files as before, except for data.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use super::client::Client;
use super::debian::PACKAGE;
use super::services_kept;
use super::system::{read, tool};
use super::units::{
    IMAGES, OWN_IMAGES, Unit, ctl, has, make_image, make_own_image, socket, until, write,
};

/// The highest exposure level of `systemd-analyze security`, from 0 (safe) to 10.
const MAX_EXPOSURE: f64 = 1.0;
/// The files that change on any system: logs, caches and lists of packages, backup copies of the
/// list of users.
const ALWAYS_CHANGED: &[&str] = &[
    "/lab",
    "/tmp",
    "/var/tmp",
    "/var/log",
    "/var/cache",
    "/var/lib/dpkg",
    "/var/lib/apt",
    "/var/lib/systemd",
    "/etc/passwd-",
    "/etc/group-",
    "/etc/shadow-",
    "/etc/gshadow-",
    "/etc/subuid-",
    "/etc/subgid-",
    "/etc/.pwd.lock",
];

/// Runs all parts.
pub fn run() -> Result<()> {
    println!("  {}", tool("systemctl", &["--version"])?.lines().next().unwrap_or_default());
    let before = files()?;
    apt(&["install", PACKAGE])?;
    hardened()?;
    activated()?;
    restarted()?;
    services_kept::killed_between_clients()?;
    services_kept::upgraded()?;
    services_kept::hung()?;
    #[cfg(target_arch = "x86_64")]
    super::taken_over::run()?;
    described()?;
    installed_again()?;
    removed(&before)
}

fn apt(words: &[&str]) -> Result<()> {
    tool("apt-get", &[&["--yes", "--quiet"], words].concat()).map(drop)
}

/// The service manager's own judgement on the loaded units.
fn hardened() -> Result<()> {
    for unit in ["blockhouse@disk.qcow2.service", "blockhouse.service"] {
        let said = tool("systemd-analyze", &["security", "--no-pager", unit])?;
        let line = said.lines().find(|line| line.contains("Overall exposure level"));
        let words = line.with_context(|| format!("no level: {said}"))?.split_whitespace();
        let exposure = words.filter_map(|word| word.parse::<f64>().ok()).next();
        let exposure = exposure.with_context(|| format!("no level: {said}"))?;
        println!("  systemd-analyze security {unit}: {exposure}");
        ensure!(exposure <= MAX_EXPOSURE, "{unit} is not hardened: {exposure}");
    }
    Ok(())
}

const SERVICE: Unit = Unit("blockhouse@disk.qcow2.service");
const SOCKET_UNIT: Unit = Unit("blockhouse@disk.qcow2.socket");

/// Follows docs/install.md word by word, then inspects the service.
fn activated() -> Result<()> {
    make_own_image("disk.qcow2")?;
    std::fs::create_dir_all("/etc/blockhouse")?;
    let options = format!("OPTIONS=--control {}\n", control().display());
    std::fs::write("/etc/blockhouse/disk.qcow2.conf", options)?;
    tool("systemctl", &["enable", "--now", SOCKET_UNIT.0])?;
    let (state, socket) = (SERVICE.property("ActiveState")?, socket("disk.qcow2", "nbd.sock"));
    ensure!(state == "inactive", "it runs before its first client: {state}");
    let owner = tool("stat", &["--format", "%U:%G %a", socket.to_str().unwrap_or_default()])?;
    ensure!(owner == "blockhouse-disk.qcow2:blockhouse-disk.qcow2 660", "{owner}");
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let info = tool("qemu-img", &["info", &uri])?;
    ensure!(info.contains("64 MiB"), "{info}");
    ensure!(SERVICE.property("ActiveState")? == "active", "no client started it");
    let info = tool("nbdinfo", &["--size", &uri])?;
    ensure!(info == "67108864", "{info}");
    println!("  status: {}", SERVICE.property("StatusText")?);
    let control = control();
    let disks = ctl(&control, &["disks"])?;
    ensure!(disks.contains("disk.qcow2"), "{disks}");
    let mut asking = UnixStream::connect(&control)?;
    let sandbox = services_kept::version(&mut asking)?["sandbox"].to_string();
    println!("  sandbox: {sandbox}");
    let profile = read(&PathBuf::from(format!("/proc/{}/attr/current", SERVICE.process()?)))?;
    println!("  AppArmor: {profile}");
    ensure!(profile == "blockhouse (enforce)", "AppArmor does not confine it: {profile}");
    ensure!(sandbox.contains("landlock") && sandbox.contains("seccomp"), "no sandbox: {sandbox}");
    let mut client = Client::connect(&socket)?;
    write(&mut client, 0, 7)?;
    let top = tool("blockhouse", &["top", control.to_str().unwrap_or_default()])?;
    println!("  top: {}", top.lines().next().unwrap_or_default());
    ensure!(top.contains("disk.qcow2"), "top does not show it: {top}");
    client.close()
}

fn control() -> PathBuf {
    socket("disk.qcow2", "control")
}

/// Acknowledged writes are there after an orderly restart and after kills, without a warning.
fn restarted() -> Result<()> {
    let socket = socket("disk.qcow2", "nbd.sock");
    for (way, byte) in [("restart", 8), ("kill", 9), ("kill", 10)] {
        let mut client = Client::connect(&socket)?;
        write(&mut client, 1 << 20, byte)?;
        let before = SERVICE.process()?;
        match way {
            "kill" => SERVICE.kill()?,
            _ => drop(tool("systemctl", &["restart", SERVICE.0])?),
        }
        // The client waits at the socket, which the service manager listens at.
        has(&mut Client::connect(&socket)?, 1 << 20, byte)?;
        ensure!(SERVICE.process()? != before, "{way}: it is the same process");
        println!("  after a {way}: served, as written");
    }
    let restarts = SERVICE.property("NRestarts")?;
    ensure!(restarts == "2", "{restarts} restarts by the service manager");
    ctl(&control(), &["disks"]).map(drop)
}

/// All disks of a configuration file, which changes.
fn described() -> Result<()> {
    const DAEMON: Unit = Unit("blockhouse.service");
    let names = ["first.qcow2", "second.img", "third.qcow2"];
    names.iter().try_for_each(|name| make_image(name).map(drop))?;
    let disk = |name: &&str| {
        let (path, socket) = (Path::new(IMAGES).join(name), socket_of(name));
        let (path, socket) = (path.display(), socket.display());
        format!("[[disk]]\npath = \"{path}\"\nexports = [\"nbd+unix:///?socket={socket}\"]\n")
    };
    let text = |names: &[&str]| {
        let disks: String = names.iter().map(disk).collect();
        format!("[server]\ncontrol = \"/run/blockhouse/control\"\n{disks}")
    };
    let file = Path::new("/etc/blockhouse/blockhouse.toml");
    std::fs::create_dir_all("/etc/blockhouse")?;
    std::fs::write(file, text(&names[..2]))?;
    tool("systemctl", &["enable", "--now", DAEMON.0])?;
    let control = Path::new("/run/blockhouse/control");
    let has_all = |names: &[&str]| -> Result<bool> {
        let disks = ctl(control, &["disks"])?;
        Ok(names.iter().all(|name| disks.contains(name)))
    };
    ensure!(has_all(&names[..2])? && !has_all(&names)?, "other disks than described");
    std::fs::write(file, text(&names))?;
    tool("systemctl", &["reload", DAEMON.0])?;
    until("the third disk", || Ok(has_all(&names)?.then_some(())))?;
    let mut client = Client::connect(&socket_of("third.qcow2"))?;
    write(&mut client, 0, 3)?;
    DAEMON.kill()?;
    // The service manager keeps the socket while no server runs.
    has(&mut Client::connect(&socket_of("third.qcow2"))?, 0, 3)?;
    println!("  blockhouse.service: {}", DAEMON.property("StatusText")?);
    Ok(())
}

fn socket_of(name: &str) -> PathBuf {
    Path::new("/run/blockhouse").join(format!("{name}.sock"))
}

/// A new version of the package stops nothing.
fn installed_again() -> Result<()> {
    let before = SERVICE.process()?;
    apt(&["install", "--reinstall", PACKAGE])?;
    ensure!(SERVICE.process()? == before, "the server was stopped");
    let mut client = Client::connect(&socket("disk.qcow2", "nbd.sock"))?;
    has(&mut client, 1 << 20, 10)
}

/// Removal leaves only data and the user who owns it; when the data is gone, the user is removed,
/// too.
fn removed(before: &Files) -> Result<()> {
    apt(&["purge", "blockhouse"])?;
    let units =
        tool("systemctl", &["list-units", "--all", "--plain", "--no-legend", "blockhouse*"])?;
    ensure!(units.is_empty(), "units are left: {units}");
    let left = different(before, &files()?);
    let is_data = |path: &&String| {
        path.starts_with(IMAGES) || path.starts_with(OWN_IMAGES) || USERS.contains(&path.as_str())
    };
    let more: Vec<_> = left.iter().filter(|path| !is_data(path)).collect();
    ensure!(more.is_empty(), "left: {more:?}");
    let run =
        tool("find", &["/run", "-path", "*blockhouse*", "-not", "-path", "/run/systemd/system/*"])?;
    ensure!(run.is_empty(), "left: {run}");
    tool("qemu-img", &["check", "/var/lib/blockhouse-images/disk.qcow2/disk.qcow2"])?;
    println!("  removed: {} files of data and the users are left", left.len());
    std::fs::remove_dir_all(IMAGES)?;
    std::fs::remove_dir_all(OWN_IMAGES)?;
    apt(&["install", PACKAGE])?;
    apt(&["purge", "blockhouse"])?;
    let left = different(before, &files()?);
    ensure!(left.is_empty(), "left without data: {left:?}");
    println!("  removed: nothing is left");
    Ok(())
}

/// The files that have the user of the services, who stays while there are images.
const USERS: &[&str] = &["/etc/passwd", "/etc/group", "/etc/shadow", "/etc/gshadow"];

/// The files of the system, with the content of configuration files.
type Files = BTreeMap<String, Vec<u8>>;

fn files() -> Result<Files> {
    let mut all = Files::new();
    let device = Path::new("/").metadata()?.dev();
    let mut folders = vec![PathBuf::from("/")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let entry = entry?;
            let path = entry.path();
            let name = path.to_str().context("a name that is no text")?.to_owned();
            let metadata = entry.metadata()?;
            if metadata.dev() != device || ALWAYS_CHANGED.contains(&name.as_str()) {
                continue;
            }
            if metadata.is_dir() {
                folders.push(path);
                all.insert(name, Vec::new());
            } else {
                let is_text = metadata.is_file() && name.starts_with("/etc/");
                all.insert(name, if is_text { std::fs::read(&path)? } else { Vec::new() });
            }
        }
    }
    if all.is_empty() { bail!("the system has no files") } else { Ok(all) }
}

/// The files that were added, removed or changed.
fn different(before: &Files, now: &Files) -> Vec<String> {
    let came = now.iter().filter(|(name, content)| before.get(*name) != Some(content));
    let went = before.keys().filter(|name| !now.contains_key(*name));
    came.map(|(name, _)| name).chain(went).cloned().collect()
}
