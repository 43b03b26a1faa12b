//! Whether two paths lead to one file.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Whether two paths lead to the same file, through any links. If a path leads to no accessible
/// file, for example because it is the address of a server: whether both paths are the same text.
pub fn is_same_file(one: &Path, other: &Path) -> bool {
    let identity = |path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
    one == other || matches!((identity(one), identity(other)), (Ok(one), Ok(other)) if one == other)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_lead_to_the_same_file_and_a_missing_one_is_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let [file, symbolic, hard, other, missing] =
            ["file", "symbolic", "hard", "other", "missing"].map(|name| folder.path().join(name));
        for path in [&file, &other] {
            fs::write(path, "the same").unwrap();
        }
        symlink("file", &symbolic).unwrap();
        fs::hard_link(&file, &hard).unwrap();
        for path in [&symbolic, &hard, &folder.path().join("./file")] {
            assert!(is_same_file(&file, path) && is_same_file(path, &file), "{}", path.display());
        }
        assert!(!is_same_file(&file, &other));
        assert!(is_same_file(&missing, &missing));
        for path in [&file, &symbolic, &folder.path().join("also-missing")] {
            assert!(!is_same_file(&missing, path) && !is_same_file(path, &missing));
        }
        assert!(is_same_file(Path::new("nbd://host/a"), Path::new("nbd://host/a")));
    }
}
