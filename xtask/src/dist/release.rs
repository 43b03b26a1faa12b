//! `cargo xtask release`: makes all files of a version that are published, in one folder.
//!
//! Guarantees: a release is made from a commit, never from a work tree with changes; the notes are
//! the changelog's section of the version; each file has its checksum in `SHA256SUMS`. A second
//! build of the commit, with the same toolchain in the same folder, makes the same files:
//! `--expect` compares them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use lab_tools::process::{run, stdout_of};
use lab_tools::workspace::Workspace;

use super::archive::tar;
use super::files;
use super::parts::Parts;

/// The checksums' file, as `sha256sum --check` reads it.
const SUMS: &str = "SHA256SUMS";

/// The parts of a release.
#[derive(clap::Args)]
pub struct Options {
    /// Make it although the changelog says that the version is not released, or the work tree has
    /// changes
    #[arg(long)]
    draft: bool,
    /// Pack binaries that are not optimized: to try the task itself
    #[arg(long, requires = "draft")]
    quick: bool,
    /// Compare the files with these checksums, of a release that was made elsewhere
    #[arg(long, value_name = "SHA256SUMS")]
    expect: Option<PathBuf>,
}

/// Makes the release in `target/release-VERSION`.
pub fn run_release(workspace: &Workspace, options: &Options) -> Result<()> {
    let version = super::parts::version(workspace)?;
    let changelog = files::read(&workspace.root().join("CHANGELOG.md"))?;
    let notes = notes(&changelog, &version)?;
    if !options.draft {
        check_ready(workspace, &notes)?;
    }
    let output = workspace.root().join("target").join(format!("release-{version}"));
    files::make_anew(&output)?;
    let dist = super::Options {
        output: Some(output.clone()),
        quick: options.quick,
        ..super::Options::default()
    };
    let parts = super::make(workspace, &dist)?;
    pack_image(&parts, &output)?;
    files::write(&output.join("NOTES.md"), notes.text)?;
    let sums = checksums(&output)?;
    files::write(&output.join(SUMS), &sums)?;
    if let Some(expected) = &options.expect {
        compare(&sums, &files::read(expected)?)?;
        println!("xtask: the files are those of {}", expected.display());
    }
    print!("{sums}");
    println!("xtask: version {version} is in {}", output.display());
    Ok(())
}

/// The changelog's section of a version.
struct Notes<'a> {
    heading: &'a str,
    text: String,
}

fn notes<'a>(changelog: &'a str, version: &str) -> Result<Notes<'a>> {
    let is_heading = |line: &&str| line.starts_with("## ");
    let is_ours = |line: &&str| {
        let name = line.strip_prefix("## ").and_then(|rest| rest.strip_prefix(version));
        name.is_some_and(|rest| rest.is_empty() || rest.starts_with(','))
    };
    let mut lines = changelog.lines().skip_while(|line| !is_ours(line));
    let heading = lines.next();
    let heading = heading.with_context(|| format!("CHANGELOG.md has no section of {version}"))?;
    let text: Vec<_> = lines.take_while(|line| !is_heading(line)).collect();
    Ok(Notes { heading, text: format!("# Blockhouse {version}\n{}\n", text.join("\n").trim_end()) })
}

/// Refuses a version that is not released, and a work tree with changes.
fn check_ready(workspace: &Workspace, notes: &Notes<'_>) -> Result<()> {
    if notes.heading.contains("not released") {
        bail!(
            "CHANGELOG.md says {:?}: write the day in its place and commit that, or try with --draft",
            notes.heading
        );
    }
    let mut status = Command::new("git");
    status.args(["status", "--porcelain"]).current_dir(workspace.root());
    if let Some(change) = stdout_of(status)?.lines().next() {
        bail!("the work tree is not a commit ({change}): commit it, or try with --draft");
    }
    Ok(())
}

/// Packs the image's folder into one file.
fn pack_image(parts: &Parts<'_>, output: &Path) -> Result<()> {
    let mut pack = tar(parts, output);
    pack.arg("--file").arg(output.join("blockhouse-oci.tar")).arg("blockhouse-oci");
    run(pack)?;
    fs::remove_dir_all(output.join("blockhouse-oci")).context("cannot remove the image's folder")
}

/// The checksums, one line for each file, sorted by name.
fn checksums(folder: &Path) -> Result<String> {
    let entries = fs::read_dir(folder)?.collect::<Result<Vec<_>, _>>()?;
    let mut names: Vec<_> = entries.iter().map(fs::DirEntry::file_name).collect();
    names.sort();
    let mut sum = Command::new("sha256sum");
    sum.arg("--").args(names).current_dir(folder);
    stdout_of(sum)
}

/// Refuses checksums that differ from the expected ones; the error names the files.
fn compare(made: &str, expected: &str) -> Result<()> {
    let other = |lines: &str, than: &str| -> Vec<String> {
        let lines = lines.lines().filter(|line| !than.lines().any(|one| one == *line));
        lines.filter_map(|line| Some(line.split_once("  ")?.1.to_owned())).collect()
    };
    let mut names = [other(made, expected), other(expected, made)].concat();
    names.sort();
    names.dedup();
    if names.is_empty() {
        Ok(())
    } else {
        bail!("these files are not those that were expected: {}", names.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHANGELOG: &str = "# Changelog\n\n## 0.10.0, not released\n\n- c\n\n## 0.1.0, 3 May 2026\n\n- b\n\n## 0.0.1\n- a\n";

    #[test]
    fn the_notes_are_the_section_of_the_version() {
        let found = notes(CHANGELOG, "0.1.0").expect("a section");
        assert_eq!(found.heading, "## 0.1.0, 3 May 2026");
        assert_eq!(found.text, "# Blockhouse 0.1.0\n\n- b\n");
        assert_eq!(notes(CHANGELOG, "0.0.1").expect("a section").text, "# Blockhouse 0.0.1\n- a\n");
        assert!(notes(CHANGELOG, "0.2.0").is_err());
    }

    #[test]
    fn files_that_differ_are_named() {
        let (first, second) = ("1  a\n2  b\n3  c\n", "1  a\n9  b\n4  d\n");
        assert!(compare(first, first).is_ok());
        let error = compare(first, second).expect_err("they differ").to_string();
        assert!(error.ends_with("expected: b, c, d"), "{error}");
    }
}
