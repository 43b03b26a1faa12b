//! A server's certificates and keys, read from files at the start and at each reload, and the check
//! of clients against them.
//!
//! Guarantee: the credentials in use are always a complete, consistent set of files. If a reload
//! fails, the old set stays in use.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use blockhouse_tls::{
    CipherKind, TlsError, context, file_error, names_of, read_keys, unfit, use_identity,
    use_revoked,
};
use openssl::sha::sha256;
use openssl::ssl::{SslContext, SslContextBuilder, SslFiletype, SslMethod, SslRef, SslVerifyMode};
use openssl::stack::Stack;
use openssl::x509::store::{X509Lookup, X509Store, X509StoreBuilder, X509StoreRef};
use openssl::x509::verify::X509VerifyFlags;
use openssl::x509::{X509, X509Name, X509Ref, X509StoreContext, X509StoreContextRef};
use parking_lot::RwLock;

use super::refusal::note;
use super::{ClientIdentity, TlsFiles};

/// The secrets of a server, and the clients that each export admits.
#[derive(Debug)]
pub struct TlsServer {
    files: TlsFiles,
    /// Pairs of an export and a client that may use it.
    allowed: Vec<(String, String)>,
    current: RwLock<Arc<Secrets>>,
}

/// The secrets of one read of all files.
pub(crate) struct Secrets {
    context: SslContext,
    check: ClientCheck,
}

/// The method of client authentication.
enum ClientCheck {
    /// Clients are not authenticated.
    None,
    /// By certificates of an authority. The check after a reload ignores validity times, so a
    /// certificate that has expired since the handshake, or an outdated revocation list, does not
    /// end a connection.
    Certificates(X509Store),
    /// By pre-shared keys: the hash of the key for each identity.
    Keys(HashMap<String, [u8; 32]>),
}

/// The credential that admitted a client.
#[derive(Debug)]
pub enum Credential {
    /// No credential was requested.
    Nothing,
    /// A certificate, and the chain between it and the authority.
    Certificate(X509, Vec<X509>),
    /// The identity of a key, and the key's hash.
    Key(String, [u8; 32]),
}

impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Secrets").finish_non_exhaustive()
    }
}

impl TlsServer {
    /// Reads the files. `allowed` has pairs of an export's name and a client's name. An export
    /// without a pair admits all clients.
    ///
    /// # Errors
    /// A file is missing, invalid or does not match another one; `allowed` names clients, but no
    /// file identifies them.
    pub fn load(files: TlsFiles, allowed: Vec<(String, String)>) -> Result<Self, TlsError> {
        let secrets = Arc::new(Secrets::read(&files)?);
        let server = Self { files, allowed, current: RwLock::new(secrets) };
        server.check_allowed()?;
        Ok(server)
    }

    /// Reads the files again. New connections use the new content.
    ///
    /// # Errors
    /// As [`load`](Self::load), also if clients were checked and would not be checked from now on.
    /// After any error the earlier content stays in use.
    pub fn reload(&self) -> Result<(), TlsError> {
        let secrets = Arc::new(Secrets::read(&self.files)?);
        if let (TlsFiles::Certificates(folder), ClientCheck::None) = (&self.files, &secrets.check)
            && self.has_client_check()
        {
            let why = "is missing, and clients are checked by it; start the server again to serve any client";
            return Err(file_error(&folder.join("ca-cert.pem"), why));
        }
        let old = std::mem::replace(&mut *self.current.write(), secrets);
        self.check_allowed().inspect_err(|_| *self.current.write() = old)
    }

    fn check_allowed(&self) -> Result<(), TlsError> {
        match &self.files {
            TlsFiles::Certificates(folder)
                if !self.allowed.is_empty() && !self.has_client_check() =>
            {
                let why = "is missing, so clients cannot be told apart; put it there to have clients \
                           checked, or allow all";
                Err(file_error(&folder.join("ca-cert.pem"), why))
            }
            _ => Ok(()),
        }
    }

    /// Whether clients must present a certificate or PSK identity.
    pub fn has_client_check(&self) -> bool {
        !matches!(self.current.read().check, ClientCheck::None)
    }

    /// Whether the files as last read still admit a client with this credential. A client without a
    /// credential is no longer admitted if the files now require one.
    pub fn still_admits(&self, credential: &Credential) -> bool {
        let secrets = Arc::clone(&self.current.read());
        match (&secrets.check, credential) {
            (ClientCheck::None, _) => true,
            (ClientCheck::Certificates(store), Credential::Certificate(own, chain)) => {
                is_signed(store, own, chain)
            }
            (ClientCheck::Keys(keys), Credential::Key(identity, hash)) => {
                keys.get(identity) == Some(hash)
            }
            _ => false,
        }
    }

    /// Whether an export admits only the clients in its list.
    pub fn is_restricted(&self, export: &str) -> bool {
        self.allowed.iter().any(|(name, _)| name == export)
    }

    /// Whether a client may use an export; `None` is a client without TLS.
    pub fn admits(&self, export: &str, client: Option<&ClientIdentity>) -> bool {
        let is_it = |(name, allowed): &(String, String)| {
            name == export && client.is_some_and(|client| client.names.contains(allowed))
        };
        !self.is_restricted(export) || self.allowed.iter().any(is_it)
    }

    /// The secrets for new connections.
    pub(crate) fn secrets(&self) -> Arc<Secrets> {
        Arc::clone(&self.current.read())
    }
}

impl Secrets {
    fn read(files: &TlsFiles) -> Result<Self, TlsError> {
        let kind = match files {
            TlsFiles::Certificates(_) => CipherKind::Certificates,
            TlsFiles::Psk(_) => CipherKind::Psk,
        };
        let mut builder = context(SslMethod::tls_server(), kind)?;
        builder.set_num_tickets(0)?;
        let check = match files {
            TlsFiles::Certificates(folder) => use_certificates(&mut builder, folder)?,
            TlsFiles::Psk(file) => use_keys(&mut builder, file)?,
        };
        Ok(Self { context: builder.build(), check })
    }

    pub(super) fn context(&self) -> &SslContext {
        &self.context
    }

    /// The credential of a client after its handshake, with the PSK identity that it named.
    pub(super) fn credential(&self, ssl: &SslRef, identity: Option<&String>) -> Credential {
        let certificate = || {
            let chain = ssl.peer_cert_chain().into_iter().flatten();
            let chain = chain.map(X509Ref::to_owned).collect();
            Some(Credential::Certificate(ssl.peer_certificate()?, chain))
        };
        let shown = match &self.check {
            ClientCheck::None => None,
            ClientCheck::Certificates(_) => certificate(),
            ClientCheck::Keys(keys) => {
                identity.and_then(|name| Some(Credential::Key(name.clone(), *keys.get(name)?)))
            }
        };
        shown.unwrap_or(Credential::Nothing)
    }
}

/// Whether an authority of the store has signed a certificate, and not revoked it.
fn is_signed(store: &X509StoreRef, certificate: &X509Ref, chain: &[X509]) -> bool {
    let verify = || {
        let mut between = Stack::new()?;
        chain.iter().try_for_each(|one| between.push(one.clone()))?;
        let mut context = X509StoreContext::new()?;
        context.init(store, certificate, &between, |context| context.verify_cert())
    };
    // If memory runs out, the check has no result; the signature is then assumed to be good, so
    // that the connection is not ended.
    verify().unwrap_or(true)
}

/// Configures the certificates, and returns the check of clients.
fn use_certificates(
    builder: &mut SslContextBuilder,
    folder: &Path,
) -> Result<ClientCheck, TlsError> {
    let file = |name: &str| folder.join(name);
    let (authority, revoked) = (file("ca-cert.pem"), file("ca-crl.pem"));
    use_identity(builder, &file("server-cert.pem"), &file("server-key.pem"))?;
    // A file that cannot be read is an error below: it must not admit every client.
    let looked_up = authority.symlink_metadata();
    if looked_up.is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        return if revoked.exists() {
            Err(file_error(&authority, "is missing, but there is a ca-crl.pem beside it"))
        } else {
            Ok(ClientCheck::None)
        };
    }
    builder.set_ca_file(&authority).map_err(unfit(&authority, "is no certificate in PEM"))?;
    let names = X509Name::load_client_ca_file(&authority);
    builder.set_client_ca_list(names.map_err(unfit(&authority, "is no certificate in PEM"))?);
    let must = SslVerifyMode::PEER | SslVerifyMode::FAIL_IF_NO_PEER_CERT;
    builder.set_verify_callback(must, check_client);
    use_revoked(builder.cert_store_mut(), &revoked)?;
    let mut store = X509StoreBuilder::new()?;
    store
        .add_lookup(X509Lookup::file())?
        .load_cert_file(&authority, SslFiletype::PEM)
        .map_err(unfit(&authority, "is no certificate in PEM"))?;
    use_revoked(&mut store, &revoked)?;
    store.set_flags(X509VerifyFlags::NO_CHECK_TIME)?;
    Ok(ClientCheck::Certificates(store.build()))
}

/// Records the fault of a client's certificate.
fn check_client(is_good: bool, context: &mut X509StoreContextRef) -> bool {
    if !is_good {
        let whose = context.current_cert().map(|certificate| names_of(certificate).join(", "));
        let why = context.error().error_string();
        let text = format!("its certificate ({}) is refused: {why}", whose.unwrap_or_default());
        note(|note| note.certificate = Some(text));
    }
    is_good
}

fn use_keys(builder: &mut SslContextBuilder, path: &Path) -> Result<ClientCheck, TlsError> {
    let keys = read_keys(path)?;
    let hashes = keys.iter().map(|(name, key)| (name.clone(), sha256(key))).collect();
    builder.set_psk_server_callback(move |_, identity, into| {
        let identity = String::from_utf8_lossy(identity.unwrap_or_default()).into_owned();
        let key = keys.get(&identity).filter(|key| key.len() <= into.len());
        note(|note| {
            note.is_unknown = key.is_none();
            note.identity = Some(identity);
        });
        let Some(key) = key else { return Ok(0) };
        into[..key.len()].copy_from_slice(key);
        Ok(key.len())
    });
    Ok(ClientCheck::Keys(hashes))
}
