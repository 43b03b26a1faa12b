//! Storages of tests under the type [`SimDisk`](crate::SimDisk).
//!
//! The I/O path is compiled for each type of storage that it stands on, which takes longer than
//! most of the tests. So all of these storages have one type, and their methods are called through
//! a table.

use std::pin::Pin;
use std::time::Duration;

use blockhouse_core::{
    Allocation, ByteRange, Capabilities, Durability, IoVector, Result, Storage, SyncMode, Unmap,
};

/// Defines [`Wrapped`], and implements it for each storage.
macro_rules! wrapped {
    (
        $(fn $now:ident(&self$(, $one:ident: $its:ty)?) -> $out:ty;)*
        $(async fn $later:ident(&self$(, $arg:ident: $type:ty)*) -> $done:ty;)*
    ) => {
        /// The methods of a [`Storage`], with boxed futures.
        pub(crate) trait Wrapped: Send + Sync {
            $(fn $now(&self$(, $one: $its)?) -> $out;)*
            $(fn $later(&self$(, $arg: $type)*) -> Pin<Box<dyn Future<Output = $done> + '_>>;)*
        }

        impl<S: Storage + Send + Sync> Wrapped for S {
            $(fn $now(&self$(, $one: $its)?) -> $out {
                Storage::$now(self$(, $one)?)
            })*

            $(fn $later(&self$(, $arg: $type)*) -> Pin<Box<dyn Future<Output = $done> + '_>> {
                Box::pin(Storage::$later(self$(, $arg)*))
            })*
        }
    };
}

wrapped! {
    fn name(&self) -> &str;
    fn capabilities(&self) -> Capabilities;
    fn size(&self) -> u64;
    fn grows_with_zeros(&self) -> bool;
    fn check_size(&self, size: u64) -> Result<()>;
    fn needs_close(&self) -> bool;
    async fn read(&self, offset: u64, into: IoVector) -> Result<()>;
    async fn write(&self, offset: u64, from: IoVector, durability: Durability) -> Result<()>;
    async fn write_zeroes(&self, range: ByteRange, unmap: Unmap) -> Result<()>;
    async fn prepare_zeroes(&self, range: ByteRange, held: IoVector) -> Result<()>;
    async fn free_space(&self) -> Result<Option<u64>>;
    async fn discard(&self, range: ByteRange) -> Result<()>;
    async fn flush(&self, sync: SyncMode) -> Result<()>;
    async fn resize(&self, size: u64) -> Result<()>;
    async fn last_change(&self) -> Result<Option<Duration>>;
    async fn extend_hint(&self, size: u64) -> ();
    async fn block_status(&self, range: ByteRange) -> Result<(Allocation, u64)>;
    async fn prefetch(&self, range: ByteRange) -> Result<()>;
    async fn close(&self) -> Result<()>;
}
