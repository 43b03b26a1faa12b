//! TLS of the NBD sockets: loaded according to the setup, and loaded again at a reload.

use std::sync::Arc;

use anyhow::{Result, bail};
use blockhouse_config::server::TlsSetup;
use blockhouse_nbd::uri::{Address, Security};
use blockhouse_nbd::{Server, SocketTls, TlsFiles, TlsMode, TlsServer};

/// TLS of all sockets.
pub struct Tls {
    setup: TlsSetup,
    server: Arc<TlsServer>,
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// A file cannot be read or is invalid; the error names it.
    pub fn load(setup: &TlsSetup) -> Result<Self> {
        let server = TlsServer::load(setup.files.clone(), setup.allowed.clone())?;
        if !server.has_client_check()
            && let TlsFiles::Certificates(folder) = &setup.files
        {
            tracing::warn!(
                "{}: there is no ca-cert.pem, so clients are not checked: connections are encrypted, and anybody \
                 may make one",
                folder.display()
            );
        }
        Ok(Self { setup: setup.clone(), server: Arc::new(server) })
    }

    /// TLS of the socket with this address; `tls` is the TLS of all sockets. With
    /// [`Security::Tls`], TLS is required.
    ///
    /// # Errors
    /// TLS is required and not set up.
    pub fn at(
        tls: Option<&Self>,
        address: &Address,
        security: Security,
    ) -> Result<Option<SocketTls>> {
        let mode = match (tls, security) {
            (None, Security::Plain) => return Ok(None),
            (None, Security::Tls) => bail!(
                "TLS is not set up; start the server with --tls-certificates DIR or --tls-psk FILE, or use nbd"
            ),
            (Some(_), Security::Tls) => TlsMode::Required,
            (Some(tls), Security::Plain) => tls.setup.mode_at(address),
        };
        Ok(tls.map(|tls| SocketTls { server: Arc::clone(&tls.server), mode }))
    }

    /// Reads the files again, for new connections. Ends the connections of `server` whose clients'
    /// credentials were revoked. A failure is logged and changes nothing.
    pub fn reload(&self, server: &Server) {
        match self.server.reload() {
            Ok(()) => {
                tracing::info!("TLS: read the files again");
                server.end_refused_clients(&self.server);
            }
            Err(error) => tracing::error!("TLS: what was read before stays in force: {error}"),
        }
    }
}
