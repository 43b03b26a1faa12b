//! TLS to a server: the credentials, read from the files that a URI names, and the trusted
//! certificate authorities.
//!
//! Guarantees: the files are read when the storage is opened, and again for each later connection,
//! so a renewed certificate is used. If the files cannot be read for a later connection, or one of
//! them is missing by then, the content read before stays in use. Unless the URI turns verification
//! off, a server that does not prove its identity is refused before the name of the export is sent.
//! The error is one line that states the fault. With a pre-shared key, the server must have that
//! key: no certificate replaces it.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blockhouse_core::{BufferPool, Error, ErrorKind, Result};
use blockhouse_nbd_protocol::tls_parameters::TlsParameters;
use blockhouse_nbd_protocol::uri::{Address, ClientUri, Security};
use blockhouse_tls::{
    CipherKind, TlsError, TlsSession, context, file_error, names_of, read_keys, unfit,
    use_identity, use_revoked,
};
use openssl::error::ErrorStack;
use openssl::ssl::{self, Ssl, SslContext, SslContextBuilder, SslMethod, SslVerifyMode};
use openssl::x509::X509StoreContextRef;
use parking_lot::Mutex;

use super::refusal::Refusal;

/// Paths of the system's trusted authorities in distributions: Debian, Alpine and Arch, then
/// Fedora, then openSUSE.
const BUNDLES: [&str; 3] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/ca-bundle.pem",
];

/// The hint if the keys do not match.
const OTHER_KEYS: &str =
    "its keys are other ones than those of tls-psk-file, or it has certificates only";

/// How connections to a server are secured.
pub(super) struct ClientTls {
    parameters: TlsParameters,
    /// The name that the server's certificate must have; `None`: any, because a Unix socket has no
    /// name.
    hostname: Option<String>,
    current: Mutex<Credentials>,
}

/// The content of the files.
struct Credentials {
    context: SslContext,
    /// The names of the optional files that exist.
    found: Vec<&'static str>,
}

/// The fault of the server's certificate, which the verification callback stores.
type Fault = Arc<Mutex<Option<String>>>;

/// A session before or during its handshake.
pub(super) struct Beginning {
    pub(super) session: TlsSession,
    fault: Fault,
}

impl ClientTls {
    /// The parameters of this URI; `None` for a URI without TLS.
    ///
    /// # Errors
    /// The error names the missing or invalid file.
    pub(super) fn load(uri: &ClientUri) -> Result<Option<Self>> {
        if uri.export.security == Security::Plain {
            return Ok(None);
        }
        let read = read(&uri.tls).map_err(|error| {
            let error = Error::new(ErrorKind::InvalidInput, error.to_string());
            error.on(&uri.export.to_string())
        })?;
        let host = match &uri.export.address {
            Address::Tcp { host, .. } => Some(host.as_str()),
            Address::Unix(_) => None,
        };
        let hostname = uri.tls.hostname().or(host).map(str::to_owned);
        Ok(Some(Self { parameters: uri.tls.clone(), hostname, current: Mutex::new(read) }))
    }

    /// Reads the files again. On an error, or if a file that existed before is missing, logs a
    /// warning and keeps the content read before.
    pub(super) fn refresh(&self) {
        // The files are read without the lock, because other connections wait for it in `begin`.
        let new = match read(&self.parameters) {
            Ok(new) => new,
            Err(error) => return tracing::warn!("{error}; what was read before is used"),
        };
        let mut current = self.current.lock();
        match current.found.iter().find(|name| !new.found.contains(name)) {
            Some(name) => tracing::warn!("{name} is missing; what was read before is used"),
            None => *current = new,
        }
    }

    /// Begins a session.
    ///
    /// # Errors
    /// Errors of OpenSSL.
    pub(super) fn begin(&self, pool: BufferPool) -> Result<Beginning, ErrorStack> {
        let mut ssl = Ssl::new(&self.current.lock().context)?;
        let fault = Fault::default();
        let has_key = self.parameters.psk().is_some();
        if !has_key {
            self.name_server(&mut ssl)?;
        }
        let mode = if has_key || self.parameters.verifies_peer() {
            SslVerifyMode::PEER
        } else {
            SslVerifyMode::NONE
        };
        let noted = Arc::clone(&fault);
        ssl.set_verify_callback(mode, move |is_good, context| {
            // A server that has the pre-shared key shows no certificate, so a certificate is
            // refused.
            let is_good = is_good && !has_key;
            if !is_good {
                noted.lock().get_or_insert_with(|| describe_certificate(context));
            }
            is_good
        });
        ssl.set_connect_state();
        Ok(Beginning { session: TlsSession::new(ssl, pool)?, fault })
    }

    /// Checks, after a successful handshake, that the server has proved to have the pre-shared key,
    /// if one is required.
    ///
    /// # Errors
    /// The server has not proved to have the key.
    pub(super) fn check(&self, session: &TlsSession) -> Result<(), Refusal> {
        match self.parameters.psk() {
            Some((identity, _)) if !session.is_by_key() => Err(refusal_of_keyless(identity)),
            _ => Ok(()),
        }
    }

    /// Sets the server name to request, and to verify in the certificate.
    fn name_server(&self, ssl: &mut Ssl) -> Result<(), ErrorStack> {
        let Some(name) = &self.hostname else { return Ok(()) };
        if let Ok(address) = name.parse::<IpAddr>() {
            return ssl.param_mut().set_ip(address);
        }
        ssl.param_mut().set_host(name)?;
        ssl.set_hostname(name)
    }

    /// The reason for a failure of TLS, after an error in the handshake or in the first bytes after
    /// it.
    pub(super) fn refusal(&self, fault: Option<String>, error: &ssl::Error) -> Refusal {
        let reason = reason(error);
        let is = |part: &str| reason.contains(part);
        if let Some(fault) = fault {
            if let Some((identity, _)) = self.parameters.psk() {
                return refusal_of_keyless(identity);
            }
            return Refusal {
                what: format!("the server's certificate {fault}"),
                hint: self.hint_for(&fault),
            };
        }
        if is("alert") {
            return self.refusal_by_server(&reason);
        }
        if is("wrong version number") || is("unexpected message") || is("packet length") {
            return "the server sends something else than TLS".into();
        }
        match error.io_error() {
            Some(error) => format!("the TLS handshake has failed: {error}").into(),
            None => format!("the TLS handshake has failed: {reason}").into(),
        }
    }

    fn hint_for(&self, fault: &str) -> Option<&'static str> {
        let is = |part: &str| fault.contains(part);
        if is("mismatch") {
            return Some("name the server as its certificate does, or add tls-hostname=NAME");
        }
        let is_strange = is("self-signed") || is("self signed") || is("issuer certificate");
        is_strange.then_some(match self.parameters.certificates() {
            Some(_) => "its authority is not the one of ca-cert.pem in tls-certificates",
            None => "this host does not know its authority; add tls-certificates=DIR with its ca-cert.pem",
        })
    }

    /// The reason if the server has sent an alert.
    fn refusal_by_server(&self, reason: &str) -> Refusal {
        let is = |part: &str| reason.contains(part);
        if let Some((identity, _)) = self.parameters.psk() {
            // The errors of OpenSSL and GnuTLS for a wrong PSK binder.
            let alerts = ["illegal parameter", "unknown psk identity", "decrypt", "bad record mac"];
            let is_about_key = alerts.into_iter().any(is);
            let what = if is_about_key {
                format!("the server refuses the key of {identity:?} ({reason})")
            } else {
                format!("the server refuses the TLS handshake ({reason})")
            };
            return Refusal { what, hint: Some(OTHER_KEYS) };
        }
        let what = format!("the server refuses this client's certificate ({reason})");
        let hint = if is("required") || is("handshake failure") {
            Some(
                "it wants client-cert.pem and client-key.pem in tls-certificates, or has none but keys",
            )
        } else {
            None
        };
        Refusal { what, hint }
    }
}

impl Beginning {
    /// The fault of the server's certificate, if any was found.
    pub(super) fn fault(&self) -> Option<String> {
        self.fault.lock().clone()
    }
}

/// The refusal of a server that has not proved to have the key.
fn refusal_of_keyless(identity: &str) -> Refusal {
    let what = format!("the server has not shown that it has the key of {identity:?}");
    Refusal { what, hint: Some(OTHER_KEYS) }
}

fn read(parameters: &TlsParameters) -> Result<Credentials, TlsError> {
    let kind = match parameters.psk() {
        Some(_) => CipherKind::Psk,
        None => CipherKind::Certificates,
    };
    let mut builder = context(SslMethod::tls_client(), kind)?;
    let mut found = Vec::new();
    if let Some((identity, file)) = parameters.psk() {
        use_key(&mut builder, identity, file)?;
    } else if let Some(folder) = parameters.certificates() {
        found = use_certificates(&mut builder, folder)?;
    } else {
        trust_system(&mut builder)?;
    }
    Ok(Credentials { context: builder.build(), found })
}

/// Trusts the authorities that `$SSL_CERT_FILE` and `$SSL_CERT_DIR` name, or else the system's. A
/// distribution's OpenSSL knows the paths of the system's authorities; an OpenSSL built from source
/// does not.
fn trust_system(builder: &mut SslContextBuilder) -> Result<(), TlsError> {
    let is_named =
        ["SSL_CERT_FILE", "SSL_CERT_DIR"].iter().any(|name| std::env::var_os(name).is_some());
    let mut bundles = BUNDLES.iter().map(Path::new);
    match bundles.find(|bundle| bundle.exists()) {
        Some(bundle) if blockhouse_tls::IS_VENDORED && !is_named => {
            Ok(builder.set_ca_file(bundle).map_err(unfit(bundle, "is no certificate in PEM"))?)
        }
        _ => Ok(builder.set_default_verify_paths()?),
    }
}

/// Trusts the authority in the folder, and shows the client's certificate if there is one. Returns
/// the names of the optional files that exist.
fn use_certificates(
    builder: &mut SslContextBuilder,
    folder: &Path,
) -> Result<Vec<&'static str>, TlsError> {
    let mut found = Vec::new();
    let file = |name: &str| -> PathBuf { folder.join(name) };
    let (authority, certificate) = (file("ca-cert.pem"), file("client-cert.pem"));
    blockhouse_tls::check_readable(&authority)?;
    builder.set_ca_file(&authority).map_err(unfit(&authority, "is no certificate in PEM"))?;
    if certificate.exists() {
        use_identity(builder, &certificate, &file("client-key.pem"))?;
        found.push("client-cert.pem");
    }
    if use_revoked(builder.cert_store_mut(), &file("ca-crl.pem"))? {
        found.push("ca-crl.pem");
    }
    Ok(found)
}

fn use_key(builder: &mut SslContextBuilder, identity: &str, file: &Path) -> Result<(), TlsError> {
    let key = read_keys(file)?.remove(identity);
    let key = key.ok_or_else(|| file_error(file, &format!("has no key of {identity:?}")))?;
    let identity = identity.to_owned();
    builder.set_psk_client_callback(move |_, _, identity_into, key_into| {
        let (name, length) = (identity.as_bytes(), identity.len());
        // The identity ends with a NUL.
        if length >= identity_into.len() || key.len() > key_into.len() {
            return Ok(0);
        }
        identity_into[..length].copy_from_slice(name);
        identity_into[length] = 0;
        key_into[..key.len()].copy_from_slice(&key);
        Ok(key.len())
    });
    Ok(())
}

fn describe_certificate(context: &X509StoreContextRef) -> String {
    // The refused certificate may be an authority's. The server's own certificate is the first in
    // the chain.
    let own = context.chain().and_then(|chain| chain.get(0)).or(context.current_cert());
    let names = own.map(names_of).unwrap_or_default();
    format!("({}) is refused: {}", names.join(", "), context.error().error_string())
}

/// The reasons that OpenSSL gives, without its error codes.
fn reason(error: &ssl::Error) -> String {
    let errors = error.ssl_error().map(ErrorStack::errors).unwrap_or_default();
    let reasons: Vec<_> = errors.iter().filter_map(openssl::error::Error::reason).collect();
    if reasons.is_empty() { error.to_string() } else { reasons.join(", ") }
}

#[cfg(test)]
mod tests {
    use openssl::asn1::Asn1Time;
    use openssl::hash::MessageDigest;
    use openssl::pkey::{PKey, Private};
    use openssl::ssl::SslVersion;
    use openssl::x509::X509;

    use super::*;

    const KEY: [u8; 16] = [7; 16];

    /// The proof that a server may show.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Shown {
        Certificate,
        Key,
        OtherKey,
    }

    /// A certificate that has signed itself, and its key.
    fn certificate() -> (X509, PKey<Private>) {
        let key = PKey::generate_ed25519().unwrap();
        let mut certificate = X509::builder().unwrap();
        certificate.set_pubkey(&key).unwrap();
        certificate.set_not_before(&Asn1Time::days_from_now(0).unwrap()).unwrap();
        certificate.set_not_after(&Asn1Time::days_from_now(1).unwrap()).unwrap();
        certificate.sign(&key, MessageDigest::null()).unwrap();
        (certificate.build(), key)
    }

    fn server(shown: Shown, version: SslVersion) -> TlsSession {
        let mut builder = context(SslMethod::tls_server(), CipherKind::Psk).unwrap();
        builder.set_max_proto_version(Some(version)).unwrap();
        if shown == Shown::Certificate {
            builder.set_cipher_list("ALL").unwrap();
            let (certificate, key) = certificate();
            builder.set_certificate(&certificate).unwrap();
            builder.set_private_key(&key).unwrap();
        } else {
            builder.set_psk_server_callback(move |_, _, into| {
                let key = if shown == Shown::Key { KEY } else { [8; 16] };
                into[..key.len()].copy_from_slice(&key);
                Ok(key.len())
            });
        }
        let mut ssl = Ssl::new(&builder.build()).unwrap();
        ssl.set_accept_state();
        TlsSession::new(ssl, BufferPool::new(1 << 20)).unwrap()
    }

    fn carry(from: &mut TlsSession, to: &mut TlsSession) {
        if let Some(output) = from.take_output() {
            let mut input = to.take_input().unwrap();
            let count = output.len();
            input.bytes_mut()[..count].copy_from_slice(output.bytes());
            to.put_input(input, count);
        }
    }

    #[test]
    fn with_a_pre_shared_key_only_a_server_that_has_it_is_accepted() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), format!("alice:{}\n", "07".repeat(KEY.len()))).unwrap();
        let uri = format!("nbds://alice@localhost/?tls-psk-file={}", file.path().display());
        let tls = ClientTls::load(&uri.parse().unwrap()).unwrap().unwrap();
        for version in [SslVersion::TLS1_2, SslVersion::TLS1_3] {
            for shown in [Shown::Certificate, Shown::Key, Shown::OtherKey] {
                let mut server = server(shown, version);
                let mut client = tls.begin(BufferPool::new(1 << 20)).unwrap().session;
                let mut outcome = None;
                for _ in 0..6 {
                    match client.handshake() {
                        Ok(true) => outcome = Some(tls.check(&client).is_ok()),
                        Ok(false) => {}
                        Err(_) => outcome = Some(false),
                    }
                    carry(&mut client, &mut server);
                    let refused = server.handshake().is_err();
                    carry(&mut server, &mut client);
                    outcome = outcome.or(refused.then_some(false));
                    if outcome.is_some() {
                        break;
                    }
                }
                assert_eq!(outcome, Some(shown == Shown::Key), "{shown:?} {version:?}");
            }
        }
    }

    /// A revocation list of an authority named CA.
    const LIST: &str = "-----BEGIN X509 CRL-----
MIGTMEcCAQEwBQYDK2VwMA0xCzAJBgNVBAMMAkNBFw0yNjExMzAxMjU2MDRaFw0y
NjEyMDkxMjU2MDRaoA4wDDAKBgNVHRQEAwIBATAFBgMrZXADQQAwtMjnrV8J8OKR
i0QNKCfBEOlxNHPB+XkormoczWApsnXF3z2cPBMntC94LMg6nmgBerLaJCwnX5uT
vIxJpsED
-----END X509 CRL-----
";

    #[test]
    fn a_list_that_vanishes_stays_in_use() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("ca-cert.pem"), certificate().0.to_pem().unwrap()).unwrap();
        let uri = format!("nbds://localhost/?tls-certificates={}", folder.path().display());
        let tls = ClientTls::load(&uri.parse().unwrap()).unwrap().unwrap();
        let has_list = || !tls.current.lock().found.is_empty();
        assert!(!has_list());
        std::fs::write(path("ca-crl.pem"), LIST).unwrap();
        tls.refresh();
        assert!(has_list());
        std::fs::remove_file(path("ca-crl.pem")).unwrap();
        tls.refresh();
        assert!(has_list());
    }
}
