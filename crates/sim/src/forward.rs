//! Delegation of storage methods, for test storages that wrap another storage.

/// Implements methods of [`Storage`](blockhouse_core::Storage) by calls to the storage in a field:
/// `forward_storage!(disk: name, size, resize);`.
#[macro_export]
macro_rules! forward_storage {
    ($field:ident: $($method:ident),+) => {
        $($crate::forward_storage!(@ $method $field);)+
    };
    (@ name $field:ident) => {
        fn name(&self) -> &str {
            self.$field.name()
        }
    };
    (@ capabilities $field:ident) => {
        fn capabilities(&self) -> ::blockhouse_core::Capabilities {
            self.$field.capabilities()
        }
    };
    (@ size $field:ident) => {
        fn size(&self) -> u64 {
            self.$field.size()
        }
    };
    (@ read $field:ident) => {
        async fn read(
            &self,
            offset: u64,
            into: ::blockhouse_core::IoVector,
        ) -> ::blockhouse_core::Result<()> {
            self.$field.read(offset, into).await
        }
    };
    (@ write_zeroes $field:ident) => {
        async fn write_zeroes(
            &self,
            range: ::blockhouse_core::ByteRange,
            unmap: ::blockhouse_core::Unmap,
        ) -> ::blockhouse_core::Result<()> {
            self.$field.write_zeroes(range, unmap).await
        }
    };
    (@ prepare_zeroes $field:ident) => {
        async fn prepare_zeroes(
            &self,
            range: ::blockhouse_core::ByteRange,
            held: ::blockhouse_core::IoVector,
        ) -> ::blockhouse_core::Result<()> {
            self.$field.prepare_zeroes(range, held).await
        }
    };
    (@ free_space $field:ident) => {
        async fn free_space(&self) -> ::blockhouse_core::Result<Option<u64>> {
            self.$field.free_space().await
        }
    };
    (@ discard $field:ident) => {
        async fn discard(
            &self,
            range: ::blockhouse_core::ByteRange,
        ) -> ::blockhouse_core::Result<()> {
            self.$field.discard(range).await
        }
    };
    (@ flush $field:ident) => {
        async fn flush(
            &self,
            sync: ::blockhouse_core::SyncMode,
        ) -> ::blockhouse_core::Result<()> {
            self.$field.flush(sync).await
        }
    };
    (@ resize $field:ident) => {
        async fn resize(&self, size: u64) -> ::blockhouse_core::Result<()> {
            self.$field.resize(size).await
        }
    };
    (@ block_status $field:ident) => {
        async fn block_status(
            &self,
            range: ::blockhouse_core::ByteRange,
        ) -> ::blockhouse_core::Result<(::blockhouse_core::Allocation, u64)> {
            self.$field.block_status(range).await
        }
    };
    (@ prefetch $field:ident) => {
        async fn prefetch(
            &self,
            range: ::blockhouse_core::ByteRange,
        ) -> ::blockhouse_core::Result<()> {
            self.$field.prefetch(range).await
        }
    };
}
