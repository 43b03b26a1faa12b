//! The credentials of a client of another server. They turn a plain NBD URI into one with TLS.

use crate::qemu_name::escape;

/// The credentials of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientTls {
    /// The folder with the client's certificates, or with its file of keys.
    pub folder: String,
    /// The kind of the credentials.
    pub kind: ClientTlsKind,
}

/// The kind of a client's credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClientTlsKind {
    /// Certificates (`tls-creds-x509`).
    Certificates {
        /// Whether the server's certificate is checked.
        verifies_peer: bool,
    },
    /// A key of the file `keys.psk` (`tls-creds-psk`).
    Keys {
        /// The user that the key belongs to.
        user: String,
    },
}

impl ClientTls {
    /// The user name if QEMU's object gives none.
    pub const DEFAULT_USER: &str = "qemu";

    /// The URI of an export with these credentials. `hostname` is the name in the server's
    /// certificate, if it differs from the host's name.
    ///
    /// # Errors
    /// `plain` is not the URI of an export.
    pub fn uri_of(&self, plain: &str, hostname: Option<&str>) -> Result<String, String> {
        let rest = plain.strip_prefix("nbd").filter(|rest| rest.starts_with([':', '+']));
        let rest = rest.ok_or_else(|| format!("{plain}: TLS is of exports"))?;
        let mark = if rest.contains('?') { '&' } else { '?' };
        Ok(match &self.kind {
            ClientTlsKind::Keys { user } => {
                let (scheme, place) = rest.split_once("://").unwrap_or((rest, ""));
                let (user, file) = (escape(user).replace('/', "%2F"), escape(&self.folder));
                format!("nbds{scheme}://{user}@{place}{mark}tls-psk-file={file}/keys.psk")
            }
            ClientTlsKind::Certificates { verifies_peer } => {
                let mut uri = format!("nbds{rest}{mark}tls-certificates={}", escape(&self.folder));
                if let Some(name) = hostname {
                    uri.push_str(&format!("&tls-hostname={}", escape(name)));
                }
                uri + if *verifies_peer { "" } else { "&tls-verify-peer=false" }
            }
        })
    }
}
