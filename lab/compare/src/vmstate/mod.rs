//! `cargo xtask compare --vmstate`: saving and loading a machine's state, beside QEMU and `dd`.
//!
//! In each round all programs in turn save the same number of random bytes to the same disk, and
//! load them again, with direct I/O and through the page cache. The time of a save ends when it is
//! durable.
//!
//! - [`stream`]: a producer of small writes and a consumer for ours, and unbuffered small writes
//! - [`machine`]: QEMU's `savevm` and `loadvm` of a paused machine of that much memory
//! - [`report`]: the results

mod machine;
mod report;
mod stream;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use self::machine::Machine;
use self::report::Row;
use self::stream::{SaveFigure, SaveResult};
use super::caching::Caching;
use super::config::{Config, Options, write};
use super::interrupt::Interrupt;
use super::report as common;
use super::servers::Kind;
use lab_tools::apt;
use lab_tools::process::run as run_program;
use lab_tools::workspace::Workspace;

/// Unbuffered small writes are slow, so only one part in 32 of the stream is written.
const UNBUFFERED_PART: u64 = 32;
const NAME: &str = "state";

/// The program that saves and loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contender {
    /// Writes of 1 MiB, one after the other, to a file: the rate that we aim at.
    Dd,
    /// A `write` to a file for each small write.
    Unbuffered,
    /// A paused machine, by its monitor.
    Qemu,
    /// `blockhouse vmstate` at a pipe.
    Ours,
}

/// In the order of turns.
pub const CONTENDERS: [Contender; 4] =
    [Contender::Dd, Contender::Unbuffered, Contender::Qemu, Contender::Ours];

/// The result of one turn.
#[derive(Clone, Copy, Default)]
pub struct StateFigures {
    /// MiB a second.
    save: Option<f64>,
    /// MiB a second.
    load: Option<f64>,
    /// MiB of memory during a save beyond those of the idle process.
    memory: Option<f64>,
}

/// The folders and files of a comparison.
struct Place {
    /// Random data as large as the state, in memory.
    data: PathBuf,
    _memory: TempDir,
    disk: TempDir,
    size: u64,
    blockhouse: PathBuf,
}

/// Compares, as `options` say.
pub fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    apt::require(apt::FOR_STATES)?;
    let config = Config::new(workspace, options, Vec::new(), &[Kind::Blockhouse])?;
    let size = options.bytes()?;
    let disk = options.dir.clone().unwrap_or_else(|| workspace.target().to_owned());
    let place = Place::make(size, &disk, config.programs.blockhouse.clone(), &config.interrupt)?;
    let heading = report::heading(&place.blockhouse, options.mebibytes(), config.rounds)?;
    print!("{heading}");
    let mut rows = Vec::new();
    for caching in [Caching::Direct, Caching::Cached] {
        let mut row = Row::new(caching);
        for _ in 0..config.rounds {
            let turn = |contender| {
                config.interrupt.check()?;
                let context = || format!("{contender:?}, {caching:?}");
                place.turn(contender, caching, &config.interrupt).with_context(context)
            };
            row.add(CONTENDERS.iter().map(|&contender| turn(contender)).collect::<Result<_>>()?);
        }
        print!("{}", row.text());
        rows.push(row);
    }
    if let Some(file) = &options.markdown {
        write(file, &report::markdown(&heading, &rows))?;
    }
    Ok(())
}

impl Place {
    fn make(size: u64, disk: &Path, blockhouse: PathBuf, interrupt: &Interrupt) -> Result<Self> {
        let folder = |parent: &Path| {
            let mut builder = tempfile::Builder::new();
            builder.prefix("blockhouse-compare-").tempdir_in(parent)
        };
        let memory = folder(Path::new("/dev/shm")).context("no place in memory")?;
        let disk = folder(disk).with_context(|| format!("no place in {}", disk.display()))?;
        let data = memory.path().join("data");
        let mut file = File::create(&data)?;
        let mut random = stream::RandomData::new();
        for _ in 0..size >> 20 {
            interrupt.check()?;
            file.write_all(random.chunk()).context("no room in memory for the state")?;
        }
        Ok(Self { data, _memory: memory, disk, size, blockhouse })
    }

    fn turn(
        &self,
        contender: Contender,
        caching: Caching,
        interrupt: &Interrupt,
    ) -> Result<StateFigures> {
        let file = self.disk.path().join("state.qcow2");
        let turn = match contender {
            Contender::Dd => self.dd(&file, caching),
            Contender::Unbuffered => {
                let part = self.size / UNBUFFERED_PART;
                let spent = stream::save_unbuffered(&file, part, caching, interrupt)?;
                Ok(StateFigures { save: Some(rate(part, spent)), ..StateFigures::default() })
            }
            Contender::Qemu => self.qemu(&file, caching),
            Contender::Ours => self.ours(&file, caching, interrupt),
        }?;
        std::fs::remove_file(&file)?;
        // The file system frees the file's blocks in the background. syncfs waits for that, so that
        // it does not slow the next program.
        rustix::fs::syncfs(&File::open(self.disk.path())?)?;
        Ok(turn)
    }

    fn dd(&self, file: &Path, caching: Caching) -> Result<StateFigures> {
        let dd = |from: &Path, to: &Path, options: &[&str]| {
            let mut dd = Command::new("dd");
            dd.args(["bs=1M", "status=none"]).args(options);
            dd.arg(format!("if={}", from.display())).arg(format!("of={}", to.display()));
            let began = Instant::now();
            run_program(dd)?;
            Ok::<_, anyhow::Error>(rate(self.size, began.elapsed()))
        };
        let direct = caching == Caching::Direct;
        let [save, load]: [&[&str]; 2] = if direct {
            [&["oflag=direct", "conv=fdatasync"], &["iflag=direct"]]
        } else {
            [&["conv=fdatasync"], &[]]
        };
        let save = dd(&self.data, file, save)?;
        let load = dd(file, Path::new("/dev/null"), load)?;
        Ok(StateFigures { save: Some(save), load: Some(load), memory: None })
    }

    fn qemu(&self, file: &Path, caching: Caching) -> Result<StateFigures> {
        self.new_image(file)?;
        let mut machine = Machine::start(self.disk.path(), &self.data, self.size, file, caching)?;
        let save = machine.timed(&format!("savevm {NAME}"))?;
        let load = machine.timed(&format!("loadvm {NAME}"))?;
        machine.quit()?;
        let (save, load) = (rate(self.size, save), rate(self.size, load));
        Ok(StateFigures { save: Some(save), load: Some(load), memory: None })
    }

    fn ours(&self, file: &Path, caching: Caching, interrupt: &Interrupt) -> Result<StateFigures> {
        self.new_image(file)?;
        let vmstate = |action| {
            let cache = if caching == Caching::Direct { "none" } else { "writeback" };
            let mut command = Command::new(&self.blockhouse);
            command.args(["vmstate", action, "--cache", cache]).arg(file).arg(NAME);
            command
        };
        let SaveResult { spent, memory } =
            stream::save(vmstate("save"), &self.data, self.size, SaveFigure::Time, interrupt)?;
        ensure!(memory.is_none(), "a timed save is not looked at");
        let load = stream::load(vmstate("load"), self.size, interrupt)?;
        std::fs::remove_file(file)?;
        self.new_image(file)?;
        let watched =
            stream::save(vmstate("save"), &self.data, self.size, SaveFigure::Memory, interrupt)?;
        Ok(StateFigures {
            save: Some(rate(self.size, spent)),
            load: Some(rate(self.size, load)),
            memory: watched.memory.map(|bytes| bytes as f64 / f64::from(1 << 20)),
        })
    }

    fn new_image(&self, file: &Path) -> Result<()> {
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-f", "qcow2"]).arg(file).arg("64M").stdin(Stdio::null());
        run_program(create)
    }
}

/// MiB a second.
fn rate(bytes: u64, spent: Duration) -> f64 {
    bytes as f64 / f64::from(1 << 20) / spent.max(Duration::from_nanos(1)).as_secs_f64()
}

/// The processor and the kernel, for reports.
fn host() -> Result<(String, String)> {
    Ok((common::processor()?, common::kernel()))
}
