//! The exports of a server: the list, and the properties of each export (`doc/proto.md`, "Option
//! types").
//!
//! Guarantees: the number of exports and contexts is limited by the maximum number of replies to an
//! option, and the length of names by the maximum length of a reply. If a server ends the list with
//! an error reply, the result is an error.

use std::sync::Arc;

use blockhouse_core::{Result, rare};
use blockhouse_engine::{Stream, timeout};
use blockhouse_nbd_protocol::Framing;
use blockhouse_nbd_protocol::option::{ClientOption, FIXED_NEWSTYLE, InfoType, ReplyType};
use blockhouse_nbd_protocol::uri::ClientUri;
use futures_util::future::LocalBoxFuture;

use super::dial::{CONNECT_TIME, connect_stream, refused};
use super::handshake::{
    ERROR_BIT, Failure, MAX_REPLIES, OptionReply, TOO_MANY, Wire, framing, greet, refusal, string,
};
use super::refusal::Refusal;
use super::tls::ClientTls;

/// An export as its server describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListedExport {
    /// The export's name; empty for the default export.
    pub name: String,
    /// The server's description for users; may be empty, and may have any characters.
    pub description: String,
    /// The size in bytes, and the transmission flags including unknown ones; `None` if the server
    /// reports only names.
    pub size_and_flags: Option<(u64, u16)>,
    /// The minimum, the preferred and the maximum block size, in bytes.
    pub blocks: Option<[u32; 3]>,
    /// Whether requests may have lengths of 64 bits.
    pub has_extended_headers: bool,
    /// The names of the export's metadata contexts.
    pub contexts: Vec<String>,
}

/// Lists the exports of the server of this URI, whose export name is ignored.
///
/// # Errors
/// The error, with the URI: there is no server, it has no list, connecting to one address or the
/// exchange takes longer than 30 seconds, or TLS is not possible as the URI requests.
///
/// # Panics
/// Outside of an event loop.
pub fn list_exports(uri: ClientUri) -> LocalBoxFuture<'static, Result<Vec<ListedExport>>> {
    rare(list_all(uri))
}

async fn list_all(uri: ClientUri) -> Result<Vec<ListedExport>> {
    let tls = ClientTls::load(&uri)?.map(Arc::new);
    let name = uri.export.to_string();
    let stream = connect_stream(&uri.export, &name).await?;
    let listed = timeout(CONNECT_TIME, list(stream.clone(), tls.as_ref()))
        .await
        .unwrap_or_else(|| Err("the server does not answer".into()));
    stream.shutdown();
    listed.map_err(|refusal| refused(refusal, &name))
}

async fn list(stream: Stream, tls: Option<&Arc<ClientTls>>) -> Result<Vec<ListedExport>, Refusal> {
    const NO_LIST: &str = "the server cannot list its exports";
    let (mut wire, flags) = greet(stream, tls).await?;
    if flags.is_none_or(|flags| flags & FIXED_NEWSTYLE == 0) {
        return Err(NO_LIST.into());
    }
    let framing = match framing(&mut wire).await {
        Ok(framing) => framing,
        Err(Failure::Options(_)) => return Err(NO_LIST.into()),
        Err(Failure::Other(refusal)) => return Err(refusal),
    };
    let mut exports = names(&mut wire).await?;
    for export in &mut exports {
        export.has_extended_headers = framing == Framing::Extended;
        let is_told = describe(&mut wire, export).await?;
        if is_told && framing.has_chunks() {
            contexts(&mut wire, export).await?;
        }
    }
    // An error is ignored: the list is complete, and the server may have disconnected.
    let _ = wire.option(ClientOption::Abort, &[]).await;
    Ok(exports)
}

/// Sends an option, and passes each reply before the last one to `take`.
async fn ask(
    wire: &mut Wire,
    option: ClientOption,
    data: &[u8],
    mut take: impl FnMut(&OptionReply) -> Result<(), Refusal>,
) -> Result<OptionReply, Refusal> {
    wire.option(option, data).await?;
    for _ in 0..MAX_REPLIES {
        let reply = wire.reply(option).await?;
        if reply.kind == ReplyType::Ack as u32 || reply.kind & ERROR_BIT != 0 {
            return Ok(reply);
        }
        take(&reply)?;
    }
    Err(TOO_MANY.into())
}

/// The exports with their names and descriptions.
async fn names(wire: &mut Wire) -> Result<Vec<ListedExport>, Refusal> {
    let mut exports = Vec::new();
    let last = ask(wire, ClientOption::List, &[], |reply| {
        if reply.kind == ReplyType::Server as u32 {
            let length = number(&reply.data, 0, 4)? as usize;
            let name = reply.data[4..].get(..length).ok_or(MALFORMED)?;
            let (name, description) = (text(name), text(&reply.data[4 + length..]));
            exports.push(ListedExport { name, description, ..ListedExport::default() });
        }
        Ok(())
    });
    let last = last.await?;
    match last.kind & ERROR_BIT {
        0 => Ok(exports),
        _ => Err(refusal(&last, "")),
    }
}

/// Requests an export's size, flags and block sizes; `false` if the server does not report them.
async fn describe(wire: &mut Wire, export: &mut ListedExport) -> Result<bool, Refusal> {
    let mut data = string(&export.name);
    data.extend(1u16.to_be_bytes());
    data.extend((InfoType::BlockSize as u16).to_be_bytes());
    let last = ask(wire, ClientOption::Info, &data, |reply| {
        let kind = number(&reply.data, 0, 2)?;
        if kind == InfoType::Export as u64 {
            let (size, flags) = (number(&reply.data, 2, 8)?, number(&reply.data, 10, 2)?);
            export.size_and_flags = Some((size, flags as u16));
        } else if kind == InfoType::BlockSize as u64 {
            let [least, preferred, most] =
                [2, 6, 10].map(|at| number(&reply.data, at, 4).map(|number| number as u32));
            export.blocks = Some([least?, preferred?, most?]);
        }
        Ok(())
    });
    Ok(last.await?.kind & ERROR_BIT == 0)
}

/// Asks for the names of an export's contexts.
async fn contexts(wire: &mut Wire, export: &mut ListedExport) -> Result<(), Refusal> {
    let mut data = string(&export.name);
    // Zero queries request all contexts.
    data.extend(0u32.to_be_bytes());
    let contexts = &mut export.contexts;
    ask(wire, ClientOption::ListMetaContext, &data, |reply| {
        if reply.kind == ReplyType::MetaContext as u32 {
            contexts.push(text(reply.data.get(4..).ok_or(MALFORMED)?));
        }
        Ok(())
    })
    .await
    .map(drop)
}

const MALFORMED: &str = "the server sends a malformed list of its exports";

fn number(data: &[u8], at: usize, length: usize) -> Result<u64, Refusal> {
    let bytes = data.get(at..at + length).ok_or(MALFORMED)?;
    Ok(bytes.iter().fold(0, |value, &byte| value << 8 | u64::from(byte)))
}

/// Text for display: a name may be invalid UTF-8.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
