//! Keys and ciphers of encrypted images (layer 2): LUKS.
//!
//! - [`Secret`] is what a person gives: a passphrase or a key file.
//! - [`unlock`] opens a key slot of a [`LuksHeader`](blockhouse_format::LuksHeader) with it. It
//!   computes for long, so it has no place on an event loop.
//! - [`create_header`] makes the header of a new image.
//! - [`SectorCipher`] encrypts and decrypts the sectors of a disk.
//!
//! Guarantees: secrets, derived keys and the ciphers' key schedules are in locked memory that is
//! wiped ([`Locked`](blockhouse_engine::Locked)). What a header asks for in time and memory is
//! limited ([`unlock`]). The block cipher and the hashes take the same time whatever the key and
//! the data are: AES by the processor's instructions, elsewhere bitsliced. No message has a secret
//! in it.
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
pub use create::create_header;
pub use key_slots::{new_slot, slot_wipe, slots_of};
pub use secret::{MAX_SECRET, Secret};
pub use unlock::{aes_of_password, unlock};
