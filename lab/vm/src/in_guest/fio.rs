//! fio as a guest's load: random direct writes of blocks with checksums.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};

/// Bytes that are written.
const SIZE: u64 = 16 << 20;
/// The number of writes.
pub const WRITES: u64 = SIZE / 4096;
const REPORT: &str = "/tmp/fio";

/// The work of fio.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Writes everything, then reads it and compares.
    WriteAndVerify,
    /// Compares what an earlier run wrote.
    Verify,
}

/// A run of fio; killed when dropped.
pub struct Fio {
    child: Child,
}

impl Fio {
    /// Starts fio on the file `path`.
    pub fn start(path: &Path, work: Work) -> Result<Self> {
        let mut command = Command::new("fio");
        command.arg("--name=load").arg(format!("--filename={}", path.display()));
        command.arg(format!("--size={SIZE}")).arg(format!("--output={REPORT}"));
        command.args(["--rw=randwrite", "--bs=4k", "--ioengine=libaio", "--iodepth=8"]);
        // Data is made durable after every 64 writes, and at the end.
        command.args(["--direct=1", "--fdatasync=64", "--end_fsync=1"]);
        command.args(["--verify=crc32c", "--verify_fatal=1", "--do_verify=1"]);
        if work == Work::Verify {
            command.arg("--verify_only");
        }
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        Ok(Self { child: child.context("cannot start fio")? })
    }

    /// Whether it has ended.
    ///
    /// # Errors
    /// fio failed: a read or a write failed, or the data was wrong.
    pub fn has_ended(&mut self) -> Result<bool> {
        match self.child.try_wait().context("cannot wait for fio")? {
            None => Ok(false),
            Some(status) if status.success() => Ok(true),
            Some(status) => {
                let report = std::fs::read_to_string(REPORT).unwrap_or_default();
                bail!("fio failed ({status}): {report}")
            }
        }
    }

    /// Waits for its end, with the errors of [`has_ended`](Self::has_ended).
    pub fn finish(mut self) -> Result<()> {
        self.child.wait().context("cannot wait for fio")?;
        self.has_ended().map(drop)
    }
}

impl Drop for Fio {
    fn drop(&mut self) {
        // Both fail only when it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
