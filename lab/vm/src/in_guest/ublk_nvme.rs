//! Our ublk device, which the kernel's NVMe target exports over TCP to the same guest: an example
//! of what users build on a block device.
//!
//! Evidence: the NVMe disk still has FUA and a write cache, fio finds what it wrote, the file
//! system on the disk is intact, zeros and discards arrive. All data is on our device, and in the
//! image after all devices are removed.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::fio::{Fio, Work};
use super::system::{self, FileSystem, Mount, tool};
use super::ublk_user::{attach, good};

/// Bytes of the disk, enough for a file system and fio's file.
const SIZE: u64 = 64 << 20;
const PLACE: &str = "/nvme";
/// Bytes that are compared at a time.
const CHUNK: usize = 1 << 20;

/// The kernel's configuration of NVMe targets, which only this job uses here.
const TARGETS: &str = "/sys/kernel/config/nvmet";
const SUBSYSTEM: &str = "nqn.2025-01.org.example:blockhouse";
const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-000000000001";
const HOST_ID: &str = "00000000-0000-4000-8000-000000000001";
const PORT: &str = "4420";

/// Runs the test with an image of each format.
pub fn run() -> Result<()> {
    system::load("nvme_core", "multipath=N")?;
    system::load_all(&["crc32c_generic", "ext4", "ublk_drv", "nvmet-tcp", "nvme-tcp"])?;
    std::fs::create_dir_all("/run")?;
    tool("mount", &["-t", "configfs", "config", "/sys/kernel/config"])?;
    ["raw", "qcow2"].into_iter().try_for_each(serve)
}

fn serve(format: &str) -> Result<()> {
    let image = format!("/tmp/disk.{format}");
    good(&["create", "--format", format, &image, &SIZE.to_string()])?;
    let device = attach(&image)?;
    let target = Target::new(&device)?;
    let client = Client::connect()?;
    write(&client.disk)?;
    compare(&client.disk, Path::new(&device))?;
    client.disconnect()?;
    target.remove()?;
    good(&["detach", &device])?;
    if format == "qcow2" {
        good(&["check", &image])?;
    }
    // The image has all data.
    let device = attach(&image)?;
    let mount = Mount::at(FileSystem::Ext4, Path::new(&device), Path::new(PLACE))?;
    Fio::start(&mount.place().join("fio"), Work::Verify)?.finish()?;
    mount.unmount()?;
    tool("e2fsck", &["-f", "-n", &device])?;
    good(&["detach", &device])?;
    println!("  {format}: what was written over NVMe/TCP is there, on the device and in the image");
    Ok(())
}

/// Makes a file system on the client's disk, and writes data to it.
fn write(disk: &Path) -> Result<()> {
    ensure!(system::has_fua(disk)?, "no FUA over NVMe/TCP");
    FileSystem::Ext4.make(disk)?;
    let mount = Mount::at(FileSystem::Ext4, disk, Path::new(PLACE))?;
    Fio::start(&mount.place().join("fio"), Work::WriteAndVerify)?.finish()?;
    tool("fstrim", &[PLACE])?;
    mount.unmount()
}

/// Checks that both have the same content, after their buffers were flushed.
fn compare(disk: &Path, device: &Path) -> Result<()> {
    let open = |node: &Path| -> Result<File> {
        tool("blockdev", &["--flushbufs", &node.display().to_string()])?;
        File::open(node).with_context(|| format!("cannot open {}", node.display()))
    };
    let (ours, theirs) = (open(device)?, open(disk)?);
    let (mut our_bytes, mut their_bytes) = (vec![0; CHUNK], vec![0; CHUNK]);
    for offset in (0..SIZE).step_by(CHUNK) {
        ours.read_exact_at(&mut our_bytes, offset)?;
        theirs.read_exact_at(&mut their_bytes, offset)?;
        ensure!(our_bytes == their_bytes, "the device differs from the disk from {offset} on");
    }
    Ok(())
}

/// The kernel's NVMe target for a device (`drivers/nvme/target/configfs.c` in Linux).
struct Target {
    subsystem: PathBuf,
    port: PathBuf,
}

impl Target {
    fn new(device: &str) -> Result<Self> {
        let subsystem = Path::new(TARGETS).join("subsystems").join(SUBSYSTEM);
        let port = Path::new(TARGETS).join("ports/1");
        let target = Self { subsystem, port };
        for folder in [&target.subsystem, &target.namespace(), &target.port] {
            make(folder)?;
        }
        system::write(target.subsystem.join("attr_allow_any_host"), "1")?;
        system::write(target.namespace().join("device_path"), device)?;
        system::write(target.namespace().join("enable"), "1")?;
        let address = [("trtype", "tcp"), ("adrfam", "ipv4"), ("traddr", "127.0.0.1")];
        for (name, value) in address.into_iter().chain([("trsvcid", PORT)]) {
            system::write(target.port.join(format!("addr_{name}")), value)?;
        }
        symlink(&target.subsystem, target.link()).context("the target does not listen")?;
        Ok(target)
    }

    fn namespace(&self) -> PathBuf {
        self.subsystem.join("namespaces/1")
    }

    fn link(&self) -> PathBuf {
        self.port.join("subsystems").join(SUBSYSTEM)
    }

    /// Removes the target, which releases the device.
    fn remove(self) -> Result<()> {
        std::fs::remove_file(self.link()).context("the target goes on to listen")?;
        for folder in [&self.port, &self.namespace(), &self.subsystem] {
            std::fs::remove_dir(folder)
                .with_context(|| format!("cannot remove {}", folder.display()))?;
        }
        Ok(())
    }
}

fn make(folder: &Path) -> Result<()> {
    std::fs::create_dir(folder).with_context(|| format!("cannot make {}", folder.display()))
}

/// The kernel as a client of its own target.
struct Client {
    controller: PathBuf,
    disk: PathBuf,
}

impl Client {
    fn connect() -> Result<Self> {
        let fabrics = Path::new("/dev/nvme-fabrics");
        let mut fabrics = File::options().read(true).write(true).open(fabrics)?;
        let words = format!(
            "transport=tcp,traddr=127.0.0.1,trsvcid={PORT},nqn={SUBSYSTEM},hostnqn={HOST},hostid={HOST_ID}"
        );
        fabrics.write_all(words.as_bytes()).context("cannot connect by NVMe/TCP")?;
        let mut answer = String::new();
        fabrics.read_to_string(&mut answer)?;
        // "instance=0,cntlid=1"
        let mut words = answer.trim().split(',');
        let number = words.find_map(|word| word.strip_prefix("instance="));
        let number = number.with_context(|| format!("connected as nothing: {answer}"))?;
        let disk = format!("nvme{number}n1");
        // The kernel makes the node first, and this attribute last.
        let queue = Path::new("/sys/block").join(&disk).join("queue/fua");
        system::wait_for("the client's disk", || queue.exists().then_some(()))?;
        let disk = system::disk(&disk)?;
        Ok(Self { controller: PathBuf::from(format!("/sys/class/nvme/nvme{number}")), disk })
    }

    /// Ends the connection, and waits until the disk is gone.
    fn disconnect(self) -> Result<()> {
        system::write(self.controller.join("delete_controller"), "1")?;
        system::wait_for("the end of the client's disk", || (!self.disk.exists()).then_some(()))
    }
}
