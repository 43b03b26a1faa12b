//! The bytes of an image: header, extensions, entries, tables of snapshots, and the arithmetic on
//! them.
//!
//! This module has no state and does not use open images: it has types, pure functions, and
//! functions that read and write whole tables on a storage. Every value is checked against its
//! bounds before use.

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
