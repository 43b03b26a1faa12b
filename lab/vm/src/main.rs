//! `cargo xtask vm`: tests the guarantees of durability on a real kernel.
//!
//! A virtual machine runs Debian's kernel with our binary and a few tools, on disks that have what
//! the build machine's disk may lack: FUA, a write cache, a log of all requests. Each scenario
//! prints its findings. It fails if they break a guarantee, or if a server that is wrong on purpose
//! breaks none. Needs QEMU, Debian's package tools and, the first time, Debian's mirror.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "it talks to the person who started it")]

mod archive;
mod base;
mod debian;
mod disks;
mod guest;
mod in_guest;
mod kernel;
mod machine;
mod packages;
mod power;
mod scenarios;
mod server;
mod strace;
mod userland;

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use base::{Base, must_have_everything};
use clap::{Parser, Subcommand, ValueEnum};
use guest::Changes;
use in_guest::system::FileSystem;
use lab_tools::apt;
use lab_tools::process::find_program;
use lab_tools::workers;
use lab_tools::workspace::Workspace;
use packages::Packages;
use power::Bitmaps;
use server::Export;

/// Show what is guaranteed about durability on a real kernel, in a virtual machine.
#[derive(Parser)]
#[command(bin_name = "cargo xtask vm", args_conflicts_with_subcommands = true)]
struct Cli {
    /// Which scenarios to run; without any, all but `services`, which needs most
    scenarios: Vec<Scenario>,
    /// How often the server of a disk of `guest`, `guest-vhost-user` and `ublk` is killed
    #[arg(long, default_value_t = 10)]
    kills: u64,
    /// How often it is upgraded, in turn with that
    #[arg(long, default_value_t = 10)]
    upgrades: u64,
    /// Have `ublk-costs` measure a build as packages have it: it takes minutes to make
    #[arg(long)]
    optimized: bool,
    #[command(subcommand)]
    guest: Option<Hidden>,
}

#[derive(Subcommand)]
enum Hidden {
    /// The part that runs inside the guest
    #[command(hide = true, subcommand)]
    InGuest(in_guest::Task),
}

/// The scenarios.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Scenario {
    /// Requests to the disk for each durable write, beside the bare kernel's
    Fua,
    /// Requests to the disk for first durable writes to space that was prepared as written zeros,
    /// on two kernels
    FirstWrites,
    /// What is left of acknowledged writes after a loss of power
    Power,
    /// The same of volumes whose bitmaps are in a side file, and of increments by these
    PowerBitmaps,
    /// Increments of a device of the device mapper under load, whose server is killed
    Volume,
    /// A guest with ext4 on a disk of ours over NBD: freeze, trim, fio, kills and upgrades of the
    /// server, reboot, a disk that grows, a write cache that is switched
    Guest,
    /// The same with XFS over vhost-user-blk
    GuestVhostUser,
    /// The kernel's NBD client
    Nbd,
    /// The kernel's ublk driver: counts, kills and upgrades of the server, recovery, removal
    Ublk,
    /// The cost of the ublk driver, on two kernels: system calls for each request, the time until
    /// the first read
    UblkCosts,
    /// Data of a ublk device that stays in the kernel's pages, on two kernels
    UblkPages,
    /// A ublk device that the kernel serves by NVMe/TCP, on two kernels
    UblkNvme,
    /// The ublk driver in the hands of users who do what they should not, a size that changes
    UblkHostile,
    /// `attach` where the kernel has no ublk driver, but an NBD client
    AttachNbd,
    /// Completions that are polled for: the disks' interrupts, with and without
    IoPoll,
    /// Writes that a full thin pool loses behind the page cache
    LostWrites,
    /// Our package on a Debian system: installed, its services under systemd, and removed
    Services,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.guest {
        // In a guest there is no cargo to ask.
        Some(Hidden::InGuest(task)) => in_guest::run(task),
        None => Workspace::find().and_then(|workspace| run(&workspace, &cli)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vm: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the chosen scenarios. If the machine cannot run them, prints the reason and skips them.
fn run(workspace: &Workspace, cli: &Cli) -> Result<()> {
    let cache = workspace.target().join("vm");
    let packages = match get_ready(&cache) {
        Ok(packages) => packages,
        Err(reason) if must_have_everything() => {
            bail!("must not be skipped here, but: {reason}");
        }
        Err(reason) => {
            println!("vm: skipped: {reason}");
            return Ok(());
        }
    };
    let base = Base::prepare(workspace, packages, cache)?;
    let all = Scenario::value_variants().iter().filter(|one| **one != Scenario::Services);
    let chosen: Vec<_> = match &cli.scenarios[..] {
        [] => all.copied().collect(),
        chosen => chosen.to_vec(),
    };
    match chosen[..] {
        [scenario] => run_one(workspace, &base, scenario, cli),
        _ => run_side_by_side(&base, &chosen, cli),
    }
}

/// Runs each of `scenarios` as a process of its own, as many at a time as there are processors:
/// an emulated machine keeps one busy. The output of each is printed when it ends.
fn run_side_by_side(base: &Base, scenarios: &[Scenario], cli: &Cli) -> Result<()> {
    let started = Instant::now();
    // Prepares the newer kernel before the processes need it.
    base.kernels()?;
    workers::side_by_side(scenarios, |scenario| run_process(*scenario, cli))?;
    println!("vm: all ok after {:.1} s", started.elapsed().as_secs_f64());
    Ok(())
}

fn run_process(scenario: Scenario, cli: &Cli) -> Result<()> {
    let name = scenario.to_possible_value().context("a scenario without a name")?;
    let mut process = Command::new(std::env::current_exe().context("cannot find this program")?);
    process.arg(name.get_name());
    process.args(["--kills", &cli.kills.to_string(), "--upgrades", &cli.upgrades.to_string()]);
    process.args(cli.optimized.then_some("--optimized"));
    // Standard error is inherited, so that errors are seen at once.
    let output = process.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
    print!("{}", String::from_utf8_lossy(&output.stdout));
    ensure!(output.status.success(), "scenario {scenario:?} failed");
    Ok(())
}

fn run_one(workspace: &Workspace, base: &Base, scenario: Scenario, cli: &Cli) -> Result<()> {
    let changes = Changes { kills: cli.kills, upgrades: cli.upgrades };
    let started = Instant::now();
    println!("vm: {scenario:?} ...");
    let result = match scenario {
        Scenario::Fua => scenarios::fua(base),
        Scenario::FirstWrites => scenarios::first_writes(base),
        Scenario::Power => power::scenario::run(base, Bitmaps::None),
        Scenario::PowerBitmaps => power::scenario::run(base, Bitmaps::SideFile),
        Scenario::Volume => scenarios::volume(base),
        Scenario::Guest => guest::run(base, Export::Nbd, FileSystem::Ext4, changes),
        Scenario::GuestVhostUser => guest::run(base, Export::VhostUser, FileSystem::Xfs, changes),
        Scenario::Nbd => scenarios::nbd(base),
        Scenario::Ublk => scenarios::ublk(base, changes),
        Scenario::UblkCosts => {
            let optimized = cli.optimized.then(|| base.optimized(workspace)).transpose();
            optimized.and_then(|archive| scenarios::ublk_costs(base, archive.as_deref()))
        }
        Scenario::UblkPages => scenarios::ublk_pages(base),
        Scenario::UblkNvme => scenarios::ublk_nvme(base),
        Scenario::UblkHostile => scenarios::ublk_hostile(base),
        Scenario::AttachNbd => scenarios::attach_nbd(base),
        Scenario::IoPoll => scenarios::io_poll(base),
        Scenario::LostWrites => scenarios::lost_writes(base),
        Scenario::Services => scenarios::services(base),
    };
    let verdict = if result.is_ok() { "ok" } else { "FAILED" };
    println!("vm: {scenario:?} {verdict} after {:.1} s", started.elapsed().as_secs_f64());
    result.with_context(|| format!("scenario {scenario:?}"))
}

/// The packages of a guest, or the reason why none can be run here.
fn get_ready(cache: &Path) -> Result<Packages, String> {
    if std::env::consts::ARCH != "x86_64" {
        return Err("the guest is an x86-64 machine".into());
    }
    apt::require(apt::FOR_GUESTS).map_err(|error| format!("{error:#}"))?;
    if find_program("strip").is_none() {
        return Err("strip (binutils) is not there to prepare the guest's modules".into());
    }
    if let Some(reason) = Packages::unavailable() {
        return Err(reason);
    }
    Packages::fetch(cache).map_err(|error| format!("cannot get the guest's packages: {error:#}"))
}
