//! How an export is reached: the address, and what was agreed on.

use std::time::Duration;

use blockhouse_core::{Error, ErrorKind, Result};
use blockhouse_engine::{Stream, timeout};
use blockhouse_nbd_protocol::uri::{NbdUri, Security};

use super::connect::connect;
use super::handshake::{self, Negotiated};

/// How long connecting and the handshake may take, each.
const CONNECT_TIME: Duration = Duration::from_secs(30);

/// The way to an export.
pub(super) struct Dial {
    uri: NbdUri,
    name: String,
    /// The metadata context that block status tells of.
    context: String,
    reconnect_time: Duration,
    export: Negotiated,
}

impl Dial {
    /// Connects for the first time.
    ///
    /// # Errors
    /// What failed, with the URI: there is no server, it refuses the export, or it does not answer.
    pub(super) async fn connect(
        uri: NbdUri,
        reconnect_time: Duration,
        context: String,
    ) -> Result<(Self, Stream)> {
        let name = uri.to_string();
        if uri.security == Security::Tls {
            let what = "images are not read by TLS yet";
            let hint = "use nbd:// over a way that is safe by itself, like a tunnel";
            return Err(Error::new(ErrorKind::Unsupported, what).on(&name).hint(hint));
        }
        let (stream, export) = negotiate(&uri, &name, &context).await?;
        Ok((Self { uri, name, context, reconnect_time, export }, stream))
    }

    /// Another stream to the same export.
    ///
    /// # Errors
    /// As [`connect`](Self::connect); and where the export is not what it was.
    pub(super) async fn again(&self) -> Result<Stream> {
        let (stream, export) = negotiate(&self.uri, &self.name, &self.context).await?;
        match export == self.export {
            true => Ok(stream),
            false => Err(self.error("the server's export is not what it was at first")),
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn export(&self) -> &Negotiated {
        &self.export
    }

    /// How long requests wait for a server that is gone; zero: it is not waited for.
    pub(super) fn reconnect_time(&self) -> Duration {
        self.reconnect_time
    }

    pub(super) fn error(&self, what: &'static str) -> Error {
        Error::new(ErrorKind::Io, what).on(&self.name)
    }
}

/// Connects, and agrees with the server on the export.
async fn negotiate(uri: &NbdUri, name: &str, context: &str) -> Result<(Stream, Negotiated)> {
    let failed = |error| Error::host("cannot connect", error).on(name);
    let socket = connect(uri.address.clone(), CONNECT_TIME).await.map_err(failed)?;
    let stream = Stream::new(socket).map_err(failed)?;
    let handshake = handshake::negotiate(&stream, &uri.export, context);
    let negotiated = timeout(CONNECT_TIME, handshake)
        .await
        .unwrap_or_else(|| Err("the server does not answer".into()));
    negotiated.map(|negotiated| (stream.clone(), negotiated)).map_err(|refusal| {
        stream.shutdown();
        let error = Error::new(ErrorKind::Io, refusal.what).on(name);
        match refusal.hint {
            Some(hint) => error.hint(hint),
            None => error,
        }
    })
}
