//! A virtual machine that runs one job: QEMU emulates it in software, and it ends by its own exit.
//!
//! The job's output comes back as text, its exit status as a number. A guest that dies, hangs or
//! exits in another way is an error that shows the last lines of its kernel. Only a guest whose
//! kernel dies before the job begins is started again, because emulated processors sometimes fail
//! on code that the kernel patches at boot. Counts from an emulated guest are meaningful, times are
//! not.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use lab_tools::monitor::Monitor;

use super::base::{Base, EXIT_PORT, IS_UP, KernelChoice, Tools};

/// The emulator.
pub const QEMU: &str = "qemu-system-x86_64";
/// The time after which a job counts as hung: many times its duration on a busy host.
pub const TIMEOUT: Duration = Duration::from_secs(600);
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The maximum number of starts of a guest whose kernel does not boot.
const STARTS: usize = 3;
/// The kernel parameters for a fast boot, a panic at the first oops, and little output; see
/// Documentation/admin-guide/kernel-parameters.rst.
const KERNEL_LINE: &str = "console=ttyS0 quiet panic=-1 oops=panic mitigations=off tsc=reliable \
    no_timer_check nokaslr audit=0 cryptomgr.notests rcupdate.rcu_expedited=1";

/// How a disk of the guest is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bus {
    /// NVMe, with FUA.
    Nvme,
    /// SCSI by virtio, with FUA ("dpofua").
    Scsi,
    /// virtio-blk: a write cache and no FUA.
    Virtio,
}

/// A guest to be started.
pub struct Machine<'a> {
    base: &'a Base,
    folder: TempDir,
    memory: u32,
    kernel: KernelChoice,
    tools: Tools,
    archive: &'a [u8],
    words: Vec<String>,
    disks: usize,
}

/// The result of a job.
pub struct Outcome {
    /// The job's exit status, 0 to 100.
    pub status: u8,
    /// The standard output and standard error.
    pub output: String,
}

impl Outcome {
    /// The output of the job.
    ///
    /// # Errors
    /// The exit status was not 0; the error shows the end of the output.
    pub fn success(self) -> Result<String> {
        if self.status != 0 {
            let (status, said) = (self.status, tail(&self.output));
            bail!("the job in the guest failed with status {status}:\n{said}");
        }
        Ok(self.output)
    }
}

/// The last lines of a text.
fn tail(text: &str) -> String {
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}

/// A guest that runs.
pub struct Running {
    child: Child,
    folder: TempDir,
    lines: Receiver<String>,
    output: String,
    end: Instant,
}

impl<'a> Machine<'a> {
    /// A machine with `memory` MiB, in a file that other processes may share: a vhost-user device
    /// needs that.
    pub fn new(base: &'a Base, memory: u32) -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("vm-")
            .tempdir_in(base.cache())
            .context("cannot make a folder for the guest")?;
        let (kernel, tools) = (KernelChoice::Usual, Tools::Usual);
        let (archive, words) = (&[][..], Vec::new());
        Ok(Self { base, folder, memory, kernel, tools, archive, words, disks: 0 })
    }

    /// Chooses a kernel, one of [`Base::kernels`].
    pub fn kernel(&mut self, kernel: KernelChoice) -> &mut Self {
        self.kernel = kernel;
        self
    }

    /// Chooses the tools in the guest.
    pub fn tools(&mut self, tools: Tools) -> &mut Self {
        self.tools = tools;
        self
    }

    /// Adds an archive, whose files replace those of the same names.
    pub fn archive(&mut self, archive: &'a [u8]) -> &mut Self {
        self.archive = archive;
        self
    }

    /// Adds an option to QEMU's command line.
    pub fn option(&mut self, name: &str, value: &str) -> &mut Self {
        self.words.extend([name.to_owned(), value.to_owned()]);
        self
    }

    /// Attaches the raw image `file` of the host. The guest knows it by `serial`, of up to 20
    /// letters.
    pub fn disk(&mut self, bus: Bus, serial: &str, file: &Path) -> &mut Self {
        let drive = format!("format=raw,cache=unsafe,discard=unmap,file={}", file.display());
        self.drive(bus, serial, &drive)
    }

    /// Attaches a drive. `drive` is the value of QEMU's `-drive` without `id` and `if`.
    pub fn drive(&mut self, bus: Bus, serial: &str, drive: &str) -> &mut Self {
        let id = format!("disk{}", self.disks);
        self.disks += 1;
        self.option("-drive", &format!("id={id},if=none,{drive}"));
        let device = format!("drive={id},serial={serial}");
        match bus {
            Bus::Nvme => self.option("-device", &format!("nvme,{device}")),
            Bus::Scsi => self
                .option("-device", &format!("virtio-scsi-pci,id=bus-{id}"))
                .option("-device", &format!("scsi-hd,{device},bus=bus-{id}.0,dpofua=on")),
            Bus::Virtio => self.option("-device", &format!("virtio-blk-pci,{device}")),
        }
    }

    /// Runs the shell script `job` to its end.
    ///
    /// # Errors
    /// The guest does not start, dies, or is still busy after `limit`.
    pub fn run(self, job: &str, limit: Duration) -> Result<Outcome> {
        self.start(job, limit)?.finish()
    }

    /// Starts the shell script `job`, which must end within `limit`; returns when the job begins.
    ///
    /// # Errors
    /// The guest does not boot in several starts.
    pub fn start(self, job: &str, limit: Duration) -> Result<Running> {
        let initramfs = self.folder.path().join("initramfs");
        let archives = self.base.initramfs(self.kernel, self.tools, job)?;
        std::fs::write(&initramfs, [&archives, self.archive].concat())
            .context("cannot write initramfs")?;
        let mut commands: Vec<_> = (0..STARTS).map(|_| self.command(&initramfs)).collect();
        let (child, lines) = spawn(&mut commands[0])?;
        let end = Instant::now() + limit;
        let mut running = Running { child, folder: self.folder, lines, output: String::new(), end };
        for command in &mut commands[1..] {
            match running.wait_for(IS_UP) {
                Err(error) if running.has_time() => println!("started again: {error:#}"),
                outcome => return outcome.map(|_| running),
            }
            running.end_child();
            (running.child, running.lines) = spawn(command)?;
        }
        running.wait_for(IS_UP)?;
        Ok(running)
    }

    fn command(&self, initramfs: &Path) -> Command {
        let mut command = Command::new(QEMU);
        let memory = format!("memory-backend-memfd,id=memory,size={}M,share=on", self.memory);
        let console = console(&self.folder);
        let serial = format!("file:{}", console.display());
        command.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2"]);
        command.args(["-machine", "q35,memory-backend=memory", "-object", &memory]);
        command.arg("-m").arg(self.memory.to_string());
        command.args(["-nodefaults", "-no-reboot", "-display", "none"]);
        command.arg("-kernel").arg(self.base.kernel(self.kernel)).arg("-initrd").arg(initramfs);
        command.args(["-append", KERNEL_LINE, "-serial", &serial]);
        command.args(["-chardev", "stdio,id=output,signal=off", "-serial", "chardev:output"]);
        command.arg("-device").arg(format!("isa-debug-exit,iobase={EXIT_PORT},iosize=4"));
        let monitor = format!("unix:{},server=on,wait=off", monitor(&self.folder).display());
        command.args(["-qmp", &monitor]);
        command.args(&self.words).stdin(Stdio::piped()).stdout(Stdio::piped());
        let log = File::create(self.folder.path().join("qemu"));
        command.stderr(log.map_or(Stdio::inherit(), Stdio::from));
        command
    }
}

/// Starts QEMU; the receiver gets the guest's output line by line.
fn spawn(command: &mut Command) -> Result<(Child, Receiver<String>)> {
    let mut child = command.spawn().with_context(|| format!("cannot start {QEMU}"))?;
    let stdout = child.stdout.take().context("the guest has no output")?;
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            // The receiver may be gone: the scenario has ended.
            let _ = sender.send(line);
        }
    });
    Ok((child, lines))
}

fn console(folder: &TempDir) -> PathBuf {
    folder.path().join("console")
}

fn monitor(folder: &TempDir) -> PathBuf {
    folder.path().join("monitor")
}

impl Running {
    /// A connection to QEMU's monitor.
    pub fn monitor(&self) -> Result<Monitor> {
        Monitor::connect(&monitor(&self.folder))
    }

    /// Sends a line to the job.
    pub fn send_line(&mut self, line: &str) -> Result<()> {
        let input = self.child.stdin.as_mut().context("the guest has no input")?;
        writeln!(input, "{line}").context("the guest does not listen")
    }

    /// Whether the job has printed `line` by now.
    pub fn has_printed(&mut self, line: &str) -> bool {
        self.take_all();
        self.output.lines().any(|said| said == line)
    }

    /// Waits until the job prints `line`. Returns the lines that the job printed during the wait.
    ///
    /// # Errors
    /// The guest ends, or its time is up, before the line.
    pub fn wait_for(&mut self, line: &str) -> Result<String> {
        let start = self.output.len();
        loop {
            let left = self.end.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(found) if found.trim_end() == line => return Ok(self.output[start..].to_owned()),
                Ok(found) => self.take(&found),
                Err(_) => bail!("the guest never said '{line}'\n{}", self.last_words()),
            }
        }
    }

    fn end_child(&mut self) {
        // Both fail only if the process has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn has_time(&self) -> bool {
        Instant::now() < self.end
    }

    fn take(&mut self, line: &str) {
        self.output.push_str(line.trim_end());
        self.output.push('\n');
    }

    fn take_all(&mut self) {
        while let Ok(line) = self.lines.try_recv() {
            self.take(&line);
        }
    }

    /// Waits for the end of the job.
    ///
    /// # Errors
    /// The guest dies, or its time is up.
    pub fn finish(mut self) -> Result<Outcome> {
        let status = self.wait()?;
        while let Ok(line) = self.lines.recv() {
            self.take(&line);
        }
        // The guest writes its status plus one to the port, and QEMU exits with twice that plus
        // one.
        match status.code() {
            Some(code) if code >= 3 && code % 2 == 1 => Ok(Outcome {
                status: ((code - 1) / 2 - 1) as u8,
                output: std::mem::take(&mut self.output),
            }),
            _ => bail!("the guest died ({status})\n{}", self.last_words()),
        }
    }

    fn wait(&mut self) -> Result<ExitStatus> {
        loop {
            self.take_all();
            if let Some(status) = self.child.try_wait().context("cannot wait for the guest")? {
                return Ok(status);
            }
            if Instant::now() >= self.end {
                bail!("the guest is busy beyond its time\n{}", self.last_words());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// The last lines of the output of job, kernel and emulator.
    fn last_words(&self) -> String {
        let read = |name: &str| {
            let bytes = std::fs::read(self.folder.path().join(name)).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let (job, kernel, emulator) = (tail(&self.output), tail(&read("console")), read("qemu"));
        format!("job: {job}\nkernel: {kernel}\nQEMU: {}", tail(&emulator))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end_child();
    }
}
