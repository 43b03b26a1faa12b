//! Disk image formats as mappings from guest ranges to host extents.
#![forbid(unsafe_code)]
