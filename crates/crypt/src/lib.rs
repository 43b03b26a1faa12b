//! Keys and ciphers of encrypted images (layer 2): LUKS.
//!
//! - [`Secret`] is a passphrase or the content of a key file.
//! - [`unlock`] opens a key slot of a [`LuksHeader`](blockhouse_format::LuksHeader) with a secret.
//!   It computes for seconds, so do not call it on an event loop.
//! - [`create_header`] makes the header of a new image.
//! - [`SectorCipher`] encrypts and decrypts the sectors of a disk.
//!
//! Guarantees: secrets, derived keys and the ciphers' key schedules are in locked memory that is
//! wiped when it is freed ([`Locked`](blockhouse_engine::Locked)). The time and memory that a
//! header can demand are limited ([`unlock`]). The time of the block cipher and the hashes does not
//! depend on the key and the data: AES uses the processor's instructions, or is bitsliced where
//! there are none. No message contains a secret.
#![forbid(unsafe_code)]

mod cipher;
mod create;
mod hash;
mod kdf;
mod key_slots;
mod secret;
mod stripes;
mod unlock;
mod xts;

pub use cipher::SectorCipher;
pub use create::{KeyWork, create_header};
pub use key_slots::{new_slot, slot_wipe, slots_of};
pub use secret::{MAX_SECRET, Secret};
pub use unlock::{aes_of_password, unlock};
