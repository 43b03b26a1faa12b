//! An attacker who has taken over an instance of our service, beside another instance: the test
//! makes system calls in its process that open, connect to, rename or signal what belongs to the
//! other instance.
//!
//! With the server's own sandbox off, the same calls succeed for what belongs to the instance
//! itself: so the calls are valid, and the restrictions of the unit refuse the others. With the
//! sandbox on, both restrict.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use nix::libc;

use super::client::Client;
use super::injection::{Argument, Outcome, StoppedThread};
use super::system::{read, tool};
use super::units::{Unit, ctl, has, make_own_image, socket, until, write};

const TAKEN: Instance = Instance { name: "taken.img", unit: Unit("blockhouse@taken.img.service") };
const OTHER: Instance = Instance { name: "other.img", unit: Unit("blockhouse@other.img.service") };

/// Runs the test for each way of starting the instance.
pub fn run() -> Result<()> {
    for instance in [TAKEN, OTHER] {
        make_own_image(instance.name)?;
    }
    let with_control = format!("--control {}", TAKEN.control().display());
    OTHER.start(&format!("--control {}", OTHER.control().display()))?;
    for (index, options) in
        [format!("--sandbox off {with_control}"), with_control, String::new()].iter().enumerate()
    {
        TAKEN.start(options)?;
        let threads = TAKEN.threads()?;
        for &thread in &threads {
            let mut taken = Attacker(StoppedThread::stop(TAKEN.unit.process()?, thread)?);
            taken.check_itself()?;
            if index == 0 {
                taken.reach(TAKEN)?.iter().try_for_each(|(what, is_done)| {
                    ensure!(is_done, "cannot {what} of its own: the attempt shows nothing");
                    Ok(())
                })?;
            }
            taken.reach(OTHER)?.iter().try_for_each(|(what, is_done)| {
                ensure!(!is_done, "an instance with '{options}' can {what} of another one");
                Ok(())
            })?;
        }
        for (instance, byte) in [(TAKEN, 3), (OTHER, 4)] {
            instance.serves(byte)?;
        }
        let options = if options.is_empty() { "as packaged" } else { options };
        println!("  taken over ({options}): {} threads reach nothing of another", threads.len());
    }
    ends_for_tracing()?;
    tool("systemctl", &["stop", TAKEN.unit.0, OTHER.unit.0]).map(drop)
}

/// A call that only an attacker makes ends the instance, and not the other one. The next server of
/// the instance takes over its state.
fn ends_for_tracing() -> Result<()> {
    let mut taken = StoppedThread::stop(TAKEN.unit.process()?, TAKEN.unit.process()?)?;
    let other = OTHER.unit.process()?;
    let words = [number(libc::PTRACE_ATTACH as u64), number(other as u64)];
    let outcome = taken.call(libc::SYS_ptrace, &words)?;
    ensure!(outcome == Outcome::Ended, "ptrace does not end it: {outcome:?}");
    drop(taken);
    OTHER.serves(5)?;
    ensure!(OTHER.unit.process()? == other, "the other instance was started again");
    until("the next server", || Ok(Client::connect(&TAKEN.nbd()).ok()))?.close()?;
    TAKEN.serves(6)?;
    println!("  taken over: ptrace ended it alone, and the next server serves");
    Ok(())
}

/// An instance of the service of one image.
#[derive(Clone, Copy)]
struct Instance {
    name: &'static str,
    unit: Unit,
}

impl Instance {
    /// Restarts it with these options, in addition to that of its NBD socket.
    fn start(self, options: &str) -> Result<()> {
        let nbd = self.nbd();
        let text = format!("OPTIONS=--nbd nbd+unix:///?socket={} {options}\n", nbd.display());
        std::fs::write(format!("/etc/blockhouse/{}.conf", self.name), text)?;
        tool("systemctl", &["restart", self.unit.0]).map(drop)
    }

    fn image(self) -> PathBuf {
        Path::new(super::units::OWN_IMAGES).join(self.name).join(self.name)
    }

    fn nbd(self) -> PathBuf {
        socket(self.name, "own.sock")
    }

    fn control(self) -> PathBuf {
        socket(self.name, "control")
    }

    /// The threads, without the kernel's io_uring workers.
    fn threads(self) -> Result<Vec<i32>> {
        let folder = PathBuf::from(format!("/proc/{}/task", self.unit.process()?));
        let mut threads = Vec::new();
        for entry in std::fs::read_dir(&folder)? {
            let name = entry?.file_name();
            let is_kernels = read(&folder.join(&name).join("comm"))?.starts_with("iou-");
            if !is_kernels {
                threads.push(name.to_str().context("a thread")?.parse()?);
            }
        }
        Ok(threads)
    }

    /// Checks that a client reads what it writes, and that the control socket answers, if there is
    /// one.
    fn serves(self, byte: u8) -> Result<()> {
        let mut client = Client::connect(&self.nbd())?;
        write(&mut client, 0, byte)?;
        has(&mut client, 0, byte)?;
        client.close()?;
        if self.control().exists() { ctl(&self.control(), &["disks"]).map(drop) } else { Ok(()) }
    }
}

/// An attacker who controls a thread of a server.
struct Attacker(StoppedThread);

/// The attempts, and whether each succeeded.
type Attempts = Vec<(&'static str, bool)>;

impl Attacker {
    /// Checks that calls are made in the process of the instance.
    fn check_itself(&mut self) -> Result<()> {
        let process = self.0.call(libc::SYS_getpid, &[])?;
        let expected = Outcome::Returned(TAKEN.unit.process()?.into());
        ensure!(process == expected, "it is not the instance: {process:?}");
        Ok(())
    }

    /// Tries what must not be possible with another instance.
    fn reach(&mut self, target: Instance) -> Result<Attempts> {
        let process = target.unit.process()?;
        let (image, state) = (target.image(), socket(target.name, "state"));
        let descriptors = PathBuf::from(format!("/proc/{process}/fd"));
        Ok(vec![
            ("read the image", self.opens(&image, libc::O_RDONLY)?),
            ("write to the image", self.opens(&image, libc::O_RDWR)?),
            ("rename the image", self.renames(&image)?),
            ("list the state", self.opens(&state, libc::O_DIRECTORY)?),
            ("rename the state", self.renames(&state)?),
            ("rename the control socket", self.renames(&target.control())?),
            ("connect to the NBD socket", self.connects(&target.nbd())?),
            ("connect to the control socket", self.connects(&target.control())?),
            ("list the descriptors", self.opens(&descriptors, libc::O_DIRECTORY)?),
            ("signal the process", self.signals(process)?),
            ("signal the process by a descriptor", self.signals_by_descriptor(process)?),
        ])
    }

    fn opens(&mut self, path: &Path, flags: i32) -> Result<bool> {
        let (path, folder) = (c_string(path), number(libc::AT_FDCWD as u64));
        let words = [folder, Argument::Memory(&path), number(flags as u64)];
        let opened = self.0.attempt(libc::SYS_openat, &words)?;
        self.close(opened)
    }

    /// Renames a file to another name and back; returns whether that is possible.
    fn renames(&mut self, path: &Path) -> Result<bool> {
        let other = path.with_extension("taken");
        let (path, other) = (c_string(path), c_string(&other));
        let (path, other) = (Argument::Memory(&path), Argument::Memory(&other));
        let renamed = self.0.attempt(libc::SYS_rename, &[path, other])?;
        if renamed.is_some() {
            let back = self.0.attempt(libc::SYS_rename, &[other, path])?;
            ensure!(back.is_some(), "it is not renamed again");
        }
        Ok(renamed.is_some())
    }

    fn connects(&mut self, path: &Path) -> Result<bool> {
        let (family, kind) = (libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC);
        let words = [number(family as u64), number(kind as u64), number(0)];
        let Some(made) = self.0.attempt(libc::SYS_socket, &words)? else { return Ok(false) };
        let address = [(family as u16).to_ne_bytes().to_vec(), c_string(path)].concat();
        let length = number(address.len() as u64);
        let words = [number(made as u64), Argument::Memory(&address), length];
        let connected = self.0.attempt(libc::SYS_connect, &words)?;
        self.close(Some(made))?;
        Ok(connected.is_some())
    }

    /// Sends the signal 0; returns whether that is possible.
    fn signals(&mut self, process: i32) -> Result<bool> {
        let words = [number(process as u64), number(0)];
        Ok(self.0.attempt(libc::SYS_kill, &words)?.is_some())
    }

    fn signals_by_descriptor(&mut self, process: i32) -> Result<bool> {
        let words = [number(process as u64), number(0)];
        let Some(opened) = self.0.attempt(libc::SYS_pidfd_open, &words)? else {
            return Ok(false);
        };
        let words = [number(opened as u64), number(0), number(0), number(0)];
        let sent = self.0.attempt(libc::SYS_pidfd_send_signal, &words)?;
        self.close(Some(opened))?;
        Ok(sent.is_some())
    }

    /// Closes a descriptor that was opened; returns whether one was.
    fn close(&mut self, opened: Option<i64>) -> Result<bool> {
        if let Some(descriptor) = opened {
            self.0.attempt(libc::SYS_close, &[number(descriptor as u64)])?;
        }
        Ok(opened.is_some())
    }
}

fn number(value: u64) -> Argument<'static> {
    Argument::Number(value)
}

fn c_string(path: &Path) -> Vec<u8> {
    let mut bytes = path.as_os_str().as_encoded_bytes().to_vec();
    bytes.push(0);
    bytes
}
