//! How to connect to an export: the server's address, and the options that were negotiated.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use blockhouse_core::{Error, ErrorKind, Result, rare};
use blockhouse_engine::{Stream, timeout};
use blockhouse_nbd_protocol::uri::{ClientUri, NbdUri};

use super::connect::connect;
use super::handshake::{self, Failure, Negotiated, Wish};
use super::link::Link;
use super::refusal::Refusal;
use super::tls::ClientTls;

/// Time limit for connecting to one address of the server; the name look-up has none. The handshake
/// has another limit of the same length.
pub(super) const CONNECT_TIME: Duration = Duration::from_secs(30);

/// A server's address, and the TLS parameters.
struct Way {
    uri: NbdUri,
    tls: Option<Arc<ClientTls>>,
}

/// Connects to one export, also again after a failure.
pub(super) struct Dial {
    way: Way,
    name: String,
    /// The metadata context of block status requests.
    context: String,
    reconnect_time: Duration,
    export: Negotiated,
}

impl Dial {
    /// Connects for the first time.
    ///
    /// # Errors
    /// The failure, with the URI: there is no server, it refuses the export, or it does not answer.
    pub(super) async fn connect(
        uri: ClientUri,
        reconnect_time: Duration,
        context: String,
    ) -> Result<(Self, Link)> {
        let tls = ClientTls::load(&uri)?.map(Arc::new);
        let way = Way { uri: uri.export, tls };
        let name = way.uri.to_string();
        let (link, export) = rare(negotiate(&way, &name, &context)).await?;
        Ok((Self { way, name, context, reconnect_time, export }, link))
    }

    /// Opens another connection to the same export.
    ///
    /// # Errors
    /// As [`connect`](Self::connect). Also an error if the export's size or options have changed.
    pub(super) async fn again(&self) -> Result<Link> {
        if let Some(tls) = &self.way.tls {
            tls.refresh();
        }
        let (link, export) = rare(negotiate(&self.way, &self.name, &self.context)).await?;
        if export == self.export {
            Ok(link)
        } else {
            Err(self.error("the server's export is not what it was at first"))
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn export_name(&self) -> &str {
        &self.way.uri.export
    }

    pub(super) fn export(&self) -> &Negotiated {
        &self.export
    }

    /// How long requests wait for a server that cannot be reached; zero: they do not wait.
    pub(super) fn reconnect_time(&self) -> Duration {
        self.reconnect_time
    }

    pub(super) fn error(&self, what: &'static str) -> Error {
        Error::new(ErrorKind::Io, what).on(&self.name)
    }
}

/// Connects, and negotiates the export. If the server ends two connections at the first option, it
/// may not know the option: connects again and negotiates by EXPORT_NAME alone. Reason for two: one
/// may end because the server restarts, and EXPORT_NAME gives neither block status nor block sizes.
async fn negotiate(way: &Way, name: &str, context: &str) -> Result<(Link, Negotiated)> {
    let mut outcome = attempt(way, name, context, false).await?;
    for is_plain in [false, true] {
        let Err(Failure::Options(refusal)) = outcome else { break };
        outcome = match attempt(way, name, context, is_plain).await {
            Ok(again) => again,
            Err(_) => return Err(refused(refusal, name)),
        };
    }
    outcome.map_err(|failure| {
        let (Failure::Options(refusal) | Failure::Other(refusal)) = failure;
        refused(refusal, name)
    })
}

async fn attempt(
    way: &Way,
    name: &str,
    context: &str,
    is_plain: bool,
) -> Result<Result<(Link, Negotiated), Failure>> {
    let stream = connect_stream(&way.uri, name).await?;
    let wish = Wish { export: &way.uri.export, context, tls: way.tls.as_ref(), is_plain };
    let negotiated = timeout(CONNECT_TIME, handshake::negotiate(stream.clone(), wish))
        .await
        .unwrap_or_else(|| Err("the server does not answer".into()));
    if negotiated.is_err() {
        stream.shutdown();
    }
    Ok(negotiated)
}

/// Connects to the server of this URI. Errors contain `name`.
pub(super) async fn connect_stream(uri: &NbdUri, name: &str) -> Result<Stream> {
    let failed = |error: io::Error| {
        let hint = match error.kind() {
            io::ErrorKind::NotFound => {
                "no server has made that socket: start it, or check the path"
            }
            io::ErrorKind::ConnectionRefused => {
                "no server listens there: start it, or check the address"
            }
            _ => "check the address, and that its server runs",
        };
        Error::host("cannot connect", error).on(name).hint(hint)
    };
    let socket = connect(uri.address.clone(), CONNECT_TIME).await.map_err(failed)?;
    Stream::new(socket).map_err(failed)
}

/// The error for a refusal of the server; `name` is the URI.
pub(super) fn refused(refusal: Refusal, name: &str) -> Error {
    let error = Error::new(ErrorKind::Io, refusal.what).on(name);
    match refusal.hint {
        Some(hint) => error.hint(hint),
        None => error,
    }
}
