//! Services that make their own sockets, which the service manager keeps: they are killed,
//! upgraded, and hang.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::Value;

use super::client::Client;
use super::system::tool;
use super::units::{Unit, ctl, has, make_own_image, socket, until, write};

const IMAGE: &str = "own.img";
const SERVICE: Unit = Unit("blockhouse@own.img.service");
/// The number of sockets: NBD, control, metrics.
const SOCKETS: &str = "3";
const VERSION: &str = r#"{"jsonrpc":"2.0","id":7,"method":"server.version","params":{}}"#;

/// The service is killed. The next one serves clients that connect to any of its sockets before it
/// runs.
pub fn killed_between_clients() -> Result<()> {
    make_own_image(IMAGE)?;
    let [nbd, control, metrics] =
        ["own.sock", "control", "metrics"].map(|name| socket(IMAGE, name));
    let (nbd_name, metrics_name) = (nbd.display(), metrics.display());
    let control_name = control.display();
    std::fs::create_dir_all("/etc/blockhouse")?;
    let options = format!(
        "OPTIONS=--verbose --nbd nbd+unix:///?socket={nbd_name} --control {control_name} \
         --metrics unix:{metrics_name}\n"
    );
    std::fs::write(format!("/etc/blockhouse/{IMAGE}.conf"), options)?;
    // Long enough to inspect the sockets while no service runs; the test starts it by hand.
    SERVICE.override_with("[Service]\nRestartSec=1h\n")?;
    tool("systemctl", &["start", SERVICE.0])?;
    let mut client = Client::connect(&nbd)?;
    write(&mut client, 0, 5)?;
    let kept = SERVICE.property("NFileDescriptorStore")?;
    ensure!(kept == SOCKETS, "{kept} sockets are kept");
    SERVICE.kill()?;
    SERVICE.wait_for("SubState", "auto-restart")?;
    let reading = std::thread::spawn(move || has(&mut Client::connect(&nbd)?, 0, 5));
    let mut asking = UnixStream::connect(&control).context("the control socket")?;
    ask(&mut asking)?;
    let mut measuring = UnixStream::connect(&metrics).context("the socket of metrics")?;
    measuring.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")?;
    let state = SERVICE.property("SubState")?;
    ensure!(state == "auto-restart", "it is {state} again already");
    tool("systemctl", &["start", SERVICE.0])?;
    reading.join().map_err(|_| anyhow!("the reader panicked"))??;
    answered(&mut asking)?;
    let mut text = String::new();
    measuring.read_to_string(&mut text)?;
    ensure!(text.contains("blockhouse_disk_info"), "{text}");
    let kept = SERVICE.property("NFileDescriptorStore")?;
    ensure!(kept == SOCKETS, "{kept} sockets are kept after the restart");
    println!("  killed: clients of NBD, control and metrics waited and were served");
    tool("systemctl", &["restart", SERVICE.0])?;
    ctl(&control, &["disks"])?;
    noted(SERVICE)
}

/// The version of a server, by its control socket.
pub fn version(control: &mut UnixStream) -> Result<Value> {
    ask(control)?;
    answered(control)
}

fn ask(control: &mut UnixStream) -> Result<()> {
    Ok(writeln!(control, "{VERSION}")?)
}

fn answered(control: &mut UnixStream) -> Result<Value> {
    let mut line = String::new();
    BufReader::new(control).read_line(&mut line)?;
    let answer: Value = serde_json::from_str(&line).context("the control socket's answer")?;
    ensure!(answer["result"].is_object(), "{line}");
    Ok(answer["result"].clone())
}

/// The journal has the server's log lines, with their fields.
fn noted(unit: Unit) -> Result<()> {
    let find = || -> Result<Option<Value>> {
        let said = tool("journalctl", &["--output=json", "--no-pager", "--unit", unit.0])?;
        let mut entries = said.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let is_ours = |entry: &Value| {
            entry["SYSLOG_IDENTIFIER"] == "blockhouse" && entry["_TRANSPORT"] == "journal"
        };
        Ok(entries.rfind(is_ours))
    };
    let entry = until("an entry in the journal", find)?;
    let field = |name: &str| entry[name].as_str().unwrap_or_default().to_owned();
    ensure!(field("_SYSTEMD_UNIT") == unit.0, "another unit's: {entry}");
    ensure!(["3", "4", "6", "7"].contains(&&*field("PRIORITY")), "no priority: {entry}");
    let (target, message) = (field("BLOCKHOUSE_TARGET"), field("MESSAGE"));
    ensure!(!target.is_empty() && !message.is_empty(), "no fields: {entry}");
    println!("  journal: PRIORITY={} BLOCKHOUSE_TARGET={target}: {message}", field("PRIORITY"));
    Ok(())
}

/// After an upgrade another process serves: the service manager accepts it as the service's main
/// process, and can stop it in order.
pub fn upgraded() -> Result<()> {
    let [nbd, control, metrics] =
        ["own.sock", "control", "metrics"].map(|name| socket(IMAGE, name));
    let mut client = Client::connect(&nbd)?;
    write(&mut client, 4096, 6)?;
    let before = SERVICE.process()?;
    let said = tool("blockhouse", &["upgrade", "--control", control.to_str().unwrap_or_default()])?;
    println!("  upgrade: {said}");
    until("another process", || Ok((SERVICE.process()? != before).then_some(())))?;
    has(&mut client, 4096, 6)?;
    until("metrics of the new process", || Ok(measured(&metrics).ok()))?;
    SERVICE.wait_for("NFileDescriptorStore", SOCKETS)?;
    tool("systemctl", &["stop", SERVICE.0])?;
    let (result, state) = (SERVICE.property("Result")?, SERVICE.property("ActiveState")?);
    ensure!(result == "success" && state == "inactive", "stopped: {result}, {state}");
    Ok(())
}

fn measured(socket: &Path) -> Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    ensure!(text.starts_with("HTTP/1.1 200"), "{text}");
    Ok(text)
}

/// The service manager restarts a server that hangs.
pub fn hung() -> Result<()> {
    SERVICE.override_with("[Service]\nWatchdogSec=20\nTimeoutAbortSec=1\n")?;
    tool("systemctl", &["start", SERVICE.0])?;
    let mut client = Client::connect(&socket(IMAGE, "own.sock"))?;
    write(&mut client, 8192, 4)?;
    let before = SERVICE.process()?;
    SERVICE.signal("STOP")?;
    let is_other = || Ok(SERVICE.process().ok().filter(|id| *id != before));
    until("another process for the one that hangs", is_other)?;
    has(&mut Client::connect(&socket(IMAGE, "own.sock"))?, 8192, 4)?;
    let said = tool("journalctl", &["--no-pager", "--unit", SERVICE.0])?;
    ensure!(said.contains("Watchdog timeout"), "{said}");
    println!("  hung: the watchdog had it started again");
    tool("systemctl", &["stop", SERVICE.0]).map(drop)
}
