//! Sets `cfg(loom)`, with which the primitives have their models.

#![forbid(unsafe_code)]

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cfg=loom");
}
