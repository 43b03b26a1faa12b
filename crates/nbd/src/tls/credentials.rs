//! A server's secrets: read from files, read again at a reload, and whom they admit.
//!
//! Guarantee: what is in force is always a whole set of files that fit each other. Where a reload fails, the old set
//! stays.

use std::collections::HashMap;
use std::path::Path;

use openssl::error::ErrorStack;
use openssl::ssl::{
    SslContext, SslContextBuilder, SslFiletype, SslMethod, SslMode, SslOptions,
    SslSessionCacheMode, SslVerifyMode, SslVersion,
};
use openssl::x509::store::X509Lookup;
use openssl::x509::verify::X509VerifyFlags;
use openssl::x509::{X509Name, X509NameRef, X509Ref, X509StoreContextRef};
use parking_lot::RwLock;

use super::refusal::note;
use super::{ClientIdentity, TlsFiles};

/// Those of TLS 1.3, the cheapest first.
const SUITES: &str = "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";
/// Those of TLS 1.2 with certificates: with forward secrecy and authenticated encryption.
const CERTIFICATE_CIPHERS: &str = "ECDHE+AESGCM:ECDHE+CHACHA20";
/// Those of TLS 1.2 with pre-shared keys.
const PSK_CIPHERS: &str = "kECDHEPSK+CHACHA20:kPSK+AESGCM:kPSK+CHACHA20";

/// Why the files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file is missing, or it is not what its name says.
    #[error("{path}: {why}")]
    File {
        /// The file.
        path: String,
        /// What is wrong with it.
        why: String,
    },
    /// OpenSSL cannot be set up.
    #[error("TLS cannot be set up: {0}")]
    Library(#[from] ErrorStack),
}

/// The secrets of a server, and the clients that each export admits.
#[derive(Debug)]
pub struct TlsServer {
    files: TlsFiles,
    /// Pairs of an export and a client that may use it.
    allowed: Vec<(String, String)>,
    current: RwLock<Secrets>,
}

#[derive(Clone)]
struct Secrets {
    context: SslContext,
    has_client_check: bool,
}

impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Secrets").finish_non_exhaustive()
    }
}

impl TlsServer {
    /// Reads the files. `allowed` has pairs of an export's name and a client's: an export that is in none of them
    /// admits all clients.
    ///
    /// # Errors
    /// A file is missing, unfit or does not fit another one; `allowed` names clients, and no file tells who they are.
    pub fn load(files: TlsFiles, allowed: Vec<(String, String)>) -> Result<Self, TlsError> {
        let secrets = Secrets::read(&files)?;
        let server = Self { files, allowed, current: RwLock::new(secrets) };
        server.check_allowed()?;
        Ok(server)
    }

    /// Reads the files again, for connections that come from now on.
    ///
    /// # Errors
    /// As [`load`](Self::load); then what was read before stays in force.
    pub fn reload(&self) -> Result<(), TlsError> {
        let secrets = Secrets::read(&self.files)?;
        let old = std::mem::replace(&mut *self.current.write(), secrets);
        self.check_allowed().inspect_err(|_| *self.current.write() = old)
    }

    fn check_allowed(&self) -> Result<(), TlsError> {
        match &self.files {
            TlsFiles::Certificates(folder)
                if !self.allowed.is_empty() && !self.has_client_check() =>
            {
                let why = "is missing, so nobody knows which client is which; put it there to have clients \
                           checked, or allow all";
                Err(file_error(&folder.join("ca-cert.pem"), why))
            }
            _ => Ok(()),
        }
    }

    /// Whether clients have to show who they are.
    pub fn has_client_check(&self) -> bool {
        self.current.read().has_client_check
    }

    /// Whether an export is for certain clients only.
    pub fn is_restricted(&self, export: &str) -> bool {
        self.allowed.iter().any(|(name, _)| name == export)
    }

    /// Whether a client may use an export; `None` is one without TLS.
    pub fn admits(&self, export: &str, client: Option<&ClientIdentity>) -> bool {
        let is_it = |(name, allowed): &(String, String)| {
            name == export && client.is_some_and(|client| client.names.contains(allowed))
        };
        !self.is_restricted(export) || self.allowed.iter().any(is_it)
    }

    /// What connections use that begin now.
    pub(super) fn context(&self) -> SslContext {
        self.current.read().context.clone()
    }
}

impl Secrets {
    fn read(files: &TlsFiles) -> Result<Self, TlsError> {
        let mut builder = SslContext::builder(SslMethod::tls_server())?;
        builder.set_min_proto_version(Some(SslVersion::TLS1_2))?;
        builder.set_options(
            SslOptions::NO_RENEGOTIATION
                | SslOptions::NO_TICKET
                | SslOptions::NO_COMPRESSION
                | SslOptions::CIPHER_SERVER_PREFERENCE,
        );
        // A resumed session would keep a client that was revoked since.
        builder.set_session_cache_mode(SslSessionCacheMode::OFF);
        builder.set_num_tickets(0)?;
        builder.set_mode(SslMode::ACCEPT_MOVING_WRITE_BUFFER);
        builder.set_ciphersuites(SUITES)?;
        let has_client_check = match files {
            TlsFiles::Certificates(folder) => use_certificates(&mut builder, folder)?,
            TlsFiles::Psk(file) => {
                use_keys(&mut builder, file)?;
                true
            }
        };
        Ok(Self { context: builder.build(), has_client_check })
    }
}

/// Whether clients are checked.
fn use_certificates(builder: &mut SslContextBuilder, folder: &Path) -> Result<bool, TlsError> {
    let file = |name: &str| folder.join(name);
    let (certificate, key) = (file("server-cert.pem"), file("server-key.pem"));
    let (authority, revoked) = (file("ca-cert.pem"), file("ca-crl.pem"));
    builder.set_cipher_list(CERTIFICATE_CIPHERS)?;
    check_readable(&certificate)?;
    builder
        .set_certificate_chain_file(&certificate)
        .map_err(unfit(&certificate, "is no certificate in PEM"))?;
    check_readable(&key)?;
    builder
        .set_private_key_file(&key, SslFiletype::PEM)
        .map_err(unfit(&key, "is no private key in PEM"))?;
    builder
        .check_private_key()
        .map_err(unfit(&key, "is not the key of server-cert.pem beside it"))?;
    if !authority.exists() {
        return match revoked.exists() {
            true => Err(file_error(&authority, "is missing, but there is a ca-crl.pem beside it")),
            false => Ok(false),
        };
    }
    builder.set_ca_file(&authority).map_err(unfit(&authority, "is no certificate in PEM"))?;
    let names = X509Name::load_client_ca_file(&authority);
    builder.set_client_ca_list(names.map_err(unfit(&authority, "is no certificate in PEM"))?);
    let must = SslVerifyMode::PEER | SslVerifyMode::FAIL_IF_NO_PEER_CERT;
    builder.set_verify_callback(must, check_client);
    if revoked.exists() {
        let store = builder.cert_store_mut();
        store.set_flags(X509VerifyFlags::CRL_CHECK)?;
        store
            .add_lookup(X509Lookup::file())?
            .load_crl_file(&revoked, SslFiletype::PEM)
            .map_err(unfit(&revoked, "is no list of revoked certificates in PEM"))?;
    }
    Ok(true)
}

/// Notes what is wrong with a client's certificate.
fn check_client(is_good: bool, context: &mut X509StoreContextRef) -> bool {
    if !is_good {
        let whose = context.current_cert().map(|certificate| names_of(certificate).join(", "));
        let why = context.error().error_string();
        let text = format!("its certificate ({}) is refused: {why}", whose.unwrap_or_default());
        note(|note| note.certificate = Some(text));
    }
    is_good
}

/// The names in a certificate that a client may be known by.
pub(super) fn names_of(certificate: &X509Ref) -> Vec<String> {
    let common = common_names(certificate.subject_name());
    let others = certificate.subject_alt_names();
    let others = others.iter().flatten().filter_map(|name| name.dnsname().map(str::to_owned));
    let mut names: Vec<_> = common.into_iter().chain(others).collect();
    names.dedup();
    names
}

fn common_names(subject: &X509NameRef) -> Vec<String> {
    let entries = subject.entries_by_nid(openssl::nid::Nid::COMMONNAME);
    let text = |entry: &openssl::x509::X509NameEntryRef| entry.data().to_string().ok();
    entries.filter_map(text).collect()
}

fn use_keys(builder: &mut SslContextBuilder, path: &Path) -> Result<(), TlsError> {
    let keys = read_keys(path)?;
    builder.set_cipher_list(PSK_CIPHERS)?;
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
    Ok(())
}

/// The keys of a file by their identities.
fn read_keys(path: &Path) -> Result<HashMap<String, Vec<u8>>, TlsError> {
    let text =
        std::fs::read_to_string(path).map_err(|error| file_error(path, &error.to_string()))?;
    let mut keys = HashMap::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let wrong = || {
            file_error(
                path,
                &format!("line {} is not IDENTITY:KEY in hexadecimal digits", number + 1),
            )
        };
        let (identity, key) = line.rsplit_once(':').ok_or_else(wrong)?;
        let key = from_hexadecimal(key).filter(|key| !key.is_empty()).ok_or_else(wrong)?;
        keys.insert(identity.to_owned(), key);
    }
    match keys.is_empty() {
        true => Err(file_error(path, "has no key; 'psktool -u NAME -p FILE' makes one")),
        false => Ok(keys),
    }
}

fn from_hexadecimal(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(2) || !text.is_ascii() {
        return None;
    }
    let byte = |index| u8::from_str_radix(&text[index..index + 2], 16).ok();
    (0..text.len()).step_by(2).map(byte).collect()
}

fn check_readable(path: &Path) -> Result<(), TlsError> {
    let opened = std::fs::File::open(path);
    opened.map(drop).map_err(|error| file_error(path, &error.to_string()))
}

/// The error of a file that OpenSSL does not take.
fn unfit(path: &Path, what: &'static str) -> impl Fn(ErrorStack) -> TlsError {
    move |error| file_error(path, &format!("{what}: {error}"))
}

fn file_error(path: &Path, why: &str) -> TlsError {
    TlsError::File { path: path.display().to_string(), why: why.to_owned() }
}
