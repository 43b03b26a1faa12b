//! Reads and writes the guest's data of an encrypted image. Only this module encrypts and decrypts
//! this data.
//!
//! Guarantees:
//! - Guest memory never holds encrypted bytes, and a write never changes guest memory: data is
//!   encrypted and decrypted in internal buffers. The holder of such a buffer waits only for the
//!   storage, so a request that holds other buffers may wait for such a buffer.
//! - The guest memory of a write is kept until the storage has completed the write, even if the
//!   future of the write is dropped. Claims and guards attached to the memory end at that time, not
//!   earlier.
//! - Without the key, an image's data is neither read nor written, but its metadata is.
//! - Zeros and holes of the storage are not zeros of the disk, so the storage is never asked for
//!   zeros, discards or holes of encrypted data.

use std::sync::Mutex;

use blockhouse_core::{
    Allocation, ByteRange, Capabilities, Durability, Error, ErrorKind, IoVector, Offload,
    ReadAfterDiscard, Result, Storage, WorkBudget, rare,
};
use blockhouse_format::DataPlace;

use super::data_cipher::{DataCipher, DataEncryption};
use super::{HostRuns, Layer};
use crate::buffers::CHUNK_SIZE;
use crate::durability::FlushTracker;

/// The cost of encrypting a byte, relative to the cost of copying it.
const COST: u64 = 3;

impl<S: Storage> Layer<S> {
    /// Whether the guest's data is encrypted.
    pub(crate) fn is_encrypted(&self) -> bool {
        !matches!(self.encryption, DataEncryption::None)
    }

    /// The storage's capabilities for the guest's data.
    pub(crate) fn data_capabilities(&self) -> Capabilities {
        let capabilities = self.data().capabilities();
        if self.is_encrypted() {
            Capabilities {
                alignment: self.alignment,
                write_zeroes: Offload::Unavailable,
                prepare_zeroes: Offload::Unavailable,
                discard: Offload::Unavailable,
                read_after_discard: ReadAfterDiscard::Undefined,
                ..capabilities
            }
        } else {
            capabilities
        }
    }

    /// Host status of the start of a range of guest data, as [`Storage::block_status`] returns it.
    pub(crate) async fn host_status(
        &self,
        runs: &mut HostRuns,
        range: ByteRange,
    ) -> Result<(Allocation, u64)> {
        if self.is_encrypted() {
            Ok((Allocation::Data, range.length()))
        } else {
            runs.begin(self);
            runs.block_status(self.data(), range).await
        }
    }

    /// Fills `into` with the guest's data at a location whose host offset is aligned as the
    /// [layer](Self::alignment) requires.
    pub(crate) async fn read_data(&self, place: DataPlace, into: IoVector) -> Result<()> {
        match &self.encryption {
            DataEncryption::None => self.data().read_data(place.host, into).await,
            DataEncryption::Locked => Err(self.locked(place.host)),
            DataEncryption::Unlocked(cipher) => rare(cipher.read(self.data(), place, into)).await,
        }
    }

    /// Stores guest data at a location, as [`Storage::write`] does at its host offset.
    pub(crate) async fn write_data(
        &self,
        place: DataPlace,
        from: IoVector,
        durability: Durability,
    ) -> Result<()> {
        match &self.encryption {
            DataEncryption::None => self.data().write_data(place.host, from, durability).await,
            DataEncryption::Locked => Err(self.locked(place.host)),
            DataEncryption::Unlocked(cipher) => {
                rare(cipher.write(self.data(), place, from, durability)).await
            }
        }
    }

    /// The error for reads and writes of the image's data without its key.
    fn locked(&self, host: u64) -> Error {
        let what = "the image is encrypted, and was opened without its key";
        let error = Error::new(ErrorKind::Unsupported, what).on(self.name()).at(host);
        error.hint("name the key: --key-file FILE, or --passphrase-file FILE")
    }
}

impl DataCipher {
    /// Fills `into` with the decrypted bytes of `data` from `place` on.
    async fn read<S: Storage>(
        &self,
        data: &FlushTracker<S>,
        place: DataPlace,
        mut into: IoVector,
    ) -> Result<()> {
        let host = place.host;
        let block = u64::from(data.capabilities().alignment.offset);
        // A chunk and the rest of its first and last block must fit into one buffer.
        let limit = if host.is_multiple_of(block) { CHUNK_SIZE } else { CHUNK_SIZE / 2 } as u64;
        let budget = WorkBudget::new();
        let mut rest = ByteRange::between(host, host + into.len() as u64);
        while !rest.is_empty() {
            let chunk = rest.truncate(limit);
            let outer = chunk.align_outward(block);
            let mut buffer = self.buffer(outer.length() as usize).await?;
            data.read_data(outer.offset(), buffer.lend()).await?;
            let (start, length) =
                ((chunk.offset() - outer.offset()) as usize, chunk.length() as usize);
            let bytes = &mut buffer.bytes_mut()[start..start + length];
            self.decrypt(place.skip(chunk.offset() - host), bytes);
            into.copy_from(bytes);
            // If the memory is lost, the rest need not be read.
            into.check_intact()?;
            into.advance(length);
            rest = rest.skip(chunk.length());
            budget.charge(chunk.length() * COST);
            if !rest.is_empty() {
                budget.yield_if_spent().await;
            }
        }
        Ok(())
    }

    /// Stores the encrypted form of `from` in `data`, from `place` on.
    async fn write<S: Storage>(
        &self,
        data: &FlushTracker<S>,
        mut place: DataPlace,
        mut from: IoVector,
        durability: Durability,
    ) -> Result<()> {
        let budget = WorkBudget::new();
        while !from.is_empty() {
            let rest = from.split_off(from.len().min(CHUNK_SIZE));
            let part = std::mem::replace(&mut from, rest);
            let length = part.len();
            let mut buffer = self.buffer(length).await?;
            let bytes = buffer.bytes_mut();
            part.copy_to(bytes);
            // Zeros that replace a guest's lost memory must not be stored.
            part.check_intact()?;
            self.encrypt(place, bytes);
            let vector = buffer.lend().with_guard(Mutex::new(part));
            data.write_data(place.host, vector, durability).await?;
            place = place.skip(length as u64);
            budget.charge(length as u64 * COST);
            if !from.is_empty() {
                budget.yield_if_spent().await;
            }
        }
        Ok(())
    }
}
