//! Certificates, revocation lists and pre-shared keys, made by GnuTLS's tools.
//!
//! The files have the names that QEMU, nbdkit and libnbd share, so one folder is enough for a
//! server and a client.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::{run, tool};

/// A certificate authority and the certificates that it has signed.
pub struct Pki {
    folder: PathBuf,
}

/// When a certificate is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Validity {
    /// Now.
    Now,
    /// Until a time in the past.
    Expired,
}

impl Pki {
    /// A new authority, whose files are in `folder`.
    pub fn new(folder: &Path) -> Self {
        fs::create_dir_all(folder).expect("a folder");
        let pki = Self { folder: folder.to_owned() };
        pki.write(
            "ca.tmpl",
            "cn = \"CA\"\nca\ncert_signing_key\ncrl_signing_key\nexpiration_days = 9\n",
        );
        pki.certtool(&["--generate-privkey", "--key-type=ecdsa", "--outfile", "ca-key.pem"]);
        let sign =
            ["--generate-self-signed", "--load-privkey", "ca-key.pem", "--template", "ca.tmpl"];
        pki.certtool(&[&sign[..], &["--outfile", "ca-cert.pem"]].concat());
        pki
    }

    /// The certificate and key of a server called localhost, in the folder itself.
    pub fn server(&self) {
        self.server_of(Validity::Now);
    }

    /// As [`server`](Self::server), with this validity.
    pub fn server_of(&self, validity: Validity) {
        let names = "dns_name = \"localhost\"\nip_address = \"127.0.0.1\"\ntls_www_server\n";
        self.sign("server", "localhost", names, validity);
    }

    /// A folder for a client of this name, with its certificate and key, and the authority's
    /// certificate.
    pub fn client(&self, name: &str, validity: Validity) -> PathBuf {
        self.sign("client", name, "tls_www_client\n", validity);
        let folder = self.folder.join(name);
        fs::create_dir_all(&folder).expect("a folder");
        for file in ["client-cert.pem", "client-key.pem"] {
            fs::rename(self.folder.join(file), folder.join(file)).expect("a file");
        }
        fs::copy(self.folder.join("ca-cert.pem"), folder.join("ca-cert.pem")).expect("a file");
        folder
    }

    /// Revokes a client's certificate with a new `ca-crl.pem`.
    pub fn revoke(&self, client: &Path) {
        self.write("crl.tmpl", "crl_next_update = 9\ncrl_number = 1\n");
        let certificate = client.join("client-cert.pem");
        let certificate = certificate.to_str().expect("a plain name");
        self.certtool(&[
            "--generate-crl",
            "--load-ca-privkey=ca-key.pem",
            "--load-ca-certificate=ca-cert.pem",
            "--load-certificate",
            certificate,
            "--template=crl.tmpl",
            "--outfile=ca-crl.pem",
        ]);
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn sign(&self, role: &str, name: &str, more: &str, validity: Validity) {
        let time = match validity {
            Validity::Now => "expiration_days = 9\n",
            Validity::Expired => {
                "activation_date = \"2020-01-01 00:00:00\"\nexpiration_date = \"2020-02-01 00:00:00\"\n"
            }
        };
        let template = format!("cn = \"{name}\"\nsigning_key\nencryption_key\n{more}{time}");
        self.write("sign.tmpl", &template);
        let [key, certificate] = ["key", "cert"].map(|what| format!("{role}-{what}.pem"));
        self.write(&key, self.private_key());
        self.certtool(&[
            "--generate-certificate",
            "--load-ca-certificate=ca-cert.pem",
            "--load-ca-privkey=ca-key.pem",
            "--load-privkey",
            &key,
            "--template=sign.tmpl",
            "--outfile",
            &certificate,
        ]);
    }

    /// The key of all certificates but authorities', which is made once: that takes longer than all
    /// else that a test of TLS does.
    fn private_key(&self) -> &'static str {
        static KEY: OnceLock<String> = OnceLock::new();
        KEY.get_or_init(|| {
            let file = "key.pem";
            self.certtool(&[
                "--generate-privkey",
                "--key-type=rsa",
                "--bits=2048",
                "--outfile",
                file,
            ]);
            fs::read_to_string(self.folder.join(file)).expect("a key")
        })
    }

    fn certtool(&self, words: &[&str]) {
        run(tool("certtool").args(words).current_dir(&self.folder)).success();
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.folder.join(name), text).expect("a file");
    }
}

/// A file of pre-shared keys with new ones for these users.
pub fn psk_file(path: &Path, users: &[&str]) {
    for user in users {
        run(tool("psktool").arg("-u").arg(user).arg("-p").arg(path)).success();
    }
}
