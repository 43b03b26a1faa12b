//! The bytes of an image: header, extensions, entries, tables of snapshots, and the arithmetic on
//! them.
//!
//! Owns nothing and knows no opened image: types, pure functions, and reading and writing of whole
//! tables at a storage. Nothing is believed before it is inside its bounds.

pub(crate) mod bitmap_directory;
pub(crate) mod cluster_ranges;
pub(crate) mod compression;
pub(crate) mod data_file_mark;
pub(crate) mod entry;
pub(crate) mod extensions;
pub(crate) mod geometry;
pub(crate) mod header;
pub(crate) mod limits;
pub(crate) mod names;
pub(crate) mod options;
pub(crate) mod refcount;
pub(crate) mod snapshot_table;
pub(crate) mod sparse_reader;
pub(crate) mod table_io;
pub(crate) mod table_write;
pub(crate) mod words;
