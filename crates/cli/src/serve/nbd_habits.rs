//! The options of qemu-nbd that mean something here: hidden, since `--nbd`, `--snapshot` and `--limit` say the same.

use std::path::PathBuf;

use blockhouse_nbd::uri::NbdUri;

use crate::image_opts::escape;

/// What qemu-nbd's users type.
#[derive(clap::Args)]
pub struct NbdHabits {
    /// Listen at this Unix socket.
    #[arg(short = 'k', long = "socket", hide = true, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// The name of the export.
    #[arg(short = 'x', long = "export-name", hide = true, value_name = "NAME")]
    export: Option<String>,
    /// Go on when the last client has gone: a server always does.
    #[arg(short = 't', long = "persistent", hide = true)]
    persistent: bool,
    /// How many clients there may be: limits are those of --limit.
    #[arg(short = 'e', long = "shared", hide = true, value_name = "NUMBER")]
    shared: Option<u32>,
    /// Serve this snapshot.
    #[arg(short = 'l', long = "load-snapshot", hide = true, value_name = "NAME")]
    #[arg(conflicts_with = "snapshot", value_parser = crate::convert::parse_snapshot)]
    pub(super) load_snapshot: Option<String>,
}

impl NbdHabits {
    /// Where to listen because of them; `None` where they do not say it.
    ///
    /// # Errors
    /// Why that cannot be an address, in words.
    pub fn uri(&self) -> Result<Option<NbdUri>, String> {
        let Some(socket) = &self.socket else { return Ok(None) };
        let socket = socket.to_str().ok_or("the path of a socket is UTF-8")?;
        let export = escape(self.export.as_deref().unwrap_or_default());
        let uri = format!("nbd+unix:///{export}?socket={}", escape(socket));
        uri.parse().map(Some).map_err(|error| format!("--socket: {error}"))
    }

    /// The name of the export, where no URI has it.
    pub fn name(&self) -> Option<&str> {
        self.export.as_deref().filter(|_| self.socket.is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_and_a_name_are_a_uri() {
        let habits = |socket: Option<&str>, export: Option<&str>| NbdHabits {
            socket: socket.map(Into::into),
            export: export.map(Into::into),
            persistent: true,
            shared: None,
            load_snapshot: None,
        };
        let uri = habits(Some("/run/a b.sock"), Some("web")).uri().unwrap().unwrap();
        assert_eq!(uri.to_string(), "nbd+unix:///web?socket=/run/a%20b.sock");
        assert_eq!(habits(None, Some("web")).uri().unwrap(), None);
        assert_eq!(habits(None, Some("web")).name(), Some("web"));
    }
}
