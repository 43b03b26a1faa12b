//! A client of TLS 1.2 with a pre-shared key (RFC 5246, RFC 4279, RFC 5288) that can send any
//! records, which libraries do not allow.

use std::io::{self, Read, Write};

use openssl::hash::{MessageDigest, hash};
use openssl::pkey::PKey;
use openssl::sign::Signer;
use openssl::symm::{Cipher, encrypt_aead};

const HANDSHAKE: u8 = 22;
const CHANGE_CIPHER_SPEC: u8 = 20;
const SERVER_HELLO_DONE: u8 = 14;
/// TLS_PSK_WITH_AES_128_GCM_SHA256 and TLS_EMPTY_RENEGOTIATION_INFO_SCSV.
const SUITES: [u8; 4] = [0x00, 0xa8, 0x00, 0xff];

/// A client after the handshake. It does not decrypt what the server sends.
pub struct Tls12<S> {
    stream: S,
    key: Vec<u8>,
    /// The first four bytes of each nonce.
    salt: Vec<u8>,
    sequence: u64,
}

impl<S: Read + Write> Tls12<S> {
    /// Performs the handshake over a connection on which the server waits for it.
    ///
    /// # Errors
    /// An error of the connection; `InvalidData` if the server sends an unexpected record.
    pub fn connect(mut stream: S, identity: &str, psk: &[u8]) -> io::Result<Self> {
        let random = [7; 32];
        let mut said = hello(&random);
        send(&mut stream, HANDSHAKE, &said)?;
        let server_random = read_flight(&mut stream, &mut said)?;
        let mut exchange = vec![16, 0, 0, identity.len() as u8 + 2, 0, identity.len() as u8];
        exchange.extend(identity.as_bytes());
        send(&mut stream, HANDSHAKE, &exchange)?;
        said.extend(&exchange);
        let length = (psk.len() as u16).to_be_bytes();
        let premaster = [&length[..], &vec![0; psk.len()], &length, psk].concat();
        let both = [&random[..], &server_random].concat();
        let master = expand(&premaster, b"master secret", &both, 48)?;
        let both = [&server_random[..], &random].concat();
        let keys = expand(&master, b"key expansion", &both, 40)?;
        send(&mut stream, CHANGE_CIPHER_SPEC, &[1])?;
        let mut client =
            Self { stream, key: keys[..16].to_vec(), salt: keys[32..36].to_vec(), sequence: 0 };
        let digest = hash(MessageDigest::sha256(), &said)?;
        let finished = expand(&master, b"client finished", &digest, 12)?;
        client.send(HANDSHAKE, &[&[20, 0, 0, 12], &finished[..]].concat())?;
        // The server's ChangeCipherSpec and Finished.
        read_record(&mut client.stream)?;
        read_record(&mut client.stream)?;
        Ok(client)
    }

    /// Asks the server for a renegotiation.
    ///
    /// # Errors
    /// An error of the connection.
    pub fn ask_to_renegotiate(&mut self) -> io::Result<()> {
        self.send(HANDSHAKE, &hello(&[9; 32]))
    }

    /// Sends application data.
    ///
    /// # Errors
    /// An error of the connection.
    pub fn send_data(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.send(23, bytes)
    }

    /// The type of the next record that the server sends; `None` at the end.
    pub fn next_record(&mut self) -> Option<u8> {
        read_record(&mut self.stream).ok().map(|(kind, _)| kind)
    }

    fn send(&mut self, kind: u8, bytes: &[u8]) -> io::Result<()> {
        let sequence = self.sequence.to_be_bytes();
        self.sequence += 1;
        let length = (bytes.len() as u16).to_be_bytes();
        let known = [&sequence[..], &[kind, 3, 3], &length].concat();
        let nonce = [&self.salt[..], &sequence].concat();
        let mut tag = [0; 16];
        let cipher = Cipher::aes_128_gcm();
        let text = encrypt_aead(cipher, &self.key, Some(&nonce), &known, bytes, &mut tag)?;
        send(&mut self.stream, kind, &[&sequence[..], &text, &tag].concat())
    }
}

fn hello(random: &[u8; 32]) -> Vec<u8> {
    let mut body = vec![3, 3];
    body.extend(random);
    body.extend([0, 0, SUITES.len() as u8]);
    body.extend(SUITES);
    body.extend([1, 0]);
    [&[1, 0, 0, body.len() as u8], &body[..]].concat()
}

fn send(stream: &mut impl Write, kind: u8, bytes: &[u8]) -> io::Result<()> {
    let length = (bytes.len() as u16).to_be_bytes();
    stream.write_all(&[&[kind, 3, 3], &length[..], bytes].concat())
}

/// Reads the server's messages up to ServerHelloDone, and appends them to `said`; returns the
/// server's random bytes.
fn read_flight(stream: &mut impl Read, said: &mut Vec<u8>) -> io::Result<[u8; 32]> {
    let start = said.len();
    loop {
        let (kind, bytes) = read_record(stream)?;
        if kind != HANDSHAKE {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a record of {kind}")));
        }
        said.extend(&bytes);
        // ServerHelloDone is empty, and ends its record.
        if said.ends_with(&[SERVER_HELLO_DONE, 0, 0, 0]) {
            let mut random = [0; 32];
            // The random bytes follow the header and the version of ServerHello.
            random.copy_from_slice(&said[start + 6..start + 38]);
            return Ok(random);
        }
    }
}

fn read_record(stream: &mut impl Read) -> io::Result<(u8, Vec<u8>)> {
    let mut head = [0; 5];
    stream.read_exact(&mut head)?;
    let mut bytes = vec![0; usize::from(u16::from_be_bytes([head[3], head[4]]))];
    stream.read_exact(&mut bytes)?;
    Ok((head[0], bytes))
}

/// P_SHA256 of RFC 5246, section 5.
fn expand(secret: &[u8], label: &[u8], seed: &[u8], length: usize) -> io::Result<Vec<u8>> {
    let key = PKey::hmac(secret)?;
    let mac = |bytes: &[u8]| {
        let mut signer = Signer::new(MessageDigest::sha256(), &key)?;
        signer.sign_oneshot_to_vec(bytes)
    };
    let seed = [label, seed].concat();
    let (mut chained, mut output) = (mac(&seed)?, Vec::new());
    while output.len() < length {
        output.extend(mac(&[&chained[..], &seed].concat())?);
        chained = mac(&chained)?;
    }
    output.truncate(length);
    Ok(output)
}
