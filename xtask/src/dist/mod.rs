//! `cargo xtask dist`: the packages for users: a Debian package, a static binary, and the file tree
//! of an OCI image.
//!
//! Guarantees: all of them contain the same version of the binary with its own man pages,
//! completions and the licences of everything that is linked into it. Times in archives are that of
//! the commit (`SOURCE_DATE_EPOCH` if set), so two builds of one commit with one toolchain make the
//! same archives. Nothing is written outside of the target folder and `--output`.

mod archive;
mod deb;
mod files;
mod licences;
mod oci;
mod parts;
mod release;
mod static_binary;

use std::path::PathBuf;

use anyhow::{Context, Result};

use lab_tools::build::{Profile, build_binary};
use lab_tools::workspace::Workspace;

use self::licences::OpenSsl;
use self::parts::{Parts, commit_time};
pub use self::release::{Options as ReleaseOptions, run_release};

/// The products.
#[derive(Default, clap::Args)]
pub struct Options {
    /// Where to put it; left out, target/dist-packages
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,
    /// Pack binaries that are not optimized, soon rather than small: to try the packages
    /// themselves
    #[arg(long)]
    quick: bool,
    /// Make the Debian package alone, of this binary, which is not built
    #[arg(long, value_name = "BINARY")]
    deb_of: Option<PathBuf>,
    /// Make the archive and the image's file tree of the static binary alone
    #[arg(long, conflicts_with = "deb_of")]
    static_only: bool,
    /// Run the black-box tests of TLS with the static binary, too: what of it is not the package's
    #[arg(long, conflicts_with = "deb_of")]
    test: bool,
}

/// Makes everything, or the Debian package alone.
pub fn run(workspace: &Workspace, options: &Options) -> Result<()> {
    make(workspace, options).map(drop)
}

/// As [`run`]; returns the common parts of all packages.
fn make<'a>(workspace: &'a Workspace, options: &Options) -> Result<Parts<'a>> {
    let target = workspace.root().join("target");
    let output = options.output.clone().unwrap_or_else(|| target.join("dist-packages"));
    let parts = Parts {
        workspace,
        staging: target.join("dist-parts"),
        output: std::path::absolute(output).context("cannot find the folder")?,
        is_quick: options.quick || options.deb_of.is_some(),
        time: commit_time(workspace)?,
    };
    files::make_anew(&parts.staging)?;
    files::make(&parts.output)?;
    let openssl = match &options.deb_of {
        Some(_) => OpenSsl::OfTheSystem,
        None => OpenSsl::Contained,
    };
    licences::write(workspace, openssl, &parts.staging.join("THIRD-PARTY.txt"))?;
    if !options.static_only {
        let binary = match &options.deb_of {
            Some(binary) => binary.clone(),
            None => {
                build_binary(workspace, if options.quick { Profile::Dev } else { Profile::Dist })?
            }
        };
        parts.generate(&binary)?;
        deb::make(&parts, &binary)?;
    }
    if options.deb_of.is_none() {
        let binary = static_binary::build(&parts)?;
        if options.test {
            static_binary::test(&parts, &binary)?;
        }
        parts.generate(&binary)?;
        archive::make(&parts, &binary)?;
        oci::make(&parts, &binary)?;
    }
    println!("xtask: packages are in {}", parts.output.display());
    Ok(parts)
}
