//! The options of qemu-nbd that `serve` accepts. The help of `serve` shows only `-k` of them,
//! because `serve` has options of its own (such as `--nbd`, `--snapshot` and `--limit`) for the
//! others.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use blockhouse_config::offers::ExportOptions;
use blockhouse_nbd::proto::MAX_STRING;
use blockhouse_nbd::uri::NbdUri;

use blockhouse_engine::{Engine, EngineChoice, EventLoop};
use blockhouse_images::QemuTls;

use crate::attach::parse_kernel_nbd;
use crate::called_as;
use crate::image_opts::{ImageOptsArgs, escape};
use crate::output;
use crate::snapshot_name::{SnapshotName, parse_snapshot};
use crate::tls_object::with_tls;

/// The options of qemu-nbd's users.
#[derive(clap::Args)]
pub struct NbdHabits {
    /// Listen at this Unix socket: short for --nbd 'nbd+unix:///?socket=PATH', as qemu-nbd has it.
    #[arg(short = 'k', long = "socket", value_name = "PATH")]
    socket: Option<PathBuf>,
    /// The name of the export.
    #[arg(short = 'x', long = "export-name", hide = true, value_name = "NAME")]
    export: Option<String>,
    /// Keep serving after the last client: a server always does.
    #[arg(short = 't', long = "persistent", hide = true)]
    pub(super) persistent: bool,
    /// The maximum number of clients at once, as in qemu-nbd; 0: any number.
    #[arg(short = 'e', long = "shared", hide = true, value_name = "NUMBER")]
    #[arg(value_parser = crate::habits::number)]
    shared: Option<u32>,
    /// Serve a raw image from this offset on.
    #[arg(short = 'o', long, hide = true, value_name = "SIZE", value_parser = blockhouse_config::size::parse)]
    pub(super) offset: Option<u64>,
    /// Discard all writes when the server ends; the image does not change.
    #[arg(short = 's', hide = true)]
    pub(super) is_temporary: bool,
    /// Listen at this port.
    #[arg(short = 'p', long, hide = true, value_name = "PORT", conflicts_with = "socket")]
    port: Option<u16>,
    /// Listen at this address.
    #[arg(short = 'b', long, hide = true, value_name = "ADDRESS", conflicts_with = "socket")]
    bind: Option<String>,
    /// No page cache.
    #[arg(short = 'n', long, hide = true)]
    pub(super) nocache: bool,
    /// Trace events, which do not exist here.
    #[arg(short = 'T', long, hide = true, value_name = "PATTERN")]
    trace: Option<String>,
    /// How file operations are done.
    #[arg(long, hide = true, value_name = "MODE", value_parser = parse_aio)]
    pub(super) aio: Option<EngineChoice>,
    /// The description of the exports for clients.
    #[arg(short = 'D', long, hide = true, value_name = "TEXT", value_parser = parse_description)]
    description: Option<String>,
    /// Offer the metadata context qemu:allocation-depth: qemu-nbd offers it only with this option.
    #[arg(short = 'A', long, hide = true)]
    allocation_depth: bool,
    /// Connect this device of the kernel's NBD client to the server, which runs in the background.
    #[arg(short = 'c', long, hide = true, value_name = "DEVICE", value_parser = parse_kernel_nbd)]
    #[arg(conflicts_with_all = ["config", "port", "bind", "export", "tls_creds"])]
    connect: Option<u32>,
    /// Disconnect the device that is named in place of an image, and serve nothing.
    #[arg(short = 'd', long, hide = true, conflicts_with_all = ["config", "connect"])]
    pub(super) disconnect: bool,
    /// List the exports of the server that listens there, and serve nothing.
    #[arg(short = 'L', long, hide = true)]
    pub(super) list: bool,
    /// How long a client may take to choose an export, in seconds; 0: no limit.
    #[arg(long, hide = true, value_name = "SECONDS")]
    pub(super) handshake_limit: Option<u32>,
    /// The object whose credentials are used, of --object tls-creds-x509 or tls-creds-psk.
    #[arg(long, hide = true, value_name = "ID")]
    pub(super) tls_creds: Option<String>,
    /// The name in the certificate of the server whose exports are listed.
    #[arg(long, hide = true, value_name = "NAME")]
    tls_hostname: Option<String>,
    #[command(flatten)]
    pub(super) image_opts: ImageOptsArgs,
    /// Serve this snapshot.
    #[arg(short = 'l', long = "load-snapshot", hide = true, value_name = "NAME")]
    #[arg(conflicts_with = "snapshot", value_parser = parse_snapshot)]
    pub(super) load_snapshot: Option<SnapshotName>,
}

/// The engine that QEMU's `--aio` names; another one, with a warning, where the host refuses that,
/// as in a container.
///
/// # Errors
/// For an unknown name: a text that lists the valid modes.
pub fn parse_aio(name: &str) -> Result<EngineChoice, String> {
    let engine = match name {
        "native" => Engine::LinuxAio,
        "threads" => Engine::Threads,
        "io_uring" => Engine::IoUring,
        _ => return Err("use threads, native or io_uring".into()),
    };
    let choice = EngineChoice::Only(engine);
    let Err(error) = EventLoop::new(choice) else { return Ok(choice) };
    output::tell(&format!("{}: warning: --aio={name} is not used: {error}", called_as::own_name()));
    Ok(EngineChoice::Auto)
}

/// The text of `--description`.
fn parse_description(text: &str) -> Result<String, String> {
    match text.len() {
        0..=MAX_STRING => Ok(text.to_owned()),
        length => Err(format!("it has {length} bytes; give at most {MAX_STRING}")),
    }
}

impl NbdHabits {
    /// The address that these options give; `None` if they give none.
    ///
    /// # Errors
    /// The reason why the options give no valid address, as a text.
    pub fn uri(&self) -> Result<Option<NbdUri>, String> {
        if self.port.is_some() || self.bind.is_some() {
            let (host, port) = (self.bind.as_deref().unwrap_or("0.0.0.0"), self.port);
            let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
            let export = escape(self.export.as_deref().unwrap_or_default());
            let uri = format!("nbd://{host}:{}/{export}", port.unwrap_or(10809));
            return uri.parse().map(Some).map_err(|error| format!("--port, --bind: {error}"));
        }
        let Some(socket) = &self.socket else { return Ok(None) };
        let socket = socket.to_str().ok_or("the path of a socket is UTF-8")?;
        let export = escape(self.export.as_deref().unwrap_or_default());
        let uri = format!("nbd+unix:///{export}?socket={}", escape(socket));
        uri.parse().map(Some).map_err(|error| format!("--socket: {error}"))
    }

    /// The device to which the server is connected.
    pub(super) fn device(&self) -> Option<u32> {
        self.connect
    }

    /// The socket that these options name.
    pub(super) fn socket(&self) -> Option<&Path> {
        self.socket.as_deref()
    }

    /// The URI of the server whose exports are listed.
    ///
    /// # Errors
    /// The reason why the arguments name no server, as a text.
    pub(super) fn listed_uri(&self) -> Result<String, String> {
        let uri = self.uri()?.map_or_else(|| "nbd://localhost".to_owned(), |uri| uri.to_string());
        let Some(credentials) = self.tls_creds.clone() else { return Ok(uri) };
        let tls = QemuTls { credentials, hostname: self.tls_hostname.clone() };
        with_tls(&uri, &tls).map_err(|error| error.to_string())
    }

    /// Whether one of these options describes an export.
    pub(super) fn is_of_export(&self) -> bool {
        let is_named = self.export.is_some() || self.description.is_some();
        let is_changed = self.offset.is_some() || self.nocache || self.aio.is_some();
        let has_device = self.connect.is_some() || self.disconnect;
        is_named
            || is_changed
            || has_device
            || self.allocation_depth
            || self.load_snapshot.is_some()
    }

    /// The options of the exports. If the program is called as qemu-nbd, clients get the rights
    /// that qemu-nbd gives.
    pub(super) fn export_options(&self) -> ExportOptions {
        let has_depth = self.allocation_depth || !called_as::is_qemu_nbd();
        let description = self.description.clone().unwrap_or_default();
        ExportOptions { has_depth, description, ..ExportOptions::default() }
    }

    /// The maximum number of clients of each socket at once; `None` is no limit. The default is no
    /// limit, or one client if the program is called as qemu-nbd.
    pub(super) fn max_connections(&self) -> Option<NonZeroUsize> {
        let usual = if called_as::is_qemu_nbd() { 1 } else { 0 };
        NonZeroUsize::new(self.shared.unwrap_or(usual) as usize)
    }

    /// The name of the export, if the options form no URI that contains the name.
    pub fn name(&self) -> Option<&str> {
        let has_uri = self.socket.is_some() || self.port.is_some() || self.bind.is_some();
        self.export.as_deref().filter(|_| !has_uri)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_and_a_name_are_a_uri() {
        let habits = |socket: Option<&str>, export: Option<&str>| NbdHabits {
            trace: None,
            socket: socket.map(Into::into),
            export: export.map(Into::into),
            persistent: true,
            shared: None,
            offset: None,
            is_temporary: false,
            port: None,
            bind: None,
            nocache: false,
            aio: None,
            description: None,
            allocation_depth: true,
            connect: None,
            disconnect: false,
            list: false,
            handshake_limit: None,
            tls_creds: None,
            tls_hostname: None,
            image_opts: ImageOptsArgs::if_used(false),
            load_snapshot: None,
        };
        let uri = habits(Some("/run/a b.sock"), Some("web")).uri().unwrap().unwrap();
        assert_eq!(uri.to_string(), "nbd+unix:///web?socket=/run/a%20b.sock");
        assert_eq!(habits(None, Some("web")).uri().unwrap(), None);
        assert_eq!(habits(None, Some("web")).name(), Some("web"));
    }
}
