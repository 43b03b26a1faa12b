//! Names and lengths of chains.

use super::*;

fn chain(count: u64) -> Chain {
    let file = |index| (PathBuf::from(format!("folder/{index}.qcow2")), Some((1, index)));
    let files = (0..count).map(file).collect();
    let folder = Folder::of_handed_over(Path::new("folder/0.qcow2"));
    Chain { files, ..Chain::from_named(PathBuf::new(), None, folder) }
}

fn backing(name: &str, format: Option<&str>) -> Backing {
    Backing { name: name.into(), format: format.map(str::to_owned) }
}

#[test]
fn backing_files_are_found_from_the_folder_of_the_image_that_names_them() {
    let next = |name: &str| chain(1).folder.join(name.as_bytes());
    assert_eq!(next("base.raw"), Path::new("folder/base.raw"));
    assert_eq!(next("../a:b"), Path::new("folder/../a:b"));
    assert_eq!(next("/else/base.raw"), Path::new("/else/base.raw"));
    assert!(chain(1).next(&backing("../a:b", Some("raw")), &ImageOptions::default()).is_ok());
}

#[test]
fn what_is_no_file_of_a_named_format_is_refused() {
    let refused = |name: &str, format| {
        chain(1).next(&backing(name, format), &ImageOptions::default()).unwrap_err().to_string()
    };
    for name in ["json:{\"driver\":\"raw\"}", "nbd:host:10809", "file:x"] {
        assert!(refused(name, Some("raw")).contains("address"), "{name}");
    }
    assert!(refused("nbd://host/disk", Some("raw")).contains("--allow-remote"));
    let guessed = refused("base", None);
    assert!(guessed.contains("rebase -u -F FORMAT -b 'base' 'folder/0.qcow2'"), "{guessed}");
    assert!(refused("base", Some("qed")).contains("qed"));
}

#[test]
fn chains_end() {
    assert!(chain(199).next(&backing("base", Some("raw")), &ImageOptions::default()).is_ok());
    let error = chain(200)
        .next(&backing("base", Some("raw")), &ImageOptions::default())
        .unwrap_err()
        .to_string();
    assert!(error.contains("1.qcow2 -> (196 more) -> folder/198.qcow2"), "{error}");
    let folder = || Folder::of_handed_over(Path::new("folder/x"));
    let mut looped = chain(3);
    assert!(looped.enter("other".into(), Some((2, 1)), folder()).is_ok());
    let error = looped.enter("again".into(), Some((1, 0)), folder()).unwrap_err().to_string();
    assert!(error.contains("loop") && error.contains("-> other -> again"), "{error}");
}
