//! fio with its NBD engine as the client. fio is widely known; on few processors fio is the limit,
//! not the server.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::interrupt::Interrupt;
use super::light::{Operation, Order};
use super::measurement::{Latency, Measurement};
use super::rows::Row;
use super::servers::{Server, uri};
use lab_tools::process::stdout_of;

const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// fio's own name and version.
pub fn version() -> Result<String> {
    let mut command = Command::new("fio");
    command.arg("--version");
    Ok(stdout_of(command)?.trim_end().to_owned())
}

/// Runs `row` for `duration`. The server's processor time includes the handshake.
pub fn run(
    row: &Row,
    server: &Server,
    duration: Duration,
    folder: &Path,
    interrupt: &Interrupt,
) -> Result<Measurement> {
    let report = folder.join("fio.json");
    let before = server.cpu()?;
    let mut fio =
        Running(command(row, server, duration, &report)?.spawn().context("cannot start fio")?);
    let status = loop {
        interrupt.check()?;
        if let Some(status) = fio.0.try_wait()? {
            break status;
        }
        std::thread::sleep(POLL_INTERVAL);
    };
    let server_cpu = server.cpu()?.saturating_sub(before);
    let text = std::fs::read_to_string(&report).context("fio left no report")?;
    // Before the report, fio writes its messages as plain text.
    let (said, json) = text.split_at(text.find('{').unwrap_or(text.len()));
    ensure!(status.success(), "fio failed with {status}: {}", said.trim());
    let report = serde_json::from_str(json).context("cannot read fio's report")?;
    parse(&report, row.operation, server_cpu).context("fio's report is not as expected")
}

fn command(row: &Row, server: &Server, duration: Duration, report: &Path) -> Result<Command> {
    let pattern = match (row.order, row.operation) {
        (Order::Random, Operation::Read) => "randread",
        (Order::Sequential, Operation::Read) => "read",
        (Order::Random, Operation::Write) => "randwrite",
        _ => bail!("{}: fio does not do this here", row.name),
    };
    let mut fio = Command::new("fio");
    // With --thread fio is one process: killing it ends all of it.
    fio.args(["--name=compare", "--ioengine=nbd", "--thread", "--time_based", "--norandommap"]);
    fio.arg(format!("--uri={}", uri(server.socket())));
    fio.arg(format!("--rw={pattern}"));
    fio.arg(format!("--bs={}", row.block));
    fio.arg(format!("--iodepth={}", row.depth));
    fio.arg(format!("--runtime={}ms", duration.as_millis()));
    fio.arg("--output-format=json").arg(format!("--output={}", report.display()));
    fio.stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
    Ok(fio)
}

fn parse(report: &Value, operation: Operation, server_cpu: Duration) -> Option<Measurement> {
    let job = &report["jobs"][0];
    let done = &job[if operation == Operation::Read { "read" } else { "write" }];
    let runtime = job["job_runtime"].as_f64()? / 1e3;
    let client_percent = job["usr_cpu"].as_f64()? + job["sys_cpu"].as_f64()?;
    let latency = |percentile: &str| {
        done["clat_ns"]["percentile"][percentile].as_u64().map(Duration::from_nanos)
    };
    Some(Measurement {
        requests: done["total_ios"].as_u64()?,
        elapsed: Duration::from_millis(done["runtime"].as_u64()?),
        server_cpu,
        client_cpu: Duration::from_secs_f64(client_percent / 100.0 * runtime),
        latency: Latency { median: latency("50.000000")?, p99: latency("99.000000")? },
        verified: 0,
    })
}

/// A child that does not outlive us.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // An error means that it has ended, which is what we want.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
