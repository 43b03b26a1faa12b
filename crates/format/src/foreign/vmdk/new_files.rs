//! New VMDK images of several files: how the disk is divided, the names of the files, and the
//! descriptor that names them.
//!
//! Names and sizes are those of QEMU and VMware: `disk-flat.vmdk`, and `disk-f001.vmdk` or
//! `disk-s001.vmdk` for each 2 GiB of a split disk.

use std::path::Path;

use blockhouse_core::{ByteRange, Result};

use super::create::Head;
use crate::foreign::fields::SECTOR;
use crate::foreign::new_parts::{NewForeignOptions, Subformat, refuse};

/// Bytes of the disk in one file of a split image.
const SPLIT: u64 = 2 << 30;

/// A file with a part of a new disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewVmdkFile {
    /// The name in the descriptor's folder.
    pub name: String,
    /// The part of the disk.
    pub range: ByteRange,
}

/// The files with the data of a new VMDK image; none if the image is one file.
///
/// # Errors
/// `InvalidInput` for options that such an image cannot have.
pub fn vmdk_files(options: &NewForeignOptions) -> Result<Vec<NewVmdkFile>> {
    let is_flat = options.subformat == Subformat::Fixed;
    if is_flat && options.parent.is_some() {
        return Err(refuse("Flat image can't have backing file"));
    }
    if is_flat && options.has_zero_grains {
        return Err(refuse("Flat image can't enable zeroed grain"));
    }
    if !is_flat && !options.is_split {
        return Ok(Vec::new());
    }
    let part = if options.is_split { SPLIT } else { options.size.max(SECTOR) };
    let path = Path::new(&options.file_name);
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let suffix = path.extension().map(|suffix| format!(".{}", suffix.to_string_lossy()));
    let suffix = suffix.unwrap_or_default();
    let name = |number: u64| match (options.is_split, is_flat) {
        (false, _) => format!("{stem}-flat{suffix}"),
        (true, true) => format!("{stem}-f{number:03}{suffix}"),
        (true, false) => format!("{stem}-s{number:03}{suffix}"),
    };
    let count = options.size.div_ceil(part);
    let files = (0..count).map(|index| {
        let start = index * part;
        let range = ByteRange::between(start, (start + part).min(options.size));
        NewVmdkFile { name: name(index + 1), range }
    });
    Ok(files.collect())
}

/// The descriptor of a new image that has these [files](vmdk_files).
///
/// # Errors
/// `InvalidInput` for a name that a descriptor cannot state.
pub fn vmdk_descriptor(options: &NewForeignOptions, files: &[NewVmdkFile]) -> Result<String> {
    let is_flat = options.subformat == Subformat::Fixed;
    let create_type = match (options.is_split, is_flat) {
        (false, _) => "monolithicFlat",
        (true, true) => "twoGbMaxExtentFlat",
        (true, false) => "twoGbMaxExtentSparse",
    };
    let line = |file: &NewVmdkFile| {
        let (sectors, name) = (file.range.length() / SECTOR, &file.name);
        if is_flat {
            format!("RW {sectors} FLAT \"{name}\" 0\n")
        } else {
            format!("RW {sectors} SPARSE \"{name}\"\n")
        }
    };
    let lines: String = files.iter().map(line).collect();
    Ok(Head::new(options, create_type)?.descriptor(&lines))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(subformat: Subformat, is_split: bool) -> NewForeignOptions {
        let file_name = "a.b.vmdk".to_owned();
        NewForeignOptions { subformat, is_split, file_name, ..NewForeignOptions::new(5 << 30) }
    }

    #[test]
    fn files_have_the_names_of_qemu() {
        let names = |subformat, is_split| {
            let files = vmdk_files(&options(subformat, is_split)).unwrap();
            files.into_iter().map(|file| (file.name, file.range.length() >> 30)).collect::<Vec<_>>()
        };
        assert_eq!(names(Subformat::Fixed, false), [("a.b-flat.vmdk".to_owned(), 5)]);
        let [first, _, last] = &names(Subformat::Fixed, true)[..] else { panic!("three files") };
        assert_eq!(
            (&*first.0, &*last.0, first.1, last.1),
            ("a.b-f001.vmdk", "a.b-f003.vmdk", 2, 1)
        );
        assert_eq!(names(Subformat::Sparse, true)[1].0, "a.b-s002.vmdk");
        assert!(names(Subformat::Sparse, false).is_empty());
    }

    #[test]
    fn flat_files_have_neither_tables_nor_a_parent() {
        let flat = NewForeignOptions { has_zero_grains: true, ..options(Subformat::Fixed, true) };
        let error = vmdk_files(&flat).unwrap_err().to_string();
        assert!(error.contains("Flat image can't enable zeroed grain"), "{error}");
    }

    #[test]
    fn an_empty_disk_is_refused() {
        let kinds =
            [(Subformat::Fixed, false), (Subformat::Fixed, true), (Subformat::Sparse, true)];
        for (subformat, is_split) in kinds {
            let options = NewForeignOptions { size: 0, ..options(subformat, is_split) };
            let files = vmdk_files(&options).unwrap();
            assert!(vmdk_descriptor(&options, &files).is_err());
        }
        for subformat in [Subformat::Sparse, Subformat::Stream] {
            let options = NewForeignOptions { size: 0, ..options(subformat, false) };
            assert!(crate::NewForeign::new(crate::ForeignKind::Vmdk, &options).is_err());
        }
    }
}
