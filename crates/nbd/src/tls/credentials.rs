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
    Certificates {
        store: X509Store,
        /// Whether there was a revocation list.
        has_list: bool,
    },
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
    /// As [`load`](Self::load), also if an optional file is missing that was there before: a file
    /// that is missing while another program replaces it must not admit more clients.
    /// After any error the earlier content stays in use.
    pub fn reload(&self) -> Result<(), TlsError> {
        let secrets = Arc::new(Secrets::read(&self.files)?);
        if let TlsFiles::Certificates(folder) = &self.files
            && let Some(name) = secrets.check.missing_file(&self.current.read().check)
        {
            let why = "is missing, and clients are checked by it; put it back, or start the server again to do without it";
            return Err(file_error(&folder.join(name), why));
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
            (ClientCheck::Certificates { store, .. }, Credential::Certificate(own, chain)) => {
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

impl ClientCheck {
    /// The optional file that this check was read without, and the `earlier` one with.
    fn missing_file(&self, earlier: &Self) -> Option<&'static str> {
        match (earlier, self) {
            (Self::Certificates { .. }, Self::None) => Some("ca-cert.pem"),
            (
                Self::Certificates { has_list: true, .. },
                Self::Certificates { has_list: false, .. },
            ) => Some("ca-crl.pem"),
            _ => None,
        }
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
            ClientCheck::Certificates { .. } => certificate(),
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
    let is_listed = use_revoked(builder.cert_store_mut(), &revoked)?;
    let mut store = X509StoreBuilder::new()?;
    store
        .add_lookup(X509Lookup::file())?
        .load_cert_file(&authority, SslFiletype::PEM)
        .map_err(unfit(&authority, "is no certificate in PEM"))?;
    let has_list = use_revoked(&mut store, &revoked)? && is_listed;
    store.set_flags(X509VerifyFlags::NO_CHECK_TIME)?;
    Ok(ClientCheck::Certificates { store: store.build(), has_list })
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

#[cfg(test)]
mod tests {
    use std::fs;

    use openssl::asn1::Asn1Time;
    use openssl::hash::MessageDigest;
    use openssl::pkey::PKey;
    use openssl::x509::{X509Builder, X509NameBuilder};

    use super::*;

    /// A revocation list of an authority named CA.
    const LIST: &str = "-----BEGIN X509 CRL-----
MIGTMEcCAQEwBQYDK2VwMA0xCzAJBgNVBAMMAkNBFw0yNjExMzAxMjU2MDRaFw0y
NjEyMDkxMjU2MDRaoA4wDDAKBgNVHRQEAwIBATAFBgMrZXADQQAwtMjnrV8J8OKR
i0QNKCfBEOlxNHPB+XkormoczWApsnXF3z2cPBMntC94LMg6nmgBerLaJCwnX5uT
vIxJpsED
-----END X509 CRL-----
";

    #[test]
    fn a_file_that_vanishes_keeps_the_earlier_check() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let key = PKey::generate_ed25519().unwrap();
        let mut name = X509NameBuilder::new().unwrap();
        name.append_entry_by_text("CN", "CA").unwrap();
        let name = name.build();
        let times = [0, 1].map(|days| Asn1Time::days_from_now(days).unwrap());
        let mut certificate = X509Builder::new().unwrap();
        certificate.set_subject_name(&name).unwrap();
        certificate.set_issuer_name(&name).unwrap();
        certificate.set_pubkey(&key).unwrap();
        certificate.set_not_before(&times[0]).unwrap();
        certificate.set_not_after(&times[1]).unwrap();
        certificate.sign(&key, MessageDigest::null()).unwrap();
        let certificate = certificate.build().to_pem().unwrap();
        let all = [
            ("ca-crl.pem", LIST.into()),
            ("ca-cert.pem", certificate.clone()),
            ("server-cert.pem", certificate),
            ("server-key.pem", key.private_key_to_pem_pkcs8().unwrap()),
        ];
        for (name, content) in &all[1..] {
            fs::write(path(name), content).unwrap();
        }
        let files = TlsFiles::Certificates(folder.path().into());
        let server = TlsServer::load(files, Vec::new()).unwrap();
        fs::write(path(all[0].0), &all[0].1).unwrap();
        server.reload().unwrap();
        for (name, content) in &all {
            fs::remove_file(path(name)).unwrap();
            let before = server.secrets();
            let error = server.reload().unwrap_err().to_string();
            assert!(error.contains(name), "{name}: {error}");
            assert!(Arc::ptr_eq(&before, &server.secrets()), "{name}");
            fs::write(path(name), content).unwrap();
            server.reload().unwrap();
        }
    }
}
