//! Tests names of all kinds in a tree of folders and links, and compares the walk with the kernel.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use super::beneath::walk_beneath;
use super::*;

/// A tree with an image's folder `own`, a neighbour, and links of all kinds.
fn tree() -> tempfile::TempDir {
    let top = tempfile::tempdir().unwrap();
    let at = |name: &str| top.path().join(name);
    for folder in ["own/below/deep", "other", "own/empty"] {
        fs::create_dir_all(at(folder)).unwrap();
    }
    for file in ["own/base", "own/below/base", "own/below/deep/base", "other/base"] {
        fs::write(at(file), file).unwrap();
    }
    rustix::fs::mknodat(CWD, at("own/pipe"), FileType::Fifo, Mode::RUSR, 0).unwrap();
    symlink("below/base", at("own/link")).unwrap();
    symlink("../base", at("own/below/up")).unwrap();
    symlink("../other/base", at("own/out")).unwrap();
    symlink("../other", at("own/door")).unwrap();
    symlink(at("own/base"), at("own/absolute")).unwrap();
    symlink(at("other/base"), at("own/away")).unwrap();
    symlink("loop", at("own/loop")).unwrap();
    symlink("nothing", at("own/dangling")).unwrap();
    symlink("own", at("alias")).unwrap();
    top
}

#[test]
fn an_image_shows_no_certificate_of_this_host_unless_it_is_allowed_to() {
    let top = tree();
    let other = top.path().join("other");
    let allowed = AllowedPaths::new(&[&other]).unwrap();
    let uri = |folder: &Path| {
        PathBuf::from(format!("nbds://host/a?tls-certificates={}", folder.display()))
    };
    let check = |allowed: &AllowedPaths, name: &Path| allowed.check_remote(name, "base", "image");
    check(&allowed, &uri(&other)).unwrap();
    check(&allowed, &uri(&other.join("base"))).unwrap();
    check(&AllowedPaths::default(), Path::new("nbds://host/a")).unwrap();
    check(&AllowedPaths::default(), Path::new("nbd://host/a")).unwrap();
    let own = top.path().join("own");
    for (allowed, folder) in [
        (&AllowedPaths::default(), other.as_path()),
        (&allowed, &own),
        (&allowed, Path::new("other")),
        (&allowed, &other.join("../own")),
        (&allowed, &own.join("empty/missing")),
    ] {
        match check(allowed, &uri(folder)) {
            Err(FindError::Refused(error)) => assert!(error.to_string().contains("files of TLS")),
            other => panic!("{folder:?}: {other:?}"),
        }
    }
    let key = PathBuf::from(format!("nbds://me@host/a?tls-psk-file={}/base", own.display()));
    assert!(matches!(check(&allowed, &key), Err(FindError::Refused(_))));
}

#[test]
fn an_image_chooses_no_configuration_and_no_user_of_ceph() {
    let check = |allowed: &AllowedPaths, name: &str| {
        allowed.check_remote(Path::new(name), "backing file", "image")
    };
    let none = AllowedPaths::default();
    let meant = "rbd:pool/base?conf=/etc/other.conf&id=vm";
    let all = AllowedPaths::new(&["/".to_owned(), meant.to_owned()]).unwrap();
    check(&none, "rbd:pool/base@snapshot").unwrap();
    for name in [
        "rbd:pool/base?conf=/srv/images/disk.raw",
        "rbd:pool/base?id=admin",
        "rbd:pool/base?conf=%2Fetc%2Fother.conf",
        "rbd:pool/n/base@s?id=vm&conf=x",
        "rbd:pool/other?conf=/etc/other.conf&id=vm",
    ] {
        for allowed in [&none, &all] {
            match check(allowed, name) {
                Err(FindError::Refused(error)) => {
                    let error = error.to_string();
                    assert!(error.contains("--allow-path 'rbd:pool/"), "{error}");
                }
                other => panic!("{name}: {other:?}"),
            }
        }
    }
    check(&all, meant).unwrap();
    check(&all, "rbd:pool/base?id=vm&conf=/etc/other.conf").unwrap();
    assert!(AllowedPaths::new(&["rbd:pool"]).is_err());
}

/// The result if `image` names `name`: the file's content, or the refusal.
fn look_up(allowed: &AllowedPaths, image: &Path, name: &Path) -> Result<String, Refusal> {
    let folder = Folder::of_image(image).unwrap();
    let found = allowed.look_up(&folder, name, NameUse::Asked)?;
    let link = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&found.descriptor));
    Ok(fs::read_to_string(link).unwrap())
}

#[test]
fn an_untrusted_image_may_name_only_what_is_allowed() {
    let top = tree();
    let (image, other) = (top.path().join("own/image"), top.path().join("other"));
    let only = AllowedPaths::only(&[&other]).unwrap();
    for name in ["../other/base", "out", "away"] {
        assert_eq!(look_up(&only, &image, Path::new(name)).unwrap(), "other/base", "{name}");
    }
    for name in ["base", "below/base", "link", "absolute"] {
        let refused = look_up(&only, &image, Path::new(name));
        assert!(matches!(refused, Err(Refusal::NotAllowed)), "{name}: {refused:?}");
    }
    let server = only.check_remote(Path::new("nbd://host/a"), "backing file", "image");
    assert!(matches!(server, Err(FindError::Refused(_))), "{server:?}");
    assert!(!only.is_none() && AllowedPaths::only::<&Path>(&[]).unwrap().is_none());
}

#[test]
fn files_below_the_folder_of_the_image_may_be_named() {
    let top = tree();
    let image = top.path().join("own/image");
    let own = top.path().join("own");
    for (name, file) in [
        ("base".into(), "own/base"),
        ("./below/../base".into(), "own/base"),
        ("below/deep/base".into(), "own/below/deep/base"),
        ("link".into(), "own/below/base"),
        ("below/up".into(), "own/base"),
        ("absolute".into(), "own/base"),
        ("../own/base".into(), "own/base"),
        (own.join("base"), "own/base"),
        (top.path().join("alias/below/base"), "own/below/base"),
    ] {
        let found = look_up(&AllowedPaths::default(), &image, &name);
        assert_eq!(found.unwrap(), file, "{}", name.display());
    }
}

#[test]
fn what_lies_elsewhere_is_refused_until_it_is_allowed() {
    let top = tree();
    let image = top.path().join("own/image");
    let other = top.path().join("other");
    let names = ["../other/base".into(), "out".into(), "away".into(), "door/base".into()];
    let allowed = AllowedPaths::new(&[&other]).unwrap();
    let file = AllowedPaths::new(&[other.join("base")]).unwrap();
    for name in names.into_iter().chain([other.join("base")]) {
        let refused = look_up(&AllowedPaths::default(), &image, &name);
        assert!(matches!(refused, Err(Refusal::Outside)), "{}: {refused:?}", name.display());
        for allowed in [&allowed, &file] {
            assert_eq!(look_up(allowed, &image, &name).unwrap(), "other/base");
        }
    }
    // Only paths that were allowed may be named.
    for name in ["/etc/shadow", "../../../../../../../etc/passwd", "/proc/self/environ"] {
        let refused = look_up(&allowed, &image, Path::new(name));
        assert!(matches!(refused, Err(Refusal::Outside)), "{name}: {refused:?}");
    }
}

#[test]
fn what_is_no_regular_file_is_refused_and_not_opened() {
    let top = tree();
    let image = top.path().join("own/image");
    for name in ["pipe", "below", ".", "empty"] {
        // An open of the pipe would wait for a writer.
        let refused = look_up(&AllowedPaths::default(), &image, Path::new(name));
        assert!(matches!(refused, Err(Refusal::NotRegular(_))), "{name}: {refused:?}");
    }
    for (name, allowed) in [("/dev/zero", "/dev"), ("/dev/null", "/dev/null")] {
        let allowed = AllowedPaths::new(&[allowed]).unwrap();
        let refused = look_up(&allowed, &image, Path::new(name));
        assert!(matches!(refused, Err(Refusal::NotRegular(_))), "{name}: {refused:?}");
    }
}

#[test]
fn a_file_is_missing_only_where_it_may_be_named() {
    let top = tree();
    let image = top.path().join("own/image");
    let none = AllowedPaths::default();
    let inside = ["gone".into(), "dangling".into(), top.path().join("own/gone")];
    for name in inside {
        let missing = look_up(&none, &image, &name);
        assert!(matches!(missing, Err(Refusal::Host(Errno::NOENT))), "{missing:?}");
    }
    for name in ["../gone", "/gone/base"] {
        let refused = look_up(&none, &image, Path::new(name));
        assert!(matches!(refused, Err(Refusal::Outside)), "{name}: {refused:?}");
    }
}

#[test]
fn a_hidden_file_below_the_folder_is_refused_until_it_is_allowed() {
    let top = tree();
    let own = top.path().join("own");
    for folder in ["own/.hidden", "own/below/.deep", ".home"] {
        fs::create_dir_all(top.path().join(folder)).unwrap();
    }
    for file in ["own/.bashrc", "own/.hidden/base", "own/below/.deep/base", ".home/base"] {
        fs::write(top.path().join(file), file).unwrap();
    }
    symlink(".hidden/base", own.join("plain")).unwrap();
    let (image, none) = (own.join("image"), AllowedPaths::default());
    let whole = own.join(".bashrc");
    for name in [".bashrc", ".hidden/base", "below/.deep/base", "plain", whole.to_str().unwrap()] {
        let refused = look_up(&none, &image, Path::new(name));
        assert!(matches!(refused, Err(Refusal::Hidden)), "{name}: {refused:?}");
        let allowed = AllowedPaths::new(&[&own]).unwrap();
        look_up(&allowed, &image, Path::new(name)).unwrap();
    }
    let allowed = AllowedPaths::new(&[&whole]).unwrap();
    look_up(&allowed, &image, Path::new(".bashrc")).unwrap();
    // The image's own folder may be hidden.
    let home = top.path().join(".home");
    for name in [PathBuf::from("base"), "./base".into(), "../.home/base".into(), home.join("base")]
    {
        let found = look_up(&none, &home.join("image"), &name);
        let is_hidden = name.starts_with("..");
        assert_eq!(found.is_err(), is_hidden, "{}: {found:?}", name.display());
    }
}

#[test]
fn only_the_data_file_that_was_made_for_an_image_is_written_to() {
    let top = tree();
    let own = top.path().join("own");
    let image = own.join("disk.qcow2");
    fs::write(&image, "image").unwrap();
    for file in ["disk.raw", "disk-data.img", "victim.img", "below/disk.raw"] {
        fs::write(own.join(file), file).unwrap();
    }
    symlink("victim.img", own.join("disk.link")).unwrap();
    let may_write = |allowed: &AllowedPaths, name: &str| {
        let folder = Folder::of_image(&image).unwrap();
        let file = fs::File::open(&image).unwrap();
        let used = NameUse::Written(Namer { path: &image, file: Some(file.as_fd()) });
        match allowed.look_up(&folder, Path::new(name), used) {
            Ok(_) => true,
            Err(Refusal::NotItsOwn) => false,
            Err(other) => panic!("{name}: {other:?}"),
        }
    };
    let none = AllowedPaths::default();
    assert!(may_write(&none, "disk.raw") && may_write(&none, "disk-data.img"));
    for name in ["victim.img", "below/disk.raw", "disk.link", "base"] {
        assert!(!may_write(&none, name), "{name}");
        assert!(may_write(&AllowedPaths::new(&[&own]).unwrap(), name), "{name}");
        assert!(AllowedPaths::is_free_to_name(&image, name.as_bytes()), "{name}");
    }
    // `create -o data_file=` notes this name, and no other name counts.
    note_data_file(&image, b"base");
    assert!(may_write(&none, "base") && AllowedPaths::is_free_to_write(&image, b"base"));
    assert!(!may_write(&none, "./base") && !may_write(&none, "victim.img"));
}

#[test]
fn a_file_elsewhere_is_an_images_data_where_its_owner_chose_it() {
    let top = tree();
    let image = top.path().join("own/disk.qcow2");
    fs::write(&image, "image").unwrap();
    let elsewhere = top.path().join("other/base");
    let found = |used: fn(Namer<'_>) -> NameUse<'_>, name: &Path| {
        let file = fs::File::open(&image).unwrap();
        let namer = Namer { path: &image, file: Some(file.as_fd()) };
        let folder = Folder::of_image(&image).unwrap();
        AllowedPaths::default().look_up(&folder, name, used(namer)).is_ok()
    };
    let uses: [fn(Namer<'_>) -> NameUse<'_>; 2] =
        [|namer| NameUse::Read(namer), |namer| NameUse::Written(namer)];
    fs::set_permissions(&image, fs::Permissions::from_mode(0o644)).unwrap();
    uses.iter().for_each(|&used| assert!(!found(used, &elsewhere)));
    note_data_file(&image, elsewhere.as_os_str().as_bytes());
    uses.iter().for_each(|&used| assert!(found(used, &elsewhere)));
    // Only this name counts, only for data, and only if no other user may write to the image.
    assert!(!found(uses[1], &top.path().join("other/../other/base")));
    assert!(!found(|_| NameUse::Asked, &elsewhere));
    fs::set_permissions(&image, fs::Permissions::from_mode(0o664)).unwrap();
    uses.iter().for_each(|&used| assert!(!found(used, &elsewhere)));
}

#[test]
fn the_next_image_is_judged_from_its_own_folder() {
    let top = tree();
    let none = AllowedPaths::default();
    let folder = Folder::of_image(&top.path().join("own/image")).unwrap();
    let next = none.look_up(&folder, Path::new("below/base"), NameUse::Asked).unwrap().folder;
    assert!(none.look_up(&next, Path::new("deep/base"), NameUse::Asked).is_ok());
    let above = none.look_up(&next, Path::new("../base"), NameUse::Asked);
    assert!(matches!(above, Err(Refusal::Outside)), "{above:?}");
    // The image is found through a link in a folder that may not be named, so its names are
    // refused.
    symlink(top.path().join("own/base"), top.path().join("other/link")).unwrap();
    let found = none.look_up(&folder, Path::new("../other/link"), NameUse::Asked).unwrap();
    assert_eq!(fs::read_link(top.path().join("other/link")).unwrap().file_name().unwrap(), "base");
    let refused = none.look_up(&found.folder, Path::new("base"), NameUse::Asked);
    assert!(matches!(refused, Err(Refusal::Outside)), "{refused:?}");
}

/// The walk finds the same files as the kernel's `openat2` for paths of random steps.
#[test]
fn the_walk_agrees_with_the_kernel() {
    const STEPS: [&str; 14] = [
        "own", "below", "deep", "base", "..", ".", "link", "up", "out", "door", "absolute", "loop",
        "empty", "alias",
    ];
    let top = tree();
    let folder = Folder::of_image(&top.path().join("x")).unwrap().descriptor.unwrap();
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut found = 0;
    for _ in 0..20_000 {
        let steps: Vec<_> =
            (0..random.usize(1..7)).map(|_| STEPS[random.usize(..STEPS.len())]).collect();
        let name = steps.join("/");
        for symlinks in [Symlinks::Beneath, Symlinks::None] {
            let theirs = find_beneath(folder.as_fd(), Path::new(&name), symlinks);
            let ours = walk_beneath(folder.as_fd(), Path::new(&name), symlinks);
            match (theirs, ours) {
                (Ok(theirs), Ok(ours)) => {
                    found += 1;
                    assert!(is_same(theirs.as_fd(), ours.as_fd()).unwrap(), "{name}");
                }
                (theirs, ours) => assert_eq!(theirs.err(), ours.err(), "{name} {symlinks:?}"),
            }
        }
    }
    assert!(found > 100, "{found}");
}
