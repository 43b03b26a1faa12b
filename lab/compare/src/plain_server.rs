//! A plain NBD server in C, `plain_server.c`: the limit of one thread that does nothing but
//! receive, read or write, and answer.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

const SOURCE: &str = include_str!("plain_server.c");

/// Compiles the server into `folder`.
pub fn build(folder: &Path) -> Result<PathBuf> {
    let program = folder.join("plain_server");
    let mut compiler = Command::new("cc");
    compiler.args(["-O2", "-Wall", "-Wextra", "-pthread", "-x", "c", "-", "-o"]).arg(&program);
    let mut compiler =
        compiler.stdin(Stdio::piped()).spawn().context("cannot start the C compiler 'cc'")?;
    let input = compiler.stdin.take().context("its standard input is a pipe")?;
    std::io::Write::write_all(&mut { input }, SOURCE.as_bytes())
        .context("cannot hand the C compiler its source")?;
    let status = compiler.wait().context("cannot wait for the C compiler")?;
    ensure!(status.success(), "plain_server.c does not compile: {status}");
    Ok(program)
}
